"""The training loop: groups are admitted, scored, learned from and released; evaluations and guards."""
