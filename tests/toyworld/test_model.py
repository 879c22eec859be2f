"""The shipped folders are an ordinary Stable-Diffusion-3 pipeline and CLIP, small and without machine paths."""

import warnings

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from transformers import CLIPModel, CLIPProcessor, CLIPTextModelWithProjection

from benchmarks.pretraining import text_encoders as textencoders
from benchmarks.pretraining import tokenizer
from benchmarks.pretraining.autoencoder import normalised_latents
from benchmarks.pretraining.clip import pair_accuracy
from benchmarks.pretraining.dataset import draw_examples
from tests.support.paths import ROOT
from toyworld.world import vocabulary

HERE = ROOT / "toyworld"


@pytest.fixture(scope="module")
def pipeline() -> StableDiffusion3Pipeline:
    """The shipped pipeline in float32."""
    pipe = StableDiffusion3Pipeline.from_pretrained(HERE / "model", text_encoder_3=None, tokenizer_3=None)
    pipe.to(torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def test_pipeline_has_stable_diffusion_3s_parts(pipeline: StableDiffusion3Pipeline) -> None:
    assert isinstance(pipeline.transformer, SD3Transformer2DModel)
    assert isinstance(pipeline.scheduler, FlowMatchEulerDiscreteScheduler)
    assert isinstance(pipeline.text_encoder, CLIPTextModelWithProjection)
    assert isinstance(pipeline.text_encoder_2, CLIPTextModelWithProjection)
    assert pipeline.scheduler.config.shift == 3.0
    assert pipeline.vae_scale_factor == 4
    assert pipeline.tokenizer_max_length == 12


def test_shipped_folders_are_at_most_12_mb_of_files_without_links_or_machine_paths() -> None:
    files = [path for name in ("model", "sign_model", "clip") for path in (HERE / name).rglob("*")]
    assert not any(path.is_symlink() for path in files)
    assert sum(path.stat().st_size for path in files if path.is_file()) <= 12_000_000
    for path in files:
        if path.suffix == ".json":
            text = path.read_text()
            assert "name_or_path" not in text
            assert not any(root in text for root in (': "/', "/tmp", "/work", "/home", "/root"))


def test_pipeline_reads_captions_exactly_as_the_training_code_did(pipeline: StableDiffusion3Pipeline) -> None:
    prompts = ["a photo of a red circle", "a print of two squares"]
    features, _, pooled, _ = pipeline.encode_prompt(
        prompts,
        prompts,
        prompts,
        do_classifier_free_guidance=False,
        max_sequence_length=textencoders.MAX_SEQUENCE_LENGTH,
    )
    ids = textencoders.token_ids(pipeline.tokenizer, prompts)
    with torch.no_grad():
        own_features, own_pooled = textencoders.encode((pipeline.text_encoder, pipeline.text_encoder_2), ids)
    assert torch.equal(features, own_features)
    assert torch.equal(pooled, own_pooled)
    assert features.shape == (2, tokenizer.CONTEXT_LENGTH + 1, 128)


def test_latents_have_about_zero_mean_and_unit_std(pipeline: StableDiffusion3Pipeline) -> None:
    latents = normalised_latents(pipeline.vae, draw_examples(256, seed=77).images)
    assert latents.shape == (256, 4, 8, 8)
    assert abs(latents.mean().item()) < 0.05
    assert latents.std().item() == pytest.approx(1.0, abs=0.05)


def test_every_word_is_one_token_and_the_longest_caption_fits() -> None:
    built = tokenizer.build()
    assert all(len(built.tokenize(word)) == 1 for word in vocabulary.words())
    longest = "a picture of a red triangle and a yellow square"
    ids = built(longest, padding="max_length").input_ids
    assert len(ids) == tokenizer.CONTEXT_LENGTH
    assert built.unk_token_id not in ids[:-1]
    assert built.decode(ids, skip_special_tokens=True) == longest


def test_clip_scores_right_captions_above_wrong_ones_in_90_percent_of_pairs_and_loads_quietly() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = CLIPModel.from_pretrained(HERE / "clip", dtype=torch.float32).eval()
        processor = CLIPProcessor.from_pretrained(HERE / "clip")
    accuracy = pair_accuracy(model, processor, draw_examples(600, seed=4321))
    assert set(accuracy) == set(vocabulary.TAGS)
    assert sum(accuracy.values()) / len(accuracy) >= 0.90
