"""The one way to load pretrained models and tokenizers: whole, or refused in one line.

Libraries fill tensors that a file lacks at random, or make a vocabulary of two words, and say so in a log. Every
`from_pretrained` of this project goes through this module. The caller chooses the class and the exception.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from protocol.errors import FlowcreditError, InputError, one_line

LEAST_OF_ROWS = 0.9
"""Least share of an embedding's rows that a tokenizer must use: T5's has 32,100 tokens for 32,128 rows, Qwen's 151,669
for 151,936, CLIP's as many as rows."""
COUNTER = "num_batches_tracked"
"""A batch norm's counter of training steps, which no forward reads."""
AGAIN = "copy or download it again"
READ = re.compile(r"(model|diffusion_pytorch_model)(\.fp16)?(-\d+-of-\d+)?\.safetensors")
"""Names of the files of weights that the libraries read; a folder may hold others beside them."""
PLAIN = ("F64", "F32", "F16", "BF16")
"""Dtypes of weights, as safetensors names them, in which a number means itself and is no part of a code."""


def loaded(
    load: Callable[..., Any],
    source: Path | str,
    *,
    what: str,
    error: type[InputError],
    remedy: str = "",
    **options: Any,
) -> Any:
    """Call `load(source, **options)`; whatever the library raises becomes one line.

    Args:
        load: a function such as `CLIPTokenizer.from_pretrained`.
        source: a folder or a hub id.

    Raises:
        InputError: of the type `error`: the source does not exist or cannot be read.
    """
    try:
        return load(source, **options)
    except FlowcreditError:
        raise
    except Exception as failure:  # libraries raise any type, even Exception itself, for a broken folder
        raise error(f"{what} cannot be loaded: {one_line(failure)}{remedy and f'; {remedy}'}") from failure


def load_whole(
    load: Callable[..., Any], source: Path | str, *, what: str, error: type[InputError], **options: Any
) -> Any:
    """Load a model of transformers or diffusers like `loaded`, and refuse one whose tensors are not the file's.

    With `device_map="meta"` transformers reads headers only and returns a model without memory.

    Raises:
        InputError: of the type `error`: see `loaded` and `require_tensors`.
    """
    options = {"output_loading_info": True, "ignore_mismatched_sizes": True, **options}
    model, loading_info = loaded(load, source, what=what, error=error, **options)
    if options.get("device_map") != "meta":  # diffusers does not count what a shard lacks, and leaves it there
        empty = {name for name, tensor in model.state_dict().items() if tensor.is_meta}
        loading_info = {**loading_info, "missing_keys": {*loading_info["missing_keys"], *empty}}
    require_tensors(model, loading_info, what=what, error=error)
    return model


def require_tensors(model: Any, loading_info: Mapping[str, Any], *, what: str, error: type[InputError]) -> None:
    """Refuse a model that lacks tensors of its class, or whose file holds tensors of another shape or unknown ones.

    What the library ignores by the class's own lists never comes here: tied weights (T5's `encoder.embed_tokens`, a
    language model's `lm_head`), and buffers that older versions saved (`position_ids`, `inv_freq`,
    `relative_position_index`). If the file was saved by another class, such as the language model or the CLIP to which
    an encoder belongs, its modules that this class does not have are ignored too (`lm_head`, `vision_model`).

    Args:
        loading_info: `missing_keys`, `unexpected_keys` and `mismatched_keys` of `output_loading_info`.

    Raises:
        InputError: of the type `error`.
    """
    kind = type(model).__name__
    architectures = getattr(getattr(model, "config", None), "architectures", None) or [kind]
    unknown = sorted(loading_info["unexpected_keys"])
    if kind not in architectures:
        own = {name for name, _ in model.named_children()}
        unknown = [name for name in unknown if name.partition(".")[0] in own]
    lacking = sorted(name for name in loading_info["missing_keys"] if not name.endswith(COUNTER))
    odd = sorted(name for name, *_ in loading_info["mismatched_keys"])
    for names, fault in ((lacking, "missing"), (odd, "of another shape"), (unknown, "unknown")):
        if names:
            raise error(
                f"{what} must hold exactly the tensors of a {kind}, got {len(names)} {fault}, such as"
                f" {names[0]}: {AGAIN}"
            )


def require_plain_weights(folder: Path, *, what: str, error: type[InputError], remedy: str) -> None:
    """Refuse a model folder whose weights were quantised before they were saved, whether its config says so or not.

    The libraries cast numbers of 8 bits to the wanted dtype where the config does not say what they mean.

    Raises:
        InputError: of the type `error`.
    """
    try:
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("quantization_config")
    except (OSError, ValueError, AttributeError):
        return  # its loading says so
    rule = f"{what} must hold weights that are not quantised"
    if settings:
        method = settings.get("quant_method") if isinstance(settings, dict) else settings
        raise error(f"{rule}, got quantization_config {method}: {remedy}")
    for name, dtype in _dtypes(folder):
        if name.endswith(".weight") and dtype not in PLAIN:
            raise error(f"{rule}, got {dtype} for {name} and no quantization_config: {remedy}")


def _dtypes(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the names and dtypes of a model's tensors from the headers of its safetensors files."""
    from safetensors import SafetensorError, safe_open

    for file in sorted(each for each in folder.glob("*.safetensors") if READ.fullmatch(each.name)):
        try:
            with safe_open(file, framework="numpy") as held:
                yield from ((name, held.get_slice(name).get_dtype()) for name in held.keys())  # noqa: SIM118
        except (OSError, SafetensorError):
            continue  # its loading says so


def load_tokenizer(kind: Any, source: Path | str, *, what: str, error: type[InputError], **options: Any) -> Any:
    """Load a tokenizer of transformers whose files are there: without them the library makes one of a few tokens.

    Raises:
        InputError: of the type `error`: a file is missing or cannot be read.
    """
    folder, files = Path(source), dict(getattr(kind, "vocab_files_names", {}))
    whole = files.pop("tokenizer_file", "tokenizer.json")
    lacking = [name for name in files.values() if not (folder / name).exists()]
    if folder.is_dir() and not (folder / whole).exists() and (lacking or not files):
        one = " and ".join(files.values())
        raise error(f"{what} must hold {whole}{f' or {one}' if one else ''}, got no {(lacking or [whole])[0]}: {AGAIN}")
    return loaded(kind.from_pretrained, source, what=what, error=error, **options)


def require_vocabulary(tokenizer: Any, model: Any, *, what: str, error: type[InputError]) -> None:
    """Check that a tokenizer has about as many tokens as the embedding of its model has rows, and never more.

    Raises:
        InputError: of the type `error`.
    """
    tokens, rows = len(tokenizer), len(model.get_input_embeddings().weight)
    if not LEAST_OF_ROWS * rows <= tokens <= rows:
        raise error(
            f"{what} must have about as many tokens as the model's embedding has rows, and no more, got {tokens} for"
            f" {rows} rows: {AGAIN}"
        )
    config = getattr(model.config, "text_config", model.config)
    positions = getattr(config, "max_position_embeddings", None)
    if type(tokenizer).__name__.startswith("CLIP") and positions and tokenizer.model_max_length > positions:
        raise error(
            f"{what} must have at most the model's {positions} positions as model_max_length, got"
            f" {min(tokenizer.model_max_length, 10**9)}: correct tokenizer_config.json"
        )
