"""A flow-matching world with exact answers: for data x_0 ~ N(mean, spread^2 I) the velocity has a closed form.

With t = sigma, x = (1 - t) x_0 + t x_1 is N((1 - t) mean, s^2 I) where s^2 = (1 - t)^2 spread^2 + t^2, and

    E[x_0 | x] = mean + (1 - t) spread^2 / s^2 (x - (1 - t) mean)
    E[x_1 | x] = t / s^2 (x - (1 - t) mean)
    v = E[x_1 | x] - E[x_0 | x]

so the ODE and Flow-SDE turn noise into N(mean, spread^2 I) as the number of steps grows. DDIM-SDE does not quite: its
noise does not shrink with the step, so with a fixed eta some bias stays. Used by the tests.
"""

from jaxtyping import Float
from torch import Tensor

from flow.maths.transition import per_sample


def gaussian_velocity(
    *, latents: Float[Tensor, "B ..."], sigma: Float[Tensor, " B"], mean: float, spread: float | Float[Tensor, " D"]
) -> Float[Tensor, "B ..."]:
    """The exact velocity at these states; `spread` is one number, or one for each element."""
    t = per_sample(sigma, latents)
    variance = (1 - t).square() * spread**2 + t.square()
    offset = latents - (1 - t) * mean
    return t / variance * offset - (mean + (1 - t) * spread**2 / variance * offset)
