"""A few combinations that hold every pair of values (a covering array of strength two), chosen greedily."""

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np


def cover_pairs(rows: Sequence[Sequence[Any]]) -> list[int]:
    """Indices of rows that together hold every pair of values, in two columns, that any row holds. The first row is always among them.

    Each choice holds most pairs that are missing still; of equals it is the first, so the same rows give the same choice.
    """
    if not rows:
        return []
    numbers: dict[tuple, int] = {}
    pairs = [[numbers.setdefault((a, b, row[a], row[b]), len(numbers)) for a, b in combinations(range(len(row)), 2)] for row in rows]
    held = np.array(pairs, np.int64).reshape(len(rows), -1)
    is_missing = np.ones(len(numbers), bool)
    chosen, best = [], 0
    while True:
        chosen.append(best)
        is_missing[held[best]] = False
        if not is_missing.any():
            return chosen
        best = int(is_missing[held].sum(axis=1).argmax())
