"""PickScore equals its formula computed independently, whatever the batch, and is useful on the toy world."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import CLIPModel, CLIPTokenizer

from protocol.errors import ScorerError
from rewards.scorer import build_scorer, check_prompts
from tests.support.worlds.clips import CONTEXT, SIZE, write_clip

PROMPTS = ["a", "a red cat on a mat", "Two!", "a very long prompt that is cut at the model's context, nobody reads on"]
MEAN = torch.tensor([0.48145466, 0.4578275, 0.40821073])
STD = torch.tensor([0.26862954, 0.26130258, 0.27577711])


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_clip(tmp_path_factory.mktemp("clip"))


@pytest.fixture(scope="module")
def images() -> np.ndarray:
    return np.random.default_rng(4).integers(0, 256, (33, 40, 31, 3), np.uint8)


def by_hand(clip: Path, image: np.ndarray, prompt: str) -> float:
    """exp(logit_scale) <t, i> / 26 for one pair, with PIL's resize and no processor, no padding, no batch."""
    model = CLIPModel.from_pretrained(clip).double().eval()
    height, width = image.shape[:2]
    scale = SIZE / min(height, width)
    small = Image.fromarray(image).resize((int(width * scale), int(height * scale)), Image.Resampling.BICUBIC)
    left, top = (small.width - SIZE) // 2, (small.height - SIZE) // 2
    pixels = torch.from_numpy(np.array(small)[top : top + SIZE, left : left + SIZE].copy()).double() / 255
    pixels = ((pixels - MEAN) / STD).permute(2, 0, 1)[None]
    ids = CLIPTokenizer.from_pretrained(clip)([prompt], truncation=True, max_length=CONTEXT, return_tensors="pt")
    with torch.no_grad():
        image = model.visual_projection(model.vision_model(pixels).pooler_output)[0]
        text = model.text_projection(model.text_model(ids.input_ids).pooler_output)[0]
        cosine = torch.nn.functional.cosine_similarity(image, text, dim=0)
        return float(model.logit_scale.exp() * cosine / 26)


def test_scores_equal_the_formula_for_every_batch_from_1_to_33(clip: Path, images: np.ndarray) -> None:
    prompts = [PROMPTS[index % len(PROMPTS)] for index in range(33)]
    expected = [by_hand(clip, image, prompt) for image, prompt in zip(images, prompts, strict=True)]
    assert max(expected) - min(expected) > 0.5, "the formula must tell images apart"
    scorer = build_scorer("pickscore", model=str(clip), batch=8)
    for size in range(1, 34):
        scores = scorer.score(images[:size], prompts[:size], [{}] * size)
        assert scores.valid.all()
        np.testing.assert_allclose(scores.values, expected[:size], atol=2e-5)


def test_a_score_depends_on_no_neighbour_to_the_last_bit(clip: Path, images: np.ndarray) -> None:
    scorer = build_scorer("pickscore", model=str(clip), batch=8)
    prompts = [PROMPTS[index % len(PROMPTS)] for index in range(33)]
    together = scorer.score(images, prompts, [{}] * 33).values
    alone = [scorer.score(images[i : i + 1], prompts[i : i + 1], [{}]).values[0] for i in range(33)]
    assert together.tolist() == alone


def test_the_range_is_read_from_the_weights(clip: Path) -> None:
    scorer = build_scorer("pickscore", model=str(clip))
    assert scorer.high == pytest.approx(100 / 26, rel=1e-3)
    assert scorer.low == -scorer.high


def test_right_captions_beat_wrong_ones_on_the_toy_world_in_9_of_10_pairs() -> None:
    from benchmarks.pretraining.dataset import draw_examples

    examples = draw_examples(600, seed=31)
    scorer = build_scorer("pickscore", model="pkg://toyworld/clip", batch=60)
    sides = [
        scorer.score(examples.images, [line["prompt"] for line in lines], lines).values
        for lines in (examples.true_lines, examples.wrong_lines)
    ]
    assert (sides[0] > sides[1]).mean() >= 0.9


def test_loading_prints_nothing(clip: Path, capfd: pytest.CaptureFixture[str]) -> None:
    build_scorer("pickscore", model=str(clip))
    assert capfd.readouterr() == ("", "")


def test_prompts_are_checked_without_loading_weights() -> None:
    check_prompts("pickscore", {"model": "/no/such/folder"}, [])
    with pytest.raises(ScorerError, match="takes no argument 'modle': did you mean 'model'"):
        check_prompts("pickscore", {"modle": "x"}, [])


def test_weights_that_are_not_there_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(ScorerError, match="weights '.*nowhere' cannot be loaded: .*give a folder") as caught:
        build_scorer("pickscore", model=str(tmp_path / "nowhere"))
    assert "\n" not in str(caught.value)
