"""What of a run's metrics is the same in every run of one config."""

from collections.abc import Mapping
from typing import Any

OF_THE_MACHINE = ("seconds/", "update/", "reward_pool/", "usage/")
"""Begin the metrics that depend on time, on the number of workers, and on what failed."""


def untimed(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out everything that may differ between two runs of one config."""
    return {
        name: value
        for name, value in metrics.items()
        if not (name.startswith(OF_THE_MACHINE) or (name.startswith("work/") and name.endswith("_seconds")))
    }
