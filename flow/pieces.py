"""How a batch that is too large for one pass is cut."""


def even_pieces(count: int, most: int | None) -> list[slice]:
    """Cut `count` rows into as few pieces of at most `most` rows as possible, whose sizes differ by at most one.

    A small remainder would be dear: on a CPU, one sample of a small model takes as long as five in one forward.

    Args:
        count: number of rows.
        most: most rows of a piece; None for one piece.

    Returns:
        The pieces in order; none if there are no rows.
    """
    number = -(-count // most) if most else min(count, 1)
    return [slice(count * piece // number, count * (piece + 1) // number) for piece in range(number)]


def largest_piece(count: int, most: int | None) -> int:
    """Return the rows of the largest of the even pieces of `count` rows, with at most `most` rows each."""
    return max((piece.stop - piece.start for piece in even_pieces(count, most)), default=0)
