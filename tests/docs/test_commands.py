"""Every command that the pages show is one that the program takes; their configs load, and the quick ones run."""

import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from deploy.cli.app import app
from deploy.presets import load_config
from tests.support.paths import ROOT

PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "toyworld" / "README.md", *ROOT.glob("docs/**/*.md")]
)
STANDS_FOR = {"PRESET": "toy_geneval", "[PRESET]": "toy_geneval"}
"""Placeholders of the pages that name a preset; others name folders and addresses, which no parser looks up."""
ELSEWHERE = ("ray", "make", "bash", "docker", "kubectl", "pip", "hf", "helm", "gh", "git", "sbatch", "srun", "curl")
"""Programs that the pages show beside ours; they are not parsed here."""


def commands(page: Path) -> list[str]:
    """The lines of a page's code blocks that call a program, without comments; continued lines are one."""
    text = re.sub(r"\\\n\s*", "", page.read_text(encoding="utf-8"))
    blocks = re.findall(r"^(?: {4}.+\n?)+|^```(?:bash|sh|console)\n.*?^```", text, re.MULTILINE | re.DOTALL)
    lines = [line.strip() for block in blocks for line in block.splitlines()]
    lines = [re.sub(r"\s+# .*", "", line).removeprefix("$ ") for line in lines]
    return [line for line in lines if re.match(r"(\w+=\S* )*(\S*/)?(flowcredit|python3?) (?!-c)", line)]


SHOWN = [pytest.param(line, id=f"{page.stem}: {line[:60]}") for page in PAGES for line in dict.fromkeys(commands(page))]


def test_the_pages_show_commands() -> None:
    assert len(SHOWN) > 50
    assert any("group.size=16" in param.values[0] for param in SHOWN), "README's first command of `Use`"


@pytest.mark.parametrize("line", SHOWN)
def test_a_shown_command_is_one_that_the_program_takes(line: str) -> None:
    for part in re.split(r" (?:&&?|\|\|?|;) ", line):
        words = [STANDS_FOR.get(word, word) for word in shlex.split(part.rstrip("& "))]
        while words and re.match(r"\w+=", words[0]):
            del words[0]
        if "…" in words or not words or Path(words[0]).name in ELSEWHERE:
            continue
        program, *rest = words
        if Path(program).name.startswith("python"):
            assert rest[0] == "-m", f"neither a module nor one of ours: {line}"
            assert find_spec(rest[1]) is not None, f"no module {rest[1]}"
            program, rest = rest[1], rest[2:]
        if Path(program).name not in ("flowcredit", "deploy"):
            continue
        group = get_command(app)
        name, *arguments = rest
        assert name in group.commands, f"no command {name!r}"  # pyright: ignore[reportAttributeAccessIssue]
        given = group.commands[name].make_context(name, arguments).params  # pyright: ignore[reportAttributeAccessIssue]
        if given.get("preset") and not given["preset"].endswith((".yaml", ".yml")):
            load_config(given["preset"], overrides=given.get("overrides") or [])


@pytest.mark.parametrize("command", ["methods", "scorers", "--version", "--help"])
def test_a_quick_command_runs(command: str) -> None:
    done = CliRunner().invoke(app, [command])
    assert done.exit_code == 0
    assert done.output.strip()
