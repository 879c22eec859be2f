"""Noise calibration: a noise level for each step, found before training as in DenseGRPO (arXiv 2601.20218, alg. 1).

For each step, count the trajectories whose reward it raised, and the trajectories whose reward it lowered. If the two
counts are balanced, the level grows, because there is room to explore; otherwise the noise is too strong, and the level
shrinks:

    |#{gain > 0} - #{gain < 0}| < tolerance   level + rate
    otherwise                                 level - rate

All levels move at once, in each round on new trajectories, until every level has changed its direction twice. A step
without a valid gain in a round keeps its level. The result is `sampling.noise_levels` of the config that is written.
During calibration every step but the last is stochastic, even with little noise: `sampling.std_min` does not apply.
"""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from protocol.config.parse import parse_config
from protocol.config.run import RunConfig
from protocol.config.sampling import TOO_LOUD
from protocol.errors import ConfigError, ContractError
from protocol.ground.files import require_folder_of
from protocol.messages import Prompt, ScoredGroup, ScoredShard, ShardRequest

if TYPE_CHECKING:
    from flow.models.contract import Backbone
    from rewards.scorer import CheckedScorer

FLIPS = 2
"""Changes of direction after which a level counts as settled."""
RATE = 0.01
"""Change of a level in one round."""
TOLERANCE = 2.0
"""Difference of the two counts below which they are balanced, for the paper's groups of 24; scaled to the number of
trajectories in a round."""
Measure = Callable[[Sequence[float], int], np.ndarray]
"""measure(levels, round): gains [trajectories, steps], NaN where a score is missing."""


def calibrate(
    levels: Sequence[float],
    measure: Measure,
    report: Callable[[str], None],
    *,
    rounds: int,
    highest: float = math.inf,
) -> list[float]:
    """Run the noise calibration: move the levels until each has settled or the rounds are over.

    A level is settled if it has changed its direction `FLIPS` times, has reached a limit, or its step never had a gain.

    Args:
        levels: first levels, one per step; they stay above 0: without noise a step has no gains that judge its level.
        measure: returns the gains at given levels, [trajectories, steps].
        highest: largest level that the kernel accepts.
    """
    current = np.array(levels, float)
    direction, flips = np.zeros(len(current)), np.zeros(len(current), int)
    has_gains, is_open = np.zeros(len(current), bool), np.ones(len(current), bool)
    for number in range(rounds):
        gains = measure(current.tolist(), number)
        if not np.isfinite(gains).any():
            raise ContractError("a noise calibration needs at least one valid score, got none")
        has_gains |= np.isfinite(gains).any(0)
        moves = np.where(is_balanced(gains, TOLERANCE), 1.0, -1.0) * np.isfinite(gains).any(0)
        flips += (moves * direction) < 0
        direction = np.where(moves == 0, direction, moves)
        wanted = current + RATE * moves
        current = np.clip(wanted, RATE, highest)
        report(f"round {number + 1}/{rounds}: {', '.join(f'{level:.2f}' for level in current)}")
        is_open = has_gains & (flips < FLIPS) & (wanted == current)
        if not is_open.any():
            break
    else:
        unsettled = np.flatnonzero(is_open).tolist()
        report(f"steps {unsettled} have not settled after {rounds} rounds; raise --rounds to go further")
    if not has_gains.all():
        report(f"steps {np.flatnonzero(~has_gains).tolist()} never had a gain and keep their first level")
    return [round(float(level), 6) for level in current]


def is_balanced(gains: np.ndarray, tolerance: float) -> np.ndarray:
    """Return for each step whether its noise raised about as many rewards as it lowered: bool [steps].

    The difference of two counts grows with the square root of their sum, so the tolerance does too (ours: the paper
    gives no number).
    """
    difference = np.abs((gains > 0).sum(0) - (gains < 0).sum(0))
    return difference < tolerance * np.sqrt(np.isfinite(gains).sum(0) / 24)


def calibrated_config(
    config: RunConfig, prompts: Sequence[Prompt], report: Callable[[str], None], *, rounds: int, prompts_per_round: int
) -> RunConfig:
    """Calibrate the noise of a config.

    A `flow_sde` becomes the `dance_sde` with the same std at each step, because the levels are the diffusion itself.

    Args:
        config: config of the run; the calibration begins with its noise levels.

    Raises:
        ConfigError: the credit rule does not score all points, or a window is set.
    """
    if not config.scores_points or config.sampling.window.rule != "all" or config.completion.every > 1:
        raise ConfigError(
            "a noise calibration needs credit.rule gains, gae or turning_point, sampling.window.rule all and"
            f" completion.every 1, got {config.credit.rule}, {config.sampling.window.rule} and"
            f" {config.completion.every}: set method=dense_grpo"
        )
    from deploy.run.encode import encode_ahead
    from flow.device import best_device
    from flow.models.load import load_backbone
    from learner.loop.groups import prompt_at
    from rewards.scorer import scorer_of

    chosen = [prompt_at(prompts, index, seed=config.seed) for index in range(prompts_per_round)]
    asyncio.run(encode_ahead(config, chosen, is_local=True, say=report))
    backbone = load_backbone(config.model, device=best_device())
    kernel, levels = first_levels(config, backbone)
    scorers = {name: scorer_of(config.rewards[name]) for name in config.reward_weights}

    def measure(levels: Sequence[float], number: int) -> np.ndarray:
        return _gains(_with_levels(config, kernel, levels, std_min=0.0), backbone, scorers, chosen, number)

    highest = 1.0 if kernel in TOO_LOUD else math.inf
    return _with_levels(config, kernel, calibrate(levels, measure, report, rounds=rounds, highest=highest))


def first_levels(config: RunConfig, backbone: "Backbone") -> tuple[str, list[float]]:
    """Return the kernel, and the first level of each step but the last: the first round has the noise of the config."""
    from flow.policy import policy_of

    policy = policy_of(backbone, config)
    count = config.sampling.steps - 1
    if config.sampling.kernel == "flow_sde":
        steps = [math.sqrt(policy.step_size(k)) for k in range(count)]
        return "dance_sde", [policy.std(k) / step for k, step in enumerate(steps)]
    return config.sampling.kernel, list(config.sampling.noise_levels) or [config.sampling.noise_level] * count


def require_writable(path: Path) -> None:
    """Check before the calibration that its config can be written to a file that `train` can read.

    Raises:
        ConfigError: the name does not end in .yaml or .yml.
        RunFolderError: its folder does not exist or cannot be written to.
    """
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"--out must end in .yaml or .yml, got {path}: `train` reads no other file; rename it")
    require_folder_of(path, "--out")


def _with_levels(config: RunConfig, kernel: str, levels: Sequence[float], **sampling: float) -> RunConfig:
    tree = config.model_dump(mode="json")
    tree["sampling"] |= {"kernel": kernel, "noise_levels": list(levels)} | sampling
    return parse_config(tree)


def _gains(
    config: RunConfig,
    backbone: "Backbone",
    scorers: Mapping[str, "CheckedScorer"],
    prompts: Sequence[Prompt],
    number: int,
) -> np.ndarray:
    """Roll out a group for every prompt and score all points; return gains [trajectories, steps], NaN without score."""
    from flow.policy import policy_of
    from flow.rollout import rollout_shard
    from learner.credit.rules import gains
    from learner.credit.tables import along_windows, reward_tables
    from rewards.scorer import score_prompts
    from rewards.scores import mix

    policy = policy_of(backbone, config)
    tables = []
    for index, prompt in enumerate(prompts):
        request = ShardRequest(
            iteration=number,
            group=index,
            prompt=prompt,
            first_member=0,
            members=config.group.shard,
            adapter_version=0,
            adapter_digest="",
        )
        rollout, images = rollout_shard(policy, request, config)
        answers = {name: score_prompts(scorer, images, [prompt] * len(images)) for name, scorer in scorers.items()}
        shard = ScoredShard(rollout=rollout, facts=rollout.facts(), scores=mix(answers, config.reward_weights))
        group = ScoredGroup(prompt=prompt, shards=(shard,))
        held = reward_tables([group], members=request.members, total=config.sampling.steps)
        (own,) = along_windows(gains, held.rewards, held.explored)
        tables.append(own[:, :-1].double().numpy())
    return np.concatenate(tables)
