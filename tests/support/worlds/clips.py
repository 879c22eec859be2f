"""Tiny random checkpoints in transformers' format, made on disk for tests."""

from pathlib import Path
from typing import Any

CONTEXT = 20
SIZE = 24


def write_clip(folder: Path, *, seed: int = 3, size: int = SIZE, hidden_act: str = "quick_gelu") -> Path:
    """A random CLIP with its tokenizer and image processor, 16 wide; `logit_scale` is that of exp(...) = 100."""
    import torch
    from transformers import CLIPConfig, CLIPModel, CLIPTextConfig, CLIPVisionConfig
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    tokenizer = letters_tokenizer()
    text = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        hidden_act=hidden_act,
        num_attention_heads=2,
        max_position_embeddings=CONTEXT,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    vision = CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        hidden_act=hidden_act,
        num_attention_heads=2,
        image_size=size,
        patch_size=8,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = CLIPModel(CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=12))
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.4)
            elif "logit_scale" in name:
                torch.nn.init.constant_(parameter, 4.6052)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    CLIPImageProcessorPil(size={"shortest_edge": size}, crop_size={"height": size, "width": size}).save_pretrained(
        folder
    )
    return folder


def write_segmenter(folder: Path) -> Path:
    """A tiny random Mask2Former with four COCO classes, and its image processor."""
    import torch
    from transformers import Mask2FormerConfig, Mask2FormerForUniversalSegmentation, SwinConfig
    from transformers.models.mask2former.image_processing_pil_mask2former import Mask2FormerImageProcessorPil

    backbone = SwinConfig(
        image_size=64,
        patch_size=4,
        embed_dim=8,
        depths=[1, 1, 1, 1],
        num_heads=[1, 1, 2, 2],
        window_size=4,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )
    names = {0: "person", 1: "motorbike", 2: "keyboard", 3: "dog"}
    config = Mask2FormerConfig(
        backbone_config=backbone,
        feature_size=32,
        mask_feature_size=32,
        hidden_dim=32,
        encoder_feedforward_dim=32,
        dim_feedforward=32,
        encoder_layers=1,
        decoder_layers=2,
        num_attention_heads=2,
        num_queries=6,
        id2label=names,
        label2id={name: index for index, name in names.items()},
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = Mask2FormerForUniversalSegmentation(config)
        torch.nn.init.normal_(model.class_predictor.weight, std=2.0)
    model.save_pretrained(folder)
    Mask2FormerImageProcessorPil(size={"shortest_edge": 64, "longest_edge": 96}).save_pretrained(folder)
    return folder


def letters_tokenizer() -> Any:
    """A byte-pair tokenizer of letters without merges, so that any text is legal."""
    from transformers import CLIPTokenizer

    letters = [chr(code) for code in range(33, 127)]
    tokens = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    return CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=CONTEXT)
