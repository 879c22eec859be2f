"""Every family of models is learnt exactly: the ratio is 1 before the first update, and a checkpoint continues."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flow.models.located import adapter_config
from flow.rollout import RolloutPolicy
from learner.checkpoint import read_checkpoint, write_checkpoint
from learner.update.learner import Learner
from protocol.config.run import RunConfig
from tests.support.learning.groups import iterate
from tests.support.worlds.tiny_qwen import write_flux2_klein, write_qwen_image, write_qwen_image_21, write_z_image

Config = Callable[..., RunConfig]
WRITERS: dict[str, Callable[[Path], Path]] = {
    "flux2_klein": write_flux2_klein,
    "qwen_image": write_qwen_image,
    "qwen_image_21": write_qwen_image_21,
    "z_image": write_z_image,
}
TOKENS = {"flux2_klein": 60, "qwen_image": 240, "qwen_image_21": 100, "z_image": 60}


@pytest.fixture(scope="module", params=WRITERS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return WRITERS[request.param](tmp_path_factory.mktemp("models") / request.param)


def configured(tiny_config: Config, folder: Path, **model: Any) -> RunConfig:
    held = {"path": str(folder), "height": 16, "width": 16, "max_sequence_length": TOKENS[folder.name]}
    lora = {"rank": 2, "alpha": 4, "targets": None}
    return tiny_config(model={**held, "lora": lora, "guidance": 2.0, "forward_batch": 2, **model})


def test_the_ratio_is_exactly_one_and_a_checkpoint_continues_to_the_same_adapter(
    tiny_config: Config, folder: Path, tmp_path: Path
) -> None:
    """In half precision, checkpointed, and guided: prompts of different length share a forward."""
    config = configured(tiny_config, folder, dtype="bfloat16", gradient_checkpointing=True)
    learner, policy = Learner(config), RolloutPolicy(config)
    fresh = learner.adapter().digest
    metrics = iterate(learner, policy, config)
    assert metrics["probe/ratio_deviation"] == 0
    assert metrics["train/grad_norm"] > 0
    assert learner.adapter().digest != fresh
    state = read_checkpoint(write_checkpoint(tmp_path, learner.state(), adapter_config(config.model), keep=1))
    again = Learner(config)
    again.restore(state)
    for each in (learner, again):
        iterate(each, policy, config)
    assert again.adapter().digest == learner.adapter().digest
