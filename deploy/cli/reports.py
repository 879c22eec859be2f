"""The commands that show the results of runs: `report`, `compare` and `eval`.

RUN is a run folder, or the name of a run in `runs/`.
"""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deploy.cli.options import (
    BETWEEN,
    AdapterShare,
    IsBest,
    IsJson,
    IsLocal,
    Iteration,
    Overrides,
    complete_preset,
    source_and_words,
)
from deploy.folder.location import folder_named, found_run, runs_folder
from deploy.folder.names import CONFIG, SUITES
from deploy.presets import load_config, preset_names, sources
from protocol.errors import ConfigError, named_line

if TYPE_CHECKING:
    from deploy.report.account import MfuPeak
    from deploy.tools.evaluate import Assessed
    from protocol.config.run import RunConfig


def report(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Run folders, or names of runs in runs/.")],
    out: Annotated[Path, typer.Option(help="HTML file to write; an earlier report there is replaced.")] = Path(
        "report.html"
    ),
    png: Annotated[Path | None, typer.Option(help="Folder to write each chart to as PNG too.")] = None,
    peak_tflops: Annotated[
        float | None,
        typer.Option(
            help="Peak TFLOP/s of one GPU, 989 for an H100 in bfloat16; adds the share that was reached (mfu).",
            min=0.001,
            max=1e9,
        ),
    ] = None,
) -> None:
    """Write one HTML file about one or many runs: curves, step rewards, trajectories, before and after, configs.

    Runs that differ only in their seed become one line with a band. The file needs no network, follows the reader's
    light or dark scheme, fits a phone and can be printed.
    """
    from deploy.report.page import write_report

    peak = _peak(peak_tflops) if peak_tflops else None
    for path in write_report([found_run(run) for run in runs], out, png, peak=peak):
        typer.echo(path)


def evidence(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run folder, or the name of a run in runs/.")],
    out: Annotated[Path, typer.Option(help="Folder to write; new or empty.")] = Path("evidence"),
    device: Annotated[
        str | None, typer.Option(help="What the run computed on, such as '8 x H100'; default: this machine's GPU.")
    ] = None,
) -> None:
    """Pack what others need to judge a run into a folder to publish.

    It holds config, digests of all inputs, metrics, images, the report and its charts, and in evidence.json versions,
    the commit, the device, held-out scores, GPU-hours, seconds by part and the sha256 of each file.
    """
    from deploy.report.evidence import pack_evidence

    typer.echo(pack_evidence(found_run(run), out, device=device))


def _peak(tflops: float) -> "MfuPeak":
    from deploy.report.account import MfuPeak
    from deploy.tools.estimate import estimate
    from flow.models.completed import completed_for_estimate

    def operations(config: "RunConfig") -> tuple[float, float]:
        counts = estimate(completed_for_estimate(config)[0]).evaluations
        return counts.forward_flops, counts.gradient_flops

    return MfuPeak(tflops=tflops, operations=operations)


def compare(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN... [--] RUN...", help="Two runs; or two groups of seeds with -- between them."),
    ],
    is_json: IsJson = False,
) -> None:
    """Compare two runs, or two groups of seeds, with intervals for the difference of their held-out scores.

    The interval of two runs covers the held-out prompts; for two groups it also covers the training seeds.
    """
    from rich.console import Console

    from deploy.cli.tables import show_comparison
    from deploy.report.compare import compare as comparison_of

    first, second = _sides(runs)
    found = comparison_of([found_run(run) for run in first], [found_run(run) for run in second])
    if is_json:
        typer.echo(found.model_dump_json(indent=1))
        return
    Console(markup=False, emoji=False, highlight=False).print(show_comparison(found))


def _sides(words: list[str]) -> tuple[list[str], list[str]]:
    """Split at `BETWEEN`; without it, two runs are one against the other."""
    at = words.index(BETWEEN) if BETWEEN in words else 1 if len(words) == 2 else 0
    first, second = words[:at], [word for word in words[at:] if word != BETWEEN]
    if not first or not second or words.count(BETWEEN) > 1:
        raise ConfigError(
            "compare needs two runs, or two groups with -- between them, got"
            f" {' '.join(words).replace(BETWEEN, '--')!r}: write `flowcredit compare runs/tree_* -- runs/flow_*`"
        )
    return first, second


def evaluate(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN|PRESET]",
            help="A run folder or the name of a run in runs/, evaluated with its own config; or a preset, a YAML file"
            " or a model folder, for the base model or, with --run, for an adapter.",
            autocompletion=complete_preset,
        ),
    ] = None,
    overrides: Overrides = None,
    run: Annotated[
        Path | None,
        typer.Option(help="Run or LoRA whose adapter is evaluated, if the first word is a preset or model."),
    ] = None,
    iteration: Iteration = None,
    is_best: IsBest = False,
    has_base: Annotated[bool, typer.Option("--base", help="Score the base model too, at the same noise.")] = False,
    adapter_share: AdapterShare = 1.0,
    prompts: Annotated[
        Path | None, typer.Option(help="File with the prompts, instead of data.heldout; all of its kinds count.")
    ] = None,
    scorer: Annotated[
        list[str] | None,
        typer.Option(help="A further scorer to report, NAME or NAME=package.module:Class; repeatable."),
    ] = None,
    suite: Annotated[
        str | None,
        typer.Option(
            help="A published suite's prompts, scorers and aggregate: geneval, geneval2, dpg-ours, drawbench,"
            " partiprompts, ocr; for models that edit: gedit, gedit-ours, imgedit or imgedit-ours."
        ),
    ] = None,
    diversity: Annotated[
        str | None,
        typer.Option(
            metavar="CLIP",
            help="Measure how a prompt's images differ: 1 - cosine of this CLIP's image features, mean over pairs.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder to write evaluation.json and grid.png to, with some of the images; --suite on a run writes to"
            " RUN/suites/SUITE, which `report` shows."
        ),
    ] = None,
    is_local: IsLocal = False,
    is_json: IsJson = False,
) -> None:
    """Score held-out prompts with the adapter of a run, with the base model, or with both and paired intervals.

    All rollout and reward actors of the config take part, on the Ray cluster of cluster.address or on a new local one.
    """
    from deploy.run.signals import run_to_end
    from deploy.tools.evaluate import assess, document, make_results_folder, write_results
    from deploy.tools.suites import suite_of, words_for

    preset, folder, named = _subject(what, run)
    source, words = source_and_words(preset, [*named, *(overrides or [])], folder, "or a run")
    if suite and prompts:
        raise ConfigError("--suite has prompts of its own, got --prompts too: leave one out")
    others = [word for word in words if not word.startswith("rewards.")]
    wanted = words_for(suite_of(suite), load_config(source, overrides=others)) if suite else []
    wanted += [f"data.heldout={json.dumps(str(prompts))}", "data.tags=[]"] if prompts else []
    words = [*wanted, *words]
    config = load_config(source, overrides=[*_scorers(scorer or [], source, words), *words])
    if out is None and suite and folder:
        out = folder / SUITES / suite
    home = out and out.absolute()  # before a scorer changes the working folder
    if out:
        make_results_folder(out)
    results = run_to_end(
        assess(
            config,
            folder,
            iteration=iteration,
            is_best=is_best,
            has_base=has_base,
            has_start=any(word.startswith(START) for word in named),
            adapter_share=adapter_share,
            features=diversity,
            is_local=is_local,
        )
    )
    if is_json:
        typer.echo(json.dumps(document(results, diversity, suite), indent=1))
    else:
        for line in evaluation_lines(results, diversity, suite_of(suite).parts if suite else ()):
            typer.echo(line)
    if out and home:
        for path in write_results(results, home, diversity, suite):
            typer.echo(f"written   {out / path.name}", err=is_json)


START = "model.lora.start="
PRESETS_OF = {
    "StableDiffusion3Pipeline": "sd35_pickscore",
    "FluxPipeline": "flux_pickscore",
    "FluxKontextPipeline": "kontext_edit",
    "Flux2KleinPipeline": "flux2_klein_pickscore",
    "QwenImagePipeline": "qwen_image_ocr",
    "QwenImage21Pipeline": "qwen_image_21_pickscore",
    "ZImagePipeline": "z_image_pickscore",
}
"""The preset that tells how a model folder of each pipeline is sampled."""


def _subject(what: str | None, run: Path | None) -> tuple[str | None, Path | None, list[str]]:
    """Tell what is evaluated: a preset or None, a run or None, and the overrides that name a model folder or a LoRA.

    A preset's name is a preset even if a run has the same name.
    """
    words = []
    if run is not None and _is_lora(run):
        run, words = None, [f"{START}{json.dumps(str(run))}"]
    if what is not None and (Path(what) / "model_index.json").is_file():
        words.append(f"model.path={json.dumps(what)}")
        what = _preset_of(Path(what))
    if run is not None:
        return what, folder_named(run), words
    if what is None or what in preset_names():
        return what, None, words
    if _is_lora(Path(what)):
        raise ConfigError(f"{what} is a LoRA: name the preset or folder of its model, and give it as --run {what}")
    is_path = "/" in what and not what.endswith((".yaml", ".yml"))
    is_run = is_path or Path(what).is_dir() or (runs_folder() / what / CONFIG).is_file()
    return (None, found_run(what), words) if is_run else (what, None, words)


def _is_lora(path: Path) -> bool:
    if path.suffix == ".safetensors":
        return True
    return path.is_dir() and not (path / CONFIG).exists() and any(path.glob("*.safetensors"))


def _preset_of(folder: Path) -> str:
    try:
        name = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))["_class_name"]
        return PRESETS_OF[name]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{folder} must hold the model_index.json of one of {', '.join(PRESETS_OF)}, got {named_line(error)}:"
            " write a YAML file with its model section"
        ) from None


def _scorers(entries: list[str], source: str | Path, words: list[str]) -> list[str]:
    """Return the overrides that stand for --scorer; they go before the words, which may set more of a scorer."""
    named = {name: path or name for name, _, path in (entry.partition("=") for entry in entries)}
    others = [word for word in words if not word.startswith(tuple(f"rewards.{name}." for name in named))]
    held = sources(source, overrides=others)
    for name in named:
        if f"rewards.{name}" not in held and any(key.startswith(f"rewards.{name}.") for key in held):
            raise ConfigError(f"--scorer must have a new name, got {name!r}, a reward of this config: rename it")
    given = [f"rewards.{name}.scorer={json.dumps(path)}" for name, path in named.items()]
    return given + [f"rewards.{name}.use=evaluate" for name in named]


def evaluation_lines(results: Sequence["Assessed"], features: str | None, parts: Sequence[str] = ()) -> Iterator[str]:
    from deploy.folder.heldout import SCORE
    from deploy.folder.paired import families_of, score_of
    from deploy.folder.suites import ALL_KINDS
    from deploy.tools.evaluate import paired_differences

    evaluations = [each.evaluation for each in results]
    width = max(14, *(len(f"reward/{name}") for each in evaluations for name in each.readings))
    between = paired_differences(results)
    if len(results) > 1:
        yield f"{'':{width}} " + "  ".join(f"{each.name:>7}" for each in results) + "  difference, 95 %"

    def line(name: str, values: Sequence[float], change: object = None) -> str:
        shown = f"{name:{width}} " + "  ".join(f"{value:>{7 if len(values) > 1 else 0}.3f}" for value in values)
        return f"{shown}  {change}" if change else shown

    def means(kind: str, name: str = SCORE) -> list[float]:
        tag = None if kind == ALL_KINDS else kind
        scores = [score_of(each.scores, tag, name=name) for each in results]
        return [math.nan if score is None else score for score in scores]

    for tag in evaluations[0].by_tag:
        yield line(tag, [each.by_tag[tag] for each in evaluations], between.get(tag))
    families = families_of(results[0].scores.tags)
    for family in families:
        yield line(family, means(family), between.get(family))
    for part in parts:
        changes = paired_differences(results, name=part)
        for kind in families or [ALL_KINDS]:
            yield line(f"{part} {kind}", means(kind, part), changes.get(kind))
    for name in evaluations[0].readings:
        yield line(f"reward/{name}", [each.readings[name] for each in evaluations])
    if features:
        yield line("diversity", [each.diversity or 0.0 for each in results]) + f"  (1 - cosine of {features})"
    scores = results[0].scores
    size = f" of {scores.height} x {scores.width}" if scores.height and scores.width else ""
    all_counts = [f"{each.images} images{size}, {each.missing} without a score" for each in evaluations]
    counts = "; ".join(dict.fromkeys(all_counts))
    yield line("overall", [each.score for each in evaluations], between.get(ALL_KINDS)) + f"  ({counts})"
    share, first = results[-1].adapter_share, results[-1].adapter_steps
    if share is not None and first is not None and first < scores.steps:
        yield f"{'adapter share':{width}} {share:g}: the first {first} of {scores.steps} steps, the base model after"
