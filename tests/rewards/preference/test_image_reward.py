"""ImageReward equals its formula, written here with plain products in float64 from the authors' tensors."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import BertTokenizer

from protocol.errors import ScorerError
from rewards.scorer import build_scorer, require_ready
from tests.support.worlds.tensors import Layers, add_linear, add_norm, attention, heads_of

SEEN, READ = 128, 192
"""Widths of the two encoders: two heads of 64, and three."""
SIDE, PATCH = 16, 8
LETTERS = "abcdefghijklmnopqrstuvwxyz"
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS, *("##" + letter for letter in LETTERS)]
PROMPTS = [
    "a",
    "a red cat on a mat",
    "Two!",
    "so long a prompt that the thirty five tokens are all used before its end",
]


def published_tensors() -> dict[str, Any]:
    """A tiny ImageReward with random weights, by the names of the authors' file."""
    state: dict[str, Any] = {}
    seen, read = "blip.visual_encoder", "blip.text_encoder"
    small = 0.003  # so small that the first norm's epsilon counts
    state[f"{seen}.cls_token"] = small * torch.randn(1, 1, SEEN)
    state[f"{seen}.pos_embed"] = small * torch.randn(1, (SIDE // PATCH) ** 2 + 1, SEEN)
    state[f"{seen}.patch_embed.proj.weight"] = small / 10 * torch.randn(SEEN, 3, PATCH, PATCH)
    state[f"{seen}.patch_embed.proj.bias"] = small * torch.randn(SEEN)
    for block in (f"{seen}.blocks.{number}" for number in range(2)):
        add_norm(state, f"{block}.norm1", SEEN)
        add_linear(state, f"{block}.attn.qkv", 3 * SEEN, SEEN)
        add_linear(state, f"{block}.attn.proj", SEEN, SEEN)
        add_norm(state, f"{block}.norm2", SEEN)
        add_linear(state, f"{block}.mlp.fc1", 32, SEEN)
        add_linear(state, f"{block}.mlp.fc2", SEEN, 32)
    add_norm(state, f"{seen}.norm", SEEN)
    state[f"{read}.embeddings.position_ids"] = torch.arange(40)[None]
    state[f"{read}.embeddings.word_embeddings.weight"] = torch.randn(len(VOCABULARY) + 2, READ)
    state[f"{read}.embeddings.position_embeddings.weight"] = torch.randn(40, READ)
    add_norm(state, f"{read}.embeddings.LayerNorm", READ)
    for layer in (f"{read}.encoder.layer.{number}" for number in range(2)):
        for kind, width in (("attention", READ), ("crossattention", SEEN)):
            add_linear(state, f"{layer}.{kind}.self.query", READ, READ)
            add_linear(state, f"{layer}.{kind}.self.key", READ, width)
            add_linear(state, f"{layer}.{kind}.self.value", READ, width)
            add_linear(state, f"{layer}.{kind}.output.dense", READ, READ)
            add_norm(state, f"{layer}.{kind}.output.LayerNorm", READ)
        add_linear(state, f"{layer}.intermediate.dense", 48, READ)
        add_linear(state, f"{layer}.output.dense", READ, 48)
        add_norm(state, f"{layer}.output.LayerNorm", READ)
    add_linear(state, "blip.vision_proj", 6, SEEN)
    add_linear(state, "blip.text_proj", 6, READ)
    for number, (outputs, inputs) in {0: (24, READ), 2: (12, 24), 4: (8, 12), 6: (4, 8), 7: (1, 4)}.items():
        add_linear(state, f"mlp.layers.{number}", outputs, inputs)
    return state


@pytest.fixture(scope="module")
def state() -> dict[str, Any]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(12)
        return published_tensors()


@pytest.fixture(scope="module")
def folder(state: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("imagereward")
    torch.save(state, folder / "ImageReward.pt")
    BertTokenizer(vocab={token: index for index, token in enumerate(VOCABULARY)}).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def scorer(folder: Path) -> Any:
    return build_scorer("imagereward", model=str(folder), tokenizer=str(folder), device="cpu")


@pytest.fixture(scope="module")
def images() -> np.ndarray:
    return np.random.default_rng(4).integers(0, 256, (5, 40, 31, 3), np.uint8)


def tokens_of(prompt: str) -> list[int]:
    """[CLS], the letters of each word, [SEP]; at most 35; neither padding nor a tokenizer."""
    words = "".join(letter if letter in LETTERS else " " for letter in prompt.lower().replace("!", " ! ")).split(" ")
    pieces = [("##" if number else "") + letter for word in words if word for number, letter in enumerate(word)]
    pieces += ["[UNK]"] * prompt.count("!")
    return [VOCABULARY.index(piece) for piece in ["[CLS]", *pieces[:33], "[SEP]"]]


class ByHand(Layers):
    """The formula for one image and one prompt, from the authors' tensors."""

    def attended(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        heads = zip(heads_of(query, 64), heads_of(key, 64), heads_of(value, 64), strict=True)
        return torch.cat([attention(*each) for each in heads], 1)

    def seen(self, image: np.ndarray) -> torch.Tensor:
        height, width = image.shape[:2]
        short = min(height, width)
        small = Image.fromarray(image).resize(
            (int(SIDE * width / short), int(SIDE * height / short)), Image.Resampling.BICUBIC
        )
        left, top = (small.width - SIDE) // 2, (small.height - SIDE) // 2
        pixels = np.array(small)[top : top + SIDE, left : left + SIDE] / 255
        pixels = (pixels - [0.48145466, 0.4578275, 0.40821073]) / [0.26862954, 0.26130258, 0.27577711]
        name = "blip.visual_encoder"
        kernel = self.state[f"{name}.patch_embed.proj.weight"].permute(0, 2, 3, 1).flatten(1)
        patches = [
            kernel @ torch.from_numpy(pixels[y : y + PATCH, x : x + PATCH]).flatten()
            for y in range(0, SIDE, PATCH)
            for x in range(0, SIDE, PATCH)
        ]
        states = torch.stack(patches) + self.state[f"{name}.patch_embed.proj.bias"]
        states = torch.cat([self.state[f"{name}.cls_token"][0], states]) + self.state[f"{name}.pos_embed"][0]
        for block in (f"{name}.blocks.{number}" for number in range(2)):
            normed = self.norm(f"{block}.norm1", states, 1e-6)
            attended = self.attended(*self.linear(f"{block}.attn.qkv", normed).split(SEEN, 1))
            states = states + self.linear(f"{block}.attn.proj", attended)
            inner = self.linear(f"{block}.mlp.fc1", self.norm(f"{block}.norm2", states, 1e-6))
            states = states + self.linear(f"{block}.mlp.fc2", self.gelu(inner))
        return self.norm(f"{name}.norm", states, 1e-6)

    def score(self, image: np.ndarray, prompt: str) -> float:
        seen, ids = self.seen(image), tokens_of(prompt)
        name = "blip.text_encoder"
        states = self.state[f"{name}.embeddings.word_embeddings.weight"][ids]
        states = states + self.state[f"{name}.embeddings.position_embeddings.weight"][: len(ids)]
        states = self.norm(f"{name}.embeddings.LayerNorm", states, 1e-12)
        for layer in (f"{name}.encoder.layer.{number}" for number in range(2)):
            for kind in ("attention", "crossattention"):
                part, source = f"{layer}.{kind}", states if kind == "attention" else seen
                attended = self.attended(
                    self.linear(f"{part}.self.query", states),
                    self.linear(f"{part}.self.key", source),
                    self.linear(f"{part}.self.value", source),
                )
                states = self.norm(
                    f"{part}.output.LayerNorm", states + self.linear(f"{part}.output.dense", attended), 1e-12
                )
            inner = self.gelu(self.linear(f"{layer}.intermediate.dense", states))
            states = self.norm(f"{layer}.output.LayerNorm", states + self.linear(f"{layer}.output.dense", inner), 1e-12)
        rating = states[0]
        for number in (0, 2, 4, 6, 7):
            rating = self.linear(f"mlp.layers.{number}", rating)
        return (float(rating) - 0.16717362830052426) / 1.0333394966054072


def test_scores_equal_the_formula(scorer: Any, state: dict[str, Any], images: np.ndarray) -> None:
    prompts = [*PROMPTS, "a"]
    expected = [ByHand(state).score(image, prompt) for image, prompt in zip(images, prompts, strict=True)]
    assert abs(expected[0] - expected[4]) > 0.01, "the formula must tell images apart"
    scores = scorer.score(images, prompts, [{}] * 5)
    assert scores.valid.all()
    np.testing.assert_allclose(scores.values, expected, atol=2e-5)


def test_a_score_depends_on_no_neighbour_and_is_the_same_again(scorer: Any, images: np.ndarray) -> None:
    prompts = [*PROMPTS, "a"]
    together = scorer.score(images, prompts, [{}] * 5).values.tolist()
    alone = [scorer.score(images[i : i + 1], prompts[i : i + 1], [{}]).values[0] for i in range(5)]
    assert together == alone
    assert scorer.score(images[::-1], prompts[::-1], [{}] * 5).values.tolist() == together[::-1]


def test_a_pair_that_cannot_be_read_is_missing_and_never_zero(scorer: Any, images: np.ndarray) -> None:
    scores = scorer.score(images[:3], ["a", "\ud800", "a cat"], [{}] * 3)
    assert scores.valid.tolist() == [True, False, True]
    assert np.isnan(scores.values[1])
    assert scores.reasons[1].startswith("imagereward: ")
    np.testing.assert_array_equal(scores.values[[0]], scorer.score(images[:1], ["a"], [{}]).values)


def without(state: dict[str, Any], *parts: str) -> dict[str, Any]:
    return {name: tensor for name, tensor in state.items() if not any(part in name for part in parts)}


def test_a_file_of_other_tensors_is_refused_in_one_line(state: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    cases = {
        r"got 2 missing \['blip.text_encoder.encoder.layer.1.crossattention.self.key.bias', .* and 0 unknown": without(
            state, "layer.1.crossattention.self.key"
        ),
        r"got 0 missing \[\] and 1 unknown \['blip.itm_head.weight'\]": state | {"blip.itm_head.weight": torch.ones(2)},
        r"got none named 'blip.visual_encoder.patch_embed.proj.weight'": without(state, "visual_encoder"),
        r"got none named 'mlp.layers.N.weight of output width 1'": without(state, "mlp.layers"),
        r"in shapes that fit each other, got .*post_layernorm.weight": state
        | {"blip.visual_encoder.norm.weight": torch.ones(3)},
    }
    for number, (message, tensors) in enumerate(cases.items()):
        file = tmp_path / f"{number}.pt"
        torch.save(tensors, file)
        for read in (build_scorer, lambda name, **args: require_ready(name, args)):  # with weights, and headers alone
            with pytest.raises(ScorerError, match=message) as caught:
                read("imagereward", model=str(file), tokenizer=str(folder))
            assert "\n" not in str(caught.value)
    (tmp_path / "text.pt").write_text("no tensors")
    for name in ("text.pt", "absent.pt", "absent"):
        with pytest.raises(ScorerError, match="cannot be") as caught:
            build_scorer("imagereward", model=str(tmp_path / name), tokenizer=str(folder))
        assert "\n" not in str(caught.value)


def test_another_tokenizer_is_refused(folder: Path, tmp_path: Path) -> None:
    BertTokenizer(vocab={token: index for index, token in enumerate(VOCABULARY[:-1])}).save_pretrained(tmp_path)
    with pytest.raises(ScorerError, match=r"tokenizer must have 57 tokens .*, got 56 in"):
        build_scorer("imagereward", model=str(folder), tokenizer=str(tmp_path))


def test_what_is_missing_is_said_before_a_run(folder: Path, tmp_path: Path) -> None:
    require_ready("imagereward", {"model": str(folder), "tokenizer": str(folder)})
    require_ready("imagereward", {"model": str(folder / "ImageReward.pt"), "tokenizer": str(folder)})
    with pytest.raises(ScorerError, match=r"must hold a file ImageReward.pt, got none"):
        require_ready("imagereward", {"model": str(tmp_path), "tokenizer": str(folder)})
    with pytest.raises(ScorerError, match=r"'/no/where.pt' must be a file"):
        require_ready("imagereward", {"model": "/no/where.pt", "tokenizer": str(folder)})
    with pytest.raises(ScorerError, match=r"must hold a file tokenizer.json or vocab.txt, got none"):
        require_ready("imagereward", {"model": str(folder), "tokenizer": str(tmp_path)})
