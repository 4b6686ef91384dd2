"""One picture of a run, drawn from its metrics.jsonl: loss, expert load, optimizer, speed."""

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from moejax.train.console import short
from moejax.train.metrics import METRICS_FILE, read_records

PICTURE_FILE = "run.png"

_BLUE, _ORANGE, _GREEN, _GREY, _RED = "#2f6db3", "#e07b39", "#3a9a5b", "#8a8f98", "#b03030"
_STYLE = {"font.size": 10, "axes.titlesize": 11, "axes.titleweight": "bold", "axes.titlelocation": "left", "axes.spines.top": False,
          "axes.spines.right": False, "axes.grid": True, "grid.color": "#e6e8eb", "axes.axisbelow": True}  # fmt: skip
_RECENT = 20  # logged steps whose expert load is averaged in the heat map


def draw_run(run_dir: Path) -> Path:
    """Draw run.png into a run directory and return its path."""
    records = read_records(run_dir / METRICS_FILE)
    train = [record for record in records if record["kind"] == "train"]
    logged = [record for record in train if "speed/step_s" in record]
    is_sparse = any("moe/expert_load" in record for record in logged)
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(13, 7.5) if is_sparse else (13, 4), layout=_layout(), dpi=130)
        axes = figure.subplots(2 if is_sparse else 1, 3, squeeze=False)
        _draw_loss(axes[0, 0], records, train)
        _draw_optimizer(axes[0, 1], train)
        _draw_speed(axes[0, 2], logged)
        if is_sparse:
            _draw_load(figure, axes[1, 0], logged)
            _draw_imbalance(axes[1, 1], train)
            _draw_drops(axes[1, 2], train)
        figure.suptitle(_title(run_dir, records, train), x=0.012, ha="left", fontsize=13)
        path = run_dir / PICTURE_FILE
        figure.savefig(path)
    return path


def _layout() -> ConstrainedLayoutEngine:
    return ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1)


def _title(run_dir: Path, records: list[dict[str, Any]], train: list[dict[str, Any]]) -> str:
    start = next((record for record in reversed(records) if record["kind"] == "start"), {})
    parts = [run_dir.absolute().name]
    if "parameters" in start:
        parts.append(f"{short(start['parameters'])} parameters, {short(start['active_parameters'])} active")
        mesh = "  ".join(f"{axis} {size}" for axis, size in start["mesh"].items() if size > 1)
        parts.append(f"{start['devices']} x {start['device_kind']}" + (f" ({mesh})" if mesh else ""))
    parts.append(f"{short(train[-1]['tokens_seen'])} tokens")
    return "    ".join(parts)


def _draw_loss(axes: Axes, records: list[dict[str, Any]], train: list[dict[str, Any]]) -> None:
    steps, losses = _series(train, "train/loss")
    axes.plot(steps, losses, color=_BLUE, alpha=0.25, linewidth=0.8)
    axes.plot(steps, _smooth(losses), color=_BLUE, label="training, smoothed")
    eval_steps, eval_losses = _series([record for record in records if record["kind"] == "eval"], "eval/loss")
    if eval_steps.size:
        axes.plot(eval_steps, eval_losses, "o-", color=_ORANGE, markersize=5, label=f"held out: {eval_losses[-1]:.3f} at the end")
    unigram = next((record["unigram_entropy"] for record in records if record["kind"] == "start" and "unigram_entropy" in record), None)
    if unigram is not None:
        axes.axhline(unigram, color=_GREY, linestyle="--", linewidth=1, label=f"unigram entropy: {unigram:.3f}")
    _finish(axes, "Loss", "nats per token")
    axes.legend(loc="upper right", frameon=False)


def _draw_optimizer(axes: Axes, train: list[dict[str, Any]]) -> None:
    steps, norms = _series(train, "optim/grad_norm")
    axes.plot(steps, norms, color=_BLUE, alpha=0.25, linewidth=0.8)
    axes.plot(steps, _smooth(norms), color=_BLUE)
    if (norms > 0).any():
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
    skipped, _ = _series([record for record in train if record.get("optim/skipped")], "step")
    _finish(axes, "Optimizer (▼ skipped step)" if skipped.size else "Optimizer", "gradient norm")
    axes.scatter(skipped, [0.97] * skipped.size, marker="v", color=_RED, transform=axes.get_xaxis_transform(), clip_on=False)
    rate = axes.twinx()
    rate.plot(*_series(train, "optim/lr"), color=_ORANGE)
    rate.set_ylabel("learning rate", color=_ORANGE)
    rate.set_ylim(bottom=0)
    rate.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
    rate.grid(False)
    rate.spines["right"].set_visible(True)
    axes.yaxis.label.set_color(_BLUE)


def _draw_speed(axes: Axes, logged: list[dict[str, Any]]) -> None:
    steps, rates = _series(logged, "speed/tokens_per_s")
    axes.plot(steps, rates / 1e3, color=_GREEN)
    axes.set_ylim(bottom=0)
    _finish(axes, "Throughput", "thousand tokens per second")
    _, mfu = _series(logged, "speed/mfu")
    if np.isfinite(mfu).any():
        axes.text(0.98, 0.05, f"MFU {100 * np.nanmedian(mfu):.1f} % (median)", transform=axes.transAxes, ha="right")


def _draw_load(figure: Figure, axes: Axes, logged: list[dict[str, Any]]) -> None:
    recent = [record for record in logged if "moe/expert_load" in record][-_RECENT:]
    load = np.mean([record["moe/expert_load"] for record in recent], axis=0)
    relative = load * load.shape[1]
    norm = TwoSlopeNorm(1.0, vmin=0.0, vmax=max(2.0, float(relative.max())))
    image = axes.imshow(relative, aspect="auto", cmap="RdBu_r", norm=norm, interpolation="nearest")
    figure.colorbar(image, ax=axes, label="load / even load", pad=0.02)
    if relative.size <= 96:
        for layer, expert in np.ndindex(relative.shape):
            axes.text(expert, layer, f"{relative[layer, expert]:.2f}", ha="center", va="center", fontsize=8)
    axes.set_title(f"Expert load, last {len(recent)} logged steps")
    axes.set_xlabel("expert")
    axes.set_ylabel("MoE layer")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.grid(False)


def _draw_imbalance(axes: Axes, train: list[dict[str, Any]]) -> None:
    for name, color, label in (("moe/max_load", _BLUE, "fullest expert"), ("moe/rank_max_load", _ORANGE, "fullest rank")):
        steps, values = _series(train, name)
        if name == "moe/rank_max_load" and np.allclose(values, 1.0):
            continue  # one rank holds all experts
        axes.plot(steps, values, color=color, alpha=0.25, linewidth=0.8)
        axes.plot(steps, _smooth(values), color=color, label=f"{label}, smoothed")
    axes.axhline(1.0, color=_GREY, linestyle="--", linewidth=1, label="even load")
    axes.set_ylim(bottom=min(1.0, axes.get_ylim()[0]))
    _finish(axes, "Load of the fullest, worst layer", "max / mean")
    axes.legend(loc="upper right", frameon=False)


def _draw_drops(axes: Axes, train: list[dict[str, Any]]) -> None:
    steps, drops = _series(train, "moe/drop_fraction")
    balance_steps, balance = _series(train, "moe/balance_loss")
    if np.nanmax(drops, initial=0.0) > 0:
        axes.plot(steps, 100 * drops, color=_BLUE)
        axes.set_ylim(bottom=0)
        _finish(axes, "Dropped routes", "percent")
        return
    axes.plot(balance_steps, balance, color=_BLUE, alpha=0.25, linewidth=0.8)
    axes.plot(balance_steps, _smooth(balance), color=_BLUE)
    axes.axhline(1.0, color=_GREY, linestyle="--", linewidth=1)
    _finish(axes, "Balance loss (nothing dropped)", "1 is even")


def _finish(axes: Axes, title: str, ylabel: str) -> None:
    axes.set_title(title)
    axes.set_xlabel("step")
    axes.set_ylabel(ylabel)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 2.5, 5, 10]))


def _series(records: list[dict[str, Any]], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of the records that have the value; a null is a gap."""
    found = [(record["step"], np.nan if record[name] is None else record[name]) for record in records if name in record]
    steps, values = np.asarray(found, np.float64).reshape(-1, 2).T
    return steps, values


def _smooth(values: np.ndarray) -> np.ndarray:
    """Exponential mean over about a hundredth of the run, corrected at the start; gaps take no part."""
    keep, mean, weight, smooth = 1 - 1 / max(1, len(values) / 100), 0.0, 0.0, []
    for value in values:
        if np.isfinite(value):
            mean, weight = keep * mean + (1 - keep) * value, keep * weight + (1 - keep)
        smooth.append(mean / weight if weight else np.nan)
    return np.asarray(smooth)
