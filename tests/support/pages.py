"""The commands of README and docs, and what keeps some of them from running in a test."""

import importlib
import inspect
import re
import shlex
from pathlib import Path

import typer

from deploy.cli.app import app
from tests.support.paths import ROOT

PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "toyworld" / "README.md", *ROOT.glob("docs/**/*.md")]
)
PROGRAM = r"(?:\w+=\S* )*(?:\S*/)?(?:flowcredit|python3?) (?!-c)|curl "
NOT_RUN = {
    r"model\.quantize=": "needs the extra package torchao",
    r"\b(sd35|flux2?|kontext|qwen_image|z_image)_": "needs the weights of a model from the hub",
    r"^flowcredit prompts (flow_grpo|\S+\.jsonl)": "needs a network; tests/deploy/tools/prompts has a local one",
    r"--suite ": "needs a network; tests/deploy/tools/test_suites.py has the files in a cache",
    r"--push ": "needs an account of the hub; tests/deploy/cli/test_card.py has a local one",
    r"learner\.objective=\./mine": "needs the file of the page; tests/deploy/run/test_own.py runs it",
    r"^flowcredit serve-rewards ocr pickscore": "needs the weights of a model from the hub",
    r"^flowcredit (submit|fetch)\b": "needs a Ray cluster or a bucket; tests/lab/cluster/test_jobs.py runs them",
    r"^flowcredit calibrate-noise": "takes minutes; tests/deploy/tools/test_noise_calibration.py runs it",
    r"-m benchmarks\.fidelity": "takes hours; tests/benchmarks/fidelity",
    r"-m benchmarks\.race": "takes hours; tests/benchmarks/race",
    r"-m benchmarks\.same_bits": "takes minutes and starts Ray; tests/benchmarks/test_workers.py",
    r"-m benchmarks\.toy\.demo_gain": "takes ten minutes: five runs of the demo",
    r"-m benchmarks\.toy\.growth": "takes twenty minutes; tests/benchmarks/toy/test_growth.py",
    r"-m benchmarks\.speed": "takes minutes on idle cores; tests/benchmarks/speed",
    r"-m benchmarks\.pretraining": "takes hours; tests/toyworld",
    r"-m tests\.lab\.": "takes an hour; tests/lab",
    r"-m pytest": "runs these tests",
}
"""Why a shown command is only read by the program's own parser: the first pattern that is found in it counts."""
STANDS_FOR = {
    "PRESET": "toy_geneval",
    "RUN": "runs/mine",
    **{str(path.relative_to(ROOT)): str(path) for path in (ROOT / "docs/results").glob("*.json")},
}
"""Placeholders of the pages, and files of the repository, since a test works in a folder of its own."""


def commands(page: Path) -> list[str]:
    """The lines of a page's code blocks that call a program, without comments; continued lines are one."""
    text = re.sub(r"\\\n\s*", "", page.read_text(encoding="utf-8"))
    blocks = re.findall(r"^(?: {4}[^\n]+\n?)+|^```(?:bash|sh|console)?\n.*?^```", text, re.MULTILINE | re.DOTALL)
    lines = [line.strip() for block in blocks for line in block.splitlines()]
    lines = [re.sub(r"\s+# .*", "", line).removeprefix("$ ") for line in lines]
    return [line for line in dict.fromkeys(lines) if re.match(PROGRAM, line)]


def blocks_of(page: Path, heading: str) -> list[list[str]]:
    """The lines of each code block below a heading, without comments; continued lines are one."""
    text = re.sub(r"\\\n\s*", "", page.read_text(encoding="utf-8"))
    section = re.split(rf"^#+ {heading}\n", text, flags=re.MULTILINE)[1].split("\n#")[0]
    blocks = re.findall(r"(?:^ {4}[^\n]+\n)+", section, re.MULTILINE)
    return [[re.sub(r"\s+# .*", "", line).strip() for line in block.splitlines()] for block in blocks]


def name_of(page: Path) -> str:
    """How a test calls a page."""
    return page.relative_to(ROOT).as_posix()


def why_not_run(line: str) -> str | None:
    """The reason of `NOT_RUN`, None for a command that a test runs."""
    return next((reason for pattern, reason in NOT_RUN.items() if re.search(pattern, line)), None)


def words_of(line: str) -> tuple[str, list[str]]:
    """What is called, `flowcredit`, `curl` or a module of `python -m`, and its arguments without placeholders."""
    words = shlex.split(line.rstrip("& "))
    while re.match(r"\w+=", words[0]):
        del words[0]
    program, *rest = words
    if Path(program).name.startswith("python"):
        assert rest[0] == "-m", f"neither a module nor one of ours: {line}"
        program, rest = rest[1], rest[2:]
    rest = [STANDS_FOR.get(word, word) for word in rest]
    return Path(program).name, rest


def stories() -> dict[Path, list[str]]:
    """The commands that run, by page; one that an earlier page shows too is left out."""
    told: dict[Path, list[str]] = {}
    seen = []
    for page in PAGES:
        for line in commands(page):
            if not why_not_run(line) and words_of(line) not in seen:
                seen.append(words_of(line))
                told.setdefault(page, []).append(line)
    return told


def program_of(name: str) -> typer.Typer | None:
    """The program `flowcredit` or a benchmark's; None for a module that has none of typer."""
    if name == "flowcredit":
        return app
    module = importlib.import_module(name)
    if isinstance(held := getattr(module, "app", None), typer.Typer):
        return held
    if name.startswith("tests.") or not hasattr(module, "main") or "ArgumentParser" in inspect.getsource(module):
        return None
    one = typer.Typer()
    one.command()(module.main)
    return one


def metric_patterns() -> list[str]:
    """The first column of every table of docs/metrics.md as patterns; `…_x` changes the end of the name before."""
    patterns: list[str] = []
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    for row in re.findall(r"^\| (`[^|]+) \|", page, re.MULTILINE):
        for name in re.findall(r"`([^`]+)`", row):
            whole = re.sub(r"_[a-z]+$", "", patterns[-1]) + name.removeprefix("…") if name.startswith("…") else name
            patterns.append(re.sub(r"<\w+>", "*", whole))
    return patterns
