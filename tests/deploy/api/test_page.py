"""The page in a real browser: a live run moves, a size set there reaches the run, a lost connection heals."""

import asyncio
import itertools
import json
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from deploy.board.board import Board, Update
from deploy.board.embedded import BoardServer
from deploy.monitor.credit_words import words_of
from protocol.commands import Command
from protocol.config.credit import CreditConfig
from protocol.errors import BoardError
from protocol.status import ActorStatus, Event, MetricLine, PoolStatus, RunStatus
from tests.support.runs.scene import Driver, preset
from tests.support.runs.statuses import a_record, a_status
from tests.support.services.browsing import resize, started_browser, text, wait_for
from tests.support.services.serving import TOKEN, free_port, start_server
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.whole


class LivingRun:
    """A run on a real board that goes on by itself: an iteration every half second, commands are carried out."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._ending = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._live()))
        self.iteration = 0
        self.rollout = 1
        self.phase = "running"

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ending.set()
        self._thread.join()

    def status(self) -> RunStatus:
        names = [f"rollout-{index}" for index in range(self.rollout)]
        actors = [
            ActorStatus(
                name=n,
                kind="rollout",
                state="busy",
                node="here",
                adapter_version=self.iteration,
                adapter_digest="0123456789ab",
            )
            for n in names
        ]
        pools = [PoolStatus(name="rollout", desired=self.rollout, ready=self.rollout, busy=1, busy_share=0.6)]
        metrics = {"seconds/rollout_and_reward": 3.0, "seconds/update": 2.0}
        return a_status(
            "live",
            self.phase,
            iteration=self.iteration,
            lines=self.iteration,
            pools=pools,
            actors=actors,
            metrics=metrics,
            credit=words_of(CreditConfig()),
            heartbeat_s=0.5,
        )

    async def _live(self) -> None:
        board = Board(self._url)
        outcomes: list[Command] = []
        while not self._ending.is_set():
            self.iteration += self.phase == "running"
            line = MetricLine(seq=max(1, self.iteration), values=self._values())
            event = Event(number=max(1, self.iteration), time=time.time(), kind="info", message="an iteration")
            try:
                update = Update(self.status(), [line], [event], [a_record()], outcomes)
                outcomes = [self._carry_out(command) for command in (await board.write(update, keep_s=3600)).asked]
            except BoardError:
                pass
            await asyncio.sleep(0.5)
        await board.close()

    def _values(self) -> dict[str, float | None]:
        gains = {f"step_reward/step_{step}_abs_mean": 0.1 * step for step in range(3)}
        return {"iteration": self.iteration, "reward/mean": 0.5, "train/grad_norm": 0.1, **gains}

    def _carry_out(self, command: Command) -> Command:
        if command.kind == "scale":
            assert command.count is not None
            self.rollout = command.count
        if command.kind in ("pause", "resume"):
            self.phase = {"pause": "paused", "resume": "running"}[command.kind]
        return command.model_copy(update={"state": "done", "finished": time.time(), "message": "as desired"})


class Server:
    """`flowcredit serve`, which can go away and come back on the same port."""

    def __init__(self, where: str) -> None:
        self._where = where
        self.port = free_port()
        self.address = f"http://127.0.0.1:{self.port}/"
        self.start()

    def start(self) -> None:
        self._process, _ = start_server(self._where, port=self.port)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait(PATIENCE_S)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LivingRun, Server]]:
    board = BoardServer(tmp_path_factory.mktemp("board"))
    board.start()
    run = LivingRun(board.url)
    run.start()
    server = Server(board.url)
    yield run, server
    server.stop()
    run.stop()
    board.stop()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with started_browser() as started:
        yield started


@pytest.fixture
def page(browser: Any, scene: tuple[LivingRun, Server]) -> Any:
    browser.get(scene[1].address)
    wait_for(browser, lambda: "live" in text(browser, "#link"))
    return browser


def shown_iteration(browser: Any) -> int:
    found = re.search(r"(\d+) / \d+", text(browser, "#facts"))
    return int(found[1]) if found else 0


def test_the_page_of_a_live_run_moves_and_nothing_goes_wrong_in_the_browser(page):
    page.get_log("browser")
    wait_for(page, lambda: shown_iteration(page) > 0)
    first = shown_iteration(page)
    wait_for(page, lambda: shown_iteration(page) >= first + 3)
    assert "running" in text(page, "#facts")
    assert "3 missing" in text(page, "#attention")
    assert page.execute_script("return document.querySelectorAll('#reward-chart canvas').length") == 1
    assert page.execute_script("return document.querySelector('#heat canvas').height") == 3
    wait_for(page, lambda: page.execute_script("return document.querySelectorAll('.trajectory').length") == 2)
    assert "+0.100" in text(page, "#trajectories")
    assert "reward 0.200\nvalue +0.100\nbefore step 1" in text(page, "#trajectories")
    assert "step reward\n+0.200" in text(page, "#trajectories")
    assert "no score\nno value" in text(page, "#trajectories")
    assert "The group's mean reward is 0.650" in text(page, "#record-prompt")
    assert "The value of a point is the final reward that" in text(page, "#credit-rule")
    assert "gains are +0.08 and +0.15" in text(page, "#credit-example")
    assert "share" not in text(page, "#credit"), "nothing about trees"
    assert "rollout-0" in text(page, "#actors")
    assert "Groups scored, not yet trained on\n1" in text(page, "#queues")
    assert "Images for geneval\n40" in text(page, "#queues")
    assert [entry for entry in page.get_log("browser") if entry["level"] == "SEVERE"] == []


def test_an_address_without_a_run_shows_the_newest_run_and_its_name(browser, scene):
    browser.get("about:blank")
    browser.get(scene[1].address)
    wait_for(browser, lambda: "live" in text(browser, "#link"))
    shown = browser.execute_script("return [document.querySelector('#runs').value, location.hash]")
    assert shown[0]
    assert shown[1] == f"#run={shown[0]}"


def test_a_size_set_on_the_page_changes_the_pool(page, scene):
    run, _ = scene
    wait_for(page, lambda: page.find_elements("css selector", "#pools input"))
    field = page.find_element("css selector", "#pools input")
    field.clear()
    field.send_keys("3")
    page.find_element("css selector", "#pools button").click()
    page.find_element("css selector", "#token").send_keys("wrong-token")
    page.find_element("css selector", "#token-dialog button.main").click()
    wait_for(page, lambda: "token is missing or wrong" in text(page, "#outcomes"))
    assert run.rollout == 1
    page.find_element("css selector", "#pools button").click()
    page.find_element("css selector", "#token").send_keys(TOKEN)
    page.find_element("css selector", "#token-dialog button.main").click()
    wait_for(page, lambda: "done, as desired" in text(page, "#outcomes"))
    assert run.rollout == 3
    wait_for(page, lambda: "rollout-2" in text(page, "#actors"))
    page.find_element("css selector", "[data-command=pause]").click()
    wait_for(page, lambda: "paused" in text(page, "#facts"))
    assert not page.find_element("css selector", "[data-command=pause]").is_enabled()
    page.find_element("css selector", "[data-command=resume]").click()
    wait_for(page, lambda: "running" in text(page, "#facts"))


def test_a_lost_connection_is_shown_and_heals(page, scene):
    _, server = scene
    before = shown_iteration(page)
    server.stop()
    wait_for(page, lambda: "connection lost" in text(page, "#link"))
    assert "running" in text(page, "#facts")
    server.start()
    wait_for(page, lambda: text(page, "#link") == "live")
    wait_for(page, lambda: shown_iteration(page) > before + 1)
    label = "return document.querySelector('#reward-chart').getAttribute('aria-label') ?? ''"
    wait_for(page, lambda: "reward now 0.5" in page.execute_script(label))


def test_enter_in_the_token_dialog_takes_the_token(page):
    page.find_element("css selector", "#token-open").click()
    field = page.find_element("css selector", "#token")
    field.clear()
    field.send_keys("a-token-by-the-keyboard\n")
    wait_for(page, lambda: not page.execute_script("return document.getElementById('token-dialog').open"))
    held = "return sessionStorage.getItem('flowcredit-token')"
    assert page.execute_script(held) == "a-token-by-the-keyboard"
    page.find_element("css selector", "#token-open").click()
    page.find_element("css selector", "#token").send_keys("-2")
    page.find_element("css selector", "#token-dialog [value=cancel]").click()
    assert page.execute_script(held) == "a-token-by-the-keyboard"


def test_more_windows_than_a_browser_has_connections_are_all_live(page, scene):
    """A browser opens six connections to a server, for all its tabs and windows together."""
    first, opened = page.current_window_handle, []
    page.set_page_load_timeout(40)
    try:
        for number in range(8):
            page.switch_to.new_window("window" if number % 2 else "tab")
            opened.append(page.current_window_handle)
            page.get(scene[1].address)
            wait_for(page, lambda: text(page, "#link") == "live")
        for handle in opened:
            page.switch_to.window(handle)
            page.execute_cdp_cmd("Page.bringToFront", {})
            before = shown_iteration(page)
            wait_for(page, lambda before=before: shown_iteration(page) > before)
    finally:
        for handle in opened:
            page.switch_to.window(handle)
            page.close()
        page.switch_to.window(first)


def test_an_unknown_run_in_the_address_shows_no_other_one(browser, scene):
    browser.get("about:blank")
    browser.get(f"{scene[1].address}#run=gone")
    wait_for(browser, lambda: "There is no run “gone” here" in text(browser, "#notice"))
    assert text(browser, "#facts") == ""
    browser.execute_script("location.hash = 'run=live'")
    wait_for(browser, lambda: "running" in text(browser, "#facts") and not text(browser, "#notice"))


def test_the_end_of_a_run_and_of_its_server_is_no_alarm_and_names_the_way_back(page, scene):
    run, server = scene
    run.phase = "finished"
    try:
        wait_for(page, lambda: "finished" in text(page, "#facts"))
        wait_for(page, lambda: text(page, "#link") == "connected")
        assert "ready" not in text(page, "#pools")
        server.stop()
        wait_for(page, lambda: text(page, "#link") == "server ended")
        assert "The run has finished" in text(page, "#notice")
        assert "flowcredit serve <run folder>" in text(page, "#notice")
        assert page.execute_script("return document.getElementById('link').dataset.state") == "over"
    finally:
        run.phase = "running"
        server.start()
    wait_for(page, lambda: text(page, "#link") == "live" and "running" in text(page, "#facts"))
    wait_for(page, lambda: not text(page, "#notice"))


@pytest.mark.parametrize("width", [400, 1200])
def test_axe_finds_nothing(page, width):
    axe = pytest.importorskip(
        "axe_core_python.selenium", reason="axe-core-python is not installed: pip install -e .[dev]"
    )
    wait_for(page, lambda: page.execute_script("return document.querySelectorAll('.trajectory').length") == 2)
    resize(page, width)
    found = axe.Axe().run(page)
    page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert [(one["id"], [node["html"] for node in one["nodes"]]) for one in found["violations"]] == []
    assert len(found["passes"]) > 20


HEAT = """
const done = arguments[arguments.length - 1];
import("/static/charts.js").then(({ Heat }) => {
  const holder = Object.assign(document.createElement("div"), { className: "heat" });
  document.body.append(holder);
  const [iterations, steps] = [5000, 28];
  const gain = (n, k) => (n + k) / 1e4;
  const values = Array.from({ length: iterations }, (_, n) => Array.from({ length: steps }, (_, k) => gain(n, k)));
  new Heat(holder).show(values.map((_, n) => n + 1), values[0].map((_, k) => k), values);
  const canvas = holder.querySelector("canvas").getBoundingClientRect();
  const middle = (box) => (box.top + box.bottom) / 2 - canvas.top;
  const spans = [...holder.querySelectorAll(".steps span")];
  const labels = spans.map((span, row) => [row, span.textContent, span.getBoundingClientRect()]);
  done({
    height: canvas.height / steps,
    labels: labels.filter((one) => one[1]).map(([row, text, box]) => [row, text, middle(box)]),
    most: holder.querySelector(".scale span").textContent,
  });
}).catch((error) => done({ error: String(error) }));
"""


def test_the_heat_map_of_a_long_run_of_many_steps_is_drawn_and_its_labels_stand_beside_their_rows(page):
    found = page.execute_async_script(HEAT)
    assert "error" not in found, found
    assert found["most"] == "0.5026"
    assert len(found["labels"]) >= 10
    for row, words, middle in found["labels"]:
        assert words == f"step {row}"
        assert abs(middle - (row + 0.5) * found["height"]) < found["height"], "the label belongs to its row"
    distances = [later[2] - earlier[2] for earlier, later in itertools.pairwise(found["labels"])]
    assert min(distances) >= 12, "labels do not overlap"


TREE = """
const [record, done] = arguments;
import("/static/trajectories.js").then(async ({ drawTrajectories, explanation }) => {
  const holder = document.body.appendChild(document.createElement("div"));
  await drawTrajectories(holder, record);
  const shown = [explanation(record), ...[...holder.children].map((row) => row.innerText)];
  holder.remove();
  done(shown);
});
"""


def test_steps_of_a_tree_stand_before_the_only_image(page):
    """Twins that share step 0: both have its step reward."""
    record = a_record()
    first, second = (each.model_dump() for each in record.trajectories)
    first |= {"rewards": [0.4], "values": None, "step_rewards": [0.1, -0.2], "advantages": [1.0, -2.0]}
    second |= {"rewards": [0.9], "values": None, "step_rewards": [0.1, 0.3], "advantages": [1.0, 3.0]}
    alone = record.model_dump() | {"trajectories": [first, second], "width": 3 * record.width}
    explained, *shown = page.execute_async_script(TREE, alone)
    assert "A step reward is the credit of the step" in explained
    assert "step 0 →\nstep reward\n+0.100\nadvantage +1.00\nstep 1 →\nstep reward\n−0.200" in shown[0]
    assert "step 0 →\nstep reward\n+0.100\nadvantage +1.00\nstep 1 →\nstep reward\n+0.300\nadvantage +3.00" in shown[1]


@pytest.mark.parametrize("skipped", [[0, 1], [1]])
def test_an_image_that_nobody_scored_is_shown_as_an_estimate(page, skipped):
    record = a_record().model_dump() | {"skipped": skipped}
    for trajectory in record["trajectories"]:
        trajectory["rewards"] = [None if k in skipped else 0.5 for k in range(3)]
    explained, *shown = page.execute_async_script(TREE, record)
    assert explained.endswith(
        " An image without a reward is the policy's estimate of the finished image at that step; it is not scored."
    )
    assert [row.count("not scored") for row in shown] == [len(skipped)] * len(record["trajectories"])


def test_the_finished_image_of_a_trajectory_is_on_a_narrow_screen(page):
    resize(page, 300)
    wait_for(page, lambda: page.find_elements("css selector", ".trajectory .finished"))
    right = "return document.querySelector('.trajectory .finished').getBoundingClientRect().right"
    wait_for(page, lambda: page.execute_script(right) <= 300)
    page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.parametrize("width", [400, 1200])
def test_nothing_stands_out_of_the_page_sideways(page, width):
    resize(page, width)
    wait_for(page, lambda: page.execute_script("return document.documentElement.scrollWidth") <= width)
    page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_every_control_has_a_name_and_can_be_reached_by_keyboard(page):
    wait_for(page, lambda: page.execute_script("return document.querySelectorAll('.trajectory').length") == 2)
    nameless = page.execute_script(
        """
        const name = (e) => e.getAttribute('aria-label') || e.labels?.[0]?.innerText || e.innerText || e.title;
        return [...document.querySelectorAll('button, select, input, [role=img], [role=region]')]
          .filter((e) => !name(e)?.trim() && !e.getAttribute('aria-labelledby')).map((e) => e.outerHTML)
        """
    )
    assert nameless == []
    controls = "[...document.querySelectorAll('button, select, input, #heat canvas')]"
    unreachable = page.execute_script(f"return {controls}.filter((e) => e.tabIndex < 0).length")
    assert unreachable == 0
    page.find_element("css selector", "#heat canvas").send_keys("\ue012")
    wait_for(page, lambda: "step 0" in text(page, "#heat output"))


@pytest.mark.ray
@pytest.mark.timeout(600)
def test_the_page_of_a_real_run_scales_and_stops_it(browser, tiny_sd3, tmp_path):
    path = preset(tmp_path, tiny_sd3, iterations=5000, cluster={"rollout_actors": 1})
    driver = Driver(path, tmp_path / "run", "--page")
    try:
        driver.wait_for_iteration(1)  # by then the page's server has started
        browser.get(driver.wait_for(lambda line: line.startswith("page")).split()[1])
        wait_for(browser, lambda: shown_iteration(browser) >= 2, seconds=150)
        browser.execute_script("document.querySelector('#pools input').value = 2")
        browser.find_element("css selector", "#pools button").click()
        token = (tmp_path / "run" / "control.token").read_text()
        browser.find_element("css selector", "#token").send_keys(token)
        browser.find_element("css selector", "#token-dialog button.main").click()
        wait_for(browser, lambda: "done, rollout has 2 actors" in text(browser, "#outcomes"), seconds=300)
        wait_for(browser, lambda: "rollout-1" in text(browser, "#actors"), seconds=120)
        before = shown_iteration(browser)
        wait_for(browser, lambda: shown_iteration(browser) >= before + 2, seconds=150)
        browser.find_element("css selector", "[data-command=stop]").click()
        browser.find_element("css selector", "#confirm-dialog button.danger").click()
        assert "the same command continues" in driver.finish(timeout_s=120)
        wait_for(browser, lambda: text(browser, "#link") == "server ended")
        assert "The run has stopped" in text(browser, "#notice")
    finally:
        driver.kill()
    status = json.loads((tmp_path / "run" / "status.json").read_text())["status"]
    assert (status["phase"], status["desired_sizes"]) == ("stopped", {"rollout": 2})
    digests = {actor["adapter_digest"] for actor in status["actors"] if actor["kind"] == "rollout"}
    assert len(digests) == 1
    assert None not in digests
