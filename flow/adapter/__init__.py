"""The LoRA adapter: attach it to a transformer, export and load it, and store it in diffusers' format."""
