"""Pretrained text-to-image models behind one contract: finding, loading, encoding prompts, decoding images."""
