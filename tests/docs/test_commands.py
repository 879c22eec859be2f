"""Every command that README and docs show is one that the program takes; so is every section of YAML.

`tests/deploy/cli/test_shown_commands.py` runs the commands.
"""

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from typer.main import get_command

from deploy.presets import load_config
from protocol.config.run import RunConfig
from tests.support.pages import NOT_RUN, PAGES, commands, program_of, why_not_run, words_of

SHOWN = tuple(dict.fromkeys(line for page in PAGES for line in commands(page)))


def test_every_reason_not_to_run_a_command_is_that_of_a_shown_one() -> None:
    assert set(NOT_RUN.values()) <= {why_not_run(line) for line in SHOWN}


def require_taken(line: str) -> None:
    """Parse each command of a shown line as its program does.

    Raises:
        Exception: whatever the program, its parser or a config has against it.
    """
    for part in re.split(r" (?:&&?|\|\|?|;) ", line):
        program, words = words_of(part)
        if "…" in part or program in ("curl", "pytest"):
            continue
        assert program == "flowcredit" or find_spec(program) is not None, f"no module {program}"
        if (found := program_of(program)) is None:
            continue
        parser: Any = get_command(found)
        if hasattr(parser, "commands"):
            assert words[0] in parser.commands, f"no command {words[0]!r}"
            parser, words = parser.commands[words[0]], words[1:]
        given = parser.make_context(program, words).params
        if (
            given.get("preset")
            and not given["preset"].startswith("runs/")
            and not given["preset"].endswith((".yaml", ".yml"))
        ):
            load_config(given["preset"], overrides=given.get("overrides") or [])


def test_shown_commands_are_ones_that_their_programs_take() -> None:
    assert SHOWN
    wrong = []
    for line in SHOWN:
        try:
            require_taken(line)
        except Exception as error:  # noqa: BLE001  every kind of refusal is shown
            wrong.append(f"{line}: {getattr(error, 'message', error)}")
    assert not wrong, "\n".join(wrong)


def sections(page: Path) -> Iterator[str]:
    """The lines of YAML that a page shows, as overrides."""
    fields, section = RunConfig.model_fields, ""
    for line in re.findall(r"^ {4}( *\w+:(?: .*)?)$", page.read_text(encoding="utf-8"), re.MULTILINE):
        line = re.sub(r"\s+# .*", "", line)
        key, _, value = line.strip().partition(": ")
        if line.startswith(" ") and section:
            yield f"{section}={{{line.strip()}}}"
        elif line.endswith(":") and line[:-1] in fields:
            section = line[:-1]
        elif value and key in fields:
            yield f"{key}={value}"


def test_the_sections_of_yaml_that_pages_show_are_ones_that_a_config_takes() -> None:
    shown = [override for page in PAGES for override in sections(page)]
    assert shown
    for override in shown:
        load_config("toy_geneval", overrides=["method=stepwise_fast", override, "evaluation.component=reward"])
