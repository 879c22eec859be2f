"""Few cases instead of a full product: every two values of different factors meet in at least one case."""

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest


def pairwise(**factors: Sequence[Any]) -> list[Any]:
    """Choose cases of a product so that every pair of values of two factors is in one of them.

    Greedy and always in the same order, so the cases are the same in every process.
    """
    wanted = {
        ((one, i), (other, j))
        for one, other in combinations(factors, 2)
        for i, j in product(range(len(factors[one])), range(len(factors[other])))
    }
    rows = {
        row: set(combinations(zip(factors, row, strict=True), 2))
        for row in product(*(range(len(values)) for values in factors.values()))
    }
    cases = []
    while wanted:
        best = max(rows, key=lambda row: len(rows[row] & wanted))
        wanted -= rows.pop(best)
        values = [values[index] for values, index in zip(factors.values(), best, strict=True)]
        cases.append(pytest.param(*values, id="-".join(map(_name, values))))
    return cases


def _name(value: Any) -> str:
    return "-".join(map(str, value.values())) if isinstance(value, dict) else str(value)
