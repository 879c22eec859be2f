"""The matrix of the learner group holds every method, objective and precision, and each of its runs has a config."""

from benchmarks.workers import LOCAL, cells, config_of
from deploy.presets import method_names
from protocol.config.learning import FORWARD, OF_STEPS


def test_the_matrix_has_every_method_objective_precision_and_lag():
    configs = [config_of(keys, ways[0]) for keys, ways in cells().values()]
    assert {config.learner.objective for config in configs} == {*OF_STEPS, *FORWARD}
    assert {(config.model.dtype, config.group.max_lag) for config in configs} >= {
        (dtype, lag) for dtype in ("float32", "bfloat16", "float16") for lag in (0, 1)
    }
    assert set(method_names()) <= set(cells())


def test_every_way_of_a_cell_is_one_run_by_identity():
    """Only `cluster`, which changes no bit, differs between the ways."""
    for name, (keys, ways) in cells().items():
        if len(ways) < 6:
            continue
        assert ways[0] is LOCAL
        configs = [config_of(keys, way).model_dump(exclude={"cluster"}) for way in ways]
        assert all(config == configs[0] for config in configs), name
        assert all(config_of(keys, way).iterations == 6 for way in ways)
