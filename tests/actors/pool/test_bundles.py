"""Bundles of a rollout actor and a learner worker, before Ray reserves them."""

from actors.pool.bundles import shortage_of_bundles


def test_bundles_that_find_no_room_are_counted() -> None:
    needs = {"CPU": 2.0, "GPU": 0.9}
    free = [{"CPU": 8.0, "GPU": 2.0}, {"CPU": 3.0, "GPU": 1.0}, {"CPU": 64.0}]
    assert shortage_of_bundles(needs, free, count=3) == ""
    assert shortage_of_bundles(needs, free, count=4).endswith(
        "each with 2 CPU and 0.9 GPU on one node; the cluster has room for 3"
    )
