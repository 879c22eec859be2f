"""Benchmarks of image editing: their instructions, and the images to edit, in one folder of the cache.

GEdit-Bench is a dataset of Arrow files on the hub, which its list of files gives a sha256. ImgEdit-Bench has its
instructions on GitHub and its images in an archive on the hub.
"""

import json
import re
import tarfile
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from deploy.tools.prompts.fetched import Source, fetch
from protocol.errors import PromptError, one_line
from protocol.ground.files import write_whole, writing

HUB = "https://huggingface.co"
STEP1X_EDIT = "https://raw.githubusercontent.com/stepfun-ai/Step1X-Edit/570eba6ebda0c45c013983a483afbf2fd12bfcbc"
IMGEDIT = "https://raw.githubusercontent.com/PKU-YuanGroup/ImgEdit/547185d12c08267a862b94248576e1746e479937/Benchmark"
GEDIT_FILES = Source(f"{HUB}/api/datasets/stepfun-ai/GEdit-Bench/tree/main?recursive=true", name="files.json")
GEDIT_DATA = f"{HUB}/datasets/stepfun-ai/GEdit-Bench/resolve/main"
GEDIT_WORDS = Source(
    f"{STEP1X_EDIT}/GEdit-Bench/viescore/vie_prompts.py",
    sha256="010234af186eb0a70fcb99047cd32ad1da01bed59ca1a95a01335426417cf838",
)
"""The judge's questions."""
IMGEDIT_EDITS = Source(
    f"{IMGEDIT}/Basic/basic_edit.json", sha256="5ee9b7d61e918692416f79896300f738598c83adff8de737b25be4aaff72dc69"
)
IMGEDIT_WORDS = Source(
    f"{IMGEDIT}/Basic/prompts.json", sha256="f9468dc848776ee0a6c2e2c31e678c7224e9cb61b013747c8c52d4a05627b5a0"
)
"""The judge's rubrics."""
IMGEDIT_IMAGES = Source(f"{HUB}/datasets/sysuyy/ImgEdit/resolve/main/Benchmark.tar")
COLUMNS = ("instruction", "instruction_language", "task_type", "key", "input_image_raw")
MOST_BYTES = 2**32
"""Of one Arrow file."""
PLAIN = re.compile(r"[\w-]+")


def gedit(folder: Path) -> tuple[Path, str]:
    """Make GEdit-Bench's prompts, with tags such as `en/color_alter`, and their images; the Arrow files go then.

    Raises:
        PromptError: a file cannot be fetched or has another form, or pyarrow is not installed.
    """

    def rows() -> Iterator[tuple[dict[str, Any], bytes]]:
        if find_spec("pyarrow") is None:
            raise PromptError("GEdit-Bench comes as Arrow files, and pyarrow is missing: pip install -e '.[gedit]'")
        listing, _ = fetch(GEDIT_FILES, folder)
        shards = [fetch(source, folder)[0] for source in _shards(listing)]
        for shard in shards:
            for row in _arrow_rows(shard):
                names = [row[column] for column in ("instruction_language", "task_type", "key")]
                if not all(isinstance(name, str) and PLAIN.fullmatch(name) for name in names):
                    raise ValueError(f"language, task and key of an instruction must be plain names, got {names}")
                language, task, key = names
                line = {"prompt": row["instruction"], "image": f"images/{language}/{key}", "tag": f"{language}/{task}"}
                yield line, row["input_image_raw"]["bytes"]

    known = f"the Arrow files' sha256 as the hub lists them; the list's sha256 recorded in {GEDIT_FILES.name}.sha256"
    return _made(folder, rows, known, clean="*.arrow")


def imgedit(folder: Path) -> tuple[Path, str]:
    """Make the prompts of ImgEdit-Bench's basic suite, with the type of the edit as tag, and their images.

    Raises:
        PromptError: a file cannot be fetched or has another form.
    """

    def rows() -> Iterator[tuple[dict[str, Any], bytes]]:
        edits, archive = (fetch(source, folder)[0] for source in (IMGEDIT_EDITS, IMGEDIT_IMAGES))
        found = json.loads(edits.read_text(encoding="utf-8"))
        with tarfile.open(archive) as tar:
            members = {name.partition("/singleturn/")[2]: name for name in tar.getnames()}
            for each in found.values():
                if ".." in each["id"]:
                    raise ValueError(f"an image must lie in the archive's folder, got {each['id']!r}")
                line = {"prompt": each["prompt"], "image": f"images/{each['id']}", "tag": each["edit_type"]}
                file = tar.extractfile(members[each["id"]])
                yield line, file.read() if file else b""

    known = "sha256 of the instructions as pinned; the images' sha256 recorded in Benchmark.tar.sha256"
    return _made(folder, rows, known)


def _made(
    folder: Path, rows: Callable[[], Iterator[tuple[Mapping[str, Any], bytes]]], known: str, *, clean: str | None = None
) -> tuple[Path, str]:
    """Write the images, and last the prompt file that names them; one that is there is taken as it is."""
    path = folder / "heldout_prompts.jsonl"
    if path.exists():
        return path, known
    lines = []
    try:
        for line, image in rows():
            home = folder / line["image"]
            with writing(home, "--cache"):
                home.parent.mkdir(parents=True, exist_ok=True)
                write_whole(home, image)
            lines.append(f"{json.dumps(line)}\n")
    except (LookupError, TypeError, ValueError, AttributeError, tarfile.TarError) as error:
        raise PromptError(f"the files in {folder} must have the published form, got {one_line(error)}") from None
    with writing(path, "--cache"):
        write_whole(path, "".join(lines))
    for raw in folder.glob(clean) if clean else ():
        raw.unlink()
    return path, known


def _shards(listing: Path) -> list[Source]:
    """Read the dataset's Arrow files and the sha256 that the hub gives them."""
    try:
        files = {each["path"]: each for each in json.loads(listing.read_text(encoding="utf-8"))}
        pins = {path: files[path]["lfs"]["oid"] for path in sorted(files) if path.endswith(".arrow")}
    except (LookupError, TypeError, ValueError) as error:
        raise PromptError(f"{listing} must be the hub's list of files, got {one_line(error)}: delete it") from None
    if not pins:
        raise PromptError(f"{listing} must name Arrow files, got none: delete it")
    return [
        Source(f"{GEDIT_DATA}/{path}", sha256=pin, name=path.replace("/", "_"), most_bytes=MOST_BYTES)
        for path, pin in pins.items()
    ]


def _arrow_rows(shard: Path) -> Iterator[dict[str, Any]]:
    import pyarrow
    from pyarrow import ipc

    try:
        with pyarrow.memory_map(str(shard)) as file, ipc.open_stream(file) as batches:
            for batch in batches:
                for index in range(batch.num_rows):
                    yield {name: batch.column(name)[index].as_py() for name in COLUMNS}
    except pyarrow.ArrowException as error:
        raise PromptError(f"{shard} must be an Arrow file, got {one_line(error)}: delete it") from None
