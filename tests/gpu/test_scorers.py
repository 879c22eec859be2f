"""Scorers on a GPU: an image's answer does not depend on its batch, and TF32 changes no score by more than 1e-3."""

from pathlib import Path

import numpy as np
import pytest

from rewards.geneval.photo_detector import PhotoDetector
from rewards.scorer import build_scorer
from tests.support.worlds.clips import write_clip, write_segmenter

pytestmark = pytest.mark.gpu
IMAGES = np.random.default_rng(3).integers(0, 256, (7, 48, 60, 3), np.uint8)


@pytest.mark.parametrize("name", ["pickscore", "hpsv2"])
def test_a_score_is_its_own_and_near_that_of_the_cpu(name: str, tmp_path: Path) -> None:
    model = str(write_clip(tmp_path / "clip"))
    fast, exact = (build_scorer(name, model=model, device=device, batch=4) for device in ("cuda", "cpu"))
    values = fast.score(IMAGES, ["a cat"] * 7, [{}] * 7).values
    alone = [fast.score(IMAGES[i : i + 1], ["a cat"], [{}]).values[0] for i in range(7)]
    np.testing.assert_array_equal(values, alone)
    np.testing.assert_allclose(values, exact.score(IMAGES, ["a cat"] * 7, [{}] * 7).values, atol=1e-3)


def test_what_is_found_does_not_depend_on_the_batch(tmp_path: Path) -> None:
    model, clip = write_segmenter(tmp_path / "segmenter"), write_clip(tmp_path / "clip")
    detector = PhotoDetector(model=str(model), clip=str(clip), threshold=0.05, device="cuda", batch=4)
    found = detector.detect(IMAGES, [detector.labels] * 7)
    assert any(found)
    assert found == [detector.detect(IMAGES[i : i + 1], [detector.labels])[0] for i in range(7)]
