"""Signs: words that OCR reads, captions that fill the tokenizer's context exactly, and a recipe that runs through."""

from pathlib import Path

import numpy as np
import pytest
import typer
from rich.console import Console

from benchmarks.pretraining import tokenizer
from benchmarks.pretraining.signs import SignRecipe, mislabelled, pretrain
from toyworld.world import words


def test_every_sign_is_read_right() -> None:
    from rewards.ocr.scorer import Ocr

    shown = [first + second for first, second in zip(words.LETTERS, reversed(words.LETTERS), strict=True)]
    colours = list(words.COLOURS) * 3
    images = np.stack([words.render(word, colour) for word, colour in zip(shown, colours, strict=True)])
    prompts = [words.caption(word, colour, "a photo of") for word, colour in zip(shown, colours, strict=True)]
    assert Ocr().score(images, prompts, [{}] * len(shown)).values.tolist() == [1.0] * len(shown)


def test_captions_spell_the_word_letter_by_letter_and_fit_the_context() -> None:
    built = tokenizer.build()
    longest = words.caption("KX", "yellow", "a picture of")
    assert built.tokenize(longest)[-4:] == ['"</w>', "k", "x</w>", '"</w>']
    assert len(built(longest).input_ids) == tokenizer.CONTEXT_LENGTH


def test_signs_come_from_their_seed_and_a_quarter_of_captions_is_wrong() -> None:
    signs, again = words.draw_signs(400, seed=3), words.draw_signs(400, seed=3)
    assert np.array_equal(signs.images, again.images) and signs.captions == again.captions
    wrong = [f'"{word}"' not in caption for word, caption in zip(signs.words, signs.captions, strict=True)]
    assert 0.18 < np.mean(wrong) < 0.32


def test_the_last_stage_s_captions_mostly_name_another_word() -> None:
    captions = [words.caption("KX", "red", "a photo of")] * 1000
    written = mislabelled(captions, seed=3)
    assert written == mislabelled(captions, seed=3)
    assert 0.54 < np.mean([line != captions[0] for line in written]) < 0.65
    assert all(line.startswith('a photo of a red sign "') and line.endswith('"') for line in written)
    assert len(set(written)) > 100


def test_one_word_in_four_is_held_out() -> None:
    assert len(words.words()) == 144
    assert sum(words.is_heldout(word) for word in words.words()) == 36


@pytest.mark.whole
def test_the_recipe_makes_a_pipeline_that_diffusers_loads(tmp_path: Path) -> None:
    from diffusers import StableDiffusion3Pipeline

    recipe = SignRecipe(images=256, autoencoder_steps=2, transformer_steps=2, web_steps=2)
    pretrain(recipe, work=tmp_path / "work", folder=tmp_path / "model", console=Console(quiet=True))
    pipe = StableDiffusion3Pipeline.from_pretrained(tmp_path / "model", text_encoder_3=None, tokenizer_3=None)
    assert pipe.transformer.config.sample_size == 8
    with pytest.raises(typer.BadParameter, match="autoencoder_steps must stay 2"):
        pretrain(
            recipe.model_copy(update={"autoencoder_steps": 3}),
            work=tmp_path / "work",
            folder=tmp_path / "model",
            console=Console(quiet=True),
        )
