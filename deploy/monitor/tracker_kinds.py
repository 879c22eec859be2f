"""The built-in trackers TensorBoard, Weights & Biases and MLflow, and the interface for a tracker of your own.

Each library is imported when its tracker starts. A resumed run continues its record: the record's id is kept in the run
folder, so two folders of the same name never share a record.
"""

import io
import os
import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from deploy.folder.names import MLFLOW, WANDB
from protocol.config.run import RunConfig
from protocol.errors import ConfigError, RunFolderError
from protocol.ground.files import iteration_name, write_whole

Values = Mapping[str, Any]
AT_ONCE = 100
"""Most parameters or metrics in one call: MLflow limits them."""
LONGEST = 500
"""Most characters of a parameter at MLflow."""


@dataclass(frozen=True)
class TrackedImage:
    """An image for people."""

    name: str
    """Name of the series, such as `evaluation/image_00` or `trajectories/sheet`: the same at every iteration."""
    caption: str
    png: bytes
    size: tuple[int, int]
    """Width and height in pixels."""


class Tracker(Protocol):
    """The interface of a tracker: `Tracker(config, folder)` begins or continues the record of this run folder.

    It may also have a method `show(iteration, images)` for a sequence of `TrackedImage`: the gallery of an evaluation,
    or recorded trajectories.
    """

    def log(self, iteration: int, values: Values) -> None:
        """Record one line of metrics, names as in docs/metrics.md; numbers that are not finite are left out."""
        ...

    def close(self) -> None:
        """Write the lines that are not written yet."""
        ...


class TensorBoard:
    """Writes event files to `tensorboard/` in the run folder; `tensorboard --logdir runs` shows them.

    They include the config as hyperparameters, so that TensorBoard can compare runs by their settings.
    """

    def __init__(self, config: RunConfig, folder: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary, self._metadata = Event, Summary, SummaryMetadata
        self._writer = EventFileWriter(str(folder / "tensorboard"))
        self._writer.add_event(self._event(wall_time=time.time(), summary=hparams_pb(parameters_of(config))))

    def log(self, iteration: int, values: Values) -> None:
        self._write(iteration, [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()])

    def show(self, iteration: int, images: Sequence[TrackedImage]) -> None:
        """Write a summary with all images; TensorBoard shows a slider over the iterations for each name."""
        self._write(iteration, [self._image(image) for image in images])

    def _image(self, image: TrackedImage) -> Any:
        width, height = image.size
        held = self._summary.Image(encoded_image_string=image.png, width=width, height=height, colorspace=3)
        return self._summary.Value(
            tag=image.name,
            image=held,
            metadata=self._metadata(display_name=image.name, summary_description=image.caption),
        )

    def _write(self, iteration: int, values: Sequence[Any]) -> None:
        self._writer.add_event(self._event(wall_time=time.time(), step=iteration, summary=self._summary(value=values)))

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A W&B run in the project that the environment's WANDB_PROJECT names, or in `flowcredit`.

    It has the folder's name. Its random id is kept in the run folder: a resumed run continues the same W&B run, and two
    folders of the same name never share one.
    """

    @staticmethod
    def check() -> None:
        """Raise ConfigError if W&B would ask for a login."""
        import wandb

        is_online = os.environ.get("WANDB_MODE", "online") in ("online", "run", "shared")
        if is_online and not wandb.login(prompt=False, verify=False):
            raise ConfigError(
                "tracker wandb must be logged in, got no key: run `wandb login`, set WANDB_API_KEY or"
                " WANDB_MODE=offline, or leave it out of status.trackers"
            )

    def __init__(self, config: RunConfig, folder: Path) -> None:
        import wandb

        name = folder.resolve().name
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "flowcredit"),
            name=name,
            id=kept_id(folder / WANDB, lambda: uuid.uuid4().hex),
            resume="allow",
            dir=str(folder),
            config=config.model_dump(mode="json"),
        )
        self._run.define_metric("iteration")
        self._run.define_metric("*", step_metric="iteration")

    def log(self, iteration: int, values: Values) -> None:
        """Log one line; the iteration is one of the values, so that a resumed run may repeat it."""
        self._run.log({**values, "iteration": iteration})

    def show(self, iteration: int, images: Sequence[TrackedImage]) -> None:
        """Log the images of an evaluation in one panel with a slider, and a sheet of trajectories in another."""
        import wandb
        from PIL import Image

        panels: dict[str, list[Any]] = {}
        for image in images:
            held = wandb.Image(Image.open(io.BytesIO(image.png)), caption=image.caption)
            panels.setdefault(f"{image.name.partition('/')[0]}/images", []).append(held)
        self._run.log({**panels, "iteration": iteration})

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """A run at the server that MLFLOW_TRACKING_URI names, in the experiment MLFLOW_EXPERIMENT_NAME or `flowcredit`.

    It has the folder's name. The config becomes its parameters, and images become artifacts.
    """

    def __init__(self, config: RunConfig, folder: Path) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._client, self._metric = MlflowClient(), Metric
        self._run = kept_id(folder / MLFLOW, lambda: self._new_run(folder.resolve().name))
        self._client.update_run(self._run, "RUNNING")
        held = self._client.get_run(self._run).data.params
        parameters = [Param(name, str(value)[:LONGEST]) for name, value in parameters_of(config).items()]
        new = [parameter for parameter in parameters if parameter.key not in held]  # MLflow refuses another value
        for start in range(0, len(new), AT_ONCE):
            self._client.log_batch(self._run, params=new[start : start + AT_ONCE])

    def _new_run(self, name: str) -> str:
        title = os.environ.get("MLFLOW_EXPERIMENT_NAME", "flowcredit")
        found = self._client.get_experiment_by_name(title)
        experiment = found.experiment_id if found else self._client.create_experiment(title)
        return self._client.create_run(experiment, run_name=name).info.run_id

    def log(self, iteration: int, values: Values) -> None:
        now = int(1000 * time.time())
        named = {_one_slash(name): float(value) for name, value in values.items()}
        metrics = [self._metric(name, value, now, iteration) for name, value in named.items()]
        for start in range(0, len(metrics), AT_ONCE):
            self._client.log_batch(self._run, metrics=metrics[start : start + AT_ONCE])

    def show(self, iteration: int, images: Sequence[TrackedImage]) -> None:
        """Log images as artifacts, in one folder per iteration."""
        from PIL import Image

        for image in images:
            file = f"{image.name.partition('/')[0]}/{iteration_name(iteration)}/{image.name.rpartition('/')[2]}.png"
            self._client.log_image(self._run, Image.open(io.BytesIO(image.png)), file)

    def close(self) -> None:
        """Mark the run as finished; a resumed run is marked as running again."""
        self._client.set_terminated(self._run, "FINISHED")


def _one_slash(name: str) -> str:
    """Write a metric's name for MLflow, whose file store cannot hold both `reward/geneval` and a name below it."""
    first, slash, rest = name.partition("/")
    return first + slash + rest.replace("/", ".")


def parameters_of(config: RunConfig) -> dict[str, bool | int | float | str]:
    """Return the config by dotted key for trackers: each value is a number or a text, others are converted to text."""
    fields = config.flat_fields().items()
    return {key: value if isinstance(value, bool | int | float | str) else str(value) for key, value in fields}


def kept_id(path: Path, begin: Callable[[], str]) -> str:
    """Return the id in a file of the run folder; if there is no file, get an id from `begin` and write it there.

    Raises:
        RunFolderError: the file holds no id.
    """
    if not path.exists():
        write_whole(path, begin())
    found = path.read_text(encoding="utf-8").strip()
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", found):
        raise RunFolderError(f"{path} must hold the id of a run, got {found[:64]!r}: remove it to begin a new one")
    return found
