"""The flow-matching policy and its mathematics, shared by rollout actors and the learner.

Conventions: sigma runs from 1 (noise) to 0 (image); x = (1 - sigma) x_0 + sigma x_1 with x_1 ~ N(0, I);
velocity v = x_1 - x_0; step k goes from point k to point k + 1.
"""
