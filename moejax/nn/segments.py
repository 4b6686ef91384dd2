"""Layers whose windows are known to the compiler, in few loops: a stack is cut where its pattern of windows breaks.

windows   F w w F w w w F w w w F        F: full attention
segments  F|w w|F|w w w F x 2            a loop each, its period unrolled: 1 + 1 + 1 + 4 compiled blocks for 12 layers
"""

from typing import NamedTuple

Window = int | None
"""Tokens that a query sees; None where the compiler does not know."""


class Segment(NamedTuple):
    """Consecutive layers: the windows of one period, and how often it runs."""

    period: tuple[Window, ...]
    repeats: int

    @property
    def num_layers(self) -> int:
        return len(self.period) * self.repeats


def split(windows: tuple[Window, ...]) -> tuple[Segment, ...]:
    """The segments with the fewest compiled blocks in all; of those, the fewest segments."""
    best: list[tuple[int, tuple[Segment, ...]]] = [(0, ())]
    for end in range(1, len(windows) + 1):
        options = []
        for start in range(end):
            period = _period(windows[start:end])
            options.append((best[start][0] + len(period), (*best[start][1], Segment(period, (end - start) // len(period)))))
        best.append(min(options, key=lambda option: (option[0], len(option[1]))))
    return best[-1][1]


def _period(windows: tuple[Window, ...]) -> tuple[Window, ...]:
    """The shortest tuple that gives the windows when repeated."""
    lengths = (n for n in range(1, len(windows) + 1) if len(windows) % n == 0)
    return windows[: next(n for n in lengths if windows[:n] * (len(windows) // n) == windows)]
