"""How faithful completions, credit and gradients are to a reference."""
