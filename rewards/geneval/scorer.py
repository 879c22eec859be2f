"""The GenEval scorer: does the image show the objects, counts, colours and positions of its prompt?

    scorer = build_scorer("geneval")                                              # photographs: COCO's classes
    scorer = build_scorer("geneval", detector="toyworld.world.detector:ShapeDetector", reward="soft")

The detector is named by its import path; the default is `PhotoDetector`, since GenEval's prompts name COCO's classes.
`rewards.geneval.verdict` judges its detections; `rewards.geneval.original` does so exactly as the original code.
"""

from collections.abc import Mapping, Sequence, Set
from typing import Any, Literal, Protocol

import numpy as np

from protocol.errors import ContractError, PromptError, ScorerError, suggest
from protocol.messages import Detection, Metadata, Prompt, Scores
from protocol.prompts import check_each
from rewards.geneval.clauses import read_clauses
from rewards.geneval.original import judge_original
from rewards.geneval.verdict import judge
from rewards.loading import build_from_path, require_class_ready
from rewards.scores import scored

PHOTOS = "rewards.geneval.photo_detector:PhotoDetector"
JUDGES = {"sound": judge, "original": judge_original}


class Detector(Protocol):
    """Finds objects in images. The scorer constructs it with `detector_args`.

    A detector may have three further attributes. `labels` and `colors` are the sets of names that it knows; a prompt
    that uses another name is refused before a run starts. `counting_threshold` is the score that an object must exceed
    to count for a counting prompt.
    """

    def detect(self, images: np.ndarray, colored: Sequence[Set[str]]) -> list[list[Detection]]:
        """Return the objects of each image of uint8 [B, H, W, 3], in any order; an empty list if there are none.

        `colored` names, for each image, the classes whose colour its prompt asks for. Objects of other classes need no
        colour.
        """
        ...


class GenEval:
    """Scores images by GenEval metadata (Ghosh et al. 2023, arXiv 2310.11513), in [0, 1].

    The value is the soft score (the training reward of Flow-GRPO, arXiv 2505.05470) or the strict verdict. The
    components are `strict` and the official `correct`, each 1 or 0. See `rewards.geneval.verdict.judge` for the
    formulas. An image without any object has the valid score 0, since the detector has examined it. With
    `compat="original"` soft score and strict verdict are the original code's; that soft score has no lower bound.
    """

    name = "geneval"
    components = ("strict", "correct")
    high = 1.0

    def __init__(
        self,
        *,
        detector: str = PHOTOS,
        detector_args: Mapping[str, Any] | None = None,
        reward: Literal["soft", "strict"] = "soft",
        compat: Literal["sound", "original"] = "sound",
    ) -> None:
        """Load the detector.

        Args:
            detector: import path `package.module:Class` of a `Detector`.
            reward: the value of an image: `soft` or `strict`.
            compat: the formulas: `sound`, or `original`, the original code's.

        Raises:
            ScorerError: the detector cannot be loaded or has no `detect`, or `reward` or `compat` has another value.
        """
        if reward not in ("soft", "strict"):
            raise ScorerError(f"reward of geneval must be 'soft' or 'strict', got {reward!r}")
        if compat not in JUDGES:
            raise ScorerError(f"compat of geneval must be 'sound' or 'original', got {compat!r}")
        self.low = -float("inf") if (compat, reward) == ("original", "soft") else 0.0
        self._reward = reward
        self._judge = JUDGES[compat]
        self._detector: Detector = build_from_path(detector, args=detector_args or {})
        if not callable(getattr(self._detector, "detect", None)):
            raise ScorerError(f"the detector of geneval must have a method detect(images), but {detector!r} has none")

    @staticmethod
    def ready(*, detector: str = PHOTOS, detector_args: Mapping[str, Any] | None = None, **_: Any) -> None:
        require_class_ready(detector, detector_args or {})

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Check that the metadata of every prompt is a valid GenEval line whose classes and colours the detector knows.

        Raises:
            PromptError: it is not; the error names the first such line.
        """
        check_each(prompts, lambda prompt: self._require_known(prompt.metadata))

    def score(self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Scores:  # noqa: ARG002
        """Judge B images by their metadata.

        Raises:
            ContractError: the detector's answer is not one list of detections for each image.
            PromptError: a line of metadata is malformed.
        """
        lines = {id(line): line for line in metadata}  # the images of a group share theirs
        clauses = {key: read_clauses(line) for key, line in lines.items()}
        detections = self._detector.detect(images, [clauses[id(line)].colored for line in metadata])
        _check_detections(detections, len(images))
        verdicts = [
            self._judge(self._sure_enough(objects, line), clauses[id(line)])
            for objects, line in zip(detections, metadata, strict=True)
        ]
        return scored(
            [getattr(verdict, self._reward) for verdict in verdicts],
            {name: [getattr(verdict, name) for verdict in verdicts] for name in self.components},
        )

    def _require_known(self, metadata: Metadata) -> None:
        clauses = read_clauses(metadata)
        asked = {
            "labels": [item.label for item in (*clauses.include, *clauses.exclude)],
            "colors": [item.color for item in clauses.include if item.color is not None],
        }
        for what, names in asked.items():
            known: frozenset[str] | None = getattr(self._detector, what, None)
            for name in names:
                if known is not None and name not in known:
                    kind = {"labels": "class", "colors": "colour"}[what]
                    raise PromptError(f"the detector knows no {kind} {name!r}: {suggest(name, known)}")

    def _sure_enough(self, objects: list[Detection], metadata: Metadata) -> list[Detection]:
        threshold = getattr(self._detector, "counting_threshold", None)
        if threshold is None or metadata.get("tag") != "counting":
            return objects
        return [detection for detection in objects if detection.score > threshold]


def _check_detections(detections: list[list[Detection]], size: int) -> None:
    if len(detections) != size:
        raise ContractError(f"the detector must return one list for each of {size} images, got {len(detections)}")
    for image, objects in enumerate(detections):
        for item in objects:
            if not isinstance(item, Detection):
                raise ContractError(f"the detector must return Detections, got {item!r} for image {image}")
            x0, y0, x1, y1 = item.box
            if not (np.isfinite((*item.box, item.score)).all() and x0 <= x1 and y0 <= y1):
                got = f"box {item.box} with score {item.score} for image {image}"
                raise ContractError(f"box and score must be finite, with x0 <= x1 and y0 <= y1, got {got}")
