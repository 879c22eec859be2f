"""The meter adds up counts and seconds by name and begins anew when it is read."""

from flow.meter import Meter


def test_counts_and_seconds_add_up_by_name_and_begin_anew(monkeypatch):
    moments = iter([10.0, 11.5, 20.0, 20.25, 30.0, 33.0])
    monkeypatch.setattr("flow.meter.time.perf_counter", lambda: next(moments))
    meter = Meter()
    meter.count("images", 3)
    meter.count("images", 4)
    with meter.timed("sampling"):
        pass
    with meter.timed("sampling"):
        pass
    assert meter.read() == {"work/images": 7.0, "work/sampling_seconds": 1.75}
    with meter.timed("decoding"):
        pass
    assert meter.read() == {"work/decoding_seconds": 3.0}
    assert meter.read() == {}
