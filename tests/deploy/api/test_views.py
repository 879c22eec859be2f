"""The page's views of ended runs in a real browser: curves beside each other, images, runs, configs, events."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from protocol.config.run import RunConfig
from tests.support.runs.long import a_long_run
from tests.support.services.browsing import act, count, resize, started_browser, text, wait_for
from tests.support.services.serving import servers

pytestmark = pytest.mark.whole
VIEWS = ("overview", "curves", "images", "runs", "config", "events")
READY = {
    "overview": "#reward-chart canvas",
    "curves": "#bar-charts canvas",
    "images": "#gallery canvas",
    "runs": "#run-rows td.text[title]:not([title=''])",
    "config": "#config-rows tr",
    "events": "#events li",
}
"""What is there once a view is drawn."""
SERIES = """
const labels = document.querySelectorAll(`${arguments[0]} .u-legend .u-series:not(.aid) .u-label`);
return [...labels].map((each) => each.textContent).slice(1);
"""

EVENT_COUNT = "return document.querySelector('#event-count').textContent"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with started_browser() as started:
        yield started


@pytest.fixture(scope="module")
def address(tiny_config: Callable[..., RunConfig], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    root = tmp_path_factory.mktemp("runs")
    for seed in (1, 2):
        a_long_run(root / f"mine_{seed}", tiny_config(seed=seed), iterations=40, steps=3, evaluations=4)
    a_long_run(root / "other", tiny_config(seed=3, group={"size": 8, "shard": 2}), iterations=40, steps=3)
    a_long_run(root / "long", tiny_config(seed=4), iterations=1200, steps=28, evaluations=3)
    with servers() as serve:
        _, started = serve(str(root), token=None)
        yield started


@pytest.fixture
def visit(browser: Any, address: str) -> Callable[..., Any]:
    def go(view: str, run: str = "mine_1", *others: str) -> Any:
        browser.get("about:blank")
        beside = "".join(f"&with={other}" for other in others)
        browser.get(f"{address}/#run={run}&view={view}{beside}")
        wait_for(browser, lambda: count(browser, READY[view]))
        return browser

    yield go
    browser.execute_script("localStorage.clear()")


def set_value(page: Any, selector: str, value: object, event: str = "input") -> None:
    script = """
    const element = document.querySelector(arguments[0]);
    element.value = arguments[1];
    element.dispatchEvent(new Event(arguments[2]));
    """
    page.execute_script(script, selector, value, event)


def label(page: Any, title: str) -> str:
    """How a screen reader calls a chart."""
    script = """
    const cards = [...document.querySelectorAll(".grid .card")];
    const card = cards.find((each) => each.querySelector("h3").textContent === arguments[0]);
    return card && !card.hidden ? card.querySelector(".chart").getAttribute("aria-label") ?? "" : "";
    """
    return page.execute_script(script, title)


def test_runs_stand_beside_each_other_and_seeds_are_one_line(visit):
    visit("overview").get_log("browser")
    page = visit("curves", "mine_1", "mine_2", "other")
    wait_for(page, lambda: "mine, 2 seeds: mine_1, mine_2" in text(page, "#compared"))
    wait_for(page, lambda: label(page, "Reward").startswith("Reward: mine now 0."))
    assert ", other now 0." in label(page, "Reward")
    wait_for(page, lambda: "mine: colors" in page.execute_script(SERIES, "#charts"))
    shown = page.execute_script(
        "return [...document.querySelectorAll('.grid .card:not([hidden]) h3')].map((e) => e.textContent)"
    )
    wanted = [
        "Held-out score",
        "Held-out score by kind of prompt",
        "Reward spread within a group",
        "KL",
        "Ratio",
        "Loss",
    ]
    assert set(wanted) <= set(shown)
    assert {"Seconds per iteration", "Where the time of an iteration goes", "Work of the actors"} <= set(shown)
    assert "missing scores" in text(page, "#zeros"), "what is always 0 has no chart"
    assert label(page, "Memory of each actor, GiB").endswith(": rollout-0 now 1.500")
    assert [entry for entry in page.get_log("browser") if entry["level"] == "SEVERE"] == []


def test_every_metric_has_a_chart_by_its_name(visit):
    page = visit("curves", "mine_1", "other")
    assert not label(page, "step_reward/step_0_abs_mean")
    page.find_element("css selector", "#further summary").click()
    wait_for(page, lambda: ", other now" in label(page, "step_reward/step_0_abs_mean"))


def test_axis_smoothing_and_zoom_persist(visit):
    page = visit("curves")
    assert "KL: approximate KL now" in label(page, "KL")
    set_value(page, "#smoothing", 0.9)
    set_value(page, "#zoom-from", 10, "change")
    set_value(page, "#zoom-to", 20, "change")
    wait_for(page, lambda: page.execute_script("return document.querySelector('#zoom-all').disabled") is False)
    page = visit("curves")
    assert page.execute_script("return document.querySelector('#zoom-from').value") == "10"
    assert text(page, "#smoothing-now") == "0.90"
    page = visit("overview")
    wait_for(page, lambda: "iterations 10 to 20" in text(page, "#zoomed-text"))
    page.find_element("css selector", "#zoomed-all").click()
    wait_for(page, lambda: page.execute_script("return document.querySelector('#zoomed').hidden"))
    page = visit("curves", "other")
    assert page.execute_script("return document.querySelector('#zoom-from').value") == "", "a zoom belongs to its run"
    set_value(page, "#by", "seconds", "change")
    wait_for(page, lambda: "seconds" in text(page, "#charts .u-legend"))


def test_dragging_over_a_chart_shows_that_part(visit):
    page = visit("curves", "long")
    from selenium.webdriver import ActionChains

    def drag(chart: Any) -> None:
        moves = ActionChains(page).move_to_element_with_offset(chart, -40, 0).click_and_hold()
        moves.move_by_offset(80, 0).release().perform()

    act(page, "#charts .u-over", drag)
    wait_for(page, lambda: page.execute_script("return document.querySelector('#zoom-to').value") != "")
    first, last = (
        int(page.execute_script(f"return document.querySelector('#zoom-{end}').value")) for end in ("from", "to")
    )
    assert 0 < first < last < 1200
    act(page, "#charts .u-over", lambda chart: ActionChains(page).double_click(chart).perform())
    wait_for(page, lambda: page.execute_script("return document.querySelector('#zoom-to').value") == "")


def test_a_long_run_is_drawn_from_few_points(visit):
    page = visit("overview", "long")
    wait_for(page, lambda: count(page, "#heat canvas"))
    height, width = (
        page.execute_script(f"return document.querySelector('#heat canvas').{side}") for side in ("height", "width")
    )
    assert height == 28
    assert page.execute_script(SERIES, "#reward-chart") == ["reward", "clip"]
    assert 200 < width <= 301
    assert page.execute_script("return document.querySelector('#credit').hidden"), "no words without a known rule"
    assert text(page, "#health").startswith("Finished after 1200 iterations: held-out score")
    assert "2 learner workers. All hold adapter 0123456789ab." in text(page, "#learners-words")


def test_the_slider_goes_through_the_evaluations(visit):
    page = visit("images")
    wait_for(page, lambda: text(page, "#gallery-now").startswith("iteration 40, 4 of 4; images of 32 x 32 pixels; "))
    wait_for(page, lambda: count(page, "#gallery canvas") == 12)
    newest = text(page, "#gallery")
    shown = re.findall(r"(\d\.\d+) \(([+−]\d\.\d+)\)", newest)
    now = [float(score) for score, _ in shown]
    first = [float(score) - float(change.replace("−", "-")) for score, change in shown]
    said = re.search(r"since iteration 0: mean of the 12 shown: (\S+) → (\S+); score", text(page, "#gallery-now"))
    assert said and [float(mean) for mean in said.groups()] == pytest.approx([sum(first) / 12, sum(now) / 12], abs=2e-3)
    page.find_element("css selector", "#gallery-at").send_keys("\ue012" * 3)  # the left arrow
    wait_for(page, lambda: text(page, "#gallery-now").startswith("iteration 0, 1 of 4"))
    wait_for(page, lambda: text(page, "#gallery") != newest and "(" not in text(page, "#gallery"))
    assert "24 of 24 prompts, iteration 0 to 40" in text(page, "#prompt-count")
    set_value(page, "#prompt-kind", "counting")
    set_value(page, "#prompt-words", "red")
    assert count(page, "#prompt-rows tr") == 2
    set_value(page, "#prompt-kind", "")
    set_value(page, "#prompt-words", "")
    page.find_element("css selector", "#prompts-table [data-column=now] button").click()
    scores = page.execute_script(
        "return [...document.querySelectorAll('#prompt-rows tr')].map((row) => Number(row.cells[3].textContent))"
    )
    assert scores == sorted(scores)
    set_value(page, "#prompt-reading", "clip", "change")
    wait_for(
        page,
        lambda: (
            float(page.execute_script("return document.querySelector('#prompt-rows td:nth-child(4)').textContent"))
            < scores[0] + 1e-9
        ),
    )


def test_runs_are_searched_by_what_differs_and_marked_for_comparison(visit):
    page = visit("runs")
    wait_for(page, lambda: "group.size" in text(page, "#run-heads"))
    assert count(page, "#run-rows tr") == 4
    set_value(page, "#run-words", "group.size=8 finished")
    assert [text(page, "#run-rows button")] == ["other"]
    assert count(page, "#run-rows tr") == 1
    page.find_element("css selector", "#run-rows input").click()
    wait_for(page, lambda: "with=other" in page.current_url)
    page.find_element("css selector", "#run-curves").click()
    wait_for(page, lambda: "other now" in label(page, "Reward"))
    page.find_element("css selector", "[data-view=config]").click()
    wait_for(page, lambda: "group.size\t4\t8" in text(page, "#differences-rows"))
    set_value(page, "#config-words", "learning_rate")
    wait_for(page, lambda: text(page, "#config-rows").startswith("learner.learning_rate"))
    assert "Report of these 2 runs (HTML)" in text(page, "#files")
    page.back()
    wait_for(page, lambda: text(page, "#charts") != "")


def test_the_runs_table_begins_with_method_seed_and_what_differs_and_its_columns_are_chosen(visit):
    page = visit("runs")
    heads = "return [...document.querySelectorAll('#run-heads th')].map((head) => head.dataset.column)"
    wait_for(page, lambda: page.execute_script(heads)[1:5] == ["run", "method", "seed", "group.size"])
    assert "seed=" not in text(page, "#run-rows"), "the seed has a column of its own"
    page.execute_script("document.querySelector('.columns').open = true")
    boxes = {box.text: box for box in page.find_elements("css selector", "#run-columns label")}
    boxes["group.size"].find_element("css selector", "input").click()
    wait_for(page, lambda: "group.size" not in page.execute_script(heads))
    assert "group.size=8" in text(page, "#run-rows"), "what has no column is in the last one"


def test_held_out_score_and_reward_have_axes_of_their_own_and_legends_show_the_newest_values(visit):
    page = visit("overview")
    wait_for(page, lambda: count(page, "#heldout-chart canvas") == 1)
    assert page.execute_script(SERIES, "#heldout-chart") == ["held-out score"]
    assert "held-out score" not in page.execute_script(SERIES, "#reward-chart")
    shown = text(page, "#heldout-chart .u-series:last-child .u-value")
    said = page.execute_script("return document.querySelector('#heldout-chart').getAttribute('aria-label')")
    assert said.endswith(f"held-out score now {shown}")


ONE_POINT = """
const [at, done] = arguments;
import("/static/charts.js").then(({ Lines }) => {
  const holder = document.body.appendChild(document.createElement("div"));
  const lines = new Lines(holder, 100, "score", null);
  lines.show([{ name: "score", color: 0, x: [at], y: [0.5] }]);
  const { x, y } = lines.plot.scales;
  holder.remove();
  done([x.min, x.max, y.min, y.max]);
});
"""


@pytest.mark.parametrize(("at", "axis"), [(0, [0, 1]), (500, [499, 501])])
def test_one_point_has_an_axis_about_it(visit, at, axis):
    assert visit("overview").execute_async_script(ONE_POINT, at) == [*axis, 0.45, 0.55]


def test_a_file_is_saved_under_the_name_of_its_run(visit, tmp_path: Path):
    page = visit("config")
    page.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    page.find_elements("css selector", "#files button")[1].click()
    wait_for(page, lambda: text(page, "#files-notice") == "metrics.jsonl: saved")
    wait_for(page, lambda: (tmp_path / "mine_1_metrics.jsonl").exists())
    page.find_elements("css selector", "#files button")[0].click()
    wait_for(page, lambda: "the run has no whole checkpoint yet" in text(page, "#files-notice"))


def test_the_config_says_what_set_a_value_and_shows_only_those_that_were_set(visit):
    page = visit("config")
    assert "seed\t1\toverride" in text(page, "#config-rows")
    assert "group.size\t4\tdefault" in text(page, "#config-rows")
    page.find_element("css selector", "#config-changed").click()
    wait_for(page, lambda: text(page, "#config-rows") == "seed\t1\toverride")


def test_events_have_dates_and_are_filtered(visit):
    page = visit("events")
    wait_for(page, lambda: text(page, "#event-count") == "40 of 40 events")
    assert "2023" in text(page, "#events .day")
    set_value(page, "#event-kind", "trouble")
    assert text(page, "#event-count") == "5 of 40 events"
    set_value(page, "#event-words", "reward actor")
    assert text(page, "#event-count") == "1 of 40 events"


def test_all_events_of_an_answer_are_drawn_at_once(visit):
    page = visit("overview")
    page.execute_script(
        """
        window.drawn = 0;
        const seen = new MutationObserver((changes) => { window.drawn += changes.length; });
        seen.observe(document.querySelector("#events"), { childList: true });
        document.querySelector("#events").replaceChildren();
        location.hash = "run=mine_2&view=overview";
        """
    )
    wait_for(page, lambda: text(page, "#runs") and "40 of 40" in page.execute_script(EVENT_COUNT))
    wait_for(page, lambda: page.execute_script("return document.querySelectorAll('#events li').length") > 40)
    assert page.execute_script("return window.drawn") < 10


def test_another_run_of_the_same_name_is_shown_in_an_open_window(browser, tiny_config, tmp_path: Path):
    runs = tmp_path / "runs"
    a_long_run(runs / "mine", tiny_config(seed=1), iterations=20, steps=2, evaluations=3, pace=0.1)
    a_long_run(tmp_path / "new", tiny_config(seed=2), iterations=20, steps=2, evaluations=3, pace=3)
    status = tmp_path / "new" / "status.json"
    status.write_text(status.read_text().replace('"run":"new"', '"run":"mine"'))
    scores = "return [...document.querySelectorAll('#gallery b')].map((each) => each.textContent).join()"
    with servers() as serve:
        _, address = serve(str(runs), token=None)
        browser.get("about:blank")
        browser.get(f"{address}/#run=mine&view=config")
        wait_for(browser, lambda: "seed\t1" in text(browser, "#config-rows"))
        browser.execute_script("location.hash = 'run=mine&view=images'")
        wait_for(browser, lambda: browser.execute_script(scores))
        before = browser.execute_script(scores)
        (runs / "mine").rename(tmp_path / "old")
        (tmp_path / "new").rename(runs / "mine")
        wait_for(browser, lambda: browser.execute_script(scores) not in ("", before))
        browser.execute_script("location.hash = 'run=mine&view=config'")
        wait_for(browser, lambda: "seed\t2" in text(browser, "#config-rows"))
        browser.get("about:blank")


def test_nothing_is_asked_of_elsewhere(visit, address):
    page = visit("curves", "mine_1", "other")
    names = page.execute_script("return performance.getEntriesByType('resource').map((each) => each.name)")
    assert len(names) > 10
    assert {name for name in names if not name.startswith((address, "data:"))} == set()


@pytest.mark.parametrize(("width", "scheme"), [(400, "light"), (1200, "dark")])
def test_axe_finds_nothing_in_any_view_and_nothing_stands_out_sideways(visit, width, scheme):
    axe = pytest.importorskip(
        "axe_core_python.selenium", reason="axe-core-python is not installed: pip install -e .[dev]"
    )
    page = visit("overview")
    page.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )
    resize(page, width)
    found = {}
    for view in VIEWS:
        visit(view, "mine_1", "other")
        sideways = page.execute_script("return document.documentElement.scrollWidth")
        broken = [(one["id"], [node["html"] for node in one["nodes"]]) for one in axe.Axe().run(page)["violations"]]
        if broken or sideways > width:
            found[view] = sideways, broken
    page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    assert found == {}, json.dumps(found, indent=1)
