"""How a batch that is too large for one pass is cut."""


def even_pieces(count: int, most: int | None) -> list[slice]:
    """Cut `count` rows into as few pieces of at most `most` rows as possible, whose sizes differ by at most one.

    A small remainder would be expensive: on a CPU, a forward of one state of the toy model takes nearly as long as six
    states do in a forward of 24.

    Args:
        most: most rows of a piece; None for one piece.

    Returns:
        The pieces in order; none if there are no rows.
    """
    number = -(-count // most) if most else min(count, 1)
    return [slice(count * piece // number, count * (piece + 1) // number) for piece in range(number)]
