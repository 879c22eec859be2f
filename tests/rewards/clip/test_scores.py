"""CLIP score, HPSv2 and the aesthetic head equal their formulas on a tiny CLIP."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from transformers import CLIPModel
from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

from deploy.tools.evaluate import diversity_of
from protocol.errors import ScorerError
from rewards.clip.features import ClipFeatures
from rewards.scorer import build_scorer, require_ready
from tests.support.worlds.clips import write_clip

IMAGES = np.random.default_rng(9).integers(0, 256, (5, 24, 24, 3), np.uint8)
PROMPTS = ["a cat", "two dogs", "a sign", "rain", "a cat"]


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_clip(tmp_path_factory.mktemp("clip"), seed=8)


@pytest.fixture(scope="module")
def cosines(clip: Path) -> np.ndarray:
    features = ClipFeatures(str(clip), device="cpu")
    images, texts = features.of_images(IMAGES).astype(np.float64), features.of_texts(PROMPTS)
    return (images * texts).sum(1) / np.linalg.norm(images, axis=1) / np.linalg.norm(texts, axis=1)


def test_clip_score_is_two_and_a_half_cosines_and_never_negative(clip: Path, cosines: np.ndarray) -> None:
    assert cosines.min() < 0 < cosines.max()
    values = build_scorer("clipscore", model=str(clip)).score(IMAGES, PROMPTS, [{}] * 5).values
    np.testing.assert_allclose(values, [2.5 * max(cosine, 0) for cosine in cosines], atol=1e-5)


def test_hpsv2_is_the_cosine(clip: Path, cosines: np.ndarray) -> None:
    values = build_scorer("hpsv2", model=str(clip)).score(IMAGES, PROMPTS, [{}] * 5).values
    np.testing.assert_allclose(values, cosines, atol=1e-5)  # images of CLIP's own size are not resized


@pytest.mark.parametrize("size", [(32, 50), (90, 31), (24, 20), (40, 40)])
def test_hpsv2_fits_the_longer_side_and_pads_with_black(clip: Path, size: tuple[int, int]) -> None:
    image = np.random.default_rng(4).integers(0, 256, (*size, 3), np.uint8)
    height, width = (round(edge * 24 / max(size)) for edge in size)  # the tiny CLIP sees 24 pixels
    square = np.zeros((24, 24, 3), np.float32)
    down, left = (24 - height) // 2, (24 - width) // 2
    for channel in range(3):  # Pillow resizes floats with the same kernel, without rounding
        plane = Image.fromarray(image[..., channel].astype(np.float32) / 255)
        resized = np.asarray(plane.resize((width, height), Image.Resampling.BICUBIC))
        square[down : down + height, left : left + width, channel] = resized
    features = ClipFeatures(str(clip), device="cpu")
    pixels = (square - OPENAI_CLIP_MEAN) / OPENAI_CLIP_STD
    model = CLIPModel.from_pretrained(clip).eval()
    with torch.inference_mode():
        found = model.get_image_features(torch.tensor(pixels, dtype=torch.float32).permute(2, 0, 1)[None])
    unit = found.pooler_output[0].numpy() / np.linalg.norm(found.pooler_output)
    value = build_scorer("hpsv2", model=str(clip)).score(image[None], ["rain"], [{}]).values[0]
    assert value == pytest.approx(unit @ features.of_texts(["rain"])[0], abs=1e-5)
    cut = features.cosines(image[None], ["rain"])[0]
    assert size == (40, 40) or abs(value - cut) > 1e-3, "the middle square alone is another image"


def test_hpsv2_must_be_told_where_its_weights_are() -> None:
    with pytest.raises(ScorerError, match="must be given its arguments, got none for model"):
        build_scorer("hpsv2")


def test_the_aesthetic_head_is_its_linear_layers_one_after_the_other(clip: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    head = torch.nn.Sequential(torch.nn.Linear(12, 5), torch.nn.Dropout(0.2), torch.nn.Linear(5, 1)).eval()
    state = {f"layers.{name}": value for name, value in head.state_dict().items()}
    save_file(state, tmp_path / "head.safetensors")
    torch.save(state, tmp_path / "head.pth")
    features = torch.from_numpy(ClipFeatures(str(clip), device="cpu").of_images(IMAGES))
    with torch.no_grad():
        expected = head(features)[:, 0].numpy()
    for name in ("head.safetensors", "head.pth"):
        scorer = build_scorer("aesthetic", model=str(clip), head=str(tmp_path / name))
        np.testing.assert_allclose(scorer.score(IMAGES, PROMPTS, [{}] * 5).values, expected, atol=1e-5)


LAYERS = {"0.weight": (5, 12), "0.bias": (5,), "2.weight": (1, 5), "2.bias": (1,)}


@pytest.mark.parametrize("file", ["head.safetensors", "head.pth"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"2.bias": None}, r"1 missing \['layers.2.bias'\]"),
        ({"2.weight": None}, "none named 'layers.2.weight'"),
        ({"other": (3,)}, r"1 unknown \['layers.other'\]"),
        ({"0.weight": (5, 13)}, "shapes that fit each other"),  # of another CLIP
        ({"0.bias": (4,)}, "shapes that fit each other"),
        ({"2.weight": (3, 5), "2.bias": (3,)}, "output width 1"),
    ],
)
def test_a_head_of_other_layers_is_refused_by_its_header_too(
    clip: Path, tmp_path: Path, file: str, change: dict, message: str
) -> None:
    shapes = {name: shape for name, shape in (LAYERS | change).items() if shape}
    state = {f"layers.{name}": torch.zeros(shape) for name, shape in shapes.items()}
    (torch.save if file.endswith("pth") else save_file)(state, tmp_path / file)
    for read in (build_scorer, lambda name, **args: require_ready(name, args)):
        with pytest.raises(ScorerError, match=f"{file} must hold an aesthetic head's tensors.*{message}"):
            read("aesthetic", model=str(clip), head=str(tmp_path / file))


def test_a_head_that_is_not_there_is_one_line(clip: Path, tmp_path: Path) -> None:
    with pytest.raises(ScorerError, match=r"weights '.*absent.pth' cannot be loaded"):
        build_scorer("aesthetic", model=str(clip), head=str(tmp_path / "absent.pth"))


def test_diversity_is_the_mean_distance_from_the_rest_of_the_group(clip: Path) -> None:
    features = ClipFeatures(str(clip), device="cpu").of_images(IMAGES).astype(np.float64)
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    expected = [np.mean([1 - features[i] @ features[j] for j in range(5) if j != i]) for i in range(5)]
    scorer = build_scorer("diversity", model=str(clip))
    assert scorer.sees == "group"
    found = scorer.score(IMAGES, ["a cat"] * 5, [{}] * 5)
    np.testing.assert_allclose(found.values, expected, atol=1e-5)
    assert found.values.mean() == pytest.approx(diversity_of(features[None]), abs=1e-5)
    alike = scorer.score(IMAGES[[0, 0, 0]], ["a cat"] * 3, [{}] * 3)
    np.testing.assert_allclose(alike.values, 0, atol=1e-5)
    assert not scorer.score(IMAGES[:1], ["a cat"], [{}]).valid.any()
