"""The command that makes and fetches prompt files."""

import json
from pathlib import Path
from typing import Annotated

import typer

from protocol.errors import InputError, suggest
from protocol.ground.files import require_folder_of, write_whole, writing

GENEVAL = "geneval"


def prompts(
    name: Annotated[
        str | None,
        typer.Argument(
            help="`geneval` makes training prompts, FILE.jsonl fetches its images, a set's name fetches the set."
        ),
    ] = None,
    count: Annotated[int, typer.Option(min=1, max=10**7, help="geneval: number of lines.")] = 50_000,
    seed: Annotated[
        int, typer.Option(min=0, help="geneval: seed of their choice and order; the same one gives the same file.")
    ] = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            help="geneval: the file to write; FILE.jsonl: the copy, NAME.jsonl, whose images go into NAME_images."
        ),
    ] = None,
    cache: Annotated[
        Path | None, typer.Option(help="Folder for fetched sets; default: ~/.cache/flowcredit/prompts.")
    ] = None,
) -> None:
    """Make GenEval training prompts, or fetch a published set or a file's images; without a name, list the sets.

    It prints the keys that take its files, such as data.train=geneval.jsonl.

    Content of a set with another sha256 or git id is refused; a sha256 that is not known is recorded beside the file at
    the first fetch. Tables become text files without repeated prompts. An interrupted download goes on when you repeat
    the command.
    """
    from deploy.tools.prompts.sets import CACHE, SETS, fetch_set

    if name is None:
        for each, prompt_set in {GENEVAL: None, **SETS}.items():
            about = (
                prompt_set.about if prompt_set else "training prompts from GenEval's forms, without its test prompts"
            )
            typer.echo(f"{each:20} {about}")
        return
    if name == GENEVAL:
        _make(count, seed, out)
        return
    if name.endswith(".jsonl"):
        from deploy.tools.prompts.images import fetch_images

        copy = _required(out, "FILE.jsonl")
        typer.echo(f"data.train={copy}  ({fetch_images(Path(name), copy):,} prompts)")
        return
    if name not in SETS:
        raise InputError(f"unknown prompts {name!r}: {suggest(name, [GENEVAL, *SETS])}")
    if out:
        raise InputError(f"--out belongs to `prompts {GENEVAL}`, got it with {name}: take --cache, or leave it out")
    for key, path, known in fetch_set(name, SETS[name], cache or CACHE):
        typer.echo(f"data.{key}={path}  ({known})")


def _make(count: int, seed: int, out: Path | None) -> None:
    from deploy.tools.prompts.geneval import geneval_prompts

    out = _required(out, GENEVAL)
    lines = geneval_prompts(count, seed=seed)
    with writing(out, "--out"):
        write_whole(out, "".join(f"{json.dumps(line)}\n" for line in lines))
    typer.echo(f"data.train={out}  ({count:,} prompts, {len({line['prompt'] for line in lines}):,} different)")


def _required(out: Path | None, name: str) -> Path:
    if out is None or out.suffix != ".jsonl":
        raise InputError(f"--out must name a .jsonl file for `prompts {name}`, got {out}: give one")
    require_folder_of(out, "--out")
    return out
