"""The released code of others, run from checkouts: their functions and their training loops as they are.

A loop that is part of a long `main` is found in the parsed file and run with the variables that it reads. Packages that
a checkout imports and this machine lacks (loggers, scorers, DeepSpeed) are replaced by mocks while it is imported; none
of them takes part in what is measured.
"""

import ast
import importlib
import itertools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import torch
from accelerate import Accelerator
from diffusers import StableDiffusion3Pipeline
from jaxtyping import Float
from peft import LoraConfig, get_peft_model
from torch import Tensor

from benchmarks.speed.peers.ours import STEPS, Ours, Update
from flow.models.contract import EMBEDS
from protocol.ground.resources import resolve

PREFIX = "transformer."
NOISE = 0.7


class Released:
    """A peer's side: a pipeline with our weights and our adapter, by PEFT."""

    name: str
    url: str
    shipped: int
    """The images at a time of its release's configs for Stable Diffusion 3."""
    words: tuple[str, ...] = ("method=flow_grpo", "learner.kl.weight=0", "sampling.schedule=model")
    """Our config for the same work."""
    trains = True
    """Whether its update is compared."""

    def __init__(self, root: Path, ours: Ours) -> None:
        """
        Args:
            root: folder of the checkout.
            ours: gives weights, embeddings, and the pairs of the update.
        """
        self.root, self.ours = root, ours
        pipeline: Any = StableDiffusion3Pipeline.from_pretrained(
            resolve(ours.config.model.path), text_encoder_3=None, tokenizer_3=None
        )
        pipeline.set_progress_bar_config(disable=True)
        pipeline.vae.requires_grad_(requires_grad=False)
        pipeline.transformer.requires_grad_(requires_grad=False)
        lora: Any = ours.config.model.lora
        self._lora = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=list(lora.targets))
        pipeline.transformer = get_peft_model(pipeline.transformer, self._lora)
        self.pipeline, self.model = pipeline, pipeline.transformer
        self.parameters = self._hold(ours.adapter.arrays, "default")
        tensors = ours.conditioning().tensors
        self.embeds, self.pooled = tensors[EMBEDS], tensors["pooled_projections"]
        pipeline.scheduler.set_timesteps(STEPS)
        self.timesteps: Float[Tensor, "N T"] = pipeline.scheduler.timesteps.repeat(ours.config.group.size, 1)
        learner = ours.config.learner
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(),
            lr=learner.rate(0),
            betas=learner.betas,
            weight_decay=learner.weight_decay,
            eps=learner.adam_epsilon,
        )
        self.prepare()

    def prepare(self) -> None:
        """Import the checkout's code."""

    def rollout(self) -> Any:
        """Roll out as many trajectories as our shard has."""
        raise NotImplementedError

    def rolled_out(self) -> Mapping[str, float]:
        """Roll out with our noise; return by how much the results differ from ours."""
        return {}

    def train(self) -> None:
        """Take an optimizer step with the trajectories of our rollout."""
        raise NotImplementedError

    def update(self) -> Update:
        """Take it from our adapter; return its gradient and the change of the adapter."""
        seen: dict[str, Tensor] = {}

        def watched(*_: Any, **__: Any) -> None:
            seen.update({name: each.grad.clone() for name, each in self.parameters.items() if each.grad is not None})

        before = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        handle = self.optimizer.register_step_pre_hook(watched)
        self.train()
        handle.remove()
        change = {name: parameter.detach() - before[name] for name, parameter in self.parameters.items()}
        return Update(gradient=seen, change=change)

    def _hold(self, arrays: Mapping[str, Any], adapter: str) -> dict[str, torch.nn.Parameter]:
        """Give an adapter of PEFT's our numbers; return its parameters by our names."""
        parameters = {}
        for name, parameter in self.model.named_parameters():
            if f".{adapter}." in name:
                saved = PREFIX + name.removeprefix("base_model.model.").replace(f".{adapter}.", ".")
                parameter.data.copy_(torch.from_numpy(arrays[saved]))
                parameters[saved] = parameter
        assert parameters.keys() == arrays.keys()
        return parameters

    def _differences(self, latents: Any, log_probs: Any) -> dict[str, float]:
        """Compare points 0 to T - 1 and the log-probs of the trained steps with our rollout's."""
        made = self.ours.trajectories
        count = len(made.steps)
        assert made.log_probs is not None
        return {
            "latents": _relative(latents[:, :STEPS], torch.from_numpy(made.latents[:, :STEPS])),
            "log-probs": _relative(log_probs[:, :count], torch.from_numpy(made.log_probs)),
        }

    def _sample(self) -> dict[str, Tensor]:
        """Return our rollout in the form of Flow-GRPO's trainer."""
        made = self.ours.trajectories
        latents, log_probs = torch.from_numpy(made.latents), made.log_probs
        assert log_probs is not None
        return {
            "timesteps": self.timesteps,
            "latents": latents[:, :-1],
            "next_latents": latents[:, 1:],
            "log_probs": torch.from_numpy(log_probs),
            "advantages": self.ours.advantages,
            "prompt_embeds": self.embeds,
            "pooled_prompt_embeds": self.pooled,
        }


class FlowGrpo(Released):
    """Flow-GRPO."""

    name, url, shipped = "flow_grpo", "yifan123/flow_grpo", 9

    def prepare(self) -> None:
        patched = "flow_grpo.diffusers_patch"
        self._kernel = loaded(self.root, f"{patched}.sd3_sde_with_logprob", self.url)
        self._roll = loaded(self.root, f"{patched}.sd3_pipeline_with_logprob", self.url).pipeline_with_logprob
        script = self.root / "scripts" / "train_sd3.py"
        self._names = {"torch": torch, "sde_step_with_logprob": self._kernel.sde_step_with_logprob}
        run(part_of(script, ast.FunctionDef, "def compute_log_prob("), self._names)
        self._loop = part_of(script, ast.For, "for j in ", "compute_log_prob(", "accelerator.backward(")
        self._accelerator: Any = Accelerator(cpu=True, gradient_accumulation_steps=len(self.ours.trajectories.steps))
        self._prepared: Any = self._accelerator.prepare(self.optimizer)

    def rollout(self) -> Any:
        return self._roll(
            self.pipeline,
            prompt_embeds=self.embeds,
            pooled_prompt_embeds=self.pooled,
            num_inference_steps=STEPS,
            guidance_scale=1.0,
            output_type="pt",
            height=self.height,
            width=self.height,
            noise_level=NOISE,
        )

    @property
    def height(self) -> int:
        """Side of an image in pixels."""
        return self.ours.images.shape[-2]

    def rolled_out(self) -> Mapping[str, float]:
        with our_noise(self._kernel, self.ours), self._from_our_start():
            _, latents, log_probs = self.rollout()
        return self._differences(torch.stack(latents, dim=1), torch.stack(log_probs, dim=1))

    def train(self) -> None:
        steps = list(self.ours.trajectories.steps)
        train = SimpleNamespace(cfg=False, beta=0.0, adv_clip_max=5.0, max_grad_norm=1e6, ema=False)
        train.clip_range = self.ours.config.learner.clip_range
        self.model.train()
        run(
            self._loop,
            {
                **self._names,
                "tqdm": lambda steps, **_: steps,
                "train_timesteps": steps,
                "accelerator": self._accelerator,
                "autocast": nullcontext,
                "transformer": self.model,
                "pipeline": self.pipeline,
                "sample": self._sample(),
                "embeds": self.embeds,
                "pooled_embeds": self.pooled,
                "config": SimpleNamespace(train=train, sample=SimpleNamespace(guidance_scale=1.0, noise_level=NOISE)),
                "optimizer": self._prepared,
                "info": defaultdict(list),
                "wandb": MagicMock(),
                "defaultdict": defaultdict,
                **dict.fromkeys(("epoch", "inner_epoch", "global_step"), 0),
            },
        )

    @contextmanager
    def _from_our_start(self) -> Iterator[None]:
        with patch.object(self.pipeline, "prepare_latents", lambda *_, **__: self.ours.initial()):
            yield


class TurningPoint(FlowGrpo):
    """TurningPoint-GRPO's generator, with an image of every point."""

    name, url, shipped = "TurningPoint-GRPO", "YunzeTong/TurningPoint-GRPO", 9
    words = ("method=tp_grpo", "learner.kl.weight=0", "sampling.schedule=model")
    trains = False

    def prepare(self) -> None:
        patched = "flow_grpo.diffusers_patch"
        self._kernel = loaded(self.root, f"{patched}.sd3_sde_with_logprob", self.url)
        self._generator = loaded(self.root, f"{patched}.sd3_pipeline_with_logprob_fast_my", self.url)

    def rollout(self) -> Any:
        how = self._how()
        first = self._generator.pipeline_ode_sampling(self.pipeline, generator=None, **how)
        return first, *self._mixed(how)

    def _mixed(self, how: Mapping[str, Any]) -> Any:
        mixed = self._generator.pipeline_mixed_sampling_with_intermediate_ode
        return mixed(self.pipeline, noise_level=NOISE, **how)

    def _how(self) -> dict[str, Any]:
        return {
            "prompt_embeds": self.embeds,
            "pooled_prompt_embeds": self.pooled,
            "negative_prompt_embeds": None,
            "negative_pooled_prompt_embeds": None,
            "num_inference_steps": STEPS,
            "guidance_scale": 1.0,
            "output_type": "pt",
            "height": self.height,
            "width": self.height,
            "sde_type": "cps",
        }

    def rolled_out(self) -> Mapping[str, float]:
        with self._from_our_start():
            first = self._generator.pipeline_ode_sampling(self.pipeline, generator=None, **self._how())
            with our_noise(self._kernel, self.ours):
                main, later = self._mixed(self._how())
        images = torch.stack([first, *(each["images"] for each in later)], dim=1)  # the points 0 to 8, and the end
        made = torch.from_numpy(self.ours.images).permute(0, 1, 4, 2, 3)
        latents = torch.stack([*main["latents"], main["next_latents"][-1]], dim=1)
        differences = self._differences(latents, torch.stack(main["log_probs"], dim=1))
        return differences | {"images, of 255": ((255 * images).round() - made).abs().max().item()}


class FlowFactory(FlowGrpo):
    """Flow-Factory's adapter of Stable Diffusion 3.5 and its GRPO trainer."""

    name, url, shipped = "Flow-Factory", "X-GenGroup/Flow-Factory", 8
    words = ("method=flow_grpo", "learner.kl.weight=0", "sampling.schedule=shifted")

    def prepare(self) -> None:
        source, package = self.root / "src", "flow_factory"
        family: Any = loaded(source, f"{package}.models.stable_diffusion.sd3_5", self.url)
        self._kernel = sys.modules[f"{package}.scheduler.flow_match_euler_discrete"]
        self._trainer: Any = loaded(source, f"{package}.trainers.grpo", self.url)
        self.pipeline.scheduler = self._kernel.FlowMatchEulerDiscreteSDEScheduler(
            noise_level=NOISE, **self.pipeline.scheduler.config
        )
        self._accelerator: Any = Accelerator(cpu=True, gradient_accumulation_steps=len(self.ours.trajectories.steps))
        adapter = family.SD3_5Adapter.__new__(family.SD3_5Adapter)
        adapter.__dict__ |= {
            "pipeline": self.pipeline,
            "accelerator": self._accelerator,
            "training_args": SimpleNamespace(latent_storage_dtype=None),
            "model_args": SimpleNamespace(target_components=["transformer"]),
            "target_module_map": {"transformer": []},
            "_components": {},
        }
        self._adapter = adapter
        self._prepared: Any = self._accelerator.prepare(self.optimizer)
        self._samples = self.rollout()

    def rollout(self) -> Any:
        return self._adapter.inference(
            prompt=[""] * len(self.embeds),
            height=self.height,
            width=self.height,
            num_inference_steps=STEPS,
            guidance_scale=1.0,
            prompt_embeds=self.embeds,
            pooled_prompt_embeds=self.pooled,
        )

    def rolled_out(self) -> Mapping[str, float]:
        with our_noise(self._kernel, self.ours), self._from_our_start():
            self._samples = self.rollout()
        latents, log_probs = (
            torch.stack([getattr(each, name) for each in self._samples]) for name in ("all_latents", "log_probs")
        )
        return self._differences(latents, log_probs)

    def train(self) -> None:
        settings = Settings(
            per_device_batch_size=len(self._samples),
            num_inner_epochs=1,
            seed=0,
            guidance_scale=1.0,
            adv_clip_range=(-5.0, 5.0),
            clip_range=(-self.ours.config.learner.clip_range, self.ours.config.learner.clip_range),
            max_grad_norm=1e6,
        )
        for sample, advantages in zip(self._samples, self.ours.advantages, strict=True):
            sample.extra_kwargs["advantage"] = advantages[0]
        trainer = SimpleNamespace(
            accelerator=self._accelerator,
            training_args=settings,
            adapter=self._adapter,
            optimizer=self._prepared,
            autocast=nullcontext,
            enable_kl_loss=False,
            show_progress_bar=False,
            log_data=lambda *_, **__: None,
            epoch=0,
            step=0,
        )
        self._trainer.GRPOTrainer.optimize(trainer, self._samples)


class Nft(FlowGrpo):
    """DiffusionNFT. Its rollout has a solver of its own (dpm2), with as many evaluations as our ODE."""

    name, url, shipped = "DiffusionNFT", "NVlabs/DiffusionNFT", 9
    words = ("method=diffusion_nft", "learner.step_fraction=1", "sampling.schedule=model")

    def prepare(self) -> None:
        module = loaded(self.root, "flow_grpo.diffusers_patch.pipeline_with_logprob", self.url)
        self._roll = module.pipeline_with_logprob
        self._loop = part_of(
            self.root / "scripts" / "train_nft_sd3.py", ast.For, "for j_idx, ", "old_prediction", ".backward()"
        )
        self.model.add_adapter("old", self._lora)
        self._hold(self.ours.old.arrays, "old")
        self.model.set_adapter("default")

    def rollout(self) -> Any:
        return self._roll(
            self.pipeline,
            prompt_embeds=self.embeds,
            pooled_prompt_embeds=self.pooled,
            num_inference_steps=STEPS,
            guidance_scale=1.0,
            output_type="pt",
            height=self.height,
            width=self.height,
            deterministic=True,
            solver="dpm2",
        )

    def rolled_out(self) -> Mapping[str, float]:
        return {}

    def train(self) -> None:
        config = self.ours.config
        noises = iter(self.ours.forward_noises())
        drawn = Overlay(torch, randn_like=lambda _: next(noises))
        train = SimpleNamespace(adv_clip_max=5.0, beta=config.learner.kl.weight, max_grad_norm=1e6, ema=False)
        wrapped: Any = Wrapped(self.model)
        self.model.train()
        run(
            self._loop,
            {
                "torch": drawn,
                "tqdm": lambda steps, **_: steps,
                "num_train_timesteps": STEPS,
                "train_sample_batch": self._clean(),
                "torch_autocast": lambda **_: nullcontext(),
                "transformer_ddp": wrapped,
                "embeds": self.embeds,
                "pooled_embeds": self.pooled,
                "config": SimpleNamespace(train=train, beta=config.learner.forward.beta, use_lora=True),
                "optimizer": self.optimizer,
                "effective_grad_accum_steps": STEPS,
                "info_accumulated": defaultdict(list),
                "is_main_process": lambda _: False,
                "dist": MagicMock(),
                "defaultdict": defaultdict,
                "device": torch.device("cpu"),
                **dict.fromkeys(("scaler", "mixed_precision_dtype"), None),
                **dict.fromkeys(("enable_amp", "current_accumulated_steps", "gradient_update_times", "rank"), 0),
                **dict.fromkeys(("global_step", "epoch", "inner_epoch"), 0),
            },
        )

    def _clean(self) -> dict[str, Tensor]:
        return {
            "latents_clean": torch.from_numpy(self.ours.trajectories.latents[:, -1]),
            "timesteps": self.timesteps,
            "advantages": self.ours.advantages,
        }


class Settings(dict[str, Any]):
    """Read as a mapping and by attribute."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Overlay:
    """A module with some other attributes."""

    def __init__(self, module: ModuleType, **others: Any) -> None:
        self._module = module
        self.__dict__ |= others

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class Wrapped:
    """A model as DistributedDataParallel shows it."""

    def __init__(self, module: Callable[..., Any]) -> None:
        self.module = module

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self.module(*args, **named)


def loaded(root: Path, name: str, url: str) -> Any:
    """Import a module of a checkout; what else it imports and is not here is a mock.

    Args:
        url: of its repository; others may have a package of the same name.
    """
    top = name.partition(".")[0]
    if getattr(sys.modules.get(top), "checkout", url) != url:
        for other in [each for each in sys.modules if each == top or each.startswith(f"{top}.")]:
            del sys.modules[other]
    missing: list[str] = []
    with patch.object(sys, "path", [str(root), *sys.path]):
        try:
            while True:
                try:
                    module = importlib.import_module(name)
                except ModuleNotFoundError as error:
                    if not error.name or error.name.startswith(top):
                        raise
                    missing.append(error.name)
                    sys.modules[error.name] = MagicMock()
                else:
                    break
        finally:
            for each in missing:
                del sys.modules[each]
    sys.modules[top].__dict__["checkout"] = url
    return module


def part_of(script: Path, kind: type[ast.stmt], *words: str) -> Any:
    """Compile the smallest statement of a kind in a script that begins with the first word and has the others."""
    first, *others = words
    source = script.read_text(encoding="utf-8")
    found = [
        (len(text), node)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, kind)
        and (text := ast.unparse(node)).startswith(first)
        and all(word in text for word in others)
    ]
    if not found:
        raise LookupError(
            f"{script} must have a statement {first}..., got none: take the commit of docs/performance.md"
        )
    node: Any = min(found, key=lambda each: each[0])[1]
    return compile(ast.Module([node], []), str(script), "exec")


def run(code: Any, names: dict[str, Any]) -> None:
    """Run a part of a checkout with these variables."""
    exec(code, names)


@contextmanager
def our_noise(kernel: ModuleType, ours: Ours) -> Iterator[None]:
    """Let a peer's kernel draw the noise of our steps, one after the other; what comes later is multiplied by 0."""
    steps = itertools.count()
    with patch.object(kernel, "randn_tensor", lambda *_, **__: ours.noise(next(steps))):
        yield


def _relative(one: Tensor, other: Tensor) -> float:
    return ((one - other).norm() / other.norm()).item()
