"""What crosses a process boundary, and what it means.

Letters used in array shapes everywhere in this project:

    G  groups of an iteration
    N  members of a group (trajectories that share one prompt), or of one of its shards
    M  trajectories, whatever their group
    T  denoising steps; a trajectory has T+1 points, point 0 is pure noise, point T the finished latents
    S  stochastic (trained) steps, S <= T
    P  points of a trajectory in a table, the finished image's last: T+1 of the schedule, S+1 along its stochastic
       steps, or 1 where only finished images are scored
    B  a batch of whatever the docstring says
    C H W  latent channels, height, width (images are H W 3, uint8)
    L D  text tokens, embedding width
"""
