"""The frozen messages that cross a process boundary: numpy arrays with their shapes, checked when made.

Who writes and who reads each of them is said in its docstring; letters are defined in `protocol`.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from protocol.errors import ContractError

Metadata = Mapping[str, Any]
"""One prompt's facts for the scorers; for GenEval the keys `tag`, `include`, `exclude`."""


def _require(holds: object, message: str) -> None:
    if not holds:
        raise ContractError(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Detection:
    """One object that a detector found in an image; written by detectors, read by the GenEval scorer."""

    label: str
    color: str | None
    box: tuple[float, float, float, float]
    """x0, y0, x1, y1 in pixels, y down."""
    score: float
    """Confidence in [0, 1]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One line of a prompt file; `index` is its line, counted from 0."""

    index: int
    text: str
    negative: str = ""
    metadata: Metadata = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """The adapter at one version: made by the learner, loaded by every rollout actor, written to checkpoints."""

    version: int
    """The number of learner updates behind these adapter; grows by one per published update."""
    arrays: Mapping[str, np.ndarray]
    """Adapter tensors by their diffusers name, float32."""
    digest: str
    """sha256 over names, shapes and bytes of `arrays`, as `digest_of` computes it."""


def digest_of(arrays: Mapping[str, np.ndarray]) -> str:
    """sha256 over the arrays in name order: name, dtype, shape, bytes."""
    sha = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        sha.update(f"{name}|{array.dtype.str}|{array.shape}|".encode())
        sha.update(array.tobytes())
    return sha.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRequest:
    """The unit of rollout work: some members of one group. Written by the loop, read by a rollout actor.

    Its size comes from the config and never from the number of actors, so array shapes, and with them every
    bit of the result, do not depend on the pool.
    """

    iteration: int
    group: int
    """The group's place in its iteration; with it the noise of two groups of one prompt differs."""
    prompt: Prompt
    first_member: int
    members: int
    version: int
    digest: str
    """Version and digest of the adapter that must draw this shard."""


COMMON_IMAGE = -1
"""In `Rollout.image_index`: the image that the group's first shard has at place 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One shard's trajectories, exactly as sampled. Written by a rollout actor, read by the learner."""

    request: ShardRequest
    steps: tuple[int, ...]
    """The stochastic steps k, ascending; only these have a log-prob and are trained (S of them)."""
    latents: np.ndarray
    """float32 [N, T+1, C, H, W]"""
    log_probs: np.ndarray
    """float32 [N, S], mean over latent elements"""
    image_index: np.ndarray
    """int64 [N, P]: which image of the shard's image array shows point p; P = S+1, or 1 for final images only.
    `COMMON_IMAGE` stands for the first image of the group's first shard: the point that all members share."""
    means: np.ndarray | None = None
    """float32 [N, S, C, H, W]: means of the stochastic steps, for objectives that compare them."""
    targets: np.ndarray | None = None
    """float32 [N, S, C, H, W]: clean latents that each stochastic step led to, for objectives that regress on them."""

    def __post_init__(self) -> None:
        members = self.request.members
        shape = self.latents.shape
        _require(len(shape) == 5, f"latents must be [N, T+1, C, H, W], got {list(shape)}")
        _require(shape[0] == members, f"latents of {shape[0]} members, request of {members}")
        for name, extra in (("means", self.means), ("targets", self.targets)):
            wanted = (members, len(self.steps), *shape[2:])
            _require(extra is None or extra.shape == wanted, f"{name} must be {list(wanted)}")
        _require(
            self.log_probs.shape == (members, len(self.steps)),
            f"log_probs must be [{members}, {len(self.steps)}], got {list(self.log_probs.shape)}",
        )
        _require(
            self.image_index.shape in ((members, 1), (members, len(self.steps) + 1)),
            f"image_index must be [{members}, 1 or {len(self.steps) + 1}], got {list(self.image_index.shape)}",
        )
        _require(self.latents.dtype == np.float32, f"latents must be float32, got {self.latents.dtype}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """A rollout actor's small answer beside the large arrays: which adapter drew how many images."""

    version: int
    digest: str
    images: int
    """Number of images that came with it."""

    def require(self, *, version: int, digest: str) -> None:
        """Samples count only when the adapter that drew them are the ones that were asked for (ContractError)."""
        _require(
            (self.version, self.digest) == (version, digest),
            f"samples must come from version {version} ({digest[:12]}), got {self.version} ({self.digest[:12]})",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """What one scorer says of B images. A failed score is invalid with a reason, never 0."""

    values: np.ndarray
    """float32 [B]; NaN where invalid"""
    valid: np.ndarray
    """bool [B]"""
    reasons: tuple[str, ...]
    """Per image; empty where valid."""
    components: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Further float32 [B] readings by name, e.g. `strict`; NaN where invalid."""
    voids_group: bool = False
    """An image is missing and the failure policy sets its whole group aside; written by reward pools."""

    def __post_init__(self) -> None:
        size = len(self.reasons)
        _require(self.values.shape == (size,), f"values must be [{size}], got {list(self.values.shape)}")
        _require(self.valid.shape == (size,), f"valid must be [{size}], got {list(self.valid.shape)}")
        for name, component in self.components.items():
            _require(component.shape == (size,), f"component {name} must be [{size}], got {list(component.shape)}")

    @staticmethod
    def missing(size: int, reason: str) -> "Scores":
        """All `size` scores missing for one reason: a dead reward actor, a deadline."""
        return Scores(values=np.full(size, np.nan, np.float32), valid=np.zeros(size, bool), reasons=(reason,) * size)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredShard:
    """One shard's trajectories with the scores of its images. Made by the loop, read by the learner."""

    rollout: Any
    """A `Rollout`, or a handle to one that the learner's shell resolves."""
    scores: Scores


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroup:
    """All shards of one prompt's group, in member order."""

    prompt: Prompt
    shards: tuple[ScoredShard, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """What one group's steps earned in the newest update. Made by the learner, read by the strip recorder."""

    version: int
    """The version that this update made."""
    gains: np.ndarray
    """float32 [N, T] step rewards of the credit rule; NaN where invalid, and for steps that were not stochastic."""
    advantages: np.ndarray
    """float32 [N, T]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Excerpt:
    """The first M members of a shard, small enough to show. Cut out by a rollout actor, read by the strip recorder."""

    request: ShardRequest
    steps: tuple[int, ...]
    images: np.ndarray
    """uint8 [M, P, h, w, 3], the longer side at most 128"""
    image_index: np.ndarray
    """int64 [M, P], as in `Rollout`: which score of the shard is an image's"""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """Images without exploration: ODE from keyed noise. Written by the evaluation, read by a rollout actor."""

    prompts: tuple[Prompt, ...]
    numbers: tuple[int, ...]
    """Which of its prompt's images each one is; with seed and prompt it keys the noise."""
    seed: int
    steps: int
    """Euler steps of the ODE."""
    version: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerState:
    """Everything a learner needs to go on exactly: made by the learner, written to and read from checkpoints."""

    iteration: int
    """Iterations done; the version of the adapter."""
    adapter: Adapter
    optimizer: Mapping[str, np.ndarray]
    """float32 arrays named `<parameter>/exp_avg`, `<parameter>/exp_avg_sq`, `<parameter>/step`."""
    average: Adapter | None = None
    """The adapter's running mean, when the config asks for one."""
    baseline: tuple[float | None, ...] = ()
    """Running mean gain of each step, None where none was seen; empty unless the normalisation keeps one."""
    recent: tuple[Adapter, ...] = ()
    """Adapters of the versions before, oldest first, that groups in flight are drawn with: at most `max_lag`. Added
    and read by the loop; the learner does not look at them."""
    broken: Mapping[str, int] = field(default_factory=dict)
    """Guards whose rule is broken: in how many iterations in a row. Added and read by the loop."""
