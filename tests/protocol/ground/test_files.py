"""A disk that takes only a part of a line or a file keeps none of it; names by iteration."""

import os

import pytest

from protocol.ground.files import append_whole, by_iteration, iteration_name, whole, write_whole


def test_text_is_added_at_the_end(tmp_path):
    for text in ("a\n", "b\n", ""):
        append_whole(tmp_path / "lines", text)
    assert (tmp_path / "lines").read_text() == "a\nb\n"


def test_what_is_appended_after_half_a_line_begins_a_line(tmp_path):
    path = tmp_path / "lines"
    path.write_text('{"whole": 1}\n{"ha')
    append_whole(path, '{"next": 2}\n')
    append_whole(path, '{"last": 3}\n')
    assert path.read_text().splitlines() == ['{"whole": 1}', '{"ha', '{"next": 2}', '{"last": 3}']


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


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_block_that_raises_leaves_what_was_there_and_nothing_else(tmp_path, is_shared):
    def write() -> None:
        with whole(tmp_path / "held", is_shared=is_shared) as partial:
            partial.mkdir()
            (partial / "half").write_text("x")
            raise ZeroDivisionError

    (tmp_path / "held").mkdir()
    with pytest.raises(ZeroDivisionError):
        write()
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == ["held"]


def test_two_processes_that_share_a_path_do_not_write_to_the_same_file(tmp_path):
    with whole(tmp_path / "file", is_shared=True) as one, whole(tmp_path / "file", is_shared=True) as other:
        assert one != other
        one.write_text("one")
        other.write_text("other")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_link_is_replaced_and_its_target_stays(tmp_path):
    (tmp_path / "target").mkdir()
    for _ in range(2):
        with whole(tmp_path / "link") as partial:
            partial.symlink_to("target", target_is_directory=True)
    assert (tmp_path / "link").readlink().name == "target"
    assert (tmp_path / "target").is_dir()


def test_what_belongs_to_an_iteration_is_listed_by_its_number(tmp_path):
    assert iteration_name(40, ".npz") == "iteration_000040.npz"
    for name in ("iteration_1000000", "iteration_999999", "iteration_000040", "iteration_000040_best", "iteration_40"):
        (tmp_path / name).mkdir()
    (tmp_path / "iteration_000007.npz").touch()
    assert by_iteration(tmp_path) == {i: tmp_path / iteration_name(i) for i in (40, 999999, 1000000)}
    assert list(by_iteration(tmp_path)) == [40, 999999, 1000000], "not in the order of the names"
    assert list(by_iteration(tmp_path, ".npz")) == [7]
    assert by_iteration(tmp_path / "none") == {}
