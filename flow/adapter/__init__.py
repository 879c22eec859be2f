"""The LoRA adapter: attached to a transformer, exported, loaded, and stored in diffusers' format."""
