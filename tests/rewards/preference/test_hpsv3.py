"""HPSv3 equals its formula, written here with plain products in float64 from the authors' tensors."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from tokenizers.pre_tokenizers import ByteLevel
from transformers import Qwen2Tokenizer

from protocol.errors import PromptError, ScorerError
from protocol.messages import Prompt
from rewards.scorer import build_scorer, check_prompts, require_ready
from tests.support.worlds.tensors import Layers, add_linear, add_norm, attention, heads_of

WIDTH, HEADS, GROUPS, PATCH = 32, 4, 2, 56
"""The text model has 4 heads of width 8 on 2 pairs of key and value; an image has 8 x 8 patches."""
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
LETTERS = sorted(ByteLevel.alphabet())
WORDS = [*LETTERS, *SPECIAL, "<|Reward|>"]
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
INSTRUCTION, QUESTION = "Judge {text_prompt}!\n", "\nMark: <|Reward|>\n\nEND\n"
TEMPLATE = f'''"""Not run."""
import nothing_that_exists
INSTRUCTION = """{INSTRUCTION}"""
prompt_with_special_token = {QUESTION!r}
other = [1]
'''
PROMPTS = ["a cat", "a {red} sign\nand rain", "x"]
CONFIG = {
    "model_type": "qwen2_vl",
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]},
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "vocab_size": 300,
    "image_token_id": WORDS.index("<|image_pad|>"),
    "vision_config": {
        "depth": 2,
        "embed_dim": 24,
        "num_heads": 2,
        "mlp_ratio": 2,
        "in_chans": 3,
        "hidden_size": WIDTH,
        "patch_size": PATCH,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}


def published_tensors() -> dict[str, Any]:
    """A tiny HPSv3 with random weights, by the names of the authors' file."""
    state: dict[str, Any] = {"visual.patch_embed.proj.weight": torch.randn(24, 3, 2, PATCH, PATCH) * 0.01}
    for block in (f"visual.blocks.{number}" for number in range(2)):
        add_norm(state, f"{block}.norm1", 24)
        add_norm(state, f"{block}.norm2", 24)
        add_linear(state, f"{block}.attn.qkv", 72, 24)
        add_linear(state, f"{block}.attn.proj", 24, 24)
        add_linear(state, f"{block}.mlp.fc1", 48, 24)
        add_linear(state, f"{block}.mlp.fc2", 24, 48)
    add_norm(state, "visual.merger.ln_q", 24)
    add_linear(state, "visual.merger.mlp.0", 96, 96)
    add_linear(state, "visual.merger.mlp.2", WIDTH, 96)
    state["model.embed_tokens.weight"] = torch.randn(len(WORDS), WIDTH)
    for layer in (f"model.layers.{number}" for number in range(2)):
        add_norm(state, f"{layer}.input_layernorm", WIDTH, has_bias=False)
        add_norm(state, f"{layer}.post_attention_layernorm", WIDTH, has_bias=False)
        add_linear(state, f"{layer}.self_attn.q_proj", WIDTH, WIDTH)
        add_linear(state, f"{layer}.self_attn.k_proj", 8 * GROUPS, WIDTH)
        add_linear(state, f"{layer}.self_attn.v_proj", 8 * GROUPS, WIDTH)
        add_linear(state, f"{layer}.self_attn.o_proj", WIDTH, WIDTH, has_bias=False)
        add_linear(state, f"{layer}.mlp.gate_proj", 48, WIDTH, has_bias=False)
        add_linear(state, f"{layer}.mlp.up_proj", 48, WIDTH, has_bias=False)
        add_linear(state, f"{layer}.mlp.down_proj", WIDTH, 48, has_bias=False)
    add_norm(state, "model.norm", WIDTH, has_bias=False)
    add_linear(state, "lm_head", len(WORDS), WIDTH, has_bias=False)
    for number, (outputs, inputs) in {0: (20, WIDTH), 3: (6, 20), 5: (2, 6)}.items():
        add_linear(state, f"rm_head.{number}", outputs, inputs)
    return state


@pytest.fixture(scope="module")
def state() -> dict[str, Any]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(21)
        return published_tensors()


@pytest.fixture(scope="module")
def folder(state: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights, the Qwen2-VL's config and tokenizer, and the template."""
    folder = tmp_path_factory.mktemp("hpsv3")
    save_file(state, folder / "HPSv3.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    tokenizer = Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate([*LETTERS, *SPECIAL])},
        merges=[],
        additional_special_tokens=SPECIAL,
    )
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    (folder / "texts.py").write_text(TEMPLATE)
    return folder


def arguments(folder: Path, **more: str) -> dict[str, str]:
    """The scorer's arguments; the tests compute in float32, whose rounding the oracle can follow."""
    sources = {"model": str(folder), "base": str(folder), "template": str(folder / "texts.py")}
    return sources | {"device": "cpu", "dtype": "float32"} | more


@pytest.fixture(scope="module")
def scorer(folder: Path) -> Any:
    return build_scorer("hpsv3", **arguments(folder))


@pytest.fixture(scope="module")
def images() -> np.ndarray:
    return np.random.default_rng(4).integers(0, 256, (3, 64, 64, 3), np.uint8)


def turned(x: torch.Tensor, positions: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """Turn pairs (i, i + half) of rows by angles positions x frequencies."""
    angles = positions[:, None] * frequencies if positions.ndim == 1 else positions
    first, second = x.chunk(2, 1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], 1)


class ByHand(Layers):
    """The formula for one image and one prompt, from the authors' tensors."""

    def seen(self, image: np.ndarray) -> torch.Tensor:
        """States of 4 x 4 blocks of 2 x 2 patches; 448 x 448 pixels are 256 x 28 x 28."""
        small = np.array(Image.fromarray(image).resize((448, 448), Image.Resampling.BICUBIC)) / 255
        pixels = (small - [0.48145466, 0.4578275, 0.40821073]) / [0.26862954, 0.26130258, 0.27577711]
        cells = [
            (y + down, x + right) for y in range(0, 8, 2) for x in range(0, 8, 2) for down in (0, 1) for right in (0, 1)
        ]
        kernel = self.state["visual.patch_embed.proj.weight"].sum(2).permute(0, 2, 3, 1).flatten(1)  # two equal frames
        states = torch.stack(
            [
                kernel @ torch.from_numpy(pixels[PATCH * y : PATCH * (y + 1), PATCH * x : PATCH * (x + 1)]).flatten()
                for y, x in cells
            ]
        )
        where = torch.tensor(cells, dtype=torch.float64)
        frequencies = 10000.0 ** -(torch.arange(0, 6, 2, dtype=torch.float64) / 6)
        angles = torch.cat([where[:, [0]] * frequencies, where[:, [1]] * frequencies], 1)
        for block in (f"visual.blocks.{number}" for number in range(2)):
            qkv = self.linear(f"{block}.attn.qkv", self.norm(f"{block}.norm1", states, 1e-6))
            query, key, value = (heads_of(part, 12) for part in qkv.split(24, 1))
            attended = [
                attention(turned(q, angles, angles), turned(k, angles, angles), v)
                for q, k, v in zip(query, key, value, strict=True)
            ]
            states = states + self.linear(f"{block}.attn.proj", torch.cat(attended, 1))
            inner = self.linear(f"{block}.mlp.fc1", self.norm(f"{block}.norm2", states, 1e-6))
            states = states + self.linear(f"{block}.mlp.fc2", inner * torch.sigmoid(1.702 * inner))
        merged = self.norm("visual.merger.ln_q", states, 1e-6).reshape(16, 96)
        return self.linear("visual.merger.mlp.2", self.gelu(self.linear("visual.merger.mlp.0", merged)))

    def score(self, image: np.ndarray, prompt: str) -> float:
        text = INSTRUCTION.replace("{text_prompt}", prompt) + QUESTION
        before, after = text.split("<|Reward|>")
        table = self.state["model.embed_tokens.weight"]

        def read(*pieces: str) -> torch.Tensor:
            tokens = [token for piece in pieces for token in ([piece] if piece in SPECIAL else letters(piece))]
            return table[[WORDS.index(token) for token in tokens]]

        states = torch.cat(
            [
                read("<|im_start|>", "user\n", "<|vision_start|>"),
                self.seen(image),
                read("<|vision_end|>", before),
                table[[-1]],
            ]
        )
        reward = len(states) - 1
        states = torch.cat([states, read(after, "<|im_end|>", "\n", "<|im_start|>", "assistant\n")])
        positions = torch.arange(len(states), dtype=torch.float64)
        frequencies = 1000000.0 ** -(torch.arange(0, 8, 2, dtype=torch.float64) / 8)
        for layer in (f"model.layers.{number}" for number in range(2)):
            normed = self.rms_norm(f"{layer}.input_layernorm", states, 1e-6)
            query, key, value = (
                heads_of(self.linear(f"{layer}.self_attn.{kind}_proj", normed), 8) for kind in ("q", "k", "v")
            )
            attended = [
                attention(
                    turned(each, positions, frequencies),
                    turned(key[head * GROUPS // HEADS], positions, frequencies),
                    value[head * GROUPS // HEADS],
                    is_causal=True,
                )
                for head, each in enumerate(query)
            ]
            states = states + self.linear(f"{layer}.self_attn.o_proj", torch.cat(attended, 1))
            normed = self.rms_norm(f"{layer}.post_attention_layernorm", states, 1e-6)
            gate = self.linear(f"{layer}.mlp.gate_proj", normed)
            inner = gate * torch.sigmoid(gate) * self.linear(f"{layer}.mlp.up_proj", normed)
            states = states + self.linear(f"{layer}.mlp.down_proj", inner)
        x = self.rms_norm("model.norm", states, 1e-6)[reward]
        for number in (0, 3):
            x = self.linear(f"rm_head.{number}", x).clamp(min=0)
        return float(self.linear("rm_head.5", x)[0])


def letters(text: str) -> list[str]:
    """A token for each byte, in the byte-level alphabet: a blank is Ġ, a line feed Ċ."""
    return list(text.replace(" ", "Ġ").replace("\n", "Ċ"))


def test_scores_equal_the_formula(scorer: Any, state: dict[str, Any], images: np.ndarray) -> None:
    expected = [ByHand(state).score(image, prompt) for image, prompt in zip(images, PROMPTS, strict=True)]
    other = ByHand(state).score(images[1], PROMPTS[0])
    assert abs(expected[0] - other) > 1e-3 < abs(expected[1] - other), "the formula must tell images and prompts apart"
    scores = scorer.score(images, PROMPTS, [{}] * 3)
    assert scores.valid.all()
    np.testing.assert_allclose(scores.values, expected, atol=2e-5)


def test_a_score_depends_on_no_neighbour_and_is_the_same_again(scorer: Any, images: np.ndarray) -> None:
    together = scorer.score(images, PROMPTS, [{}] * 3).values.tolist()
    assert [scorer.score(images[i : i + 1], PROMPTS[i : i + 1], [{}]).values[0] for i in range(3)] == together
    assert scorer.score(images[::-1], PROMPTS[::-1], [{}] * 3).values.tolist() == together[::-1]


def test_the_published_precision_rounds_the_same_score_and_loading_prints_nothing(
    scorer: Any, folder: Path, images: np.ndarray, capfd: pytest.CaptureFixture[str]
) -> None:
    rounded = build_scorer("hpsv3", **arguments(folder, dtype="bfloat16")).score(images, PROMPTS, [{}] * 3).values
    assert capfd.readouterr() == ("", "")
    exact = scorer.score(images, PROMPTS, [{}] * 3).values
    assert rounded.tolist() != exact.tolist()
    np.testing.assert_allclose(rounded, exact, atol=0.02)


def test_a_pair_that_cannot_be_read_is_missing_and_never_zero(scorer: Any, images: np.ndarray) -> None:
    scores = scorer.score(images, ["a cat", "\ud800", "<|Reward|>"], [{}] * 3)
    assert scores.valid.tolist() == [True, False, False]
    assert np.isnan(scores.values[1:]).all()
    assert "must not hold <|Reward|>" in scores.reasons[2]


def test_a_prompt_with_a_token_of_the_template_is_refused_before_a_run() -> None:
    check_prompts("hpsv3", {"template": "t.py"}, [Prompt(index=0, text="a cat")])
    with pytest.raises(PromptError, match=r"prompt line 2 .*must not hold <\|image_pad\|>: remove it"):
        check_prompts("hpsv3", {"template": "t.py"}, [Prompt(index=1, text="a <|image_pad|>")])


def test_a_file_of_other_tensors_is_refused_in_one_line(state: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    cases = {
        r"got 1 missing \['model.language_model.norm.weight'\] and 0 unknown": {
            name: tensor for name, tensor in state.items() if name != "model.norm.weight"
        },
        r"got 0 missing \[\] and 1 unknown \[.*scale": state | {"scale": torch.ones(1)},
        r"got none named 'rm_head.N.weight of output width 2'": {
            name: tensor for name, tensor in state.items() if not name.startswith("rm_head.5")
        },
        r"in shapes that fit each other, got ": state | {"model.norm.weight": torch.ones(3)},
    }
    for number, (message, tensors) in enumerate(cases.items()):
        file = tmp_path / f"{number}.safetensors"
        save_file(tensors, file)
        for read in (build_scorer, lambda name, **args: require_ready(name, args)):  # with weights, and headers alone
            with pytest.raises(ScorerError, match=message) as caught:
                read("hpsv3", **arguments(folder, model=str(file)))
            assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("INSTRUCTION = 'a'", r"that hold \{text_prompt\} and <\|Reward\|> once each, got 0 and 0"),
        (TEMPLATE.replace("<|Reward|>", ""), r"once each, got 1 and 0"),
        ("INSTRUCTION = '", r"texts.py' cannot be read: .*data_collator_qwen.py of https://github.com/MizzenAI/HPSv3"),
        (None, r"texts.py' cannot be read: "),
    ],
)
def test_another_template_is_refused_before_a_run(folder: Path, tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "texts.py").write_text(text)
    with pytest.raises(ScorerError, match=message):
        require_ready("hpsv3", arguments(folder, template=str(tmp_path / "texts.py")))


def test_what_is_missing_is_said_before_a_run(folder: Path, tmp_path: Path) -> None:
    require_ready("hpsv3", arguments(folder))
    with pytest.raises(ScorerError, match=r"must hold a file HPSv3.safetensors, got none"):
        require_ready("hpsv3", arguments(folder, model=str(tmp_path)))
    with pytest.raises(ScorerError, match=r"must hold a file config.json, got none"):
        require_ready("hpsv3", arguments(folder, base=str(tmp_path)))
    with pytest.raises(ScorerError, match="must be given its arguments, got none for template"):
        build_scorer("hpsv3")
    with pytest.raises(ScorerError, match="dtype must be bfloat16 or float32, got 'int4'"):
        build_scorer("hpsv3", **arguments(folder, dtype="int4"))
