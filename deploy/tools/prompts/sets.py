"""Published sets of prompts: fetched from their own public addresses into a cache, and written as prompt files.

Nothing of a set is part of this package but its address and the hash of its content.
"""

import csv
import json
import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from deploy.tools.prompts.edits import gedit, imgedit
from deploy.tools.prompts.fetched import Source, fetch
from protocol.errors import PromptError, one_line
from protocol.ground.files import write_whole, writing

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flowcredit" / "prompts"


@dataclass(frozen=True)
class PromptSet:
    about: str
    train: Source | None = None
    heldout: Source | None = None
    make: Callable[[Path], tuple[Path, str]] | None = None
    """Makes the held-out prompts with images in a folder, and says what is known of them."""


def _column(name: str, delimiter: str) -> Callable[[str], list[str]]:
    def read(content: str) -> list[str]:
        rows = csv.DictReader(content.splitlines(keepends=True), delimiter=delimiter)
        return list(dict.fromkeys(" ".join(row[name].split()) for row in rows if (row[name] or "").strip()))

    return read


def _different(content: str) -> list[str]:
    return list(dict.fromkeys(line.strip() for line in content.splitlines() if line.strip()))


def _by_atoms(content: str) -> list[str]:
    """Give each prompt of GenEval 2 its number of atoms as tag."""
    lines = [json.loads(line) for line in content.splitlines() if line.strip()]
    return [json.dumps({"tag": f"atoms_{line['atom_count']:02d}", **line}) for line in lines]


def _dpg(content: str) -> list[str]:
    """Join the questions of each prompt of DPG-Bench. The first row is left out, as in the release's evaluation."""
    found: dict[str, dict[str, Any]] = {}
    for row in list(csv.DictReader(StringIO(content)))[1:]:
        line = found.setdefault(row["item_id"], {"prompt": " ".join(row["text"].split()), "questions": []})
        parents = [int(number) for number in row["dependency"].split(",")]
        question = {"id": int(row["proposition_id"]), "question": row["question_natural_language"], "parents": parents}
        line["questions"].append(question)
    return [json.dumps(line) for line in found.values()]


FLOW_GRPO = "https://raw.githubusercontent.com/yifan123/flow_grpo/ac4c86e8cae021841f1fde853d340e0db67690dd/dataset"
DIFFUSION_NFT = "https://raw.githubusercontent.com/NVlabs/DiffusionNFT/24af5554898d85e93efa492f42b5e9cdf4156e9b/dataset"
PARTI = "https://raw.githubusercontent.com/google-research/parti/5a657978134374ce28973948331b319adef164bd"
ELLA = "https://raw.githubusercontent.com/TencentQQGYLab/ELLA/3c228f1dc6c4d3cad0a47493816151a419f14db3"
GENEVAL_2 = "https://raw.githubusercontent.com/facebookresearch/GenEval2/a6e82d2289e8d418f27f0adee77908b07060eea3"
SETS = {
    "flow_grpo_pickscore": PromptSet(
        about="Flow-GRPO's prompts of Pick-a-Pic, 25,432 to train on and 2,048 to test; some are not safe for work",
        train=Source(
            f"{FLOW_GRPO}/pickscore/train.txt",
            sha256="2f425adcbb9a6d0feee7c6c448e1cb83a1f71deca9434b803907e2578eca837f",
        ),
        heldout=Source(
            f"{FLOW_GRPO}/pickscore/test.txt",
            sha256="d75c025fa451866e70f7e36243f7cdd93095523cb51f5f9651f2ce3236d20262",
        ),
    ),
    "flow_grpo_ocr": PromptSet(
        about="Flow-GRPO's prompts that quote a text, some 20,000 to train on and 1,018 to test",
        train=Source(f"{FLOW_GRPO}/ocr/train.txt", blob="3ce0521b77b0a9031191d66ecc36ebaaf27a3922"),
        heldout=Source(
            f"{FLOW_GRPO}/ocr/test.txt", sha256="4dd8caf3ab6ade73bd376c7d14c6ca49b6eacfb1bd321e22c40714ae4a98d4dc"
        ),
    ),
    "flow_grpo_geneval": PromptSet(
        about="Flow-GRPO's prompts for GenEval, 50,000 to train on and GenEval's 553 to test",
        train=Source(f"{FLOW_GRPO}/geneval/train_metadata.jsonl", blob="0b97e8a6802c08fc7537cd00c76ae79c851bddcb"),
        heldout=Source(
            f"{FLOW_GRPO}/geneval/test_metadata.jsonl",
            sha256="cec4b24b9fee7bac21c8f787054ecc8dc9ff831674037713a4cd35e0f0a74a28",
            read=_different,
            suffix=".jsonl",
        ),
    ),
    "drawbench": PromptSet(
        about="DrawBench, as DiffusionNFT ships it",
        heldout=Source(
            f"{DIFFUSION_NFT}/drawbench/test.txt",
            sha256="9006b98feabb94b28a2bc0c88de42fd4f31a9ec3c2a19e308a02c5385b7172f0",
            read=_different,
        ),
    ),
    "partiprompts": PromptSet(
        about="PartiPrompts (P2)",
        heldout=Source(
            f"{PARTI}/PartiPrompts.tsv",
            sha256="fab29e41bb512a169b56acab4cf2a41dcb675e285df2efcde6640c7dd3c440eb",
            read=_column("Prompt", "\t"),
        ),
    ),
    "dpg": PromptSet(
        about="DPG-Bench, long prompts with questions as metadata",
        heldout=Source(
            f"{ELLA}/dpg_bench/dpg_bench.csv",
            blob="98457fc9901943f51ff9a30367250fc292533bed",
            read=_dpg,
            suffix=".jsonl",
        ),
    ),
    "geneval2": PromptSet(
        about="GenEval 2, with its questions as metadata",
        heldout=Source(
            f"{GENEVAL_2}/geneval2_data.jsonl",
            sha256="09233adbc9f877fba205f1a20efa4a8640e7e62a91dfd55893562bed8a928e43",
            read=_by_atoms,
            suffix=".jsonl",
        ),
    ),
    "gedit": PromptSet(about="GEdit-Bench, English and Chinese instructions with images (several GB)", make=gedit),
    "imgedit": PromptSet(about="ImgEdit-Bench's basic suite, 737 instructions with images", make=imgedit),
}
"""The sets by name."""
GENEVAL_2_SCRIPT = Source(
    f"{GENEVAL_2}/evaluation.py", sha256="90791e35321a1a2bf65366517dd60f39037f90435490eb122c0027b52d42cda9"
)
"""The release's evaluation, which holds the words that go with a question."""


def fetch_set(
    name: str, prompt_set: PromptSet, folder: Path, *, keys: Collection[str] = ("train", "heldout")
) -> Iterator[tuple[str, Path, str]]:
    """Make the prompt files of a set, from the cache or its addresses.

    Args:
        folder: cache; the files go to a folder of the set's name in it.
        keys: which files are wanted.

    Yields:
        The key under `data` that takes a file, its path, and what is known of the content.

    Raises:
        PromptError: an address does not answer or sends something else.
        RunFolderError: the cache cannot be written.
    """
    for key, source in (("train", prompt_set.train), ("heldout", prompt_set.heldout)):
        if source is None or key not in keys:
            continue
        raw, known = fetch(source, folder / name)
        yield key, _as_prompts(source, raw, key), known
    if prompt_set.make and "heldout" in keys:
        yield "heldout", *prompt_set.make(folder / name)


def _as_prompts(source: Source, raw: Path, key: str) -> Path:
    if source.read is None:
        return raw
    path = raw.with_name(f"{key}_prompts{source.suffix}")
    try:
        lines = source.read(raw.read_text(encoding="utf-8"))
    except (KeyError, TypeError, ValueError, AttributeError, csv.Error) as error:
        raise PromptError(f"{raw} must have the published form, got {one_line(error)}: delete it") from None
    with writing(path, "--cache"):
        write_whole(path, "".join(f"{line}\n" for line in lines))
    return path
