"""Statuses and trajectory records as a run would publish them."""

import time
from typing import Any

import numpy as np

from deploy.monitor.trajectories import record_of
from protocol.messages import Credit, Excerpt, Prompt, ShardRequest
from protocol.status import Condition, PoolStatus, RunStatus, TrajectoryRecord


def a_record(iteration: int = 5) -> TrajectoryRecord:
    """Two trajectories of three points each; one score is missing."""
    request = ShardRequest(
        iteration=iteration - 1,
        group=0,
        prompt=Prompt(index=0, text="a red circle"),
        first_member=0,
        members=2,
        adapter_version=4,
        adapter_digest="d",
    )
    images = np.arange(2 * 3 * 4 * 4 * 3, dtype=np.uint8).reshape(2, 3, 4, 4, 3)
    excerpt = Excerpt(request=request, steps=(0, 1), images=images)
    rewards = np.array([[0.1, 0.2, 0.4], [0.1, np.nan, 0.9]], np.float32)
    gains = np.array([[0.1, 0.2], [np.nan, np.nan]], np.float32)
    credit = Credit(
        adapter_version=5,
        rewards=rewards,
        values=rewards - np.float32(0.1),
        step_rewards=gains,
        advantages=np.nan_to_num(gains),
    )
    return record_of(iteration, excerpt, credit)


def a_status(run: str, phase: str = "running", **changes: Any) -> RunStatus:
    """A run in its 6th iteration of 60; `changes` replace fields."""
    pools = [
        PoolStatus(name="rollout", desired=2, ready=2, busy=1, restarts=1),
        PoolStatus(name="reward/geneval", desired=1, ready=1, busy=0),
    ]
    condition = Condition(type="ScoresComplete", status="False", reason="Missing", message="3 missing", since=5.0)
    facts = {
        "run": run,
        "session": "s1",
        "phase": phase,
        "iteration": 6,
        "iterations": 60,
        "started": time.time() - 60,
        "updated": time.time(),
        "lines": 6,
        "trajectories": [5],
        "pools": pools,
        "conditions": [condition],
        "adapter_version": 6,
        "queues": {"groups/in_work": 2, "groups/scored": 1, "images/geneval": 40},
    }
    return RunStatus(**(facts | changes))
