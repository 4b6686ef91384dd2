"""Ticks as few loops, each of which runs one program: what all ranks do in a tick is known when the step is compiled.

ticks   F F F T T T T B B B         F: forward passes only, T: forward and backward, B: backward only
loops   F x 3, T x 4, B x 3

ticks   T H T H T H                 H: the last stage is among the forward passes, so the head runs too
loops   (T x 1, H x 1) x 3
"""

import itertools
from collections.abc import Hashable, Sequence
from typing import NamedTuple

_LONGEST = 4


class Loop(NamedTuple):
    """first: tick. runs: kind and number of the ticks that follow each other in one turn. repeats: turns."""

    first: int
    runs: tuple[tuple[Hashable, int], ...]
    repeats: int

    @property
    def ticks_of_a_turn(self) -> int:
        return sum(count for _, count in self.runs)


def loops(kinds: Sequence[Hashable]) -> list[Loop]:
    """Loops that run ticks of these kinds in order: at each place the pattern of at most four runs that goes on longest."""
    runs = [(kind, len(list(same))) for kind, same in itertools.groupby(kinds)]
    found, at, tick = [], 0, 0
    while at < len(runs):
        pattern, repeats = _longest_repetition(runs, at)
        found.append(Loop(tick, pattern, repeats))
        at += len(pattern) * repeats
        tick += found[-1].ticks_of_a_turn * repeats
    return found


def _longest_repetition(runs: list[tuple[Hashable, int]], at: int) -> tuple[tuple[tuple[Hashable, int], ...], int]:
    best, repeats = (runs[at],), 1
    for length in range(2, _LONGEST + 1):
        pattern, count = runs[at : at + length], 1
        while runs[at + count * length : at + (count + 1) * length] == pattern:
            count += 1
        if count > 1 and count * length > len(best) * repeats:
            best, repeats = tuple(pattern), count
    return best, repeats
