"""The embedded default: a small world of images, captions and a small pretrained Stable-Diffusion-3 pipeline."""
