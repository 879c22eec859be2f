"""What an edit keeps: features beside MagicBrush's steps, and PSNR outside a mask with worked numbers."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import ViTConfig, ViTModel

from protocol.errors import PromptError, ScorerError
from protocol.messages import ConditionImage, Prompt
from rewards.editing.consistency import mask_of, mask_runs
from rewards.scorer import build_scorer, check_prompts, require_ready
from rewards.scores import partly

RNG = np.random.default_rng(4)


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("vit")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    ViTModel(ViTConfig(**sizes, image_size=28, patch_size=7), add_pooling_layer=False).save_pretrained(path)
    return str(path)


def test_consistency_is_the_cosine_of_the_class_tokens_as_magicbrush_computes_it(vit: str) -> None:
    """Shorter side to 256 / 224 of the model's 28 pixels, so 32; its middle square; ImageNet's mean and deviation."""
    images, before = RNG.integers(0, 256, (2, 40, 64, 3), np.uint8), RNG.integers(0, 256, (2, 60, 48, 3), np.uint8)
    scores = build_scorer("consistency", model=vit, device="cpu").score(
        images, ["", ""], [{}, {}], [[before[0]], [images[1]]]
    )
    model = ViTModel.from_pretrained(vit, add_pooling_layer=False).eval()

    def feature(image: np.ndarray, size: tuple[int, int]) -> torch.Tensor:
        small = np.asarray(Image.fromarray(image).resize(size, Image.Resampling.BICUBIC)).astype(np.float32) / 255
        top, left = (round((edge - 28) / 2) for edge in small.shape[:2])
        cut = (small[top : top + 28, left : left + 28] - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
        with torch.no_grad():
            return model(torch.tensor(cut, dtype=torch.float32).permute(2, 0, 1)[None]).last_hidden_state[0, 0]

    wanted = torch.cosine_similarity(feature(images[0], (51, 32)), feature(before[0], (32, 40)), dim=0)
    np.testing.assert_allclose(scores.values, [float(wanted), 1], rtol=1e-5)
    assert -1 < scores.values[0] < 0.999


def test_what_the_mask_covers_may_change_and_the_rest_counts(vit: str) -> None:
    """Of 4 x 6 pixels a rim of one is left out, and the mask takes two of the eight in the middle.

    A change of 51 in one channel of one pixel outside makes a mean square of 0.04 / 72, which is 32.55 dB.
    """
    before = np.zeros((4, 6, 3), np.uint8)
    mask = np.zeros((4, 6), bool)
    mask[1, 1:3] = True
    inside, outside, rim = before.copy(), before.copy(), before.copy()
    inside[1, 2], outside[2, 4, 0], rim[0] = 255, 51, 255
    facts = {"mask": mask_runs(mask)}
    assert facts["mask"] == {"size": [4, 6], "runs": [7, 2]}
    images = np.stack([inside, outside, rim, before])
    scores = build_scorer("masked_psnr").score(images, [""] * 4, [facts] * 4, [[before]] * 4)
    decibels = -10 * np.log10(0.04 / 72)
    np.testing.assert_allclose(scores.values, [1, decibels / 50, 1, 1], rtol=1e-6)
    np.testing.assert_allclose(scores.components["psnr"], [100, 32.5527, 100, 100], rtol=1e-5)


def test_a_mask_of_fewer_pixels_is_stretched_and_one_over_all_is_no_score() -> None:
    before = np.zeros((4, 8, 3), np.uint8)
    right = before.copy()
    right[:, 4:] = 255
    halves = [{"mask": mask_runs(np.array([half]))} for half in ([False, True], [True, False], [True, True])]
    scores = build_scorer("masked_psnr").score(np.stack([right] * 3), [""] * 3, halves, [[before]] * 3)
    assert scores.valid.tolist() == [True, True, False] and "leaves nothing" in scores.reasons[2]
    assert scores.values[0] == 1 and scores.values[1] < 0.2


def test_a_prompt_without_a_whole_mask_is_refused_before_the_run() -> None:
    good = {"size": [2, 3], "runs": [0, 1, 4, 9]}
    assert mask_of({"mask": good}).astype(int).tolist() == [[1, 0, 0], [0, 1, 1]]
    condition = ConditionImage(path="/a.png", sha256="")
    check_prompts("masked_psnr", {}, [Prompt(index=0, text="a", metadata={"mask": good}, conditions=(condition,))])
    for bad in (None, {"size": [2, 3], "runs": [1]}, {"size": [2, 3], "runs": [6, 1]}, {"size": [0, 3], "runs": []}):
        with pytest.raises(PromptError, match=r"prompt line 1 .*masked_psnr needs mask"):
            check_prompts(
                "masked_psnr", {}, [Prompt(index=0, text="a", metadata={"mask": bad}, conditions=(condition,))]
            )


def test_edit_mixes_the_judge_and_consistency_and_needs_both(vit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A judge's 8 of 10 and a consistency of 1 make 0.75 x 0.8 + 0.25 = 0.85."""
    from rewards.editing import judge

    monkeypatch.setattr(judge, "judge_of", lambda _: type("Quiet", (), {"parallel": 1})())
    monkeypatch.setattr(judge.EditJudge, "score", lambda *_: partly([8, 0], ["", "no answer"], {"follows": [8, 0]}))
    image = RNG.integers(0, 256, (32, 32, 3), np.uint8)
    scorer = build_scorer("edit", features=vit, device="cpu")
    scores = scorer.score(np.stack([image, image]), ["", ""], [{}, {}], [[image]] * 2)
    assert scores.values[0] == pytest.approx(0.85, rel=1e-5)
    assert scores.valid.tolist() == [True, False] and scores.reasons[1] == "no answer"
    assert scores.components["judge/follows"][0] == 8
    with pytest.raises(ScorerError, match="kept of edit must lie in"):
        build_scorer("edit", features=vit, kept=2.0)
    require_ready("consistency", {"model": vit})
    with pytest.raises(ScorerError, match="must hold a file"):
        require_ready("edit", {"features": str(Path(vit).parent)})
