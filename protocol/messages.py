"""The frozen messages that cross a process boundary: numpy arrays with their shapes, checked when made.

Each docstring says who writes the message and who reads it. `protocol` defines the letters of array shapes.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from protocol.errors import ContractError

Metadata = Mapping[str, Any]
"""What scorers know about one prompt; for GenEval the keys `tag`, `include`, `exclude`."""


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
class ConditionImage:
    """An image that a prompt edits or refers to. `protocol.ground.condition_images` makes it and reads its pixels."""

    path: str
    """Absolute; every node sees the file there."""
    sha256: str
    """Of the file."""


EncoderInput = tuple[str, tuple[ConditionImage, ...]]
"""What is encoded together: a prompt's text, or its negative one, and its condition images."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One line of a prompt file; `index` is its line, counted from 0."""

    index: int
    text: str
    negative: str = ""
    metadata: Metadata = field(default_factory=dict)
    conditions: tuple[ConditionImage, ...] = ()
    wanted: ConditionImage | None = None
    """An image that the prompt asks for, to be shown beside its own; it changes no score."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """The adapter at one version. The learner makes it, every rollout actor loads it, checkpoints store it."""

    version: int
    """Number of iterations that made this adapter; each published update adds one."""
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
        sha.update(array.data)
    return sha.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRequest:
    """The unit of rollout work: some members of one group. The loop writes it, a rollout actor reads it.

    Its size comes from the config and never from the number of actors. So array shapes, and every bit of the result,
    do not depend on the pool.
    """

    iteration: int
    group: int
    """The group's index in its iteration; it gives two groups of one prompt different noise."""
    prompt: Prompt
    first_member: int
    members: int
    adapter_version: int
    adapter_digest: str
    """Digest of the adapter that must roll out this shard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFacts:
    """What credit and metrics need to know about a shard besides its scores. It is small and travels without the
    trajectories."""

    request: ShardRequest
    steps: tuple[int, ...]
    """The S stochastic steps k, ascending."""
    image_index: np.ndarray
    """int64 [N, P], as in `Rollout`."""
    finals: tuple[str, ...]
    """sha256 of each member's final latents: equal for members that end in the same bits."""
    further_index: np.ndarray | None = None
    """int64 [N, E], as in `Rollout`."""


COMMON_IMAGE = -1
"""In `Rollout.image_index`: the image at index 0 of the group's first shard."""
NO_IMAGE = -2
"""In `Rollout.image_index`: a point that is not completed, by `completion.every`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One shard's trajectories, exactly as rolled out. A rollout actor writes it, the learner reads it."""

    request: ShardRequest
    steps: tuple[int, ...]
    """The S stochastic steps k, ascending. Only these have a log-prob and are trained. Where no step has noise: the
    steps whose noise levels are trained."""
    latents: np.ndarray
    """float32 [N, T+1, C, H, W], or [N, 1, C, H, W] with the clean latents only, where no step has noise. Points that a
    `sampling.tail` skips hold the clean latents."""
    log_probs: np.ndarray | None
    """float32 [N, S], mean over latent elements; None where no step has noise"""
    image_index: np.ndarray
    """int64 [N, P]: index of the image that shows point p; P = S+1, or 1 when only final images are scored.
    `COMMON_IMAGE` stands for the first image of the group's first shard: the point that all members share. `NO_IMAGE`
    stands for a point without one."""
    further_index: np.ndarray | None = None
    """int64 [N, E]: index of the images in which the trajectory ends at its further granularities; None for E = 0."""
    means: np.ndarray | None = None
    """float32 [N, S, C, H, W]: means of the stochastic steps, for objectives that compare means."""
    previews: np.ndarray | None = None
    """uint8 [M, S, h, w, 3]: Tweedie's estimates before the stochastic steps of the first M members, to be shown and
    not scored; None in a shard that is not recorded, and where no step has noise."""

    def __post_init__(self) -> None:
        members = self.request.members
        shape = self.latents.shape
        _require(len(shape) == 5, f"latents must be [N, T+1, C, H, W], got {list(shape)}")
        _require(shape[0] == members, f"latents of {shape[0]} members, request of {members}")
        wanted = (members, len(self.steps), *shape[2:])
        _require(self.means is None or self.means.shape == wanted, f"means must be {list(wanted)}")
        if self.log_probs is None:
            _require(shape[1] == 1, f"latents without log_probs must be the clean ones only, got {shape[1]} points")
        else:
            _require(
                self.log_probs.shape == (members, len(self.steps)),
                f"log_probs must be [{members}, {len(self.steps)}], got {list(self.log_probs.shape)}",
            )
        _require(
            self.image_index.shape in ((members, 1), (members, len(self.steps) + 1)),
            f"image_index must be [{members}, 1 or {len(self.steps) + 1}], got {list(self.image_index.shape)}",
        )
        _require(self.latents.dtype == np.float32, f"latents must be float32, got {self.latents.dtype}")

    def facts(self) -> ShardFacts:
        """Return what is known about these trajectories without their arrays."""
        finals = tuple(hashlib.sha256(final.tobytes()).hexdigest() for final in self.latents[:, -1])
        return ShardFacts(
            request=self.request,
            steps=self.steps,
            image_index=self.image_index,
            finals=finals,
            further_index=self.further_index,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """A rollout actor's small answer beside the large arrays: which adapter made how many images."""

    adapter_version: int
    adapter_digest: str
    images: int
    """Number of images that came with it."""

    def require_adapter_of(self, request: "ShardRequest | GenerateRequest") -> None:
        """Raise ContractError unless the images come from the adapter that the request names."""
        version, digest = request.adapter_version, request.adapter_digest
        _require(
            (self.adapter_version, self.adapter_digest) == (version, digest),
            f"images must come from adapter version {version} ({digest[:12]}),"
            f" got {self.adapter_version} ({self.adapter_digest[:12]})",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardReceipt(Receipt):
    """The small answer to a `ShardRequest`."""

    facts: ShardFacts
    work: Mapping[str, float] = field(default_factory=dict)
    """The work that the shard took, by the names `work/...` of docs/metrics.md."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """One scorer's answer about B images. A failed score is invalid and has a reason; it is never 0."""

    values: np.ndarray
    """float32 [B]; NaN where invalid"""
    valid: np.ndarray
    """bool [B]"""
    reasons: tuple[str, ...]
    """Per image; empty where valid."""
    components: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Further float32 [B] readings by name, e.g. `strict`; NaN where invalid."""
    voids_group: bool = False
    """A score is missing and the failure policy drops the image's whole group; reward pools set this."""
    seconds: float = 0.0
    """Seconds inside scorers that these scores took; images that are scored together share them."""

    def __post_init__(self) -> None:
        size = len(self.reasons)
        _require(self.values.shape == (size,), f"values must be [{size}], got {list(self.values.shape)}")
        _require(self.valid.shape == (size,), f"valid must be [{size}], got {list(self.valid.shape)}")
        for name, component in self.components.items():
            _require(component.shape == (size,), f"component {name} must be [{size}], got {list(component.shape)}")

    @staticmethod
    def missing(size: int, reason: str) -> "Scores":
        """Mark all `size` scores as missing for one reason, such as a dead reward actor or a deadline."""
        return Scores(values=np.full(size, np.nan, np.float32), valid=np.zeros(size, bool), reasons=(reason,) * size)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredShard:
    """One shard's trajectories with the scores of its images. The loop makes it, the learner reads it."""

    rollout: Rollout
    """In the loop a `protocol.ports.RolloutHandle`, which only the learner worker that trains the shard resolves."""
    facts: ShardFacts
    scores: Scores
    work: Mapping[str, float] = field(default_factory=dict)
    """As in `ShardReceipt`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroup:
    """All shards of one group, in member order."""

    prompt: Prompt
    shards: tuple[ScoredShard, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """The credit of one group's steps in one update. The learner makes it, the trajectory recorder reads it."""

    adapter_version: int
    """The adapter version that this update made."""
    rewards: np.ndarray
    """float32 [N, T+1] rewards of the points, the finished image's last; NaN where missing or not explored."""
    values: np.ndarray | None = None
    """float32 [N, T+1] calibrated values of the points, NaN where the reward is; None unless values are calibrated."""
    step_rewards: np.ndarray
    """float32 [N, T] step rewards of the credit rule; NaN where missing, and for steps that were not stochastic."""
    advantages: np.ndarray
    """float32 [N, T]; 0 where the step reward is NaN"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Excerpt:
    """The first M members of a recorded shard with small images. A rollout actor cuts it out, the recorder reads it."""

    request: ShardRequest
    steps: tuple[int, ...]
    images: np.ndarray
    """uint8 [M, S+1, h, w, 3], the longer side at most 128: before each step, and finished. Only [M, 1, h, w, 3], the
    finished images, where no step has noise."""
    skipped: tuple[int, ...] = ()
    """The steps before which the image is a preview: nobody scored it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """A batch of ODE images from keyed noise. The evaluation writes it, a rollout actor reads it."""

    prompts: tuple[Prompt, ...]
    numbers: tuple[int, ...]
    """The number of each image among the images of its prompt; seed, prompt and number key the noise."""
    seed: int
    steps: int
    """Euler steps of the ODE."""
    adapter_version: int
    adapter_digest: str
    size: tuple[int, int] | None = None
    """Height and width of an image in pixels; None for the training's."""
    adapter_steps: int | None = None
    """The adapter takes this many steps, from the first, and the base model the others; None for all steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerState:
    """Everything that a learner needs to resume exactly. The learner makes it, checkpoints store it."""

    iteration: int
    """Iterations done, which is the version of the adapter."""
    adapter: Adapter
    optimizer: Mapping[str, np.ndarray]
    """float32 arrays named `<parameter>/exp_avg`, `<parameter>/exp_avg_sq`, `<parameter>/step`."""
    average: Adapter | None = None
    """The adapter's running mean, if the config asks for one."""
    old: Adapter | None = None
    """The adapter `old`, if the objective has one."""
    baseline: tuple[float | None, ...] = ()
    """Running mean gain of each step, None for a step without one; empty unless the normalisation keeps means."""
    recent: tuple[Adapter, ...] = ()
    """Earlier adapters that groups in flight need, oldest first, at most `max_lag`. The loop adds and reads them."""
    broken: Mapping[str, int] = field(default_factory=dict)
    """Guards with a broken rule, and for how many iterations in a row. The loop adds and reads them."""
