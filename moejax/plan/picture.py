"""A plan as a picture: what fills one GPU's memory, by arithmetic, by XLA, and with the nearest settings that fit."""

from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from moejax.plan.estimate import ARGUMENTS, USABLE, merged, usable_bytes
from moejax.plan.plan import Plan

_GIB = 2**30
_COLOURS = {
    "parameters": "#1f4e8c",
    "optimizer": "#4f86c6",
    "router, counters, batch": "#a9c4e4",
    "gradient sums": "#c2571a",
    "gradients": "#eb9a5f",
    "kept activations": "#3a9a5b",
    "between stages": "#b9a44c",
    "working set": "#8fcf9f",
    "packing": "#d4d7db",
}
_RED, _GREY = "#b03030", "#8a8f98"
_LABEL = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
_STYLE = {"font.size": 10, "axes.titlesize": 11, "axes.titleweight": "bold", "axes.titlelocation": "left", "axes.spines.top": False,
          "axes.spines.right": False, "axes.axisbelow": True}  # fmt: skip


def draw_plan(plan: Plan, path: Path) -> Path:
    """Draw the memory of one GPU as stacked bars under the limit, into a file whose ending names the format."""
    bars = _bars(plan)
    gpu, mesh = plan.estimate.gpu, plan.config.mesh
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(11, 1.9 + 0.75 * len(bars)), layout="constrained", dpi=130)
        axes = figure.subplots()
        for row, parts in enumerate(bars.values()):
            left = 0.0
            for name, size in parts.items():
                axes.barh(row, size / _GIB, left=left, height=0.62, color=_COLOURS[name], edgecolor="white", linewidth=0.8)
                left += size / _GIB
            place = {"xytext": (6, 0), "textcoords": "offset points", "va": "center"}
            axes.annotate(f"{left:,.1f}", (left, row), fontweight="bold", bbox=_LABEL, **place)
        usable, whole = usable_bytes(gpu) / _GIB, gpu.memory_bytes / _GIB
        axes.axvline(usable, color=_RED, linewidth=1.4)
        axes.axvspan(usable, whole, color=_RED, alpha=0.08, linewidth=0)
        axes.axvline(whole, color=_GREY, linewidth=1.0, linestyle=":")
        axes.set_yticks(range(len(bars)), list(bars))
        axes.invert_yaxis()
        most = max([whole, *(sum(parts.values()) / _GIB for parts in bars.values())])
        axes.set_xlim(0, most * 1.08)
        axes.set_xlabel(f"GiB of one GPU (red line: {USABLE} of its {whole:,.0f} may be filled)")
        verdict = f"fits, {plan.margin_bytes / _GIB:,.1f} GiB to spare" if plan.fits else f"{-plan.margin_bytes / _GIB:,.1f} GiB too much"
        axes.set_title(f"{plan.config.name} on {mesh.num_devices:,} x {gpu.name}: {verdict}")
        used = [name for name in _COLOURS if any(name in parts for parts in bars.values())]
        handles = [Patch(color=_COLOURS[name], label=name) for name in used]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(used), frameon=False, handlelength=1.0, columnspacing=1.2)
        figure.savefig(path)
    return path


def _bars(plan: Plan) -> dict[str, dict[str, int]]:
    """Parts of each bar by its label."""
    bars = {"arithmetic": merged(plan.estimate.memory)}
    if (xla := plan.compiled) is not None:
        given = merged({name: plan.estimate.memory[name] for name in ARGUMENTS})
        bars["XLA"] = given | {name: xla.roles[name] for name in _COLOURS if name in xla.roles} | {"packing": xla.packing_bytes}
    for suggestion in plan.suggestions:
        bars[suggestion.words.replace(" --", "\n--")] = merged(suggestion.memory)
    return bars
