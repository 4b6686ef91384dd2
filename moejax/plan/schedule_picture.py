"""A pipeline schedule as a picture: who runs what in which tick, and how many activations wait on each rank."""

from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from moejax.parallel.pipeline import Schedule
from moejax.plan.schedule_text import cell

_COLOURS = {
    "F": ("#4f86c6", "#a9c4e4", "#1f4e8c", "#d5e2f1"),
    "B": ("#eb9a5f", "#f6cfae", "#c2571a", "#fae6d6"),
    "W": ("#3a9a5b", "#8fcf9f"),
}
_ROWS = {False: {"F": (0.08, 0.4), "B": (0.5, 0.4)}, True: {"F": (0.04, 0.32), "B": (0.37, 0.32), "W": (0.7, 0.2)}}
"""Where in a rank's row each kind of pass is drawn and how high, without and with W."""

_STYLE = {"font.size": 9, "axes.titlesize": 11, "axes.titleweight": "bold", "axes.titlelocation": "left", "axes.spines.top": False,
          "axes.spines.right": False, "axes.spines.left": False}  # fmt: skip
_MOST_TEXT = 90  # ticks; more are too narrow for words


def draw_schedule(schedule: Schedule, path: Path) -> Path:
    """Draw it into a file whose ending names the format."""
    s = schedule
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(min(24.0, 3.5 + 0.34 * s.num_ticks), 1.4 + 0.62 * s.ranks), layout="constrained", dpi=130)
        grid = figure.add_gridspec(1, 2, width_ratios=(max(6.0, s.num_ticks / 4), 1.6))
        _draw_table(figure.add_subplot(grid[0]), s)
        _draw_waiting(figure.add_subplot(grid[1]), s)
        figure.savefig(path)
    return path


def _draw_table(axes, s: Schedule) -> None:
    for kind, (offset, height) in _ROWS[s.order.weight is not None].items():
        found = s.grid(kind)
        for tick in range(s.num_ticks):
            for rank in range(s.ranks):
                stage, microbatch = map(int, found[tick, rank])
                if stage < 0:
                    continue
                shades = _COLOURS[kind]
                chunk = [i for i, place in enumerate(s.order.place) if place == rank].index(stage)
                colour = shades[chunk % len(shades)]
                axes.add_patch(Rectangle((tick, rank + offset), 0.96, height, facecolor=colour, linewidth=0))
                if s.num_ticks <= _MOST_TEXT and height > 0.3:
                    text = cell(s, kind, stage, microbatch)
                    axes.text(tick + 0.48, rank + offset + height / 2, text, ha="center", va="center", fontsize=6)
    axes.set_xlim(0, s.num_ticks)
    axes.set_ylim(s.ranks + 0.1, 0)
    axes.set_yticks([rank + 0.5 for rank in range(s.ranks)], [f"rank {rank}" for rank in range(s.ranks)])
    axes.tick_params(left=False)
    axes.set_xlabel("tick (F forward, B backward, W gradients of weights; shades: stages of a rank)")
    stages = f", {s.virtual_stages} stages each" if s.virtual_stages > 1 else ""
    axes.set_title(f"{s.name}: {s.ranks} ranks{stages}, {s.microbatches} microbatches; ranks wait {s.bubble():.1%} of the time")


def _draw_waiting(axes, s: Schedule) -> None:
    counts = [count / s.virtual_stages for count in s.in_flight()]
    axes.barh([rank + 0.5 for rank in range(s.ranks)], counts, height=0.5, color="#6b7078")
    for rank, count in enumerate(counts):
        axes.annotate(f"{count:g}", (count, rank + 0.5), xytext=(3, 0), textcoords="offset points", va="center")
    axes.set_xlim(0, max(counts) * 1.3)
    axes.set_ylim(s.ranks + 0.1, 0)
    axes.set_yticks([])
    axes.set_xlabel("microbatches' activations")
    axes.set_title("under way")
