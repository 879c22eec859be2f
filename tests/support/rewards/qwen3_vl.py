"""A tiny Qwen3-VL with random weights, whose tokens are letters."""

import json
from pathlib import Path

import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import Qwen2Tokenizer, Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"]
IMAGE, VIDEO = "<|image_pad|>", "<|video_pad|>"
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_qwen3_vl(path: Path) -> Path:
    """Write it to an empty folder."""
    (path / "vocab.json").write_text(json.dumps({letter: at for at, letter in enumerate(sorted(ByteLevel.alphabet()))}))
    (path / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = Qwen2Tokenizer.from_pretrained(str(path))
    tokenizer.add_tokens([*SPECIAL, IMAGE, VIDEO], special_tokens=True)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(path)
    known = {name: tokenizer.convert_tokens_to_ids(token) for name, token in {"image": IMAGE, "video": VIDEO}.items()}
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
            },
        },
        vision_config={
            "depth": 3,
            "hidden_size": 24,
            "num_heads": 2,
            "intermediate_size": 32,
            "out_hidden_size": 32,
            "patch_size": 4,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        },
        image_token_id=known["image"],
        video_token_id=known["video"],
        vision_start_token_id=tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        vision_end_token_id=tokenizer.convert_tokens_to_ids("<|vision_end|>"),
    )
    torch.manual_seed(0)
    Qwen3VLForConditionalGeneration(config).save_pretrained(path)
    size = {"shortest_edge": 64, "longest_edge": 4096}
    processor = Qwen2VLImageProcessorPil(size=size, patch_size=4, temporal_patch_size=2, merge_size=2)
    processor.save_pretrained(path)
    return path
