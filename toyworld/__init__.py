"""The toy world, the built-in default: images, captions, prompts and a small pretrained Stable-Diffusion-3 pipeline."""
