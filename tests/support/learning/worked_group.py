"""The worked example of docs/method/: three members and four steps, so rewards of five points."""

import torch

REWARDS = torch.tensor(
    [[0.50, 0.62, 0.58, 0.66, 0.70], [0.50, 0.46, 0.55, 0.53, 0.60], [0.50, 0.57, 0.49, 0.44, 0.40]],
    dtype=torch.float64,
)
"""In float64, so that nothing but the worked numbers' own rounding to six decimals remains."""
