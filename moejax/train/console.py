"""What the user sees: a live panel on a terminal, one plain line per logged step elsewhere, sentences in both."""

import itertools
from collections import deque
from types import TracebackType
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

_BLOCKS = "▁▂▃▄▅▆▇█"
_MISSING = "-"


class Screen:
    """Owns the terminal while a run lasts."""

    def __init__(self, console: Console | None = None):
        self._console = Console(highlight=False) if console is None else console
        self._live: Live | None = None
        self._title = ""
        self._total = 0
        self._newest = -1
        self._losses: deque[float] = deque(maxlen=400)

    def __enter__(self) -> "Screen":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.end_live()

    def say(self, text: str) -> None:
        """Print a sentence, above the live panel if there is one."""
        self._console.print(text, markup=False, soft_wrap=True)

    def start_live(self, title: str, total: int) -> None:
        """Steps follow, up to `total`."""
        self._title, self._total = title, total
        if self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=4)
            self._live.start()

    def end_live(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def show_step(self, facts: dict[str, Any], *, is_logged: bool) -> None:
        """Show a finished step, or more about the one shown. facts: its record, with ETA, skipped steps, held-out loss."""
        if facts["step"] > self._newest and facts.get("train/loss") is not None:
            self._losses.append(facts["train/loss"])
        self._newest = facts["step"]
        if self._live is not None:
            self._live.update(panel(facts, self._losses, self._title, self._total))
        elif is_logged:
            self.say(line(facts, self._total))


def line(facts: dict[str, Any], total: int) -> str:
    """One logged step in one line of plain text."""
    width = len(str(total))
    parts = [f"step {facts['step']:>{width}}/{total}", f"loss {_figure(facts, 'train/loss', '.4f')}"]
    parts += [f"{value} {unit}" for value, unit in _speed(facts)]
    parts += [f"grad {_figure(facts, 'optim/grad_norm', '.3f')}", f"lr {_figure(facts, 'optim/lr', '.2e')}"]
    if "moe/max_load" in facts:
        parts += [f"drop {_percent(facts, 'moe/drop_fraction')}", f"load {_figure(facts, 'moe/max_load', '.2f')}x"]
    parts += [f"{_figure(facts, 'speed/step_s', '.3g')} s/step", f"ETA {duration(facts.get('eta_s'))}"]
    if facts.get("skipped"):
        parts.append(f"skipped {facts['skipped']}")
    return "  ".join(parts)


def panel(facts: dict[str, Any], losses: deque[float], title: str, total: int) -> RenderableType:
    """The same figures as a panel with a progress bar and the loss over time."""
    head = Table.grid(expand=True, padding=(0, 2))
    head.add_column(ratio=1)
    head.add_column(justify="right")
    position = f"step {facts['step']}/{total}   {100 * facts['step'] // total} %   ETA {duration(facts.get('eta_s'))}"
    head.add_row(ProgressBar(total=total, completed=facts["step"]), position)
    columns = (
        [
            ("loss", _figure(facts, "train/loss", ".4f")),
            ("held-out loss", _figure(facts, "eval/loss", ".4f")),
            ("gradient norm", _figure(facts, "optim/grad_norm", ".3f")),
            ("learning rate", _figure(facts, "optim/lr", ".2e")),
        ],
        [*((unit, value) for value, unit in _speed(facts)), ("s/step", _figure(facts, "speed/step_s", ".3g"))],
        [
            ("max/mean load", f"{_figure(facts, 'moe/max_load', '.2f')}x" if "moe/max_load" in facts else _MISSING),
            ("dropped", _percent(facts, "moe/drop_fraction")),
            ("skipped steps", str(facts.get("skipped", 0))),
            ("tokens", short(facts["tokens_seen"]) if "tokens_seen" in facts else _MISSING),
        ],
    )
    body = Table.grid(expand=True, padding=(0, 3))
    for _ in columns:
        body.add_column(ratio=1)
    body.add_row(*(_pairs(column) for column in columns))
    return Panel(Group(head, "", body, "", _Sparkline(losses)), title=title, border_style="cyan", padding=(0, 1))


def _pairs(figures: list[tuple[str, str]]) -> Table:
    table = Table.grid(expand=True, padding=(0, 1))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(style="bold", justify="right", no_wrap=True)
    for name, value in figures:
        table.add_row(name, value)
    return table


class _Sparkline:
    """The loss of recent steps in one row as wide as the terminal allows."""

    def __init__(self, values: deque[float]):
        self._values = list(values)

    def __rich_console__(self, console: Console, options: Any) -> Any:
        width = max(1, min(options.max_width, 100) - 13)
        yield Text.assemble(("recent loss  ", "dim"), (sparkline(self._values, width), "cyan"))


def sparkline(values: list[float], width: int) -> str:
    """Block characters for up to `width` means of neighbouring values, scaled from the smallest to the largest."""
    if not values:
        return ""
    width = min(width, len(values))
    bounds = [len(values) * i // width for i in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(bounds)]
    low, span = min(means), (max(means) - min(means)) or 1.0
    return "".join(_BLOCKS[round((mean - low) / span * (len(_BLOCKS) - 1))] for mean in means)


def short(number: float) -> str:
    """Three or four digits and a letter: 950, 12.3k, 47.2M, 7.1B."""
    for limit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= limit:
            return f"{number / limit:.1f}{letter}"
    return f"{number:.0f}"


def duration(seconds: float | None) -> str:
    """Time as 42s, 3m05s, 2h07m or 3d04h."""
    if seconds is None:
        return _MISSING
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def _speed(facts: dict[str, Any]) -> list[tuple[str, str]]:
    tokens, flops, mfu = (facts.get(f"speed/{name}") for name in ("tokens_per_s", "model_flops_per_s", "mfu"))
    return [
        (_MISSING if tokens is None else short(tokens), "tok/s"),
        (_MISSING, "TFLOP/s")
        if flops is None
        else (f"{flops / 1e12:.3g}", "TFLOP/s")
        if flops >= 1e11
        else (f"{flops / 1e9:.3g}", "GFLOP/s"),
        (_MISSING if mfu is None else f"{100 * mfu:.1f} %", "MFU"),
    ]


def _figure(facts: dict[str, Any], name: str, form: str) -> str:
    if name not in facts:
        return _MISSING
    return "not finite" if facts[name] is None else format(facts[name], form)


def _percent(facts: dict[str, Any], name: str) -> str:
    return f"{100 * facts[name]:.1f} %" if facts.get(name) is not None else _MISSING
