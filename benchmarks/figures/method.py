"""The images of docs/method/, made from the code that they explain.

python -m benchmarks.figures.method --out docs/method
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from flow.maths.completion import substep_grid
from flow.maths.schedule import flux_sigmas, linear_sigmas, sd3_sigmas, shifted_sigmas
from flow.maths.transition import Start, Transition, cps, dance_sde, ddim_sde, flow_sde, ode
from flow.maths.windows import window_steps
from learner.credit.normalisers import centred, from_baseline, joint, per_step
from learner.credit.rules import calibrated, gae, gains, uniform
from learner.credit.step_weights import by_noise, piecewise
from learner.credit.turning_point import aggregates, balanced, turning_point
from learner.update.objective import clipped_surrogate, guarded_log_ratio
from protocol.config.credit import TurningPointConfig
from protocol.config.sampling import CompletionConfig, WindowConfig
from tests.support.worlds.gaussian import gaussian_velocity

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
MEMBERS = "ABC"
NOTHING = torch.zeros(STEPS, 1)


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
            transition = kernel(Start(latents, velocity, sigma, sigma_next))
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


def schedules() -> Figure:
    """Sigma against the step; an image of 512 pixels has 1024 packed tokens for FLUX, one of 1024 pixels 4096."""
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    panel = figure.subplots()
    grids = {
        "SD3 (model): shifted twice": SIGMAS,
        "FLUX, 1024 pixels (model)": flux_sigmas(steps=STEPS, tokens=4096),
        "FLUX, 512 pixels (model)": flux_sigmas(steps=STEPS, tokens=1024),
        "shifted: once, DanceGRPO and MixGRPO": shifted_sigmas(steps=STEPS),
        "linear": linear_sigmas(steps=STEPS),
    }
    for (name, sigmas), mark in zip(grids.items(), "osD^v", strict=True):
        panel.plot(sigmas, f"{mark}-", label=name, markersize=4, linewidth=1)
    panel.set(xlabel="point k", ylabel="sigma", xticks=range(STEPS + 1), title="schedules, T = 10")
    panel.legend(fontsize=8)
    return figure


def completion() -> Figure:
    """A trajectory's sigmas, and the sigmas at which the ways to complete its point 3 ask the model."""
    figure = Figure(figsize=(9, 3), layout="constrained")
    panel = figure.subplots()
    point = 3
    ways = {
        "trajectory": SIGMAS,
        "tweedie": substep_grid(CompletionConfig(rule="tweedie"), sigmas=SIGMAS, k=point),
        "ode, T' = 5, even": substep_grid(
            CompletionConfig(rule="ode", substeps=5, spacing="even", tapers=False), sigmas=SIGMAS, k=point
        ),
        "ode, T' = 5, schedule": substep_grid(
            CompletionConfig(rule="ode", substeps=5, spacing="schedule", tapers=False), sigmas=SIGMAS, k=point
        ),
        "schedule": substep_grid(CompletionConfig(rule="schedule"), sigmas=SIGMAS, k=point),
    }
    for row, (name, grid) in enumerate(ways.items()):
        colour = f"C{row}" if row else "black"
        panel.plot(grid, [row] * len(grid), "-", color=colour, linewidth=1)
        panel.plot(grid[:-1], [row] * (len(grid) - 1), "o", color=colour, markersize=6)
        panel.plot(grid[-1:], [row], "o", color=colour, markersize=6, markerfacecolor="white")
        for index, sigma in enumerate(grid.tolist()):
            label = str(index) if name == "trajectory" else f"{sigma:.2f}" if sigma else "0"
            side = "left" if not sigma else "right" if sigma < 0.03 else "center"
            box = {"boxstyle": "square,pad=0", "facecolor": "white", "edgecolor": "none"}
            panel.annotate(label, (sigma, row), (0, 6), textcoords="offset points", ha=side, fontsize=8, bbox=box)
    panel.axvline(SIGMAS[point].item(), color="grey", linestyle=":", linewidth=1, zorder=0)
    panel.set(xlim=(1.03, -0.03), ylim=(len(ways) - 0.5, -0.7), xlabel="sigma", yticks=range(len(ways)))
    panel.set_yticklabels(list(ways))
    panel.set_title("completing point 3 of the SD3 schedule, T = 10; a filled dot is one velocity", fontsize=10)
    return figure


def credit() -> Figure:
    """The worked example: rewards of three members, turning points, and the advantages that each rule makes."""
    own, explored = gains(REWARDS), torch.ones(1, 3, 4, dtype=torch.bool)
    (values,), _ = calibrated(REWARDS[None])
    (turned,) = turning_point(REWARDS[None], explored, **TurningPointConfig().model_dump())
    baseline = torch.tensor([0.02, 0.0, 0.01, 0.02])
    tables = {
        "uniform, joint": joint(uniform(REWARDS), epsilon=1e-4),
        "gains, joint": joint(own, epsilon=1e-4),
        "gains, per_step": per_step(own, epsilon=1e-4),
        "gains, centred": centred(own, epsilon=1e-4),
        "gains, ema": from_baseline(own, baseline=baseline, epsilon=1e-4),
        "gae 0.9, joint": joint(gae(REWARDS, decay=0.9), epsilon=1e-4),
        "turning_point, per_step": per_step(turned, epsilon=1e-4),
        "calibrated gae 0.3, per_step (default)": per_step(gae(values, decay=0.3), epsilon=1e-4),
    }
    figure = Figure(figsize=(12.5, 5), layout="constrained")
    axes = figure.subplots(2, 5).flat
    _rewards(next(axes))
    _turning_points(next(axes))
    for panel, (name, table) in zip(axes, tables.items(), strict=True):
        panel.imshow(table, cmap="RdBu", vmin=-2, vmax=2, aspect="auto")
        for (row, column), value in np.ndenumerate(table.numpy()):
            colour = "white" if abs(value) > 1.4 else "black"
            panel.text(column, row, f"{value:z.2f}", ha="center", va="center", fontsize=9, color=colour)
        panel.set(xticks=range(4), yticks=range(3), xlabel="step k")
        panel.set_title(name.replace(" (", "\n("), fontsize=9)
        panel.set_yticklabels(list(MEMBERS))
    return figure


def _rewards(panel: Axes) -> None:
    """The curves of the worked example."""
    for name, row in zip(MEMBERS, REWARDS.tolist(), strict=True):
        panel.plot(row, "o-", label=name, markersize=4)
    panel.set(xlabel="point", xticks=range(5))
    panel.set_title("rewards at the points", fontsize=9)
    panel.legend(fontsize=8)


def _turning_points(panel: Axes) -> None:
    """The same curves; a mark stands at the end of each selected step."""
    plain = aggregates(REWARDS, is_consistent=False, has_first_step=True)
    turns = aggregates(REWARDS, is_consistent=True, has_first_step=True)
    kinds: dict[str, tuple[torch.Tensor, dict[str, Any]]] = {
        "turning point": (plain, {"s": 90, "facecolors": "none", "edgecolors": "black"}),
        "consistent": (turns, {"s": 40, "color": "black"}),
        "balanced": (balanced(turns), {"s": 110, "marker": "*", "color": "gold", "edgecolors": "black"}),
    }
    panel.plot(REWARDS.T, linewidth=1)
    for name, (selected, style) in kinds.items():
        rows, columns = (~selected.isnan()).nonzero(as_tuple=True)
        panel.scatter(columns + 1, REWARDS[rows, columns + 1], zorder=3, label=name, **style)
    panel.set(xlabel="point behind the step", xticks=range(5), ylim=(0.22, 0.74))
    panel.set_title("turning points", fontsize=9)
    panel.legend(fontsize=7, loc="lower left")


def weights_and_windows() -> Figure:
    """Step weights on the left, the stochastic steps of each iteration for four windows on the right."""
    figure = Figure(figsize=(12.5, 3), layout="constrained")
    axes = figure.subplots(1, 5, width_ratios=(1.6, 1, 1, 1, 1))
    stds = KERNELS["flow_sde a = 0.7"](Start(NOTHING, NOTHING, SIGMAS[:-1], SIGMAS[1:])).std
    trained = dict(enumerate(stds.tolist()[:-1]))
    axes[0].plot(by_noise(STEPS, trained, power=2.0)[:-1], "D-", label="noise, power 2 (default)", markersize=4)
    axes[0].plot(by_noise(STEPS, trained)[:-1], "s-", label="noise, power 1 (TempFlow-GRPO)", markersize=4)
    axes[0].plot(piecewise(STEPS, early=1.8, middle=1.0, late=1.3), "o-", label="piecewise", markersize=4)
    axes[0].set(xlabel="step k", title="step weights", ylim=(0, None), xticks=range(STEPS))
    axes[0].legend(fontsize=8)
    windows = {
        "fixed 8, from step 0": WindowConfig(rule="fixed", size=8, first=0),
        "random 3, first half": WindowConfig(rule="random", size=3, within=(0.0, 0.5)),
        "sliding 4, every 3": WindowConfig(rule="sliding", size=4, every=3),
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
        panel.imshow(shown, cmap="Greys", aspect="auto", interpolation="nearest", vmin=0, vmax=1)
        panel.set(xlabel="step k", title=name, xticks=range(0, STEPS, 3))
    axes[1].set(ylabel="iteration")
    return figure


def objective() -> Figure:
    """What is climbed against the ratio; the log ratio and the KL of every step for one change of v."""
    figure = Figure(figsize=(14, 3.6), layout="constrained")
    left, right, divergence = figure.subplots(1, 3, width_ratios=(1, 1.4, 1))
    clip_range, ratio = 0.2, torch.linspace(0.6, 1.4, 201)
    for advantage in (1.0, -1.0):
        loss, _ = clipped_surrogate(ratio.log(), advantages=torch.full_like(ratio, advantage), clip_range=clip_range)
        left.plot(ratio, -loss, label=f"A = {advantage:+.0f}")
    left.axvspan(1 - clip_range, 1 + clip_range, color="lightgrey", alpha=0.5)
    left.set(xlabel="ratio ρ", ylabel="− loss", title="clipped surrogate", xticks=(1 - clip_range, 1, 1 + clip_range))
    left.set_xticklabels(["1 − c", "1", "1 + c"])
    left.legend(fontsize=8, loc="center left")
    for index, (name, ratios) in enumerate(_log_ratios().items()):
        steps = np.arange(STEPS - 1) + 0.2 * (index - 1)
        means, stds = [r.mean().item() for r in ratios], [r.std().item() for r in ratios]
        right.errorbar(steps, means, stds, fmt="o", label=name, markersize=4, capsize=3)
    right.axhline(0, color="grey", linewidth=0.8)
    right.set(xlabel="step k", ylabel="log ratio, mean ± std", xticks=range(STEPS - 1))
    right.set_title("v changed by 0.1 an element, at every step alike (SD3, T = 10, d = 256)", fontsize=10)
    right.legend(fontsize=8, loc="lower left")
    old, new = (KERNELS["flow_sde a = 0.7"](Start(NOTHING, NOTHING + v, SIGMAS[:-1], SIGMAS[1:])) for v in (0.0, 0.1))
    full = new.kl(old)[:-1]
    for name, values in {"full": full, "no_dt": full * -SIGMAS.diff()[:-1], "velocity": 0.01 + 0 * full}.items():
        divergence.plot(values, "o-", label=name, markersize=4)
    divergence.set(xlabel="step k", ylabel="KL", yscale="log", title="KL of that change", xticks=range(STEPS - 1))
    divergence.legend(fontsize=8)
    return figure


def _log_ratios(samples: int = 4000, elements: int = 256) -> dict[str, list[torch.Tensor]]:
    """Log ratios of every step but the last of Flow-SDE, after a random change of the velocity of 0.1 an element."""
    generator = torch.Generator().manual_seed(0)
    found: dict[str, list[torch.Tensor]] = {"clipped": [], "guarded": [], "guarded, divided by h": []}
    latents = torch.zeros(samples, elements)
    for k in range(STEPS - 1):
        sigma, sigma_next = SIGMAS[k].expand(samples), SIGMAS[k + 1].expand(samples)
        change, noise = torch.randn(2, samples, elements, generator=generator)
        old, new = (
            KERNELS["flow_sde a = 0.7"](Start(latents, velocity, sigma, sigma_next))
            for velocity in (latents, 0.1 * change)
        )
        drawn = old.sample(noise)
        log_ratio = new.log_prob(drawn) - old.log_prob(drawn)
        guarded = guarded_log_ratio(log_ratio, mean=new.mean, old_mean=old.mean, std=old.std)
        found["clipped"].append(log_ratio)
        found["guarded"].append(guarded)
        found["guarded, divided by h"].append(guarded / (SIGMAS[k] - SIGMAS[k + 1]))
    return found


IMAGES: dict[str, Callable[[], Figure]] = {
    "schedules": schedules,
    "kernels": kernels,
    "windows": weights_and_windows,
    "completion": completion,
    "credit": credit,
    "objective": objective,
}


def main(out: Annotated[Path, typer.Option(help="Folder of the images.")] = Path("docs/method")) -> None:
    """Write all images."""
    out.mkdir(parents=True, exist_ok=True)
    for name, draw in IMAGES.items():
        figure = draw()
        FigureCanvasAgg(figure)
        figure.savefig(out / f"{name}.png", dpi=110)
        typer.echo(out / f"{name}.png")


if __name__ == "__main__":
    typer.run(main)
