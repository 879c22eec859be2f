"""The section `model`: the model and its adapter."""

from typing import Literal

from pydantic import Field, model_validator

from protocol.config.section import Positive, Section, require_both_sides

Dtype = Literal["float32", "bfloat16", "float16"]
QKV = ("to_q", "to_k", "to_v")
"""Ends of the names of an attention's layers that read one tensor."""


class LoraConfig(Section):
    """The low-rank adapter that is trained. A key that is not set takes the model family's default."""

    rank: Positive | None = None
    """Inner width of the adapter, at least 1."""
    alpha: int | float | None = Field(default=None, gt=0)
    """Numerator of the scale alpha / rank of the adapter's output, above 0."""
    targets: tuple[str, ...] | None = Field(default=None, min_length=1)
    """Modules of the transformer that receive the adapter, each by the end of its name, such as `attn.to_q`; at least
    one. A name that finds no module is an error before the run."""
    start: str | None = None
    """Folder, file or hub id of a LoRA in diffusers' or PEFT's format that training starts from; the reference stays
    the base model."""
    revision: str | None = None
    """Branch, tag or commit of a hub id in `start`; only a commit guarantees that the LoRA never changes. A run keeps
    the commit."""
    qkv: Literal["separate", "joined"] = "separate"
    """How the layers of queries, keys and values compute, for both rollout and learner; `joined` takes their matrices A
    in one product and adds up the gradient of their input in place: by count 1.57 GB of memory traffic instead of 2.47
    for forward and backward of one attention of SD3.5-Medium with 16 rows. Files are the same; results differ by
    rounding, on a CPU by at most 1e-5 in float32 and 2 % in bfloat16 (velocity and gradients,
    `tests/flow/adapter/test_joined.py`)."""

    @model_validator(mode="after")
    def _joins_something(self) -> "LoraConfig":
        asked = self.targets or QKV
        lacking = [each for each in QKV if not any(name.endswith(each) for name in asked)]
        if self.qkv == "joined" and lacking:
            raise ValueError(
                "model.lora.qkv=joined needs queries, keys and values in model.lora.targets, got no target that ends"
                f" with {lacking[0]}"
            )
        return self


class ModelConfig(Section):
    """The pretrained model and how it runs."""

    path: str
    """A diffusers folder, `pkg://package/folder` inside an installed package, or a hub id such as `org/name`; a local
    folder of that name comes first. For a hub id HF_TOKEN opens gated models, HF_HOME names the cache, and
    HF_HUB_OFFLINE=1 uses nothing else."""
    revision: str | None = None
    """Branch, tag or commit of a hub id in `path`; only a commit guarantees that the model never changes. A run
    keeps the commit, so every actor loads the same files, and resumes only with these. A folder has none: null."""
    dtype: Dtype = "float32"
    """Dtype of the transformer's weights and activations and of the text encoders; the LoRA is float32. float16 scales
    the loss of each pair by 65,536 (`torch.amp.GradScaler`). An overflow skips that optimizer step and halves the
    scale, which is part of a checkpoint; 100 steps without one double it."""
    quantize: Literal["int8", "nf4"] | None = None
    """How the frozen transformer keeps its linear layers: `int8` in 8 bits per weight, `nf4` in 4 (QLoRA's
    NormalFloat); diffusers quantises both through torchao while it reads the model. null keeps them in `dtype`. The
    LoRA is float32 in every case. The rounding of a weight depends on its row (`nf4`: on its 64 weights) only, so every
    actor and worker holds the same bits. Quantising FLUX.1-dev takes three minutes of a core with `int8`, ten with
    `nf4`."""
    vae_dtype: Dtype | None = None
    """Dtype in which the VAE decodes; null takes `dtype`, as diffusers' pipelines do. An image that overflows in half
    precision is decoded again, alone and in float32."""
    tiny_decoder: str | None = None
    """Folder, `pkg://package/folder` or hub id of an AutoencoderTiny that decodes the images of completed points, such
    as `madebyollin/taesd3`; null uses the VAE. Finished images and evaluations always use the VAE. It runs in
    `vae_dtype` and scales latents by its own `scaling_factor` and `shift_factor` (1 and 0 in taesd3 and taef1)."""
    tiny_decoder_revision: str | None = None
    """Branch, tag or commit of a hub id in `tiny_decoder`; only a commit guarantees that it never changes. A run keeps
    the commit."""
    attention: Literal["native", "_native_efficient", "_native_math", "cudnn", "flash3"] = "native"
    """Attention kernel, for both rollout and learner: torch's own choice or one of its kernels, by their names in
    diffusers' dispatcher (`_native_efficient` on a GPU only); in half precision on a GPU also torch's cuDNN with
    FlashAttention's backward, or FlashAttention-3: each process first repeats a backward of them eight times, and ends
    if a bit differs or the gradients are not torch's. The dispatcher's others are no choice, since their gradients
    differ from run to run."""
    norms: Literal["torch", "triton"] = "torch"
    """Kernel of RMSNorm on a GPU in half precision, for both rollout and learner; `triton` takes several of the short
    rows of queries and keys at once."""
    height: Positive | None = None
    """Height of an image in pixels, a multiple of 16, for Qwen-Image-2.1 of 32; SD3's must fit its position embeddings.
    null takes the size that the model was trained for."""
    width: Positive | None = None
    """Width of an image in pixels; given together with `height`."""
    condition_side: Positive = 1024
    """Side in pixels of a square: condition images are resized to its area by the model's own rule, FLUX.2's only if
    they are larger. The pipelines have 1024. With `compile` each of their sizes has its own graphs."""
    max_sequence_length: Positive = 128
    """Tokens of a prompt for T5 or Qwen, at least 1; SD3 without a T5 encoder appends as many zero tokens.
    Qwen-Image-Edit cuts no prompt: there it counts in the estimate only."""
    guidance: float = Field(default=1.0, ge=1.0)
    """Classifier-free guidance weight w of the policy, at least 1, for rollout, completion, training, reference and
    evaluation. 1 costs one forward, a higher weight two. Z-Image's pipeline calls w - 1 its `guidance_scale`: 4 there
    is 5 here."""
    splits_guidance: bool = False
    """Run the two branches of guidance as two forwards where their prompts differ in length. No forward then has a
    mask, which the fastest attention kernels refuse (Qwen-Image); results differ by rounding."""
    embedded_guidance: float = Field(default=3.5, ge=0.0)
    """Guidance input of a guidance-distilled model (FLUX.1-dev), at least 0; other models ignore it."""
    embedding_cache: str | None = None
    """Folder for prompt embeddings and the latents of condition images, shared by all machines. With it the text
    encoders are loaded once, before the run, and then freed. Each prompt is encoded alone; an actor encodes one that
    the folder lacks, and reads no other prompt's images. A file's name is a hash of all that its embedding depends on,
    such as text, encoders and dtype, so models and runs may share the folder. A prompt takes 1.7 MB in half precision
    for SD3.5 with 128 T5 tokens, 4.2 MB for FLUX with 512. null: the actors hold the text encoders."""
    forward_batch: Positive | None = None
    """Maximum number of states in one transformer forward; null takes all at once. Rollout and learner use the same
    number (but see `learner.batch`), so the ratio stays exactly 1; the learner's backward goes piece by piece."""
    decode_batch: Positive | None = None
    """Maximum number of images that the VAE decodes at once; 1 is what diffusers calls slicing, null decodes all."""
    vae_tiling: bool = False
    """Decode in overlapping tiles: less memory for large images, slightly different pixels."""
    vae_compile: str | None = None
    """torch.compile backend for the decoders, such as `inductor`; needs `decode_batch`, to which every batch is filled
    up, so that one graph decodes all. Their weights then have channels-last order. Images differ by rounding; one that
    overflows is decoded again without the graph. null does not compile them."""
    gradient_checkpointing: bool = False
    """The learner stores one tensor of each block and recomputes the others: far less memory, one more forward."""
    compile: str | None = None
    """torch.compile backend for the transformer's blocks, such as `inductor`, which compiles in its deterministic mode,
    so that every actor has the same code; each node then needs a C compiler for a GPU, a C++ compiler for a CPU. A
    block that cannot be compiled ends the run. A rollout takes the memory of one block more. null does not compile
    them."""
    lora: LoraConfig = LoraConfig()
    """The adapter."""

    @model_validator(mode="after")
    def _both_sides(self) -> "ModelConfig":
        require_both_sides("model", self.height, self.width)
        if self.vae_compile and self.decode_batch is None:
            raise ValueError(
                f"model.vae_compile needs a model.decode_batch, got {self.vae_compile} and null: every batch is filled"
                " up to one size; set one, such as 8"
            )
        return self

    @model_validator(mode="after")
    def _kernels_fit(self) -> "ModelConfig":
        own = [f"model.attention={self.attention}"] if self.attention in ("cudnn", "flash3") else []
        own += ["model.norms=triton"] if self.norms == "triton" else []
        if own and self.dtype == "float32":
            raise ValueError(f"{own[0]} is for half precision, got model.dtype=float32: set it to bfloat16")
        if self.norms == "triton" and self.compile:
            raise ValueError(
                f"model.norms=triton is for blocks that are not compiled, got model.compile={self.compile}: leave one"
                " out"
            )
        if self.lora.qkv == "joined" and self.quantize:
            raise ValueError(
                f"model.lora.qkv=joined needs whole weights, got model.quantize={self.quantize}: leave one out"
            )
        return self

    @property
    def rows(self) -> int:
        """Rows through the transformer for one velocity: guidance needs two."""
        return 2 if self.guidance > 1 else 1
