"""The report of one or many runs: one HTML file that needs no server."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np
from jinja2 import Environment, StrictUndefined

from deploy.folder.gallery import before_after_text, read_gallery
from deploy.folder.names import GALLERY
from deploy.folder.paired import Difference
from deploy.folder.suites import read_suites
from deploy.monitor.credit_words import words_of
from deploy.monitor.summary import STAGE, number
from deploy.presets import method_of
from deploy.report import charts
from deploy.report.account import SIDES, MfuPeak, rates_of
from deploy.report.charts import Chart
from deploy.report.chosen import chosen_of, data_url
from deploy.report.compare import difference_of, result_of, verdict_of
from deploy.report.runs import (
    HELDOUT,
    REWARD,
    Run,
    SeedGroup,
    change_of,
    code_of,
    config_differences,
    groups_of,
    read_runs,
    rough_duration,
)
from flowcredit.packages import VERSION
from protocol.errors import RunFolderError
from protocol.ground.files import by_iteration, require_folder_of, write_whole, writing

TEMPLATE = Path(__file__).with_name("report.html.jinja")
MARK = '<meta name="generator" content="flowcredit report">'
"""Identifies a report of ours, near the beginning of the file."""
DIAGNOSTICS = {
    "train/approx_kl": "approximate KL: mean of half the squared log ratio",
    "train/reference_kl": "reference KL: to the model without adapter",
    "train/ratio_mean": "mean ratio between learner and rollout",
    "train/clip_fraction": "clip fraction: share of clipped pairs",
    "train/old_distance_mean": "distance between the velocities of the trained adapter and of `old`",
    "train/loss": "loss",
    "train/grad_norm": "gradient norm before clipping",
    "reward/group_std": "spread: std of rewards within a group",
    "group/zero_variance": "groups without contrast: share in which every advantage is 0",
    "reward/missing": "images without a score",
}
MOST_PAIRS = 48
"""Most pairs of images before and after of each group."""


@dataclass(frozen=True)
class Pair:
    """Two images of a prompt from the same noise."""

    prompt: str
    before: str
    after: str
    score_before: float
    score_after: float
    condition: str | None
    """The image that the prompt edits."""
    wanted: str | None


@dataclass(frozen=True)
class Kind:
    """One kind of held-out prompts in one group."""

    group: str
    tag: str
    before: float
    after: float
    difference: Difference | None


def write_report(
    paths: Sequence[Path], out: Path, png: Path | None = None, *, peak: MfuPeak | None = None
) -> list[Path]:
    """Write the report of these run folders.

    Args:
        paths: the run folders; of a run in progress, the report shows the finished iterations.
        out: path of the HTML file; an earlier report there is replaced.
        png: a folder for the charts as PNG files; files of the same names are replaced.
        peak: the peak for mfu; None leaves mfu out.

    Raises:
        RunFolderError: a folder holds no run, no run has metrics yet, or `out` cannot be written or is another file.
    """
    require_report_path(out)
    runs = read_runs(paths)
    text = report_of(runs, peak)
    if png:
        with writing(png, "--png"):
            png.mkdir(parents=True, exist_ok=True)
    with writing(out, "--out"):
        write_whole(out, text)
    return [out, *(_write_pngs(drawn_of(groups_of(runs)), png) if png else ())]


@dataclass(frozen=True)
class Drawn:
    """The charts of a report."""

    curves: Sequence[tuple[str, Chart]]
    step_rewards: Sequence[tuple[SeedGroup, Chart | None, Chart | None]]
    """Lines and map of each group."""
    diagnostics: Sequence[tuple[str, str, Chart]]
    """Metric, its meaning, and chart."""
    stages: Chart | None
    sides: Sequence[tuple[SeedGroup, Chart]]
    """Bars of each side's work over the iterations."""

    def all(self) -> Iterator[Chart]:
        yield from (chart for _, chart in self.curves)
        yield from (chart for _, lines, heat in self.step_rewards for chart in (lines, heat) if chart)
        yield from (chart for _, _, chart in self.diagnostics)
        if self.stages:
            yield self.stages
        yield from (chart for _, chart in self.sides)


def drawn_of(groups: Sequence[SeedGroup]) -> Drawn:
    return Drawn(
        curves=_curves(groups),
        step_rewards=[(group, charts.step_reward_lines(group), charts.step_reward_heat(group)) for group in groups],
        diagnostics=_diagnostics(groups),
        stages=_stages(groups),
        sides=[(group, chart) for group in groups if (chart := charts.side_bars(group, SIDES))],
    )


def _write_pngs(drawn: Drawn, folder: Path) -> Iterator[Path]:
    with writing(folder, "--png"):
        for number, chart in enumerate(drawn.all()):
            path = folder / f"{number:02d}_{re.sub(r'[^a-z0-9]+', '_', chart.title.lower()).strip('_')}.png"
            write_whole(path, chart.png)
            yield path


def require_report_path(out: Path) -> None:
    """Check that a report may be written to a path.

    Raises:
        RunFolderError: its folder does not exist, or the path holds something other than a report.
    """
    require_folder_of(out, "--out")
    with writing(out, "--out"):
        if out.is_dir():
            raise RunFolderError(f"--out must name a file, got the folder {out}: name a file in it")
        if out.exists() and not _is_report(out):
            raise RunFolderError(f"--out must be new or an earlier report, got another file {out}: choose another name")


def _is_report(path: Path) -> bool:
    if not path.is_file():
        return False  # reading a pipe or a device may never end
    with path.open("rb") as file:
        return MARK.encode() in file.read(1000)


def report_of(runs: Sequence[Run], peak: MfuPeak | None = None) -> str:
    """Return the page of these runs; with a peak it also shows their mfu."""
    groups = groups_of(runs)
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(number=number, rough_duration=rough_duration)
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(
        mark=MARK,
        sentences=sentences_of(groups),
        methods=[method_of(group.runs[0].config) for group in groups],
        codes=list(map(code_of, groups)),
        words_of={group.name: words_of(group.runs[0].config.credit) for group in groups},
        version=VERSION,
        made=f"{datetime.now():%Y-%m-%d %H:%M}",
        runs=runs,
        groups=groups,
        light=charts.LIGHT,
        dark=charts.DARK,
        colours=[f"var(--{charts.colour(index)})" for index in range(len(groups))],
        rewards=[(group.first_and_last(REWARD), group.first_and_last(HELDOUT, of="evaluations")) for group in groups],
        changes=[found or reason for found, reason in map(change_of, groups)],
        drawn=drawn_of(groups),
        rates=[(group, rates) for group in groups if (rates := rates_of(group, peak))],
        has_peak=peak is not None,
        trajectories=[(group, chosen_of(group)) for group in groups],
        zeros=[name for name in DIAGNOSTICS if _is_zero(groups, name)],
        kinds=[kind for group in groups for kind in kind_rows(group)],
        suites=[score for run in runs for score in read_suites(run.path)],
        pairs=[(group, *pairs_of(group)) for group in groups],
        differences=config_differences(groups),
        configs=[(group, group.runs[0].config.to_yaml()) for group in groups],
    )


def sentences_of(groups: Sequence[SeedGroup]) -> list[str]:
    """Say what came out: of one group how its score changed, of several each against the first."""
    if len(groups) == 1:
        found, reason = change_of(groups[0])
        if found is None:
            return [f"{result_of(groups[0])}; {reason}."]
        chance = "" if found.is_clear else ", which is within chance"
        interval = f"95 % interval {found.low:+.3f} to {found.high:+.3f} over held-out prompts"
        return [f"{result_of(groups[0])}, {found.value:+.3f} since its start{chance} ({interval})."]
    first, *others = groups
    return [verdict_of(first, other, difference_of(first, other)) for other in others]


def kind_rows(group: SeedGroup) -> Iterator[Kind]:
    """Compare the first and the newest evaluation of a group for each kind of prompt."""
    skipped = (HELDOUT, "evaluation/missing")
    for name in group.names("evaluation/", of="evaluations"):
        ends = group.first_and_last(name, of="evaluations")
        if name in skipped or name.startswith("evaluation/reward/") or ends is None:
            continue
        tag = name.removeprefix("evaluation/")
        yield Kind(group.name, tag, *ends, change_of(group, tag)[0])


def pairs_of(group: SeedGroup) -> tuple[str, list[tuple[str, list[Pair]]]]:
    """Return images before and after: of the first and the newest gallery of a run, the group's first that has both.

    Returns:
        A text that names the run, both iterations and the choice; and the prompts whose score changed most, as titled
        lists: the rises with the largest first, the falls with the largest first, and pairs without a change.
    """
    for run in group.runs:
        galleries = by_iteration(run.path / GALLERY, ".npz")
        iterations = [int(line["iteration"]) for line in run.evaluations]
        ends = [iteration for iteration in iterations if iteration in galleries]
        if len(ends) < 2:
            continue
        try:
            before, after = (read_gallery(run.path / GALLERY, iteration) for iteration in (ends[0], ends[-1]))
        except ValueError:
            continue
        both = [prompt for prompt in before if prompt in after]
        changes = {prompt: float(np.nan_to_num(after[prompt].reading - before[prompt].reading)) for prompt in both}
        shown = sorted(both, key=lambda prompt: -abs(changes[prompt]))[:MOST_PAIRS]
        parts = []
        for title, sign in (("Higher score", 1), ("Lower score", -1), ("No change", 0)):
            total = sum(np.sign(change) == sign for change in changes.values())
            pairs = [
                Pair(
                    prompt,
                    data_url(left.image),
                    data_url(right.image),
                    left.reading,
                    right.reading,
                    *(None if each is None else data_url(each) for each in (right.condition, right.wanted)),
                )
                for prompt, left, right in ((prompt, before[prompt], after[prompt]) for prompt in shown)
                if np.sign(changes[prompt]) == sign
            ]
            cut = f", {len(pairs)} of them shown" if len(pairs) < total else ""
            parts += [(f"{title}: {total} of {len(both)} prompts{cut}", pairs)] if pairs else []
        readings = [[before[prompt].reading, after[prompt].reading] for prompt in both]
        said = before_after_text(
            run.heldout, readings, first=ends[0], last=ends[-1], diversity=run.config.diversity_reading
        )
        where = (
            f"{run.name}, iteration {ends[0]} (left) and {ends[-1]} (right), the first image of each prompt, below it"
            f" the mean score of all its images; {said}."
        )
        if len(shown) < len(both):
            where += f" The {len(shown)} prompts whose score changed most are shown."
        return where, parts
    return "", []


def _curves(groups: Sequence[SeedGroup]) -> list[tuple[str, Chart]]:
    return [
        (f"{title} by {words}", chart)
        for title, name, of in (("Reward", REWARD, "iterations"), ("Held-out score", HELDOUT, "evaluations"))
        for by, words in (("iteration", "iteration"), ("seconds", "training seconds"))
        if (chart := charts.metric_chart(groups, name, of=of, by=by))
    ]


def _diagnostics(groups: Sequence[SeedGroup]) -> list[tuple[str, str, Chart]]:
    return [
        (name, text, chart)
        for name, text in DIAGNOSTICS.items()
        if not _is_zero(groups, name) and (chart := charts.metric_chart(groups, name))
    ]


def _is_zero(groups: Sequence[SeedGroup], name: str) -> bool:
    """Return whether the groups have a metric and it is always 0."""
    found = [values for group in groups for _, _, values in group.values(name)]
    return bool(found) and not any(values.any() for values in found)


def _stages(groups: Sequence[SeedGroup]) -> Chart | None:
    rows = []
    for group in groups:
        names = [name for name in group.names(STAGE) if name not in (f"{STAGE}iteration", f"{STAGE}evaluation")]
        seconds = {name.removeprefix(STAGE): group.mean(name) for name in names}
        if seconds:
            rows.append((group.name, {stage: value or 0.0 for stage, value in seconds.items()}))
    return charts.stage_bars(rows) if rows else None
