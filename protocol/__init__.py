"""What crosses a process boundary, and what it means.

Letters used in array shapes everywhere in this project:

    N  members of a group (trajectories that share one prompt)
    T  denoising steps; a trajectory has T+1 points, point 0 is pure noise, point T the finished latents
    S  stochastic (trained) steps, S <= T
    B  a batch of whatever the docstring says
    C H W  latent channels, height, width (images are H W 3, uint8)
    L D  text tokens, embedding width
"""
