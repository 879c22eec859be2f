"""A disk that takes only a part of a line or a file keeps none of it."""

import os

import pytest

from deploy.folder.files import append_whole, write_whole


def test_text_is_added_at_the_end(tmp_path):
    for text in ("a\n", "b\n", ""):
        append_whole(tmp_path / "lines", text)
    assert (tmp_path / "lines").read_text() == "a\nb\n"


def test_a_part_of_a_line_is_taken_back(tmp_path):
    import resource

    path = tmp_path / "lines"
    append_whole(path, "x" * 4000 + "\n")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            append_whole(path, "y" * 4000 + "\n")
        assert path.stat().st_size == 4001
        append_whole(path, "z\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_text().endswith("x\nz\n")
    assert os.stat(path).st_size == 4003


def test_a_file_is_replaced_whole_or_stays_as_it_was(tmp_path):
    import resource

    path = tmp_path / "file"
    write_whole(path, "text")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_whole(path, b"y" * 5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_text() == "text"
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
    write_whole(path, b"bytes")
    assert path.read_bytes() == b"bytes"
