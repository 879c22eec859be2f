"""An update and a forward never make the CPU wait for the GPU: no number is read back, nothing small is copied over.

torch's device `meta` plays the GPU. It refuses to tell a tensor's values, as a GPU would have to be waited for, and a
mode below notes whatever goes from one device to the other. On a real GPU torch itself warns of a wait.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flow.adapter.lora import Lora
from flow.models.contract import EMBEDS, Conditioning
from flow.models.hollow import hollow_backbone
from flow.policy import FlowPolicy, policy_of
from learner.update.ema import OldAdapter
from learner.update.forward import ForwardObjective
from learner.update.micro_batches import Batch, MicroBatch, NoisedBatch
from learner.update.objective import Objective
from protocol.config.learning import FORWARD, LearnerConfig
from protocol.config.parse import parse_config
from protocol.messages import Prompt
from tests.support.worlds.pipelines import SIDES

PLAYED = "meta"
MEMBERS = 4
PROMPT = Prompt(index=0, text="a red circle", negative="blurry")


class Crossings(TorchDispatchMode):
    """Notes the operations whose results lie on another device than what they read."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        read, made = (
            {each.device.type for each in tree_leaves(what) if isinstance(each, Tensor)}
            for what in ((args, kwargs), result)
        )
        if read and made and made != read:
            self.found.append(f"{func}: {read} -> {made}")
        return result


@contextmanager
def crossings() -> Iterator[list[str]]:
    with Crossings() as mode:
        yield mode.found


@contextmanager
def waits_noted(where: str) -> Iterator[set[str]]:
    """The files whose lines make the CPU wait for a GPU."""
    found: set[str] = set()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if where == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            if where == "cuda":
                torch.cuda.set_sync_debug_mode("default")
    found.update(Path(each.filename).name for each in caught if "synchronizing" in str(each.message))


def batch_of(kind: type[Batch], k: int, shape: tuple[int, ...], where: str) -> Batch:
    def zeros(*shape: int) -> Tensor:
        return torch.zeros(MEMBERS, *shape, device=where)

    common: dict[str, Any] = {
        "prompt": PROMPT,
        "k": k,
        "latents": zeros(*shape),
        "advantages": zeros(),
        "valid": zeros().bool(),
    }
    if kind is NoisedBatch:
        return kind(**common, noise=zeros(*shape), weight=zeros())
    points = {name: zeros(*shape) for name in ("next_latents", "old_mean")}
    return kind(**common, **points, old_log_prob=zeros())


@pytest.fixture(scope="module", params=[PLAYED, pytest.param("cuda", marks=pytest.mark.gpu)])
def where(request: pytest.FixtureRequest) -> str:
    """The device."""
    return request.param


@pytest.fixture(scope="module")
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(where: str, family: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[FlowPolicy, Lora]:
    """A policy with guidance and its adapter; where prompts differ in length, the negative one is shorter."""
    folder = SIDES[family].write(tmp_path_factory.mktemp("models") / family)
    model = {"path": str(folder), "height": 16, "width": 16, "max_sequence_length": 40, "guidance": 2.0}
    config = parse_config(
        {
            "iterations": 1,
            "model": model,
            "data": {"train": "none", "heldout": "none"},
            "rewards": {"none": {"scorer": "geneval"}},
            "evaluation": {"component": "reward"},
        }
    )
    backbone = hollow_backbone(config.model, device=where, within=torch.device(where))
    lora = Lora(backbone.transformer, backbone.family.adapter(config.model.lora), seed=0)
    policy = policy_of(backbone, config)
    embeddings = {PROMPT.text: backbone.example(1), PROMPT.negative: backbone.example(1)}
    if family in ("qwen_image", "qwen_image_21", "z_image"):
        (short,) = (Conditioning.of({EMBEDS: each[:, :3]}) for each in embeddings[PROMPT.negative].tensors.values())
        embeddings[PROMPT.negative] = short
    backbone.encode = lambda text, conditions=(): embeddings[text]
    with torch.no_grad():  # schedule and tables of positions are copied over once
        policy.transition(
            torch.zeros(1, *backbone.latent_shape, device=where),
            0,
            conditioning=policy.conditioning(PROMPT.text, PROMPT.negative),
        )
    return policy, lora


@pytest.mark.parametrize(
    ("family", "name"),
    [("sd35", name) for name in ("guarded", "masked", "nft", "dgpo", "elbo", "ram")]
    + [(family, "guarded") for family in SIDES if family != "sd35"],
    indirect=["family"],
)
def test_a_micro_batch_neither_reads_back_nor_copies_over(
    model: tuple[FlowPolicy, Lora], where: str, family: str, name: str
) -> None:
    policy, lora = model
    is_forward = name in FORWARD
    config = LearnerConfig.model_validate({"objective": name, "kl": {"weight": 0.1, "rule": "velocity"}})
    objective: Any = (
        ForwardObjective(policy, lora, config, OldAdapter(lora.parameters, config.old), 1.0)
        if is_forward
        else Objective(policy, lora, config)
    )
    shape = policy.backbone.latent_shape
    batch = batch_of(NoisedBatch if is_forward else MicroBatch, policy.steps[0], shape, where)
    if where == "cuda":
        objective(batch)  # libraries begin
    with waits_noted(where) as waits, crossings() as found:
        losses = objective(batch)
        losses.loss.sum().backward()
        losses.detached()
    if where == PLAYED:  # on a GPU, kernels of attention keep a random state in host memory and read nothing back
        assert found == []
    copied = {"transformer_qwenimage.py"} if family == "qwen_image" else set()
    assert waits <= copied, "diffusers copies one number if prompts differ in length"
    assert any(parameter.grad is not None for parameter in lora.parameters.values())


def test_a_copy_and_a_number_that_is_read_are_noticed() -> None:
    with crossings() as found:
        played = torch.ones(3).to(PLAYED)
    assert len(found) == 1
    with pytest.raises((RuntimeError, NotImplementedError)):
        played.sum().item()
    with pytest.raises((RuntimeError, NotImplementedError)):
        played[played.bool()]
