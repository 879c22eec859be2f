"""How well completions, credit and gradients agree with a reference."""
