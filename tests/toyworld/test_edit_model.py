"""The shipped editor is an ordinary FluxKontextPipeline, small, and it edits some scenes right and some wrong."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from diffusers import AutoencoderTiny, FluxTransformer2DModel
from PIL import Image
from transformers import CLIPTextModel, T5EncoderModel

from benchmarks.pretraining.autoencoder import decode_normalised, normalised_latents
from benchmarks.pretraining.editor import Editor, both_ids
from deploy.presets import load_config
from flow.models.load import load_backbone
from protocol.ground.condition_images import condition_of
from tests.support.paths import ROOT
from toyworld.world import edits
from toyworld.world.edit_scorer import ShapesEdit

MODEL = ROOT / "toyworld" / "edit_model"


@pytest.fixture(scope="module")
def editor() -> Editor:
    """The shipped parts in the module that was trained."""
    return Editor(
        FluxTransformer2DModel.from_pretrained(MODEL / "transformer", torch_dtype=torch.float32),
        CLIPTextModel.from_pretrained(MODEL / "text_encoder", dtype=torch.float32),
        T5EncoderModel.from_pretrained(MODEL / "text_encoder_2", dtype=torch.float32),
    ).eval()


@pytest.fixture(scope="module")
def vae() -> AutoencoderTiny:
    return AutoencoderTiny.from_pretrained(MODEL / "vae", torch_dtype=torch.float32)


def test_the_folder_has_at_most_10_mb_without_links_or_machine_paths() -> None:
    files = [path for path in MODEL.rglob("*") if path.is_file()]
    assert not any(path.is_symlink() for path in files)
    assert sum(path.stat().st_size for path in files) <= 10_000_000
    for path in files:
        if path.suffix == ".json":
            text = path.read_text()
            assert "name_or_path" not in text
            assert not any(root in text for root in (': "/', "/tmp", "/work", "/home", "/root"))


@torch.no_grad()
def test_a_run_reads_instruction_and_image_exactly_as_the_training_code_did(
    editor: Editor, vae: AutoencoderTiny
) -> None:
    line, _ = edits.lines("heldout")[0]
    path = edits.FOLDER / line["image"]
    backbone = load_backbone(load_config("toy_edit").model, device="cpu")
    assert backbone.latent_shape == (4, 8, 8)
    latents, sigma = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(1)), torch.tensor([0.6])
    ours = backbone.velocity(latents, sigma, backbone.encode(line["prompt"], (condition_of(path),)))
    condition = normalised_latents(vae, np.array(Image.open(path))[None])
    assert torch.allclose(ours, editor(latents, sigma, both_ids([line["prompt"]]), condition=condition), atol=1e-5)


@torch.no_grad()
def test_between_a_quarter_and_three_quarters_of_heldout_edits_are_exact(editor: Editor, vae: AutoencoderTiny) -> None:
    lines = [line for line, _ in edits.lines("heldout")]
    before = np.stack([np.array(Image.open(edits.FOLDER / line["image"])) for line in lines])
    condition, ids = normalised_latents(vae, before), both_ids([line["prompt"] for line in lines])
    latents = torch.randn(condition.shape, generator=torch.Generator().manual_seed(1))
    sigmas = torch.linspace(1, 0, 9)
    for sigma, following in pairwise(sigmas):
        step = editor(latents, sigma.expand(len(lines)), ids, condition=condition)
        latents = latents + (following - sigma) * step
    images = decode_normalised(vae, latents)
    scores = ShapesEdit().score(images, [""] * len(lines), lines, [[image] for image in before])
    assert scores.valid.all()
    assert 0.25 < scores.components["exact"].mean() < 0.75
