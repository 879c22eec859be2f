"""The adapter in a transformer: attach it, and convert its tensors to and from the message `Adapter`."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from flow.adapter.lora_file import PREFIX, read_foreign_lora
from protocol.config.model import QKV, LoraConfig
from protocol.errors import ContractError, ModelError
from protocol.messages import Adapter, digest_of

if TYPE_CHECKING:
    from peft.tuners.tuners_utils import BaseTunerLayer

ADAPTER = "default"
SHARED_INPUT = (QKV, ("add_q_proj", "add_k_proj", "add_v_proj"))
"""Names of the layers in diffusers' attention that read one tensor in turn, of the image and of the text."""


class Lora:
    """The LoRA tensors of one transformer by their diffusers names; each policy has one `Lora`.

    The matrix B starts at zero, so a fresh adapter changes nothing. The adapter is float32 for every `model.dtype`; the
    forward casts it to the dtype of its input.

        lora = Lora(transformer, adapter_config(config.model), seed=config.seed)
        adapter = lora.export(version=0)      # in the learner
        lora.load(adapter)                    # in a rollout actor

    Raises:
        ModelError: a target names no module of the transformer.
    """

    def __init__(self, transformer: nn.Module, config: LoraConfig, *, seed: int) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            inject(config, transformer)
        self.config = config
        self._layers = _layers(transformer)
        self.parameters: dict[str, nn.Parameter] = {
            _saved(name): parameter for name, parameter in transformer.named_parameters() if "lora_" in name
        }
        for parameter in self.parameters.values():
            parameter.data = parameter.data.float()
        idle = [
            target for target in config.targets or () if not any(f".{target}.lora_" in name for name in self.parameters)
        ]
        if idle:
            raise ModelError(f"each of model.lora.targets must name modules of the transformer, got none for {idle}")

    def export(self, *, version: int) -> Adapter:
        """Return a copy of the adapter's tensors with their digest."""
        return adapter_of(self.parameters, version=version)

    def load(self, adapter: Adapter) -> str:
        """Load an adapter into the transformer and return the digest of the loaded tensors.

        Raises:
            ContractError: names or shapes differ from this transformer's, or the digest differs after loading.
        """
        self._check(adapter.arrays)
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(torch.from_numpy(np.array(adapter.arrays[name])))
        held = self.export(version=adapter.version).digest
        if held != adapter.digest:
            raise ContractError(f"adapter version {adapter.version} must have digest {adapter.digest}, got {held}")
        return held

    @contextmanager
    def adapter_disabled(self) -> Iterator[None]:
        """Switch the adapter off inside the block: the transformer is then the base model, the reference of the KL."""
        for layer in self._layers:
            layer.enable_adapters(enabled=False)
        try:
            yield
        finally:
            for layer in self._layers:
                layer.enable_adapters(enabled=True)

    @contextmanager
    def holding(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Let the transformer hold other tensors inside the block, for forwards without a gradient; nothing is copied.

        Args:
            tensors: by name, with the names, shapes and device of `parameters`.
        """
        own = {name: parameter.data for name, parameter in self.parameters.items()}
        for name, parameter in self.parameters.items():
            parameter.data = tensors[name]
        try:
            yield
        finally:
            for name, parameter in self.parameters.items():
                parameter.data = own[name]

    def start_from(self, path: str, config: LoraConfig) -> None:
        """Load a saved LoRA as the start of training; modules that it does not name keep their fresh adapter.

        Raises:
            ModelError: the file is unreadable, has another rank or alpha, or names modules that `targets` does not.
        """
        shapes = {name: tuple(parameter.shape) for name, parameter in self.parameters.items()}
        merged = {**self.export(version=0).arrays, **lora_to_start_from(path, config, shapes)}
        self.load(Adapter(version=0, arrays=merged, digest=digest_of(merged)))

    def _check(self, arrays: Mapping[str, np.ndarray]) -> None:
        if arrays.keys() != self.parameters.keys():
            odd = sorted(arrays.keys() ^ self.parameters.keys())
            raise ContractError(f"an adapter must name the tensors of this model, got a difference in {odd[:3]}")
        _require_shapes(arrays, {name: tuple(parameter.shape) for name, parameter in self.parameters.items()})


def adapter_of(tensors: Mapping[str, torch.Tensor], *, version: int) -> Adapter:
    """Copy an adapter's tensors to host memory, with their digest."""
    arrays = {name: tensor.detach().to("cpu", copy=True).numpy() for name, tensor in tensors.items()}
    return Adapter(version=version, arrays=arrays, digest=digest_of(arrays))


def require_start(path: str, config: LoraConfig, transformer: nn.Module) -> None:
    """Check the header of a saved LoRA against a transformer, which may lie on the device `meta` and gets the adapter.

    Raises:
        ModelError: see `Lora.start_from`; or a target names no module of the transformer.
    """
    inject(config, transformer, low_cpu_mem_usage=True)
    named = transformer.named_parameters()
    lora_to_start_from(
        path, config, {_saved(name): tuple(each.shape) for name, each in named if "lora_" in name}, is_outline=True
    )


def lora_to_start_from(
    path: str, config: LoraConfig, shapes: Mapping[str, tuple[int, ...]], *, is_outline: bool = False
) -> dict[str, np.ndarray]:
    """Read a saved LoRA that fits an adapter of these shapes; see `Lora.start_from` and `read_foreign_lora`."""
    arrays, alpha = read_foreign_lora(path, is_outline=is_outline)
    foreign = sorted(arrays.keys() - shapes.keys())
    if foreign:
        raise ModelError(
            f"model.lora.start {path} must name modules that model.lora.targets names too, got {foreign[0]}"
        )
    ranks = sorted({array.shape[0] for name, array in arrays.items() if "lora_A" in name})
    alpha = alpha or next(iter(ranks), None)
    if ranks != [config.rank] or alpha != config.alpha:
        raise ModelError(
            f"model.lora.start {path} has rank {ranks} and alpha {alpha}: set model.lora.rank and model.lora.alpha"
            f" to these, got {config.rank} and {config.alpha}"
        )
    try:
        _require_shapes(arrays, shapes)
    except ContractError as error:
        raise ModelError(f"model.lora.start {path} belongs to another model: {error}") from None
    return arrays


def _require_shapes(arrays: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]]) -> None:
    for name, array in arrays.items():
        if array.shape != shapes[name]:
            raise ContractError(f"adapter tensor {name} must be {list(shapes[name])}, got {list(array.shape)}")


def _saved(name: str) -> str:
    """Return the name under which a parameter of the adapter is saved."""
    return PREFIX + name.replace(f".{ADAPTER}.", ".")


def inject(config: LoraConfig, transformer: nn.Module, *, low_cpu_mem_usage: bool = False) -> None:
    """Put an adapter's modules into a transformer.

    Args:
        config: rank, alpha and targets, which `flow.models.located.Located.lora` fills in, and `qkv`.
        low_cpu_mem_usage: leave the adapter's tensors on the device `meta`.

    Raises:
        ModelError: a target names no module of the transformer.
    """
    from peft import LoraConfig as PeftLoraConfig
    from peft import inject_adapter_in_model

    if config.rank is None or config.alpha is None or config.targets is None:
        raise ContractError(f"an adapter needs rank, alpha and targets, got {config}")
    peft_config = PeftLoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # pyrefly: ignore[bad-argument-type]  # PEFT divides it
        init_lora_weights="gaussian",
        target_modules=list(config.targets),
    )
    with warnings.catch_warnings():
        # peft warns that a quantised layer cannot be merged; `export` merges into the model's own weights instead.
        warnings.filterwarnings("ignore", message=".*was instantiated without `get_apply_tensor_subclass`")
        try:
            inject_adapter_in_model(peft_config, transformer, adapter_name=ADAPTER, low_cpu_mem_usage=low_cpu_mem_usage)
        except ValueError as error:
            raise ModelError(
                f"model.lora.targets must name modules of the transformer, got {list(config.targets)}: no module"
                " matches"
            ) from error
    for layer in _layers(transformer):
        base = layer.get_base_layer()
        if not isinstance(base, nn.Linear):
            continue  # a convolution computes as peft has it
        is_quantised = is_traceable_wrapper_subclass(base.weight)
        if type(base) is nn.Linear and base.weight.dtype == torch.float32 and not is_quantised:
            layer.forward = MethodType(_merged, layer)  # pyrefly: ignore[missing-attribute]
            continue
        # `Branch` casts the adapter, so peft must not cast the activations.
        layer.cast_input_dtype_enabled = False  # pyrefly: ignore[missing-attribute]
        layer.lora_variant[ADAPTER] = Branch  # pyrefly: ignore[missing-attribute]
    if config.qkv == "joined":
        for module in transformer.modules():
            for names in SHARED_INPUT:
                layers = [getattr(module, name, None) for name in names]
                if all(hasattr(layer, "lora_A") for layer in layers):
                    _Join(layers)


class Merged(torch.autograd.Function):
    """x (W + s B A)^T + b of a float32 layer, and its gradients for x, A and B.

    The weights are merged anew in each call, which takes little beside a product with many rows. In half precision they
    cannot be merged: most of the adapter's numbers are smaller than the rounding of W.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Float[Tensor, "... inputs"],
        weight: Float[Tensor, "outputs inputs"],
        bias: Float[Tensor, " outputs"] | None,
        low: Float[Tensor, "rank inputs"],
        high: Float[Tensor, "outputs rank"],
        scaling: float,
    ) -> Float[Tensor, "... outputs"]:
        whole = torch.addmm(weight, high, low, alpha=scaling)
        ctx.save_for_backward(x, whole, low, high)
        ctx.scaling = scaling
        return linear(x, whole, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Float[Tensor, "... outputs"]) -> tuple[Tensor | None, ...]:
        x, whole, low, high = ctx.saved_tensors
        rows, slopes = x.flatten(0, -2), gradients[0].flatten(0, -2)
        for_x = (slopes @ whole).view_as(x) if ctx.needs_input_grad[0] else None
        for_low = ctx.scaling * ((slopes @ high).t() @ rows)
        for_high = ctx.scaling * (slopes.t() @ (rows @ low.t()))
        return for_x, None, None, for_low, for_high, None


def _merged(layer: Any, x: Float[Tensor, "... inputs"]) -> Float[Tensor, "... outputs"]:
    base = layer.get_base_layer()
    if layer.disable_adapters:
        return base(x)
    low, high = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
    return Merged.apply(x, base.weight, base.bias, low, high, layer.scaling[ADAPTER])


class Branch:
    """What an adapter adds to one layer, as a variant of peft's: scaling B A x.

    Its second product adds to the layer's own result, which saves two passes over memory.
    """

    @staticmethod
    def forward(
        module: Any,
        active_adapter: str,
        x: Float[torch.Tensor, "... inputs"],
        result: Float[torch.Tensor, "... outputs"],
        **_: Any,
    ) -> Float[torch.Tensor, "... outputs"]:
        """Return the layer's result with the adapter's part.

        Args:
            module: peft's layer, which holds A, B and scaling.
            result: what the frozen layer made of it; without gradients its memory is used again.

        Returns:
            result + scaling B A x, in the dtype of x.
        """
        scaling: float = module.scaling[active_adapter]
        low, high = module.lora_A[active_adapter].weight, module.lora_B[active_adapter].weight
        rows = linear(x.flatten(0, -2), low.to(x.dtype))
        held = result.flatten(0, -2)
        add = held.addmm if torch.is_grad_enabled() else held.addmm_
        return add(rows, high.to(x.dtype).t(), alpha=scaling).view_as(result)


class Joined(torch.autograd.Function):
    """x W^T + b + s x A^T B^T of several frozen layers that read the same x, and the gradients for x, A and B.

    Their A are one product, and products add to the gradient for x, so x and its gradient cross memory less often. The
    W stay apart: the parts of one product are strided, and what follows would copy them (1.67 GB instead of 1.57 for
    forward and backward of one attention of SD3.5-Medium with 16 rows).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Float[Tensor, "... inputs"],
        low: Float[Tensor, "ranks inputs"],
        scaling: float,
        *parts: Any,
    ) -> tuple[Float[Tensor, "... outputs"], ...]:
        """Compute all layers.

        Args:
            low: their A, one below the other.
            parts: W, b and B of each layer.
        """
        weights, biases, highs = parts[::3], parts[1::3], parts[2::3]
        rows = x.flatten(0, -2)
        inner = linear(rows, low)
        ctx.save_for_backward(x, low, inner, *weights, *highs)
        ctx.scaling = scaling
        results = []
        for weight, bias, high, own in zip(weights, biases, highs, inner.chunk(len(weights), 1), strict=True):
            result = linear(rows, weight, bias).addmm_(own, high.t(), alpha=scaling)
            results.append(result.view(*x.shape[:-1], -1))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Float[Tensor, "... outputs"]) -> tuple[Tensor | None, ...]:
        x, low, inner, *rest = ctx.saved_tensors
        count, rows = len(gradients), x.flatten(0, -2)
        slopes = [each.flatten(0, -2) for each in gradients]
        for_inner = torch.cat([slope @ high for slope, high in zip(slopes, rest[count:], strict=True)], 1)
        for_inner *= ctx.scaling
        for_x = None
        if ctx.needs_input_grad[0]:
            for_x = for_inner @ low
            for slope, weight in zip(slopes, rest[:count], strict=True):
                for_x.addmm_(slope, weight)
            for_x = for_x.view_as(x)
        for_parts: list[Tensor | None] = []
        for slope, own in zip(slopes, inner.chunk(count, 1), strict=True):
            for_parts += [None, None, ctx.scaling * (slope.t() @ own)]
        return for_x, for_inner.t() @ rows, None, *for_parts


class _Join:
    """Computes layers together when the first one is called; each other call takes what is its own."""

    def __init__(self, layers: Sequence[Any]) -> None:
        self._layers = layers
        self._x: Tensor | None = None
        self._results: tuple[Tensor, ...] = ()
        for index, layer in enumerate(layers):
            layer.forward = partial(self._result, index)

    def _result(self, index: int, x: Float[Tensor, "... inputs"]) -> Float[Tensor, "... outputs"]:
        if self._layers[index].disable_adapters:
            return self._layers[index].get_base_layer()(x)
        if index == 0:
            self._x, self._results = x, self._computed(x)
        if self._x is not x:
            raise ContractError("layers that are joined must read one tensor, the first one first, got another")
        result = self._results[index]
        if index == len(self._layers) - 1:
            self._x, self._results = None, ()
        return result

    def _computed(self, x: Float[Tensor, "... inputs"]) -> tuple[Float[Tensor, "... outputs"], ...]:
        parts: list[Tensor | None] = []
        for layer in self._layers:
            base = layer.get_base_layer()
            parts += [base.weight, base.bias, layer.lora_B[ADAPTER].weight.to(x.dtype)]
        low = torch.cat([layer.lora_A[ADAPTER].weight for layer in self._layers]).to(x.dtype)
        return Joined.apply(x, low, self._layers[0].scaling[ADAPTER], *parts)


def _layers(transformer: nn.Module) -> "list[BaseTunerLayer]":
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [module for module in transformer.modules() if isinstance(module, BaseTunerLayer)]
