"""Trackers get every line, and a tracker that fails or is slow costs nothing but itself."""

import io
import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
from PIL import Image

from deploy.folder.names import MLFLOW, WANDB
from deploy.monitor import trackers
from deploy.monitor.trackers import Trackers, WeightsAndBiases, check_trackers
from protocol.config.run import RunConfig
from protocol.errors import ConfigError, RunFolderError
from tests.support.runs.ended import an_evaluation
from tests.support.runs.sinks import Told
from tests.support.runs.statuses import a_record
from tests.support.waiting import wait_until


class Failing:
    """A tracker whose service is gone."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        self.lines = 0

    def log(self, iteration: int, values: dict) -> None:
        raise OSError("the service is gone")

    def close(self) -> None:
        raise AssertionError


class Slow:
    """A tracker that takes nothing until there is a file `gate` in its folder; then it writes what it took."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        self.folder = folder
        self.taken: list[int] = []

    def log(self, iteration: int, values: dict) -> None:
        wait_until((self.folder / "gate").exists)
        self.taken.append(iteration)

    def close(self) -> None:
        (self.folder / "taken").write_text(json.dumps(self.taken))


NOT_FINITE = {"train/loss": float("nan"), "train/grad_norm": float("inf")}
SCORES = np.linspace(0.2, 0.7, 6).reshape(6, 1)
"""Of six prompts, one image each."""


def leveldb_log(data: bytes) -> Iterator[bytes]:
    """Records of a file in LevelDB's log format after a head of 7 bytes, which is how W&B keeps runs offline."""
    at, record = 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield record
            record = b""


def test_tensorboard_holds_every_finite_number_the_images_and_the_config(tiny_config, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    config = tiny_config(status={"trackers": ["tensorboard"]})
    running = Trackers(config, tmp_path, Told())
    for iteration in (1, 2):
        running.recorded(iteration, {"iteration": iteration, "reward/mean": iteration / 4, **NOT_FINITE})
    running.evaluated(2, an_evaluation(SCORES))
    running.recorded_trajectories(a_record(2))
    running.close()
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert [(point.step, point.value) for point in read.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5)]
    assert not {"train/loss", "train/grad_norm"} & set(read.Tags()["scalars"])
    (image,) = read.Images("evaluation/image_05")
    pixels = np.asarray(Image.open(io.BytesIO(image.encoded_image_string)))
    assert (image.step, pixels.shape, pixels[0, 0, 0]) == (2, (8, 8, 3), 70)
    assert read.SummaryMetadata("evaluation/image_05").summary_description == "<b>prompt</b> 5 & $x (0.700)"
    assert [image.step for image in read.Images("trajectories/sheet")] == [2]
    held = HParamsPluginData.FromString(read.SummaryMetadata("_hparams_/session_start_info").plugin_data.content)
    assert held.session_start_info.hparams["group.size"].number_value == config.group.size
    assert held.session_start_info.hparams["credit.rule"].string_value == config.credit.rule


def test_weights_and_biases_hold_every_finite_number_and_the_images_offline(tiny_config, tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is not installed: pip install wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setattr(trackers, "CLOSING_S", 120.0)
    (tmp_path / "mine").mkdir()
    status = Told()
    running = Trackers(tiny_config(status={"trackers": ["wandb"]}), tmp_path / "mine", status)
    for iteration in (1, 2):
        running.recorded(iteration, {"iteration": iteration, "reward/mean": iteration / 4, "train/loss": float("nan")})
    running.evaluated(2, an_evaluation(SCORES))
    running.recorded_trajectories(a_record(2))
    running.close()
    assert status.of("Tracker/wandb") == ("Recording", "wandb records")
    (file,) = (tmp_path / "mine").glob(f"wandb/offline-run-*/run-{(tmp_path / 'mine' / WANDB).read_text()}.wandb")
    lines, runs, images = [], [], {}
    for record in map(Record.FromString, leveldb_log(file.read_bytes())):
        if record.HasField("run"):
            runs.append((record.run.project, record.run.display_name))
        if record.HasField("history"):
            values = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item
            }
            if "reward/mean" in values:
                lines.append({name: values[name] for name in ("iteration", "reward/mean")})
            images |= {name: held for name, held in values.items() if "/images/" in name}
            assert "train/loss" not in values
    assert ("flowcredit", "mine") in runs
    assert (images["evaluation/images/count"], images["trajectories/images/count"]) == (6, 1)
    assert images["evaluation/images/captions"][5] == "<b>prompt</b> 5 & $x (0.700)"
    assert lines == [{"iteration": 1, "reward/mean": 0.25}, {"iteration": 2, "reward/mean": 0.5}]


def test_mlflow_holds_every_finite_number_the_images_and_the_config_and_a_resumed_run_goes_on(
    tiny_config, tmp_path, monkeypatch
):
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed: pip install 'flowcredit[mlflow]'")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "server").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    (folder := tmp_path / "mine").mkdir()
    for iteration in (1, 2):  # the second is the resumed run
        status = Told()
        running = Trackers(tiny_config(status={"trackers": ["mlflow"]}), folder, status)
        numbers = {"iteration": iteration, "reward/mean": iteration / 4, "reward/mean/strict": 0.5}
        running.recorded(iteration, {**numbers, **NOT_FINITE})
        running.evaluated(iteration, an_evaluation(SCORES))
        running.recorded_trajectories(a_record(iteration))
        running.close()
        assert status.of("Tracker/mlflow") == ("Recording", "mlflow records")
    client = mlflow.MlflowClient()
    (experiment,) = [each for each in client.search_experiments() if each.name == "flowcredit"]
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_id, run.info.run_name) == ((folder / MLFLOW).read_text(), "mine")
    assert (run.info.status, run.data.params["group.size"]) == ("FINISHED", "4")
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    assert sorted((point.step, point.value) for point in history) == [(1, 0.25), (2, 0.5)]
    assert run.data.metrics["reward/mean.strict"] == 0.5
    assert not NOT_FINITE.keys() & run.data.metrics.keys()
    images = [each.path for each in client.list_artifacts(run.info.run_id, "evaluation/iteration_000002")]
    assert len(images) == 6
    assert [each.path for each in client.list_artifacts(run.info.run_id, "trajectories/iteration_000001")]


class Album:
    """A tracker that takes images when its gate is open."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        self.folder, self.taken = folder, []

    def log(self, iteration: int, values: dict) -> None:
        """Numbers are not looked at."""

    def show(self, iteration: int, images: list) -> None:
        wait_until((self.folder / "gate").exists)
        self.taken.append([iteration, len(images)])

    def close(self) -> None:
        (self.folder / "taken").write_text(json.dumps(self.taken))


def test_a_slow_tracker_holds_few_images(tiny_config, tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "IMAGES_WAITING", 2)
    status, name = Told(), f"{__name__}:Album"
    running = Trackers(tiny_config(status={"trackers": [name]}), tmp_path, status)
    for iteration in (1, 2, 3):
        running.evaluated(iteration, an_evaluation(SCORES))
    wait_until(lambda: status.of(f"Tracker/{name}") == ("Slow", f"{name} is too slow, images are left out"))
    (tmp_path / "gate").touch()
    running.close()
    assert json.loads((tmp_path / "taken").read_text()) == [[1, 6], [2, 6]]


def test_a_record_that_is_damaged_is_left_out_and_the_tracker_goes_on(tiny_config, tmp_path):
    (tmp_path / "gate").touch()
    status, name = Told(), f"{__name__}:Album"
    running = Trackers(tiny_config(status={"trackers": [name]}), tmp_path, status)
    running.recorded_trajectories(a_record(4).model_copy(update={"width": 5}))
    running.recorded_trajectories(a_record(5))
    running.close()
    assert json.loads((tmp_path / "taken").read_text()) == [[5, 1]]
    assert status.of(f"Tracker/{name}")[0] == "Recording"


def test_each_run_folder_has_its_own_run_at_weights_and_biases_and_a_resumed_one_keeps_it(
    tiny_config, tmp_path, monkeypatch
):
    library = MagicMock()
    monkeypatch.setitem(sys.modules, "wandb", library)
    for method in ("flow_grpo", "stepwise", "stepwise"):
        (folder := tmp_path / method / "seed_0").mkdir(parents=True, exist_ok=True)
        WeightsAndBiases(tiny_config(), folder)
    begun = [call.kwargs for call in library.init.call_args_list]
    ids = [facts["id"] for facts in begun]
    assert [facts["name"] for facts in begun] == ["seed_0"] * 3
    assert len(set(ids)) == 2
    assert ids[1] == ids[2] == (tmp_path / "stepwise" / "seed_0" / WANDB).read_text()
    assert all(facts["resume"] == "allow" for facts in begun)
    library.init.return_value.define_metric.assert_called_with("*", step_metric="iteration")
    (tmp_path / "stepwise" / "seed_0" / WANDB).write_text("no id/\n")
    with pytest.raises(RunFolderError, match="must hold the id of a run, got 'no id/'"):
        WeightsAndBiases(tiny_config(), tmp_path / "stepwise" / "seed_0")


def test_a_failing_tracker_is_left_out_and_says_why(tiny_config, tmp_path):
    status = Told()
    running = Trackers(tiny_config(status={"trackers": [f"{__name__}:Failing"]}), tmp_path, status)
    running.recorded(1, {"reward/mean": 0.5})
    wait_until(lambda: status.of(f"Tracker/{__name__}:Failing")[0] == "Failed")
    assert "the service is gone" in status.of(f"Tracker/{__name__}:Failing")[1]
    running.recorded(2, {"reward/mean": 0.5})
    running.close()


def test_a_slow_tracker_loses_lines_and_never_holds_the_run_up(tiny_config, tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "LINES_WAITING", 3)
    status = Told()
    running = Trackers(tiny_config(status={"trackers": [f"{__name__}:Slow"]}), tmp_path, status)
    for iteration in range(10):  # would wait at the fifth line, since nothing is taken before the gate opens
        running.recorded(iteration, {"reward/mean": 0.5})
    wait_until(lambda: status.of(f"Tracker/{__name__}:Slow")[0] == "Slow")
    (tmp_path / "gate").touch()
    running.close()
    taken = json.loads((tmp_path / "taken").read_text())
    assert taken == list(range(len(taken)))
    assert 3 <= len(taken) <= 4, "one in the tracker's hands and three in the queue"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tensorbord", "must be tensorboard, wandb, mlflow or package.module:Class, got 'tensorbord'"),
        ("no_such_module:Tracker", "module .no_such_module. of .no_such_module:Tracker. does not exist"),
    ],
)
def test_trackers_that_do_not_exist_are_refused_before_the_run(name, message):
    with pytest.raises(ConfigError, match=message):
        check_trackers((name,))


class Refused:
    """A tracker whose service does not let it in."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        raise RuntimeError("not logged in\nat all")


def test_a_tracker_that_cannot_start_is_one_line_before_the_run(tiny_config, tmp_path):
    running = Trackers(tiny_config(status={"trackers": [f"{__name__}:Refused"]}), tmp_path, Told())
    with pytest.raises(ConfigError, match="Refused cannot start: not logged in at all; fix that or leave it out"):
        running.wait_for_start()
    running.close()


def test_a_tracker_that_starts_is_waited_for_and_one_that_does_not_is_slow(tiny_config, tmp_path, monkeypatch):
    fast = Trackers(tiny_config(status={"trackers": [f"{__name__}:Failing"]}), tmp_path, Told())
    fast.wait_for_start()
    fast.close()

    class Stuck:
        def __init__(self, config: RunConfig, folder: Path) -> None:
            wait_until((folder / "gate").exists)

        def close(self) -> None:
            """Nothing is open."""

    monkeypatch.setattr(trackers, "STARTING_S", 0.05)
    monkeypatch.setattr(trackers, "find_tracker", lambda name: Stuck)
    status = Told()
    stuck = Trackers(tiny_config(status={"trackers": ["stuck"]}), tmp_path, status)
    stuck.wait_for_start()
    assert status.of("Tracker/stuck") == ("Slow", "stuck has not started within 0.05 s")
    (tmp_path / "gate").touch()
    stuck.close()


@pytest.mark.parametrize(
    ("key", "mode", "is_refused"), [(None, None, True), ("k" * 40, None, False), (None, "offline", False)]
)
def test_weights_and_biases_must_be_logged_in_before_the_run(key, mode, is_refused, monkeypatch, tmp_path):
    """W&B itself may not be installed: a module with the one function that is called stands in for it."""
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(login=lambda prompt, verify: bool(key)))
    monkeypatch.setattr(trackers, "find_spec", lambda name: object())
    monkeypatch.delenv("WANDB_MODE", raising=False)
    if mode:
        monkeypatch.setenv("WANDB_MODE", mode)
    if is_refused:
        with pytest.raises(ConfigError, match="wandb must be logged in, got no key"):
            check_trackers(("wandb",))
    else:
        check_trackers(("wandb",))
