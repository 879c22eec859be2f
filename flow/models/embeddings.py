"""Prompt embeddings with their condition images: each is encoded once, then kept in memory and, if configured, in a
cache folder.

The file name of an embedding is a hash of everything it depends on: text, images, the encoders' files or their commit
on the hub, sequence length, dtype, kind of device and the libraries' versions. So runs and models may share a folder,
and a changed encoder never yields an old embedding.
"""

import hashlib
import json
import logging
from collections import OrderedDict
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from flow.device import versions_of
from flow.models.contract import Conditioning
from flow.models.families import Family
from flow.models.hub import is_on_hub
from flow.models.located import Located
from flow.models.reading import vae_dtype_of
from flow.models.text import TextEncoders
from protocol.errors import ModelError
from protocol.ground.files import sha256_of, share, whole
from protocol.ground.resources import resolve
from protocol.messages import ConditionImage, EncoderInput

log = logging.getLogger(__name__)

KEPT_PROMPTS = 256
"""Most embeddings kept in memory; the least recently used is dropped first. One of SD3.5 takes 5 MB in float32."""


class Embeddings:
    """Embeddings of any prompt. With a cache folder the encoders are freed after each encoding."""

    def __init__(self, encoders: TextEncoders) -> None:
        config = encoders.located.model
        self._encoders = encoders
        self._config = config
        self._folder = resolve(config.embedding_cache) if config.embedding_cache else None
        self._kept: OrderedDict[EncoderInput, Conditioning] = OrderedDict()

    def of(self, text: str, conditions: tuple[ConditionImage, ...] = ()) -> Conditioning:
        """Return one prompt's embeddings.

        Raises:
            ModelError: the encoders cannot be loaded, or the cache folder is not writable.
            PromptError: a condition image is not there any more, or has changed.
        """
        asked = text, conditions
        if asked not in self._kept:
            self._kept[asked] = self._cached(asked) if self._folder else self._encoders.encode(*asked)
            if len(self._kept) > KEPT_PROMPTS:
                self._kept.popitem(last=False)
        self._kept.move_to_end(asked)
        return self._kept[asked]

    def fill(self, wanted: Iterable[EncoderInput]) -> int:
        """Encode everything that the cache folder lacks, and return how much there was.

        Raises:
            ModelError: no cache folder is configured, or it is not writable.
        """
        if self._folder is None:
            raise ModelError("model.embedding_cache must name a folder to encode prompts ahead, got none")
        missing = [asked for asked in dict.fromkeys(wanted) if not self._path(asked).exists()]
        for asked in missing:
            self._write(asked, self._encoders.encode(*asked))
        return len(missing)

    def free(self) -> None:
        """Free the encoders' memory after `fill`; the next text that the cache lacks loads them again."""
        self._encoders.free()

    def _cached(self, asked: EncoderInput) -> Conditioning:
        found = self._read(asked)
        if found is None:
            log.info("the embedding cache lacks a prompt; encoding it: %.60s", asked[0])
            found = self._encoders.encode(*asked)
            self._encoders.free()
            self._write(asked, found)
        return found

    def _path(self, asked: EncoderInput) -> Path:
        assert self._folder is not None
        text, conditions = asked
        facts = {
            "text": text,
            "tokens": "its own, without padding",
            "encoders": identity_of(self._encoders.located, has_conditions=bool(conditions)),
            "max_sequence_length": self._config.max_sequence_length,
            "dtype": self._config.dtype,
            "device": self._encoders.device.type,
            "versions": versions_of("torch", "transformers", "diffusers"),
        }
        if conditions:
            facts["images"] = " ".join(each.sha256 for each in conditions)
            facts["condition_side"] = self._config.condition_side
            facts["vae_dtype"] = str(vae_dtype_of(self._config))
        key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
        return self._folder / key[:2] / f"{key}.safetensors"

    def _read(self, asked: EncoderInput) -> Conditioning | None:
        path = self._path(asked)
        try:
            held = load_file(path, device=str(self._encoders.device))
            # In the file a tensor begins at any byte, and some kernels round otherwise where memory is not aligned.
            return Conditioning.of({name: tensor.clone() for name, tensor in held.items()})
        except FileNotFoundError:
            return None
        except (OSError, SafetensorError) as error:
            log.warning("embedding %s cannot be read and is encoded again: %s", path, error)
            return None

    def _write(self, asked: EncoderInput, embeddings: Conditioning) -> None:
        path = self._path(asked)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with whole(path, is_shared=True) as partial:
                save_file({name: tensor.contiguous() for name, tensor in embeddings.tensors.items()}, partial)
                share(partial)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"model.embedding_cache {self._folder} cannot be written: {error}") from error


def identity_of(located: Located, *, has_conditions: bool) -> str:
    """Return what decides a prompt's embedding: a hub id's commit, which needs no download, or a folder's files."""
    if is_on_hub(path := located.model.path):
        return f"{path}@{located.commit}"
    return digest_of_files(located.family, located.folder, has_conditions)


@lru_cache
def digest_of_files(family: Family, folder: Path, has_conditions: bool) -> str:  # noqa: FBT001
    """Return the sha256 of the names and contents of all files of a folder that decide a prompt's embedding.

    A file of the hub's cache is a link to a blob whose name is its content's hash already; any other file is read.
    """
    sha = hashlib.sha256()
    for part in (*family.text_parts, *(["vae"] if has_conditions else [])):
        for path in sorted(file for file in (folder / part).glob("*") if file.is_file()):
            sha.update(f"{part}/{path.name}|{_content(path)}|".encode())
    return sha.hexdigest()


def _content(path: Path) -> str:
    target = path.resolve()
    if path.is_symlink() and target.parent.name == "blobs":
        return target.name
    return sha256_of(path)
