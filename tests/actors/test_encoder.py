"""What a run does on Ray before its actors: rewards are asked for their weights, prompts are encoded."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from actors.rewards.readiness import require_ready_on_ray
from deploy.run.encode import encode_ahead, encoder_inputs
from flow.models.load import load_backbone
from protocol.config.run import RunConfig
from protocol.errors import ModelError, ScorerError
from protocol.messages import Prompt

Config = Callable[..., RunConfig]
PROMPTS = [
    Prompt(index=0, text="a cat", negative="blurry"),
    Prompt(index=1, text="a dog"),
    Prompt(index=2, text="a cat"),
]


def configured(tiny_config: Config, cache: Path, **settings: object) -> RunConfig:
    held = tiny_config().model.model_dump()
    return tiny_config(model={**held, "embedding_cache": str(cache), **settings})


def test_negatives_are_wanted_only_where_guidance_asks(tiny_config: Config, tmp_path: Path) -> None:
    for guidance, texts in ((1.0, ["a cat", "a dog"]), (2.0, ["a cat", "a dog", "blurry", ""])):
        asked = encoder_inputs(configured(tiny_config, tmp_path, guidance=guidance), PROMPTS)
        assert asked == [(text, ()) for text in texts]


@pytest.mark.ray
@pytest.mark.usefixtures("shared_ray")
def test_ray_fills_the_cache_and_no_actor_needs_an_encoder(
    tiny_config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = configured(tiny_config, tmp_path, guidance=2.0)
    two = held.cluster.learner.model_copy(update={"workers": 2})
    config = held.model_copy(update={"cluster": held.cluster.model_copy(update={"learner": two})})
    monkeypatch.setattr("deploy.run.encode.BATCH", 1)
    said: list[str] = []
    for _ in range(2):
        asyncio.run(encode_ahead(config, PROMPTS, is_local=False, say=said.append))
    assert said[1:] == ["encoded 4 new prompts", said[0]]
    monkeypatch.setattr("flow.models.text.TextEncoders.load", lambda self: pytest.fail("the encoders are not needed"))
    backbone = load_backbone(config.model)
    assert backbone.encode("blurry").tensors["pooled_projections"].any()


def test_a_folder_that_cannot_be_written_is_the_user_s_mistake(tiny_config: Config, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = configured(tiny_config, tmp_path / "file" / "cache")
    with pytest.raises(ModelError, match="cannot be written"):
        asyncio.run(encode_ahead(config, PROMPTS, is_local=True, say=lambda _: None))


@pytest.mark.ray
@pytest.mark.usefixtures("shared_ray")
def test_a_cluster_s_node_names_the_reward_whose_weights_it_lacks(tiny_config: Config) -> None:
    rewards = {
        "dark": {"scorer": "tests.support.rewards.dark:Dark"},
        "clip": {"scorer": "clipscore", "args": {"model": "/no/where"}},
    }
    given = {"address": "127.0.0.1:1"}
    with pytest.raises(ScorerError, match="'/no/where' must be a folder or a hub id"):
        asyncio.run(require_ready_on_ray(tiny_config(rewards=rewards, cluster=given)))
    asyncio.run(require_ready_on_ray(tiny_config(rewards={"dark": rewards["dark"]}, cluster=given)))
    asyncio.run(require_ready_on_ray(tiny_config(rewards=rewards)))  # the run's own machine has checked it
