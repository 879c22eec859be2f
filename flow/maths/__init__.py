"""The mathematics of a flow: schedules, transitions, completions and keyed noise. Tensors in, tensors out."""
