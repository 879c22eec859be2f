"""The signal in a credit rule's gradient, for every rule and step weighting, measured without training.

    python -m benchmarks.fidelity.gradient_signal toy_geneval group.size=24 --groups 400

and, for redness in place of GenEval,

    python -m benchmarks.fidelity.gradient_signal toy_geneval group.size=24 --groups 100 \
        "rewards={geneval: null, redness: {scorer: 'benchmarks.scorers:Redness'}}" evaluation.component=reward

If a rule is linear in the points' rewards (uniform, gains, calibrated values, any lambda), its gradient is a sum of a
few parts v[k, j] = mean over the members of (lead over the group at point j) * gradient of step k's log_prob. These
parts are computed once for each group and kept as count sketches, which preserve inner products. Any rule's gradient is
then a combination of them.

Let u be a rule's gradient from one group, and g the gradient of uniform credit from another group with another prompt;
g is unbiased for the mean reward. `signal` = mean <u_i, g_j> / (|u| |g|) over all pairs. An optimizer step of fixed
length improves the reward in proportion to it, so if noise dominates, twice the signal needs half the steps. Errors are
from a jackknife over groups. Every member has its own initial noise, and statistics (slopes of the calibrated values,
the std of each step) are taken over all groups.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from jaxtyping import Float, Int
from rich.progress import track
from torch import Tensor

from benchmarks.fidelity.groups import draw_group
from benchmarks.output import show, write_json
from deploy.presets import load_config
from flow.policy import FlowPolicy, build_policy
from learner.credit.rules import calibrated
from learner.loop.groups import prompt_at
from protocol.config.run import RunConfig
from protocol.messages import Prompt
from protocol.prompts import read_prompts
from rewards.scorer import CheckedScorer, build_scorer

SKETCH = 8192
"""Entries of a gradient's count sketch."""
POWERS = (0.0, 1.0, 2.0, 3.0, 4.0)
RULES = {
    "uniform": None,
    "gains": (False, 0.0),
    "calibrated gains": (True, 0.0),
    "calibrated gae 0.3": (True, 0.3),
    "calibrated gae 1": (True, 1.0),
}
"""Rules by name: whether values are calibrated, and lambda."""


@dataclass(frozen=True)
class Folding:
    """A count sketch: every entry is added to one of `SKETCH` slots with a random sign."""

    slots: Int[Tensor, " D"]
    signs: Float[Tensor, " D"]

    @classmethod
    def of(cls, size: int) -> "Folding":
        """Make a count sketch for gradients of `size` entries."""
        generator = torch.Generator().manual_seed(0)
        signs = torch.randint(2, (size,), generator=generator) * 2.0 - 1.0
        return cls(torch.randint(SKETCH, (size,), generator=generator), signs)

    def __call__(self, gradient: Float[Tensor, " D"]) -> Float[Tensor, " sketch"]:
        """Sketch a gradient; inner products of sketches differ from those of gradients by 1 / sqrt(SKETCH) of the
        norms.
        """
        return torch.zeros(SKETCH).index_add_(0, self.slots, gradient * self.signs)


@dataclass(frozen=True)
class Collector:
    """Generates groups, scores their points, and computes the gradients of their steps."""

    config: RunConfig
    policy: FlowPolicy
    parameters: Sequence[Tensor]
    scorer: CheckedScorer

    def group(self, number: int, prompt: Prompt) -> tuple[Float[Tensor, "N P"], Float[Tensor, "S P sketch"]]:
        """Return a group's rewards at all points, the finished images last, and its parts v[k, j]."""
        size = self.config.group.size
        group = draw_group(self.policy, self.config, number=number, prompt=prompt, members=size)
        with torch.no_grad():
            guesses = [group.completed(point, self.config.completion)[0] for point in group.points]
            scores = [group.scores(latents, {"": self.scorer})[""] for latents in (*guesses, group.final)]
        rewards = torch.from_numpy(np.stack(scores, 1)).float()
        leads = rewards - rewards.mean(0)
        fold = Folding.of(sum(parameter.numel() for parameter in self.parameters))
        steps = len(group.points)
        parts = torch.zeros(steps, steps + 1, SKETCH)
        for row, point in enumerate(group.points):
            transition, _ = self.policy.transition(point.latents, point.k, conditioning=group.conditioning)
            log_prob = transition.log_prob(point.next_latents)
            for column in range(row, steps + 1):
                gradients = torch.autograd.grad(
                    (log_prob * leads[:, column]).mean(), self.parameters, retain_graph=column < steps
                )
                parts[row, column] = fold(torch.cat([gradient.flatten() for gradient in gradients]))
        return rewards, parts


def coefficients(slopes: Float[Tensor, " S"], *, is_calibrated: bool, decay: float) -> Float[Tensor, "S P"]:
    """Return the matrix c of a gae rule's step rewards A_k = sum_j c[k, j] d_j, where d_j are the leads of the points.

    Args:
        slopes: slopes of the calibrated values [S].
        is_calibrated: whether the rule uses calibrated values.
        decay: lambda in [0, 1].

    Returns:
        c [S, S + 1].
    """
    steps = len(slopes)
    factors = torch.cat([slopes.float(), torch.ones(1)]) if is_calibrated else torch.ones(steps + 1)
    table = torch.zeros(steps, steps + 1)
    for k in range(steps):
        for ahead in range(steps - k):
            table[k, k + ahead + 1] += decay**ahead * factors[k + ahead + 1]
            table[k, k + ahead] -= decay**ahead * factors[k + ahead]
    return table


def signal(own: Float[Tensor, "G D"], reference: Float[Tensor, "G D"]) -> tuple[float, float]:
    """Return the mean of <u_i, g_j> / (|u| |g|) over pairs of different groups, and its error by a jackknife."""
    products = (own @ reference.T).double().fill_diagonal_(0)
    groups = len(own)
    total = products.sum()
    left_out = (total - products.sum(0) - products.sum(1)) / ((groups - 1) * (groups - 2))
    error = ((left_out - left_out.mean()).square().sum() * (groups - 1) / groups).sqrt()
    size = (own.square().sum(1).mean() * reference.square().sum(1).mean()).sqrt()
    return (total / (groups * (groups - 1)) / size).item(), (error / size).item()


def rows_of(
    rewards: Float[Tensor, "G N P"], parts: Float[Tensor, "G S P sketch"], stds: Float[Tensor, " S"]
) -> list[dict[str, Any]]:
    """Return one row for each rule, normalisation and power of the step's std, as in `learner.credit.step_weights`.

    Args:
        rewards: rewards at all points of all groups.
        parts: sketches of the parts v[k, j] of all groups.
        stds: std of each stochastic step.

    Returns:
        Rows with rule, normalisation, power, signal and error.
    """
    steps = parts.shape[1]
    _, slopes = calibrated(rewards)
    leads = rewards - rewards.mean(1, keepdim=True)
    reference = parts[:, :, -1].sum(1)
    rows = []
    for rule, choice in RULES.items():
        table = torch.zeros(steps, steps + 1)
        table[:, -1] = 1
        if choice is not None:
            table = coefficients(slopes, is_calibrated=choice[0], decay=choice[1])
        spread = torch.einsum("gnj,kj->gnk", leads, table).std((0, 1))
        for normalise, scale in (("joint", torch.ones(steps)), ("per_step", 1 / spread)):
            if rule == "uniform" and normalise == "per_step":
                continue  # the same as joint
            for power in POWERS:
                weights = table * (scale * (stds / stds.mean()) ** power)[:, None]
                value, error = signal(torch.einsum("gkjd,kj->gd", parts, weights), reference)
                rows.append({"rule": rule, "normalise": normalise, "power": power, "signal": value, "error": error})
    return rows


def steps_of(parts: Float[Tensor, "G S P sketch"]) -> list[dict[str, float]]:
    """Return, for each step's part of uniform credit's gradient, its share of the squared norm and its own signal."""
    own = parts[:, :, -1]
    squares = own.square().sum(2).mean(0)
    found = [signal(own[:, k], own.sum(1)) for k in range(own.shape[1])]
    return [
        {"step": k, "share": (squares[k] / squares.sum()).item(), "signal": value, "error": error}
        for k, (value, error) in enumerate(found)
    ]


def plot(rows: Sequence[dict[str, Any]], steps: Sequence[dict[str, float]], path: Path) -> None:
    """Plot the signal of each rule by the power, with each step scaled to its own std (left), and the steps (right).

    Args:
        rows: from `rows_of`.
        steps: from `steps_of`.
        path: the PNG file.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for index, rule in enumerate(RULES):
        scale = "joint" if rule == "uniform" else "per_step"
        shown = [row for row in rows if (row["rule"], row["normalise"]) == (rule, scale)]
        left.errorbar(
            [row["power"] + 0.03 * (index - 2) for row in shown],
            [row["signal"] for row in shown],
            [row["error"] for row in shown],
            fmt="o-",
            label=rule,
            color="0.4" if rule == "uniform" else f"C{index - 1}",
        )
    left.set(xlabel="step weight: std to this power", ylabel="signal of the gradient")
    left.axhline(0, color="0.8", zorder=0)
    left.legend(fontsize=7)
    positions = [row["step"] for row in steps]
    right.bar(positions, [row["share"] for row in steps], color="0.8", label="share of the squared gradient")
    right.set(xlabel="step k", ylabel="share", xticks=positions)
    twin = right.twinx()
    twin.errorbar(
        positions,
        [row["signal"] for row in steps],
        [row["error"] for row in steps],
        fmt="o",
        color="C3",
        label="signal",
    )
    twin.axhline(0, color="C3", alpha=0.3)
    twin.set_ylabel("signal of the step alone", color="C3")
    right.set_title("uniform credit, step by step", fontsize=9)
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=110)


def main(
    preset: Annotated[str, typer.Argument(help="Preset whose model, prompts, sampling and scorer are used.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Config overrides.")] = None,
    groups: Annotated[int, typer.Option(min=3, help="Groups, one prompt each.")] = 400,
    out: Annotated[Path, typer.Option(help="JSON file; the plot has the same name.")] = Path(
        "runs/gradient_signal.json"
    ),
) -> None:
    """Generate the groups, combine the rules, write JSON and plot, and print the tables."""
    began = time.monotonic()
    fixed = ["method=stepwise_calibrated", "sampling.shared_noise=false"]
    config = load_config(preset, overrides=[*fixed, *(overrides or [])])
    torch.set_num_threads(config.cluster.learner.threads)
    policy, lora = build_policy(config, device="cpu")
    (reward,) = config.rewards.values()
    collector = Collector(config, policy, list(lora.parameters.values()), build_scorer(reward.scorer, **reward.args))
    prompts = read_prompts(config.data, config.data.train)
    collected = [
        collector.group(number, prompt_at(prompts, number, seed=config.seed))
        for number in track(range(groups), "groups")
    ]
    rewards, parts = (torch.stack(held) for held in zip(*collected, strict=True))
    rows = rows_of(rewards, parts, torch.tensor([policy.std(k) for k in policy.steps]))
    steps = steps_of(parts)
    facts = {"preset": preset, "overrides": overrides or [], "groups": groups, "seconds": time.monotonic() - began}
    write_json(out, facts | {"rows": rows, "steps": steps})
    plot(rows, steps, out.with_suffix(".png"))
    table: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        own = table.setdefault((row["rule"], row["normalise"]), {"rule": row["rule"], "normalise": row["normalise"]})
        own[f"power {row['power']:g}"] = _thousandths(row)
    show(list(table.values()), title="signal in thousandths")
    shares = [(f"{row['step']:.0f}", row["share"], _thousandths(row)) for row in steps]
    show([dict(zip(("step", "share of the squared gradient", "signal"), each, strict=True)) for each in shares])


def _thousandths(row: Mapping[str, Any]) -> str:
    return f"{1e3 * row['signal']:.2f} ± {1e3 * row['error']:.2f}"


if __name__ == "__main__":
    typer.run(main)
