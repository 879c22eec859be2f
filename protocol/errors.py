"""The exceptions of this project, and how one becomes one line of text.

Each class takes one string: the rule, the value, the remedy; so it pickles across Ray. An `InputError` is the user's
mistake: one line on stderr, exit code 2, nothing written.
"""

import difflib
import re
from collections.abc import Iterable
from pathlib import Path
from traceback import walk_tb


class FlowcreditError(Exception):
    """Base of all exceptions that this project raises on purpose."""


LONGEST_LINE = 400
"""Characters that `one_line` keeps: enough for a cause and its remedy, short enough for a condition or a log line."""


ESCAPES = re.compile(
    r"(?:\x1b[]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"  # OSC and other strings
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"  # CSI, such as colours
    r"|\x1b[ -/]*[0-~]?|[\x00-\x08\x0b-\x1f\x7f-\x9f]"  # any other escape or control character
)
LONG_WORD = re.compile(r"(\S{100})\S{200,}(\S{50})")


def plain(text: str) -> str:
    """Return a text that comes from elsewhere without what a terminal would obey; tabs and line ends stay."""
    return text if text.isprintable() else ESCAPES.sub("", text)


def printable(message: str) -> str:
    """Return a message that may quote foreign names: `plain`, and very long words lose their middle."""
    return LONG_WORD.sub(r"\1…\2", plain(message))


def one_line(error: object) -> str:
    """Return the message of an exception (or a text) as one bounded line; its type's name if there is no message."""
    return " ".join(plain(_message(error)).split())[:LONGEST_LINE] or type(error).__name__


def _message(error: object) -> str:
    """Return an exception's message; empty if its class, which is foreign code, fails to give it."""
    try:
        return str(error)
    except (Exception, SystemExit):  # noqa: BLE001  whatever it raises, there is no message
        return ""


def named_line(error: BaseException, file: str | None = None) -> str:
    """Return an exception of foreign code as one bounded line that begins with its type's name.

    Args:
        file: the code's file, as its frames name it; the line ends with the number of the line there, as for a
            SyntaxError.

    Returns:
        A line such as `KeyError: 'red' (mine.py, line 12)`.
    """
    name, line = type(error).__name__, one_line(error)
    return (name if line == name else f"{name}: {line}") + line_in(error, file)


def line_in(error: BaseException, file: str | None) -> str:
    """Return ` (mine.py, line 12)` for the last frame of an exception in this file; empty if none is there."""
    numbers = [number for frame, number in walk_tb(error.__traceback__) if frame.f_code.co_filename == file]
    return f" ({Path(file).name}, line {numbers[-1]})" if file and numbers else ""


def reason_of(error: Exception) -> str:
    """Return the system's reason of an OSError, such as `No space left on device`; the line of any other exception."""
    return getattr(error, "strerror", None) or one_line(error)


def breaks_gpu(error: BaseException) -> bool:
    """Tell whether an exception leaves its process without a GPU: CUDA keeps an error until the process ends."""
    return type(error).__name__ == "AcceleratorError" or "CUDA error" in _message(error)


class InputError(FlowcreditError):
    """A mistake in the input, which the user can correct."""


class ConfigError(InputError):
    """An unknown preset or key, a wrong type, or a value out of range."""


class PromptError(InputError):
    """A prompt file is missing or has a broken line."""


class ModelError(InputError):
    """A model folder is missing or of another family, or no module takes the LoRA."""


class RunFolderError(InputError):
    """A run folder cannot be written, or belongs to another config."""


class ScorerError(InputError):
    """A scorer cannot be found or built."""


class LeaseLostError(FlowcreditError):
    """Another process took this run over while this one was silent; this process stops without writing."""


class BoardError(FlowcreditError):
    """The status board does not answer, or refuses what was asked."""


class DamagedError(BoardError):
    """The status board answers, but its data about a run are foreign, damaged or of a later version."""


class ContractError(FlowcreditError):
    """A part of the program broke its contract: wrong length, NaN, out of range, another digest."""


class ParityError(FlowcreditError):
    """Learner and rollout compute different log-probs from the same adapter."""


class CheckpointError(FlowcreditError):
    """A checkpoint is partial, truncated or altered."""


class NonFiniteError(FlowcreditError):
    """Latents, rewards, loss or gradient hold NaN or infinity."""


class PoolError(FlowcreditError):
    """A pool of remote actors used up its restarts, or a call its deadline."""


class RewardError(FlowcreditError):
    """An image got no score after all tries, and the failure policy is to fail."""


class LearnerFailedError(FlowcreditError):
    """The learner crashed or hangs; a new learner continues from the newest checkpoint."""


class ShardLostError(FlowcreditError):
    """Trajectories or images were lost with the node that held them; the same request makes them again."""


class GuardError(FlowcreditError):
    """A guard against silent wrongness stops the run; the message names the guard, its rule and the value."""


class StaleAdapterError(FlowcreditError):
    """A rollout actor holds another adapter version than the request asks for."""


def closest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the known word that is closest to a misspelt one.

    Args:
        cutoff: least similarity, from 0 to 1.

    Returns:
        The closest word; None if none is that similar.
    """
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)), None)


def suggest(word: str, known: Iterable[str]) -> str:
    """Name the closest known word, if one is close, then all of them."""
    names = sorted(known)
    close = closest(word, names)
    hint = f"did you mean {close!r}? " if close else ""
    return f"{hint}known: {', '.join(names) or 'none'}"
