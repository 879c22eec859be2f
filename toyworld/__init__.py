"""The embedded default: a small world of pictures, captions and a small pretrained Stable-Diffusion-3 pipeline."""
