"""Convert an open_clip checkpoint to a CLIP folder of transformers: `python -m rewards.clip.openclip FILE FOLDER`.

HPSv2 is published in this form (`HPS_v2.1_compressed.pt`, ViT-H/14). Sizes, tokenizer and image processor come
from a CLIP folder or hub id of the same architecture.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from protocol.errors import InputError, ScorerError, one_line
from rewards.pretrained import load_pretrained

LIKE = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
PLAIN = {
    "logit_scale": "logit_scale",
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
}
TRANSPOSED = {"text_projection": "text_projection.weight", "visual.proj": "visual_projection.weight"}
NORMS = {
    "ln_final": "text_model.final_layer_norm",
    "visual.ln_pre": "vision_model.pre_layrnorm",
    "visual.ln_post": "vision_model.post_layernorm",
}
TOWERS = {"transformer.resblocks": "text_model", "visual.transformer.resblocks": "vision_model"}
PARTS = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
    "attn.out_proj": "self_attn.out_proj",
}


def transformers_names(state: Mapping[str, Any]) -> dict[str, Any]:
    """Rename open_clip's tensors to transformers' names, and split the joint query, key and value weights.

    Raises:
        ScorerError: open_clip's CLIP has no tensor of this name.
    """
    renamed: dict[str, Any] = {}
    for name, tensor in state.items():
        layer, _, kind = name.rpartition(".")
        if name in PLAIN:
            renamed[PLAIN[name]] = tensor
        elif name in TRANSPOSED:
            renamed[TRANSPOSED[name]] = tensor.T.contiguous()
        elif layer in NORMS:
            renamed[f"{NORMS[layer]}.{kind}"] = tensor
        else:
            renamed |= _of_block(name, tensor)
    return renamed


def _of_block(name: str, tensor: Any) -> dict[str, Any]:
    for prefix, tower in TOWERS.items():
        number, _, part = name.removeprefix(f"{prefix}.").partition(".")
        if not name.startswith(f"{prefix}.") or not number.isdigit():
            continue
        layer = f"{tower}.encoder.layers.{number}"
        if part in ("attn.in_proj_weight", "attn.in_proj_bias"):
            kind = part.rpartition("_")[2]
            thirds = zip("qkv", tensor.chunk(3), strict=True)
            return {f"{layer}.self_attn.{letter}_proj.{kind}": third.clone() for letter, third in thirds}
        inner, _, kind = part.rpartition(".")
        if inner in PARTS:
            return {f"{layer}.{PARTS[inner]}.{kind}": tensor}
    raise ScorerError(f"an open_clip checkpoint has no tensor {name!r}: this file holds another model")


def convert(checkpoint: Path, folder: Path, *, like: str = LIKE) -> None:
    """Convert a checkpoint and write the CLIP folder.

    Args:
        checkpoint: a file written by `torch.save` that holds the tensors, directly or under `state_dict`.
        like: CLIP folder or hub id of the same architecture.

    Raises:
        ScorerError: the file cannot be read, or its tensors do not fit the architecture.
    """
    import torch
    from transformers import CLIPConfig, CLIPModel, CLIPTokenizer
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    saved: Any = load_pretrained(lambda path: torch.load(path, map_location="cpu", weights_only=True), str(checkpoint))
    state = {name.removeprefix("module."): tensor for name, tensor in saved.get("state_dict", saved).items()}
    config: Any = load_pretrained(CLIPConfig.from_pretrained, like)
    model: Any = CLIPModel(config)
    try:
        model.load_state_dict({name: tensor.float() for name, tensor in transformers_names(state).items()})
    except RuntimeError as error:
        raise ScorerError(f"{checkpoint} does not fit {like}: {one_line(error)}") from None
    load_pretrained(CLIPTokenizer.from_pretrained, like).save_pretrained(folder)
    load_pretrained(CLIPImageProcessorPil.from_pretrained, like).save_pretrained(folder)
    model.save_pretrained(folder)


def main(
    checkpoint: Annotated[Path, typer.Argument(help="The open_clip checkpoint.")],
    folder: Annotated[Path, typer.Argument(help="The CLIP folder to write.")],
    like: Annotated[str, typer.Option(help="CLIP folder or hub id of the same architecture.")] = LIKE,
) -> None:
    """Convert an open_clip checkpoint to a CLIP folder of transformers."""
    try:
        convert(checkpoint, folder, like=like)
    except InputError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    typer.echo(f"CLIP written to {folder}")


if __name__ == "__main__":
    typer.run(main)
