"""The detector for photographs: instances worked by hand from logits, and the whole path on tiny random weights."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers.models.mask2former.image_processing_pil_mask2former import Mask2FormerImageProcessorPil

from protocol.errors import PromptError, ScorerError
from protocol.messages import Prompt
from rewards.geneval.photo_detector import COLORS, MOST_INSTANCES, PhotoDetector, instances, prepared
from rewards.scorer import build_scorer
from tests.support.scenes import long_scene
from tests.support.worlds.clips import write_clip, write_segmenter

BIG = 20.0


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("weights")
    return write_segmenter(folder / "segmenter"), write_clip(folder / "clip")


def test_instances_are_the_masks_extents_with_class_and_mask_confidence_multiplied() -> None:
    # two queries over three classes and "nothing"; masks of 4x4 logits, half a pixel of the 8x8 image each
    class_logits = torch.log(torch.tensor([[0.8, 0.1, 0.05, 0.05], [0.05, 0.05, 0.45, 0.45]]))
    masks = torch.full((2, 4, 4), -BIG)
    masks[0, 1:3, 0:2] = BIG
    masks[1, 3, 3] = BIG
    found = instances(class_logits, masks, pixel_mask=torch.ones(4, 4), size=(4, 4), threshold=0.3)
    assert [(item.label, item.box) for item in found] == [(0, (0, 1, 2, 3)), (2, (3, 3, 4, 4))]
    assert [item.score for item in found] == pytest.approx([0.8, 0.45], abs=1e-4)
    assert found[0].mask.sum() == 4
    strict = instances(class_logits, masks, pixel_mask=torch.ones(4, 4), size=(4, 4), threshold=0.45)
    assert [item.label for item in strict] == [0], "a score must be above the threshold, not at it"


def test_a_mask_s_confidence_is_its_mean_inside_and_padding_does_not_count() -> None:
    class_logits = torch.log(torch.tensor([[0.9, 0.1]]))
    masks = torch.full((1, 4, 4), -BIG)
    masks[0, 0, 0], masks[0, 0, 1] = torch.logit(torch.tensor(0.6)), torch.logit(torch.tensor(0.8))
    masks[0, 3] = BIG  # rows 2 and 3 are padding
    pixel_mask = torch.zeros(4, 4, dtype=torch.long)
    pixel_mask[:2] = 1
    (found,) = instances(class_logits, masks, pixel_mask=pixel_mask, size=(2, 4), threshold=0.3)
    assert found.box == (0, 0, 2, 1)
    assert found.score == pytest.approx(0.9 * 0.7, abs=1e-3)
    assert instances(class_logits, torch.full((1, 4, 4), -BIG), pixel_mask=pixel_mask, size=(2, 4), threshold=0.3) == []


def test_the_whole_path_runs_on_random_weights_and_obeys_its_limits(weights: tuple[Path, Path]) -> None:
    segmenter, clip = weights
    images = np.random.default_rng(1).integers(0, 256, (2, 48, 60, 3), np.uint8)
    detector = PhotoDetector(model=str(segmenter), clip=str(clip), threshold=0.05, per_class=2)
    assert detector.labels == {"person", "motorcycle", "computer keyboard", "dog"}
    found = detector.detect(images, [detector.labels] * 2)
    assert all(found), "random weights with a low threshold must find something"
    for objects in found:
        assert [item.score for item in objects] == sorted((item.score for item in objects), reverse=True)
        assert max(sum(item.label == label for item in objects) for label in detector.labels) <= 2
        for item in objects:
            x0, y0, x1, y1 = item.box
            assert 0 <= x0 < x1 <= 60 and 0 <= y0 < y1 <= 48
            assert item.color in COLORS and item.score > 0.05
    assert detector.detect(images[1:], [detector.labels]) == found[1:], "neighbours must not matter"


def test_colours_are_named_only_where_a_prompt_asks_for_them(
    weights: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    segmenter, clip = weights
    images = np.random.default_rng(1).integers(0, 256, (3, 48, 60, 3), np.uint8)
    detector = PhotoDetector(model=str(segmenter), clip=str(clip), threshold=0.05)
    plain = detector.detect(images, [frozenset()] * 3)
    assert "_clip" not in vars(detector), "the CLIP is not even loaded"
    label = plain[1][0].label
    some = detector.detect(images, [frozenset(), {label}, frozenset()])
    assert [[item.color in COLORS for item in found] for found in some] == [
        [row == 1 and item.label == label for item in found] for row, found in enumerate(plain)
    ]
    monkeypatch.setattr(PhotoDetector, "images_per_forward", 2)  # as on a GPU; the last batch is filled up
    for found, alone in zip(detector.detect(images, [frozenset(), {label}, frozenset()]), some, strict=True):
        assert [(item.label, item.color, item.box) for item in found] == [
            (item.label, item.color, item.box) for item in alone
        ]
        assert [item.score for item in found] == pytest.approx([item.score for item in alone], abs=1e-5)


def test_pixels_are_those_of_the_model_s_own_processor(weights: tuple[Path, Path]) -> None:
    segmenter, _ = weights
    images = np.random.default_rng(2).integers(0, 256, (2, 50, 130, 3), np.uint8)
    processor = Mask2FormerImageProcessorPil.from_pretrained(segmenter)
    processor.pad_size = {"height": 96, "width": 160}
    expected = processor(images=list(images), return_tensors="pt")
    pixels, pixel_mask = prepared(processor, images, "cpu")
    assert expected.pixel_mask.float().mean() < 1, "there is padding"
    torch.testing.assert_close(pixels, expected.pixel_values, rtol=0, atol=1e-6)
    torch.testing.assert_close(pixel_mask, expected.pixel_mask)


@pytest.mark.parametrize("cases", [100, pytest.param(4000, marks=[long_scene, pytest.mark.whole])])
@pytest.mark.parametrize("threshold", [0.05, 0.3, 0.9])
def test_only_queries_above_the_threshold_are_interpolated_and_nothing_else_changes(
    threshold: float, cases: int
) -> None:
    draw = torch.Generator().manual_seed(int(100 * threshold))
    for _ in range(cases):
        case = random_case(draw)
        found = [(item.label, item.box, item.score, item.mask) for item in instances(**case, threshold=threshold)]
        expected = instances_of_all_queries(**case, threshold=threshold)
        # sorted, since scores that are equal but for rounding may have either order
        found, expected = (sorted(side, key=lambda item: item[:3]) for side in (found, expected))
        assert [item[:2] for item in found] == [item[:2] for item in expected]
        assert [item[2] for item in found] == pytest.approx([item[2] for item in expected], abs=1e-6)
        assert all(np.array_equal(one[3], other[3]) for one, other in zip(found, expected, strict=True))


def random_case(draw: torch.Generator) -> dict:
    """Logits of 1 to 30 queries and 1 to 8 classes, most of them sure; masks are blobs, some are empty."""
    queries, classes, height, width, low = (
        int(torch.randint(1, most, (), generator=draw)) for most in (31, 9, 40, 40, 9)
    )
    height, width = height + 8, width + 8
    coarse = torch.randn(1, queries, low, low, generator=draw) * 6 - 2
    pixel_mask = torch.zeros(height, width, dtype=torch.long)
    pixel_mask[: height - int(torch.randint(0, 5, (), generator=draw)), : width - low // 2] = 1
    return {
        "class_logits": torch.randn(queries, classes + 1, generator=draw) * 4,
        "mask_logits": torch.nn.functional.interpolate(coarse, size=(height // 4 + 1, width // 4 + 1), mode="bicubic")[
            0
        ],
        "pixel_mask": pixel_mask,
        "size": (height + low, 2 * width - low),
    }


def instances_of_all_queries(class_logits, mask_logits, *, pixel_mask, size, threshold) -> list[tuple]:
    """The formula of `instances` as transformers computes it: every query is interpolated, then most are dropped."""
    classes = class_logits.shape[-1] - 1
    shares = class_logits.softmax(-1)[:, :-1].flatten()
    best = shares.topk(min(MOST_INSTANCES, len(shares))).indices
    padded = torch.nn.functional.interpolate(mask_logits[None], size=tuple(pixel_mask.shape), mode="bilinear")[0]
    rows, columns = int(pixel_mask[:, 0].sum()), int(pixel_mask[0].sum())
    full = torch.nn.functional.interpolate(padded[None, :, :rows, :columns], size=size, mode="bilinear")[0]
    found = []
    for index in best.tolist():
        inside = full[index // classes] > 0
        score = float(shares[index] * full[index // classes].sigmoid()[inside].mean())
        if inside.any() and shares[index] > threshold and score > threshold:
            ys, xs = inside.nonzero(as_tuple=True)
            box = (int(xs.min()), int(ys.min()), int(xs.max()) + 1, int(ys.max()) + 1)
            found.append((index % classes, box, score, inside))
    return found


def test_prompts_that_ask_for_what_the_detector_does_not_know_are_refused(weights: tuple[Path, Path]) -> None:
    segmenter, clip = weights
    scorer = build_scorer("geneval", detector_args={"model": str(segmenter), "clip": str(clip)})  # the default
    scorer.check(
        [
            Prompt(
                index=0, text="", metadata={"tag": "colors", "include": [{"class": "dog", "count": 1, "color": "pink"}]}
            )
        ]
    )
    for item, message in (
        ({"class": "dgo", "count": 1}, "knows no class 'dgo': did you mean 'dog'"),
        ({"class": "keyboard", "count": 1}, "knows no class 'keyboard': did you mean 'computer keyboard'"),
        ({"class": "dog", "count": 1, "color": "gray"}, "knows no colour 'gray'"),
    ):
        with pytest.raises(PromptError, match=f"prompt line 1 .*{message}"):
            scorer.check([Prompt(index=0, text="", metadata={"tag": "colors", "include": [item]})])


@pytest.mark.parametrize(
    ("clauses", "message"),
    [
        ({"include": [{"class": "circle", "count": 1, "color": "purple"}]}, "knows no colour 'purple'"),
        (
            {"include": [{"class": "circle", "count": 1}], "exclude": [{"class": "dog", "count": 1}]},
            "knows no class 'dog'",
        ),
    ],
)
def test_the_toy_detector_says_what_it_knows_too(clauses: dict, message: str) -> None:
    prompt = Prompt(index=0, text="", metadata={"tag": "colors", **clauses})
    with pytest.raises(PromptError, match=message):
        build_scorer("geneval", detector="toyworld.world.detector:ShapeDetector").check([prompt])


def test_weights_that_are_not_there_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(ScorerError, match="weights '.*' cannot be loaded"):
        build_scorer(
            "geneval",
            detector="rewards.geneval.photo_detector:PhotoDetector",
            detector_args={"model": str(tmp_path / "nowhere")},
        )
