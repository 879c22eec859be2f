"""Even pieces: as few as possible, none larger than allowed, sizes that differ by at most one."""

from hypothesis import given
from hypothesis import strategies as st

from flow.pieces import even_pieces


@given(count=st.integers(0, 500), most=st.none() | st.integers(1, 100))
def test_pieces_cover_all_rows_evenly(count: int, most: int | None) -> None:
    pieces = even_pieces(count, most)
    assert [row for piece in pieces for row in range(piece.start, piece.stop)] == list(range(count))
    sizes = [piece.stop - piece.start for piece in pieces]
    assert len(sizes) == (0 if not count else 1 if most is None else -(-count // most))
    assert not sizes or max(sizes) - min(sizes) <= 1
    assert max(sizes, default=0) <= (most or count)


def test_a_single_row_more_than_allowed_is_no_forward_of_its_own() -> None:
    assert even_pieces(97, 48) == [slice(0, 32), slice(32, 64), slice(64, 97)]
