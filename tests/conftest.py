"""What many tests share: a tiny random Stable Diffusion 3 pipeline on disk, and a config that names it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flow.families import ATTENTION
from protocol.config import RunConfig
from protocol.config_file import parse_config

CONTEXT_LENGTH = 24
PROCESS_FOLDERS = ("actors", "deploy")
"""Tests that start processes; side by side they would take each other's cores and miss their deadlines."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """For `-n 2 --dist loadgroup`: one worker runs the tests that start processes, the other the rest."""
    for item in items:
        group = "processes" if item.path.parent.name in PROCESS_FOLDERS else "arrays"
        item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> None:
    """The order of sums, and with it every bit, depends on torch's thread count."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_sd3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A StableDiffusion3Pipeline folder with random weights: latents 4x8x8, pictures 16x16, no T5."""
    import torch
    from diffusers import (
        AutoencoderKL,
        FlowMatchEulerDiscreteScheduler,
        SD3Transformer2DModel,
        StableDiffusion3Pipeline,
    )

    folder = tmp_path_factory.mktemp("models") / "tiny_sd3"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(20)
        transformer = SD3Transformer2DModel(
            sample_size=8,
            patch_size=2,
            in_channels=4,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=2,
            joint_attention_dim=16,
            caption_projection_dim=16,
            pooled_projection_dim=16,
            out_channels=4,
            pos_embed_max_size=8,
        )
        for name, parameter in transformer.named_parameters():
            if not name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.2)
        autoencoder = AutoencoderKL(
            latent_channels=4,
            block_out_channels=(4, 4),
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            norm_num_groups=2,
            sample_size=16,
            scaling_factor=1.5305,
            shift_factor=0.0609,
            use_quant_conv=False,
            use_post_quant_conv=False,
        )
        tokenizer = _tokenizer()
        pipeline = StableDiffusion3Pipeline(
            transformer=transformer,
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
            vae=autoencoder,
            text_encoder=_text_encoder(tokenizer),
            tokenizer=tokenizer,
            text_encoder_2=_text_encoder(tokenizer),
            tokenizer_2=tokenizer,
            text_encoder_3=None,
            tokenizer_3=None,
        )
    pipeline.save_pretrained(folder)
    return folder


@pytest.fixture
def tiny_config(tiny_sd3: Path) -> Callable[..., RunConfig]:
    """`tiny_config(sampling={"steps": 4}, ...)`: a small config of the tiny pipeline, sections merged into its own."""

    def make(**sections: Any) -> RunConfig:
        tree: dict[str, Any] = {
            "seed": 7,
            "iterations": 2,
            "model": {
                "path": str(tiny_sd3),
                "max_sequence_length": 2,
                "lora": {"rank": 4, "alpha": 8, "targets": ATTENTION},
            },
            "data": {"train": "train.txt", "heldout": "heldout.txt"},
            "sampling": {"steps": 4},
            "completion": {"substeps": 2},
            "group": {"size": 4, "shard": 2, "per_iteration": 2},
            "learner": {"updates_per_iteration": 1},
            "rewards": {"brightness": {"scorer": "geneval"}},
            "evaluation": {"component": "reward", "steps": 2, "images_per_prompt": 2, "batch": 3},
        }
        for name, value in sections.items():
            held = tree.get(name)
            tree[name] = held | value if isinstance(held, dict) and name != "rewards" else value
        return parse_config(tree)

    return make


def _tokenizer() -> Any:
    """A byte-pair tokenizer of letters without merges, so that any text is legal."""
    from transformers import CLIPTokenizer

    letters = [chr(code) for code in range(33, 127)]
    tokens = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    return CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=CONTEXT_LENGTH)


def _text_encoder(tokenizer: Any) -> Any:
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    return CLIPTextModelWithProjection(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=8,
            intermediate_size=16,
            projection_dim=8,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=CONTEXT_LENGTH,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    ).eval()
