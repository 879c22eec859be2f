"""The pictures of docs/method.md, made from the code that they explain.

python -m benchmarks.method_pictures --out docs/method
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from flow.gaussian import gaussian_velocity
from flow.schedule import sd3_sigmas
from flow.transition import Transition, cps, dance_sde, ddim_sde, flow_sde, ode
from flow.windows import window_steps
from learner.credit import gae, gains, uniform
from learner.normalise import centred, joint, per_step
from learner.step_weights import by_noise, piecewise
from learner.turning_point import turning_point
from protocol.config_learning import TurningPointConfig
from protocol.config_policy import WindowConfig

STEPS = 10
SIGMAS = sd3_sigmas(steps=STEPS)
KERNELS: dict[str, Callable[..., Transition]] = {
    "flow_sde a = 0.7": partial(flow_sde, sigma_first=SIGMAS[1].item(), noise_level=0.7),
    "dance_sde η = 0.3": partial(dance_sde, noise_level=0.3),
    "ddim_sde η = 0.7": partial(ddim_sde, sigma_first=SIGMAS[1].item(), noise_level=0.7),
    "cps a = 0.7": partial(cps, noise_level=0.7),
    "ode": ode,
}
REWARDS = torch.tensor([[0.50, 0.62, 0.58, 0.66, 0.70], [0.50, 0.46, 0.55, 0.53, 0.60], [0.50, 0.57, 0.49, 0.44, 0.40]])
VALID = torch.ones(3, 5, dtype=torch.bool)


def kernels() -> Figure:
    """Std of every step but the last, and the noise that is left where x0 is known: it should be sigma."""
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    samples = 20_000
    for name, kernel in KERNELS.items():
        generator = torch.Generator().manual_seed(0)
        latents = torch.randn(samples, 1, generator=generator)
        stds, spreads = [], []
        for k in range(STEPS - 1):
            sigma, sigma_next = SIGMAS[k].expand(samples), SIGMAS[k + 1].expand(samples)
            velocity = gaussian_velocity(latents=latents, sigma=sigma, mean=0.0, spread=0.0)
            transition = kernel(latents=latents, velocity=velocity, sigma=sigma, sigma_next=sigma_next)
            latents = transition.sample(torch.randn(samples, 1, generator=generator))
            stds.append(transition.std[0].item())
            spreads.append(latents.std().item())
        left.plot(range(STEPS - 1), stds, "o-", label=name, markersize=3)
        right.plot(range(1, STEPS), spreads, "o-", label=name, markersize=3)
    right.plot(range(1, STEPS), SIGMAS[1:-1], "k--", linewidth=1, label="sigma")
    left.set(xlabel="step k", ylabel="std of the step", title="noise added (SD3 schedule, T = 10)")
    right.set(
        xlabel="point", ylabel="noise in the state", title="noise left when x₀ is known", yscale="log", ylim=(5e-3, 2)
    )
    right.legend(fontsize=7)
    return figure


def credit() -> Figure:
    """The worked example: rewards of three members, and the advantages that each rule makes of them."""
    tables = {
        "uniform, joint": joint(*uniform(REWARDS, VALID, steps=4), epsilon=1e-4),
        "gains, joint": joint(*gains(REWARDS, VALID, steps=4), epsilon=1e-4),
        "gains, per_step": per_step(*gains(REWARDS, VALID, steps=4), epsilon=1e-4),
        "gains, centred": centred(*gains(REWARDS, VALID, steps=4), epsilon=1e-4),
        "gae 0.9, joint": joint(*gae(REWARDS, VALID, steps=4, decay=0.9), epsilon=1e-4),
        "turning_point, per_step": per_step(*turning_point([(REWARDS, VALID)], TurningPointConfig())[0], epsilon=1e-4),
    }
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    axes = figure.subplots(2, 4).flat
    first = next(axes)
    for name, row in zip("ABC", REWARDS.tolist(), strict=True):
        first.plot(row, "o-", label=name)
    first.set(title="rewards at the points", xlabel="point", xticks=range(5))
    first.legend(fontsize=8)
    for panel, (name, table) in zip(axes, tables.items(), strict=False):
        panel.imshow(table, cmap="RdBu", vmin=-2, vmax=2, aspect="auto")
        for (row, column), value in np.ndenumerate(table.numpy()):
            panel.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=8)
        panel.set(title=name, xticks=range(4), yticks=range(3), xlabel="step k")
        panel.set_yticklabels(list("ABC"))
    for unused in axes:
        unused.set_axis_off()
    figure.axes[-1].set_axis_off()
    return figure


def weights_and_windows() -> Figure:
    """Step weights on the left, the stochastic steps of each iteration for three windows on the right."""
    figure = Figure(figsize=(11, 3), layout="constrained")
    axes = figure.subplots(1, 4, width_ratios=(1.4, 1, 1, 1))
    nothing = torch.zeros(STEPS, 1)
    stds = KERNELS["flow_sde a = 0.7"](latents=nothing, velocity=nothing, sigma=SIGMAS[:-1], sigma_next=SIGMAS[1:]).std
    trained = dict(enumerate(stds.tolist()[:-1]))
    axes[0].plot(piecewise(STEPS, early=1.8, middle=1.0, late=1.3), "o-", label="piecewise")
    axes[0].plot(range(STEPS - 1), by_noise(STEPS, trained)[:-1], "s-", label="noise (TempFlow-GRPO)")
    axes[0].set(xlabel="step k", title="step weights")
    axes[0].legend(fontsize=7)
    windows = {
        "random, first half": WindowConfig(rule="random", size=2, within=(0.0, 0.5)),
        "sliding by 1 every 3": WindowConfig(rule="sliding", size=4, every=3),
        "branch, four shards": WindowConfig(rule="branch"),
    }
    for panel, (name, window) in zip(axes[1:], windows.items(), strict=True):
        shards = range(4) if window.rule == "branch" else range(1)
        shown = np.zeros((24, STEPS))
        for iteration in range(24):
            for shard in shards:
                chosen = window_steps(
                    window, candidates=range(9), total=STEPS, seed=0, iteration=iteration, shard=shard
                )
                shown[iteration, list(chosen)] = 1
        panel.imshow(shown, cmap="Greys", aspect="auto", interpolation="nearest")
        panel.set(xlabel="step k", ylabel="iteration", title=name, xticks=range(0, STEPS, 3))
    return figure


def main(out: Annotated[Path, typer.Option(help="Folder of the pictures.")] = Path("docs/method")) -> None:
    """Write all pictures."""
    out.mkdir(parents=True, exist_ok=True)
    for name, figure in (("kernels", kernels()), ("credit", credit()), ("windows", weights_and_windows())):
        FigureCanvasAgg(figure)
        figure.savefig(out / f"{name}.png", dpi=110)
        typer.echo(out / f"{name}.png")


if __name__ == "__main__":
    typer.run(main)
