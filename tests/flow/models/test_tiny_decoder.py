"""The tiny decoder: which images it decodes, and which decoders are refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderTiny

from deploy.folder.fingerprint import input_digests
from deploy.tools.estimate import estimate
from flow.maths.noise import normal
from flow.models.completed import completed
from flow.models.load import load_backbone
from flow.models.pipeline import PipelineBackbone
from flow.policy import policy_of
from flow.rollout import rollout_shard
from protocol.config.model import ModelConfig
from protocol.config.run import RunConfig
from protocol.errors import ModelError
from protocol.messages import Prompt, ShardRequest
from tests.support.worlds.tiny_qwen import write_flux2_klein


def write_tiny(folder: Path, *, channels: int = 4, levels: int = 2) -> Path:
    """A tiny decoder with random weights; with two levels its images are twice as wide as the latents."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        AutoencoderTiny(
            encoder_block_out_channels=(4,) * levels,
            decoder_block_out_channels=(4,) * levels,
            num_encoder_blocks=(0,) * levels,
            num_decoder_blocks=(1,) * levels,
            latent_channels=channels,
        ).save_pretrained(folder)
    return folder


SHARD = ShardRequest(
    iteration=0,
    group=0,
    prompt=Prompt(index=0, text="a"),
    first_member=0,
    members=3,
    adapter_version=0,
    adapter_digest="",
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("decoders") / "tiny")


def loaded(folder: Path, tiny: Path | None, **settings: Any) -> PipelineBackbone:
    config = ModelConfig(path=str(folder), max_sequence_length=2, tiny_decoder=tiny and str(tiny), **settings)
    backbone = load_backbone(config)
    assert isinstance(backbone, PipelineBackbone)
    return backbone


@pytest.mark.parametrize("chunk", [None, 2])
def test_it_decodes_the_points_and_the_vae_the_rest(tiny_sd3: Path, tiny: Path, chunk: int | None) -> None:
    plain, both = loaded(tiny_sd3, None), loaded(tiny_sd3, tiny, decode_batch=chunk)
    latents = torch.stack([normal("clean", number, shape=plain.latent_shape) for number in range(5)])
    vae = AutoencoderTiny.from_pretrained(tiny)
    with torch.no_grad():
        unit = torch.cat([vae.decode(row[None], return_dict=False)[0] for row in latents[:3]]) / 2 + 0.5
    images = both.decode(latents, points=3)
    own = (unit.clamp(0, 1) * 255).permute(0, 2, 3, 1).numpy()
    assert np.abs(images[:3].astype(float) - own).max() < 1
    assert np.array_equal(images[3:], np.concatenate([plain.decode(part) for part in latents[3:].split(chunk or 2)]))
    whole = plain.decode(latents)
    assert np.array_equal(plain.decode(latents, points=3), whole), "without a tiny decoder points are like the rest"
    assert np.abs(images[:3].astype(int) - whole[:3]).max() > 1


def test_trajectories_stay_and_finished_images_are_the_vaes(
    tiny_sd3: Path, tiny: Path, tiny_config: Callable[..., RunConfig]
) -> None:
    config = tiny_config(credit={"rule": "gains"})
    (one, without), (other, with_tiny) = (
        rollout_shard(policy_of(loaded(tiny_sd3, folder), config), SHARD, config) for folder in (None, tiny)
    )
    assert np.array_equal(one.latents, other.latents)
    assert np.abs(with_tiny[-3:].astype(int) - without[-3:]).max() <= 1, "alone the VAE may round otherwise"
    assert not np.array_equal(with_tiny[:-3], without[:-3])


def test_the_ends_of_all_granularities_are_the_vaes(
    tiny_sd3: Path, tiny: Path, tiny_config: Callable[..., RunConfig]
) -> None:
    config = tiny_config(sampling={"granularities": [1, 2], "window": {"rule": "fixed"}}, credit={"rule": "uniform"})
    without, with_tiny = (
        rollout_shard(policy_of(loaded(tiny_sd3, folder), config), SHARD, config)[1] for folder in (None, tiny)
    )
    assert len(without) == 6
    assert np.array_equal(without, with_tiny)


def test_a_decoder_of_other_latents_is_refused_with_one_line(
    tiny_sd3: Path, tmp_path: Path, tiny_config: Callable[..., RunConfig]
) -> None:
    cases = {
        "channels": (
            write_tiny(tmp_path / "channels", channels=16),
            "4 channels .* got .* for 16 channels and 2 times",
        ),
        "levels": (write_tiny(tmp_path / "levels", levels=4), "to 2 times .* got .* for 4 channels and 8 times"),
        "vae": (tiny_sd3 / "vae", "must be an AutoencoderTiny .*taesd3 for SD3"),
        "absent": (tmp_path / "absent", "must be an AutoencoderTiny"),
    }
    for path, message in cases.values():
        config = tiny_config(model={"tiny_decoder": str(path)})
        for act in (lambda config=config: completed(config), lambda path=path: loaded(tiny_sd3, path)):
            with pytest.raises(ModelError, match=f"^model.tiny_decoder .*{message}") as error:
                act()
            assert "\n" not in str(error.value)


def test_a_model_whose_latents_are_packed_is_refused(tiny: Path, tmp_path: Path) -> None:
    """FLUX.2-klein's VAE has the tiny decoder's channels and size, but its latents are packed and normalised."""
    with pytest.raises(ModelError, match=r"whose VAE is one of .* got .*, whose VAE is another .*: leave it out"):
        loaded(write_flux2_klein(tmp_path / "klein"), tiny)


def test_it_counts_in_the_estimate_and_in_the_digests_of_a_run(
    tiny: Path, tiny_config: Callable[..., RunConfig]
) -> None:
    plain, config = (tiny_config(model={"tiny_decoder": path}) for path in (None, str(tiny)))
    parameters = sum(each.numel() for each in AutoencoderTiny.from_pretrained(tiny).parameters())
    assert estimate(config).rollout["tiny decoder"] == 4 * parameters
    assert "tiny decoder" not in estimate(plain).rollout
    added = input_digests(config).keys() - input_digests(plain).keys()
    assert "model.tiny_decoder/config.json" in added and len(added) == 2


def test_estimates_that_nobody_scores_are_not_taken_from_the_images_of_the_vae(
    tiny: Path, tiny_config: Callable[..., RunConfig]
) -> None:
    """Two members have six recorded estimates, more than finished images."""
    settings: dict[str, Any] = {"credit": {"rule": "uniform"}, "group": {"size": 2, "shard": 2, "per_iteration": 1}}
    plain, both = (estimate(tiny_config(model={"tiny_decoder": path}, **settings)) for path in (None, str(tiny)))
    assert both.evaluations.decoding_flops == plain.evaluations.decoding_flops
