"""The mathematics of a flow: schedules, transitions, windows, completions and keyed noise, as functions of tensors."""
