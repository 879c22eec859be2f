"""Do the kernels keep the marginals? The std of samples in a Gaussian world whose true std is 0.5.

python -m benchmarks.fidelity.kernel_marginals
"""

import torch

from benchmarks.output import show
from flow.maths.schedule import sd3_sigmas
from flow.maths.transition import Start, ddim_sde, flow_sde, ode
from tests.support.worlds.gaussian import gaussian_velocity

MEAN, SPREAD, SAMPLES = 0.3, 0.5, 200_000


def spread(kernel: str, level: float, steps: int) -> float:
    """Generate samples, with an ODE step as the last one, and measure their std.

    Args:
        kernel: `ode`, `flow_sde` or `ddim_sde`.
        level: the kernel's noise level.
        steps: T.

    Returns:
        The std of the samples.
    """
    generator = torch.Generator().manual_seed(0)
    sigmas = sd3_sigmas(steps=steps)
    latents = torch.randn(SAMPLES, 1, generator=generator)
    for k in range(steps):
        sigma, sigma_next = sigmas[k].expand(SAMPLES), sigmas[k + 1].expand(SAMPLES)
        velocity = gaussian_velocity(latents=latents, sigma=sigma, mean=MEAN, spread=SPREAD)
        start = Start(latents, velocity, sigma, sigma_next)
        if kernel == "ode" or k == steps - 1:
            latents = ode(start).mean
        else:
            function = flow_sde if kernel == "flow_sde" else ddim_sde
            transition = function(start, sigma_first=sigmas[1].item(), noise_level=level)
            latents = transition.sample(torch.randn(SAMPLES, 1, generator=generator))
    return latents.std().item()


def main() -> None:
    """Print the std of samples by kernel and number of steps."""
    kernels = ("ode", 0.0), ("flow_sde", 0.7), ("ddim_sde", 0.7), ("ddim_sde", 1.0)
    rows = [
        {
            "kernel": kernel,
            "noise level": level,
            **{f"T = {steps}": spread(kernel, level, steps) for steps in (10, 50, 200)},
        }
        for kernel, level in kernels
    ]
    show(rows, title=f"true spread {SPREAD}")


if __name__ == "__main__":
    main()
