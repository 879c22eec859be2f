"""A converted checkpoint gives the features of an open_clip model, written here with torch's own attention layers."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from protocol.errors import ScorerError
from rewards.clip.features import ClipFeatures
from rewards.clip.openclip import convert
from tests.support.worlds.clips import CONTEXT, SIZE, letters_tokenizer, write_clip


class Block(nn.Module):
    """open_clip's residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.attn = nn.MultiheadAttention(16, 2, batch_first=True)
        self.mlp = nn.Sequential()
        self.mlp.add_module("c_fc", nn.Linear(16, 32))
        self.mlp.add_module("gelu", nn.GELU())
        self.mlp.add_module("c_proj", nn.Linear(32, 16))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        normed = self.ln_1(x)
        x = x + self.attn(normed, normed, normed, need_weights=False, attn_mask=mask)[0]
        return x + self.mlp(self.ln_2(x))


class Tower(nn.Module):
    """open_clip's stack of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.resblocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        for block in self.resblocks:
            x = block(x, mask)
        return x


class Visual(nn.Module):
    """open_clip's image encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.class_embedding = nn.Parameter(torch.randn(16))
        self.positional_embedding = nn.Parameter(torch.randn((SIZE // 8) ** 2 + 1, 16))
        self.proj = nn.Parameter(torch.randn(16, 12))
        self.conv1 = nn.Conv2d(3, 16, 8, 8, bias=False)
        self.ln_pre, self.ln_post = nn.LayerNorm(16), nn.LayerNorm(16)
        self.transformer = Tower()

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        patches = self.conv1(pixels).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.class_embedding.expand(len(pixels), 1, -1), patches], 1) + self.positional_embedding
        return self.ln_post(self.transformer(self.ln_pre(tokens))[:, 0]) @ self.proj


class OpenClip(nn.Module):
    """open_clip's CLIP, tiny."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.visual = Visual()
        self.transformer = Tower()
        self.token_embedding = nn.Embedding(vocabulary, 16)
        self.positional_embedding = nn.Parameter(torch.randn(CONTEXT, 16))
        self.ln_final = nn.LayerNorm(16)
        self.text_projection = nn.Parameter(torch.randn(16, 12))
        self.logit_scale = nn.Parameter(torch.tensor(4.0))

    def encode_text(self, ids: torch.Tensor) -> torch.Tensor:
        mask = torch.full((CONTEXT, CONTEXT), -torch.inf).triu(1)
        x = self.transformer(self.token_embedding(ids) + self.positional_embedding, mask)
        return self.ln_final(x)[torch.arange(len(ids)), ids.argmax(-1)] @ self.text_projection


@pytest.fixture(scope="module")
def oracle() -> OpenClip:
    torch.manual_seed(6)
    return OpenClip(len(letters_tokenizer())).eval()


@pytest.fixture(scope="module")
def like(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_clip(tmp_path_factory.mktemp("like"), hidden_act="gelu")


def test_features_are_those_of_the_open_clip_model(oracle: OpenClip, like: Path, tmp_path: Path) -> None:
    torch.save({"epoch": 3, "state_dict": oracle.state_dict()}, tmp_path / "hps.pt")
    convert(tmp_path / "hps.pt", tmp_path / "clip", like=str(like))
    clip = ClipFeatures(str(tmp_path / "clip"), device="cpu", batch=2)
    texts = ["a cat", "rain on a wooden roof"]
    images = np.random.default_rng(0).integers(0, 256, (3, SIZE, SIZE, 3), np.uint8)
    ids = letters_tokenizer()(texts, padding="max_length", truncation=True, return_tensors="pt").input_ids
    mean, std = (
        torch.tensor(v).view(3, 1, 1)
        for v in ([0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711])
    )
    pixels = (torch.from_numpy(images).permute(0, 3, 1, 2) / 255 - mean) / std
    with torch.no_grad():
        words, features = (nn.functional.normalize(x, dim=-1) for x in (oracle.encode_text(ids), oracle.visual(pixels)))
    np.testing.assert_allclose(clip.of_texts(texts), words, atol=2e-5)
    np.testing.assert_allclose(clip.of_images(images), features, atol=2e-5)
    assert clip.scale == pytest.approx(np.exp(4.0))


def test_another_model_s_file_is_refused_in_one_line(oracle: OpenClip, like: Path, tmp_path: Path) -> None:
    state = oracle.state_dict()
    torch.save(state | {"visual.trunk.stem.weight": torch.zeros(1)}, tmp_path / "other.pt")
    with pytest.raises(ScorerError, match="has no tensor 'visual.trunk.stem.weight'"):
        convert(tmp_path / "other.pt", tmp_path / "out", like=str(like))
    torch.save({name: tensor for name, tensor in state.items() if "ln_final" not in name}, tmp_path / "part.pt")
    with pytest.raises(ScorerError, match="does not fit .*final_layer_norm"):
        convert(tmp_path / "part.pt", tmp_path / "out", like=str(like))
    with pytest.raises(ScorerError, match="cannot be loaded"):
        convert(tmp_path / "absent.pt", tmp_path / "out", like=str(like))
