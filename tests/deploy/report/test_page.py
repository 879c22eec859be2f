"""The report of one or many runs."""

import json
import os
import re
import resource
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from PIL import Image

from deploy.report.account import SIDES, MfuPeak, rates_of
from deploy.report.charts import metric_chart, side_bars
from deploy.report.page import pairs_of, report_of, write_report
from deploy.report.runs import groups_of, read_run, read_runs
from protocol.errors import RunFolderError
from tests.support.runs.ended import an_ended_run
from tests.support.services.browsing import resize, started_browser


class Page(HTMLParser):
    """The tags of a page, its addresses and its ids; all tags must be closed in their order."""

    EMPTY = frozenset({"meta", "img", "br"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.ids: list[str] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.addresses += [value for name, value in attrs if name in ("src", "href", "xlink:href", "action", "srcset")]
        self.ids += [value for name, value in attrs if name == "id"]
        if tag not in self.EMPTY:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.EMPTY:
            self._open.pop()

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny_config) -> list[Path]:
    """Two seeds of one config, and a run of another."""
    root = tmp_path_factory.mktemp("runs")
    configs = [tiny_config(seed=0), tiny_config(seed=1), tiny_config(seed=0, learner={"learning_rate": 0.125})]
    return [
        an_ended_run(root / name, config, lift=lift)
        for name, config, lift in zip(("mine_0", "mine_1", "_other$x$"), configs, (0.1, 0.2, 0.0), strict=True)
    ]


@pytest.fixture(scope="module")
def page(runs) -> str:
    return report_of(read_runs(runs))


def test_the_page_asks_nothing_of_any_server(page):
    found = Page(page)
    assert found.addresses
    assert all(address.startswith(("data:image/", "#")) for address in found.addresses)
    assert not re.search(r"url\((?!#)|@import|<script|<link|<iframe", page)


@pytest.mark.whole
def test_no_table_is_wider_than_a_phone_or_breaks_its_words(page, tmp_path):
    path = tmp_path / "report.html"
    path.write_text(page)
    cells = "return [...document.querySelectorAll('td')].map(cell => cell.offsetWidth)"
    hidden = "return [...document.querySelectorAll('.scroll:has(table)')].map(box => box.scrollWidth - box.clientWidth)"
    with started_browser() as browser:
        browser.get(path.as_uri())
        for width in (400, 1280):
            resize(browser, width)
            assert min(browser.execute_script(cells)) > 40
            assert max(browser.execute_script(hidden)) <= 0


def test_every_id_of_the_charts_is_there_once(page):
    found = Page(page)
    assert len(found.ids) == len(set(found.ids))
    linked = {address[1:] for address in found.addresses if address.startswith("#")} | set(
        re.findall(r"url\(#([^)]*)\)", page)
    )
    assert linked <= set(found.ids)


def test_seeds_are_one_group_and_another_config_is_another(page):
    text = Page(page).text
    assert "mine (2 seeds)" in text
    assert "_other$x$" in text
    assert "mine_0 (seed 0, unknown)" in text
    assert "learner.learning_rate" in text
    assert "0.125" in text
    assert "seed" not in re.findall(r"<code>([^<]*)</code>", page)


def test_numbers_of_the_page_are_those_of_the_runs(page):
    text = " ".join(Page(page).text.split())
    assert "credit gae; objective clipped" in text and "reward = 1.0" in text
    assert "0.530 → 0.650" in text, "reward of the two seeds: 0.52 to 0.6, and 0.54 to 0.7, means 0.53 and 0.65"


WORK = {
    "work/main_evaluations": 600.0,
    "work/completion_evaluations": 300.0,
    "work/reference_evaluations": 100.0,
    "work/gradient_evaluations": 500.0,
    "work/images": 480.0,
    "work/sampling_seconds": 2.0,
    "work/scoring_seconds": 0.5,
    "work/training_seconds": 1.0,
}


def test_the_account_has_rates_and_a_bar_for_each_side(tmp_path, tiny_config):
    roles = {"rollout": {"gpus": 0.5}, "learner": {"gpus": 1.0}}
    cluster = {"rollout_actors": 2, **roles}
    config = tiny_config(cluster=cluster, group={"size": 4, "per_iteration": 8})
    run = read_run(an_ended_run(tmp_path / "run", config, iterations=50, **WORK))
    peak = MfuPeak(tflops=1e-9, operations=lambda _: (2.0, 6.0))
    (group,) = groups_of([run])
    rates = rates_of(group, peak)
    assert rates
    assert (rates.images, rates.images_per_gpu, rates.scored, rates.evaluations) == (8.0, 4.0, 120.0, 375.0)
    assert rates.mfu == pytest.approx((1000 * 2.0 + 500 * 6.0) / 4.0 / 2.0 / 1000)
    text = " ".join(Page(report_of([run], peak)).text.split())
    assert "evaluations per secondmfu run 4.0 8.00 4.00 120.0 375.0 0.625" in text
    assert "mfu" not in report_of([run])


def test_a_bar_is_the_mean_of_its_iterations_and_runs(tmp_path, tiny_config):
    runs = [
        an_ended_run(tmp_path / f"run_{seed}", tiny_config(seed=seed), iterations=50, **WORK | {name: seconds})
        for seed, name, seconds in ((0, "work/sampling_seconds", 3.0), (1, "work/sampling_seconds", 5.0))
    ]
    (group,) = groups_of(read_runs(runs))
    chart = side_bars(group, SIDES)
    assert chart
    axes = Figure().subplots()
    chart.draw(axes)
    heights = [[bar.get_height() for bar in bars] for bars in axes.containers if isinstance(bars, BarContainer)]
    assert heights == [[4.0] * 17, [0.5] * 17, [1.0] * 17], "three iterations in each of 17 bars, the last has two"
    lefts = [bar.get_x() for bars in axes.containers if isinstance(bars, BarContainer) for bar in list(bars)[:1]]
    assert lefts == sorted(lefts) and lefts[2] < 4


def test_prompts_are_shown_as_they_stand(page):
    assert "<b>prompt</b>" not in page
    assert "&lt;b&gt;prompt&lt;/b&gt; 0 &amp; $x" in page


def test_charts_take_their_colours_from_the_page(page):
    charts = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(charts) >= 8
    assert all("#0a0" not in chart and "var(--" in chart for chart in charts)


def test_a_metric_that_is_always_zero_is_named_and_not_drawn(page):
    assert "Always 0, so not drawn: <code>reward/missing</code>" in page
    assert 'aria-label="reward/missing by iteration"' not in page


def test_long_runs_are_drawn_with_few_points(tmp_path, tiny_config):
    page = report_of([read_run(an_ended_run(tmp_path / "long", tiny_config(), iterations=3000))])
    assert len(page) < 600_000


def test_a_run_with_the_finished_image_only_has_trajectories_of_one_image(tmp_path, tiny_config):
    run = an_ended_run(tmp_path / "run", tiny_config())
    path = next((run / "trajectories").glob("*.json"))
    held = json.loads(path.read_text())
    for row, each in enumerate(held["trajectories"]):  # two members share step 0 and part at step 1
        each["rewards"], each["values"] = [0.25 + row / 4], None
        each["step_rewards"], each["advantages"] = [0.125, row - 0.5], [1.5, 4 * row - 2]
    held["width"] *= 3
    path.write_text(json.dumps(held))
    page = report_of([read_run(run)])
    assert "Best: the highest reward" in page
    assert "Turned around" not in page
    shown = [Page(part.partition("</ol>")[0] + "</ol>").text for part in page.split('<div class="scroll">')[1:]]
    first, second = (f"step {step} →" for step in held["steps"])
    shared = f"{first}+0.125advantage +1.500"
    assert shared in shown[0] and f"{second}+0.500advantage +2.000" in shown[0]
    assert shared in shown[1] and f"{second}-0.500advantage -2.000" in shown[1]
    assert all(each.index(second) < each.index("finished") for each in shown)


def test_pairs_before_and_after_show_the_rises_then_the_falls_and_count_both(tmp_path, tiny_config, monkeypatch):
    monkeypatch.setattr("deploy.report.page.MOST_PAIRS", 12)
    run = an_ended_run(tmp_path / "run", tiny_config())
    names = list("abcdefghijklmnop")
    images = np.zeros((16, 8, 8, 3), np.uint8)
    first, last = sorted((run / "gallery").glob("iteration_*.npz"))[:: len(list((run / "gallery").glob("*.npz"))) - 1]
    changes = [-0.5, 0.25, 0.75, *[0.0625] * 9, -0.75, 0.0, 0.0, np.nan]
    np.savez(first, prompts=np.array(names), images=images, readings=np.full(16, 1.0, np.float32))
    readings = np.array(changes, np.float32) + 1
    np.savez(last, prompts=np.array(names), images=images, readings=readings, conditions=images, wanted=images)
    where, parts = pairs_of(groups_of([read_run(run)])[0])
    assert where.endswith("The 12 prompts whose score changed most are shown.")
    assert "the mean score of all its images; score of all 12 images: 0.495 → 0.595" in where
    assert [title for title, _ in parts] == [
        "Higher score: 11 of 16 prompts, 10 of them shown",
        "Lower score: 2 of 16 prompts",
    ]
    assert ["".join(pair.prompt for pair in pairs) for _, pairs in parts] == ["cbdefghijk", "ma"]
    assert parts[0][1][0].condition == parts[0][1][0].wanted == parts[0][1][0].before
    assert "to edit" in (html := report_of([read_run(run)])) and "wanted" in html


def test_damaged_lines_and_files_are_left_out_and_counted(tmp_path, tiny_config):
    run = an_ended_run(tmp_path / "run", tiny_config())
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 6, "rew\n\x00\n{"iteration": 6, "reward/mean": 0.7, "seconds/iteration": "4"}\n')
        file.write('{"iteration": 6, "reward/mean": 0.7')
    for path in (run / "gallery" / "iteration_000005.npz", run / "gallery" / "iteration_000000.json"):
        path.write_bytes(b"damaged")
    next((run / "trajectories").glob("*.json")).write_text("{}")
    text = " ".join(Page(report_of([read_run(run)])).text.split())
    assert "run: 3 lines of metrics.jsonl cannot be read and are left out." in text
    assert "no two evaluations with scores by prompt" in text
    assert "Recorded trajectories" not in text
    assert "Before and after" not in text


def test_a_run_that_has_just_begun_is_shown_beside_others_and_refused_alone(tmp_path, runs, tiny_config):
    young = an_ended_run(tmp_path / "young", tiny_config(seed=5))
    (young / "metrics.jsonl").unlink()
    assert "young has no finished iteration yet." in report_of(read_runs([*runs, young]))
    with pytest.raises(RunFolderError, match=r"must have a line of metrics.jsonl to be shown, got none in .*young"):
        read_runs([young])


def test_equal_names_are_told_apart_and_a_folder_counts_once(tmp_path, tiny_config):
    paths = [an_ended_run(tmp_path / where / "run", tiny_config()) for where in ("a", "b")]
    assert [run.name for run in read_runs([*paths, paths[0]])] == [str(path) for path in paths]


def test_an_earlier_report_is_replaced_and_another_file_is_not(tmp_path, runs):
    out = tmp_path / "report.html"
    assert write_report(runs[:1], out) == [out]
    before = out.read_text()
    write_report(runs, out)
    assert out.read_text() != before
    mine = tmp_path / "thesis.html"
    mine.write_text("years of work")
    os.mkfifo(tmp_path / "pipe")
    for path, rule in (
        (mine, "must be new or an earlier report"),
        (tmp_path / "pipe", "must be new or an earlier report"),
        (tmp_path, "must name a file"),
        (tmp_path / "no" / "x.html", "no folder .*no to write to"),
    ):
        with pytest.raises(RunFolderError, match=rule):
            write_report(runs, path)
    assert mine.read_text() == "years of work"
    with pytest.raises(RunFolderError, match="must hold config.yaml"):
        write_report([tmp_path], out)


def test_every_chart_of_the_page_is_a_png_too(tmp_path, runs, page):
    html, *pngs = write_report(runs, tmp_path / "report.html", tmp_path / "new" / "png")
    assert html.read_text().count("<svg") == len(pngs) == page.count("<svg")
    for path in pngs:
        with Image.open(path) as image:
            assert image.size[0] == 1040
            corners = {image.convert("RGB").getpixel(at) for at in ((0, 0), (1039, 0))}
        assert corners == {(255, 255, 255)}
    assert "00_reward_mean_by_iteration.png" in {path.name for path in pngs}
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="cannot be written: .*set --png"):
        write_report(runs, tmp_path / "other.html", tmp_path / "file")
    assert not (tmp_path / "other.html").exists()


def test_a_disk_that_takes_no_more_leaves_the_earlier_report(tmp_path, runs):
    (out,) = write_report(runs[:1], tmp_path / "report.html")
    before = out.read_text()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(RunFolderError, match="cannot be written: File too large; fix that or set --out"):
            write_report(runs, out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert out.read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_the_report_explains_the_credit_of_each_group_and_no_other(tmp_path, tiny_config):
    tree = tiny_config(credit={"rule": "tree"}, sampling={"splits": [0.5]})
    flow = tiny_config(credit={"rule": "uniform"})
    for name, config in (("tree", tree), ("flow", flow)):
        text = Page(report_of([read_run(an_ended_run(tmp_path / name, config))])).text
        assert ("share it" in text) == (name == "tree")
        assert ("Every step earns the reward" in text) == (name == "flow")
        assert "gain" not in text.lower()


def test_a_line_of_one_point_has_an_axis_about_it_and_its_value_in_the_legend(tmp_path, tiny_config):
    runs = [
        read_run(an_ended_run(tmp_path / f"run_{k}", tiny_config(group={"size": 4 + 2 * k}), iterations=1))
        for k in range(2)
    ]
    chart = metric_chart(groups_of(runs), "reward/mean")
    axes = Figure().subplots()
    chart.draw(axes)
    assert axes.get_xlim() == (0, 2)
    assert axes.get_legend_handles_labels()[1] == ["run_0: 0.6", "run_1: 0.6"]


def test_a_legend_has_the_mean_of_the_runs_last_values_over_iterations_and_over_seconds(tmp_path, tiny_config):
    """One seed takes half the seconds: its line ends where the other one's goes on."""
    paths = [
        an_ended_run(tmp_path / f"run_{seed}", tiny_config(seed=seed), lift=lift, **{"seconds/iteration": seconds})
        for seed, lift, seconds in ((0, 0.1, 4.0), (1, 0.2, 2.0))
    ]
    for by in ("iteration", "seconds"):
        axes = Figure().subplots()
        chart = metric_chart(groups_of(read_runs(paths)), "reward/mean", by=by)
        assert chart
        chart.draw(axes)
        assert axes.get_legend_handles_labels()[1] == ["run (2 seeds): 0.65"], "0.6 and 0.7"
