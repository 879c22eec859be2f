"""The text reward: its formula on hand-made readings, and real reading of real images with RapidOCR."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont

from protocol.errors import PromptError, ScorerError
from protocol.messages import Prompt
from rewards.ocr.scorer import as_released, enlarged, quoted_text
from rewards.scorer import build_scorer, check_prompts

READINGS: list[list[str] | None] = [
    ["HEL LO"],
    ["say", "hello", "you"],
    ["help"],
    [],
    ["something else altogether"],
    None,
    ["h e l l o"],
    ["hel\u00a0lo"],
    ["hel\tlo\u3000"],
]
"""What `Parrot` reads in the images whose first pixel is 0, 1, 2, …; None makes it fail."""


class Parrot:
    """Reads what its table says."""

    def __init__(self, *, threads: int = 1) -> None:
        """No engine."""

    def read(self, image: np.ndarray) -> list[str]:
        lines = READINGS[image[0, 0, 0]]
        if lines is None:
            raise RuntimeError("out of\n ink")
        return lines


def numbered(count: int) -> np.ndarray:
    images = np.zeros((count, 8, 8, 3), np.uint8)
    images[:] = np.arange(count)[:, None, None, None]
    return images


def drawn(text: str, *, size: int = 40, box: tuple[int, int] = (320, 120)) -> np.ndarray:
    image = Image.new("RGB", box, (240, 240, 235))
    ImageDraw.Draw(image).text((20, box[1] // 3), text, fill=(20, 20, 60), font=ImageFont.load_default(size))
    return np.asarray(image)


def test_the_reward_is_one_minus_the_share_of_letters_to_change() -> None:
    scorer = build_scorer("ocr", engine=f"{__name__}:Parrot")
    scores = scorer.score(numbered(7), ['a sign "Hel lo" here'] * 7, [{}] * 7)
    # target "hello": contained; contained among other lines; "help" is two letters away; nothing read: all five
    # letters; farther than its length counts as all; an engine that fails has no score; blanks do not count
    np.testing.assert_allclose(scores.values, [1, 1, 1 - 2 / 5, 0, 0, np.nan, 1])
    assert scores.valid.tolist() == [True, True, True, True, True, False, True]
    assert scores.reasons[5] == "ocr: RuntimeError: out of ink"
    np.testing.assert_allclose(scores.components["exact"], [1, 1, 0, 0, 0, np.nan, 1])


def test_every_blank_of_unicode_is_left_out_where_flow_grpos_release_leaves_out_spaces_only() -> None:
    """A no-break space, a tab and a full-width space: the release counts each as a letter, so 0.8 and 0.6 there."""
    for form, values in (("folded", [1.0, 1.0]), ("flow_grpo", [0.8, 0.6])):
        scorer = build_scorer("ocr", engine=f"{__name__}:Parrot", text=form)
        scores = scorer.score(numbered(9)[7:], ['a sign "Hel lo" here'] * 2, [{}] * 2)
        np.testing.assert_allclose(scores.values, values)


class Echo:
    """Reads a sign whose letters a test sets."""

    shown = ""

    def __init__(self, *, threads: int = 1) -> None:
        """No engine."""

    def read(self, image: np.ndarray) -> list[str]:
        return [self.shown]


@pytest.mark.parametrize(
    ("target", "shown", "released"),
    [
        ("caf\u00e9", "cafe\u0301", 0.5),
        ("DON\u2019T", "don't", 0.8),
        ("A\u2013B", "A-B", 2 / 3),
        ("\uff2f\uff30\uff25\uff2e", "OPEN", 0.0),
        ("SA\u200bLE", "SALE", 0.8),
        ("Wait\u2026", "Wait...", 0.4),
        ("Sale \u2033", "sale \u201d", 0.8),
        ("HELLO", "HELO", 0.8),
    ],
)
def test_a_sign_that_shows_the_text_exactly_scores_one(
    target: str, shown: str, released: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one does not show it."""
    for prompt, read in ((target, shown), (shown, target)):
        monkeypatch.setattr(Echo, "shown", read)
        folded, as_released = (
            build_scorer("ocr", engine=f"{__name__}:Echo", text=form).score(numbered(1), [f'a "{prompt}"'], [{}])
            for form in ("folded", "flow_grpo")
        )
        assert folded.values[0] == (1.0 if target != "HELLO" else pytest.approx(0.8 if prompt == target else 0.75))
        if prompt == target:
            assert as_released.values[0] == pytest.approx(released)


def test_the_form_of_the_release_is_its_own_arithmetic() -> None:
    for text in ("Hel lo", "\u0130stanbul", "Stra\u00dfe \u00a0", "A\u2013B\t", "\uff2f\u3000"):
        assert as_released(text) == text.replace(" ", "").lower()
    with pytest.raises(ScorerError, match=r"text of ocr must be one of .* did you mean 'flow_grpo'"):
        build_scorer("ocr", text="flow-grpo")


def test_the_target_is_the_text_between_the_first_pair_of_quotes() -> None:
    assert quoted_text('a "First" and a "Second"') == "First"
    assert quoted_text('a "First"" one" after it') == "First"
    with pytest.raises(PromptError, match="quotes in pairs, got 3 of them"):
        quoted_text('a 5" screen that shows "HELLO"')
    for broken in ("no quotes", 'one " only', 'an empty "" one', 'a blank "  " one', "“curly” ones", 'zero "\u200b"'):
        with pytest.raises(PromptError, match="double quotes"):
            quoted_text(broken)


def test_a_prompt_without_quotes_is_refused_before_a_run_with_its_line() -> None:
    good = Prompt(index=0, text='a sign "OPEN"')
    check_prompts("ocr", {}, [good])
    with pytest.raises(PromptError, match=r"prompt line 5 \('a sign'\): .* double quotes"):
        check_prompts("ocr", {}, [good, Prompt(index=4, text="a sign")])


def test_small_images_are_enlarged_by_a_whole_factor_and_large_ones_left_alone() -> None:
    assert enlarged(np.zeros((32, 32, 3), np.uint8), 192).shape == (192, 192, 3)
    assert enlarged(np.zeros((100, 50, 3), np.uint8), 192).shape == (400, 200, 3)
    large = np.zeros((192, 300, 3), np.uint8)
    assert enlarged(large, 192) is large


def test_rapidocr_reads_real_letters_without_a_download() -> None:
    scorer = build_scorer("ocr")
    images = np.stack([drawn("Hello World"), drawn("Good Luck"), np.full((120, 320, 3), 200, np.uint8)])
    prompts = ['a sign "Hello World"', 'a card "Hello World"', 'a wall "Hello World"']
    scores = scorer.score(images, prompts, [{}] * 3)
    assert scores.values[0] == 1.0
    assert 0 <= scores.values[1] < 0.5
    assert scores.values[2] == 0.0 and scores.valid[2], "an empty wall is a valid 0: the engine has looked"


def test_short_lines_and_long_ones_are_read_with_a_small_line_width() -> None:
    scorer = build_scorer("ocr", engine_args={"line_width": 96})
    images = np.stack([drawn("KX", box=(320, 120)), drawn("Hello World", box=(320, 120))])
    assert scorer.score(images, ['"KX"', '"Hello World"'], [{}] * 2).values.tolist() == [1.0, 1.0]
    with pytest.raises(ScorerError, match="line_width of rapidocr must be at least 48, got 0"):
        build_scorer("ocr", engine_args={"line_width": 0})
    with pytest.raises(ScorerError, match="did you mean 'line_width'"):
        build_scorer("ocr", engine_args={"line_widht": 96})
    with pytest.raises(ScorerError, match="engine_args of ocr must not hold threads"):
        build_scorer("ocr", engine_args={"threads": 2})


def test_an_image_is_read_the_same_alone_and_in_company() -> None:
    scorer = build_scorer("ocr")
    images = np.stack([drawn("Platform 9"), drawn("Platfrm"), drawn("9 forms")])
    together = scorer.score(images, ['"Platform 9"'] * 3, [{}] * 3).values
    alone = [scorer.score(images[i : i + 1], ['"Platform 9"'], [{}]).values[0] for i in range(3)]
    assert together.tolist() == alone


def test_an_engine_that_is_not_installed_says_how_to_install_it() -> None:
    with pytest.raises(ScorerError, match=r"pip install -e '\.\[paddleocr\]'"):
        build_scorer("ocr", engine="paddleocr")


class Pages:
    """Stands for `paddleocr.PaddleOCR`, which is not installed here; reads one page of two lines, one without trust."""

    def __init__(self, *, lang: str, cpu_threads: int, **switches: bool) -> None:
        assert (lang, cpu_threads, set(switches.values())) == ("en", 3, {False})

    def predict(self, image: np.ndarray) -> list[dict[str, list[object]]]:
        assert image[0, 0].tolist() == [235, 240, 240], "not blue, green, red"
        return [{"rec_texts": ["Hello", "noise"], "rec_scores": [0.9, 0.0]}]


def test_paddleocr_reads_lines_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "paddleocr", SimpleNamespace(PaddleOCR=Pages))
    scorer = build_scorer("ocr", engine="paddleocr", threads=3)
    scores = scorer.score(np.stack([drawn("Hello")] * 2), ['"Hello"', '"noise"'], [{}] * 2)
    assert scores.values.tolist() == [1.0, 0.0]
