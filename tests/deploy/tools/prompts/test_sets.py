"""Fetched prompt sets, from a local server in place of their public addresses."""

import hashlib
from collections.abc import Iterator

import pytest

from deploy.tools.prompts import sets as prompt_sets
from deploy.tools.prompts.fetched import Source
from deploy.tools.prompts.sets import SETS, PromptSet, fetch_set
from protocol.errors import PromptError
from tests.support.services.files import Server, serving

TEXT = "a cat\na dog\na cat\n"
TABLE = 'Prompt\tNote\na cat\tx\n"a ""red""\ndog"\ty\na cat\tz\n'


@pytest.fixture
def address() -> Iterator[str]:
    with serving({"/train.txt": TEXT.encode(), "/table.tsv": TABLE.encode()}) as url:
        yield url


def pinned(url: str, text: str = TEXT, **more: object) -> Source:
    return Source(url, sha256=hashlib.sha256(text.encode()).hexdigest(), **more)  # type: ignore[arg-type]


def test_a_set_is_fetched_once_and_then_taken_from_the_cache(address, tmp_path):
    found = PromptSet(about="", train=pinned(f"{address}/train.txt"))
    for _ in range(2):
        ((key, path, known),) = fetch_set("mine", found, tmp_path)
        assert (key, path.read_text()) == ("train", TEXT)
        assert "as pinned" in known
    assert Server.asked == [None]
    assert [each.name for each in (tmp_path / "mine").iterdir()] == ["train.txt"]


def test_an_interrupted_download_goes_on_where_it_ended(address, tmp_path):
    found = PromptSet(about="", train=pinned(f"{address}/train.txt"))
    Server.breaks_after = 5
    with pytest.raises(PromptError, match=r"cannot be fetched: .*; run the command again to go on, or put the file at"):
        list(fetch_set("mine", found, tmp_path))
    assert (tmp_path / "mine" / "train.txt.partial").read_text() == "a cat"
    ((_, path, _),) = fetch_set("mine", found, tmp_path)
    assert path.read_text() == TEXT
    assert Server.asked == [None, "bytes=5-"]


def test_other_content_is_refused_and_removed(address, tmp_path):
    for source in (pinned(f"{address}/train.txt", "other"), Source(f"{address}/train.txt", blob="00")):
        with pytest.raises(PromptError, match="must have the (sha256|git id) .*, got .*: the file is removed"):
            list(fetch_set("mine", PromptSet(about="", train=source), tmp_path))
        assert not list((tmp_path / "mine").glob("train*"))
    with pytest.raises(PromptError, match="404"):
        list(fetch_set("mine", PromptSet(about="", train=pinned(f"{address}/none.txt")), tmp_path))


def test_a_file_that_we_could_not_read_is_checked_by_its_git_id_and_its_sha256_is_recorded(address, tmp_path):
    blob = hashlib.sha1(f"blob {len(TEXT)}\0{TEXT}".encode(), usedforsecurity=False).hexdigest()
    ((_, path, known),) = fetch_set(
        "mine", PromptSet(about="", train=Source(f"{address}/train.txt", blob=blob)), tmp_path
    )
    sha256 = hashlib.sha256(TEXT.encode()).hexdigest()
    assert f"sha256 {sha256[:16]}… recorded at the first fetch" in known
    assert sha256 in (path.parent / "train.txt.sha256").read_text()


def test_tables_become_prompt_files_without_repetitions(address, tmp_path, monkeypatch, cli):
    table = pinned(f"{address}/table.tsv", TABLE, read=SETS["partiprompts"].heldout.read)  # type: ignore[union-attr]
    monkeypatch.setattr(prompt_sets, "SETS", {"mine": PromptSet(about="", heldout=table)})
    said = cli.done("prompts", "mine", "--cache", str(tmp_path))
    path = tmp_path / "mine" / "heldout_prompts.txt"
    assert f"data.heldout={path}  (sha256 " in said
    assert path.read_text() == 'a cat\na "red" dog\n'


def test_every_published_set_is_pinned():
    sources = [source for each in SETS.values() for source in (each.train, each.heldout) if source]
    assert len(sources) == 10
    assert all(len(source.sha256 or "") == 64 or len(source.blob or "") == 40 for source in sources)
    assert all(source.url.startswith("https://") for source in sources)
