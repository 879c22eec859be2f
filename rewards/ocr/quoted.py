"""The text a prompt asks for: what stands between its first pair of double quotes."""

import re

from protocol.errors import PromptError

_QUOTED = re.compile(r'"([^"]*)"')


def quoted_text(prompt: str) -> str:
    """The words between the first two `"` of a prompt.

    Raises:
        PromptError: no such pair, or nothing but blanks in it.
    """
    found = _QUOTED.search(prompt)
    if found is None:
        raise PromptError('a prompt of the text task must hold its words in double quotes, such as a sign "OPEN"')
    if not found.group(1).strip():
        raise PromptError("a prompt of the text task must hold words between its first double quotes, got none")
    return found.group(1)
