"""What a program computed, held against the reference: losses, counts, drops, and gradients by parameter, layer and expert."""

import dataclasses
from dataclasses import dataclass

import numpy as np

from moejax.testing import TOLERANCES
from moejax.verify.reference import Truth

LIMITS = dataclasses.replace(TOLERANCES["float32"], leaf=1e-4)
"""Rounding reaches 2e-5 in the gradients of nine layers; a fault is a hundredth or more."""

_METRICS = {
    "train/loss": "cross-entropy",
    "train/z_loss": "z-loss",
    "moe/balance_loss": "balance loss",
    "moe/router_z_loss": "router z-loss",
}


@dataclass(frozen=True)
class Difference:
    """One number that is not as it should be. error: relative. layer: MoE or dense block of the parameter, counted from 0.

    kind: "routes", "drops", "loss" or "gradient". what: a loss, or the dotted name of a parameter.
    """

    kind: str
    what: str
    error: float
    got: float
    expected: float
    layer: int | None = None
    expert: int | None = None

    @property
    def where(self) -> str:
        place = "" if self.layer is None else f", layer {self.layer}"
        return f"{self.what}{place}" + ("" if self.expert is None else f", expert {self.expert}")


@dataclass(frozen=True)
class Errors:
    """Largest relative errors of one case, and everything beyond the limits in the order in which it would arise.

    loss, balance: of the cross-entropy with its z-loss, and of the router's losses. gradient: of any slice. drops: routes dropped too much
    or too little, summed over layers.
    """

    loss: float
    balance: float
    gradient: float
    drops: int
    differences: tuple[Difference, ...]


def compare(metrics: dict[str, np.ndarray], gradients: dict[str, np.ndarray], truth: Truth) -> Errors:
    """metrics: of the step. gradients: float32, dotted name -> array of global shape."""
    losses = {name: _loss(name, metrics[metric], truth) for metric, name in _METRICS.items() if metric in metrics}
    differences = [*_counts(metrics, truth)]
    differences += [loss for loss in losses.values() if not loss.error <= LIMITS.scalar]
    slices = sorted(_slices(gradients, truth.gradients["total"]), key=_from_the_end)
    differences += [piece for piece in slices if not piece.error <= LIMITS.leaf]
    return Errors(
        loss=_worst(losses[name].error for name in ("cross-entropy", "z-loss")),
        balance=_worst(loss.error for name, loss in losses.items() if name not in ("cross-entropy", "z-loss")),
        gradient=_worst(piece.error for piece in slices),
        drops=int(sum(abs(d.got - d.expected) for d in differences if d.kind == "drops")),
        differences=tuple(differences),
    )


def _loss(name: str, value: np.ndarray, truth: Truth) -> Difference:
    got, expected = float(value), truth.losses[name]
    return Difference("loss", name, abs(got - expected) / max(abs(expected), 1e-6), got, expected)


def _counts(metrics: dict[str, np.ndarray], truth: Truth) -> list[Difference]:
    """Routes and drops, layer by layer: whole numbers, so any difference counts."""
    if truth.report is None:
        return []
    found, routes = [], truth.report.counts.sum(axis=1)
    got = np.rint(np.asarray(metrics["moe/expert_load"], np.float64) * routes[:, None])
    for layer, expert in zip(*np.nonzero(got != truth.report.counts), strict=True):
        have, want = float(got[layer, expert]), float(truth.report.counts[layer, expert])
        found.append(Difference("routes", "routes to an expert", abs(have - want) / max(want, 1), have, want, int(layer), int(expert)))
    dropped = np.rint(np.asarray(metrics["moe/layer_drop"], np.float64) * routes)
    for layer in np.flatnonzero(dropped != truth.report.dropped):
        have, want = float(dropped[layer]), float(truth.report.dropped[layer])
        found.append(Difference("drops", "dropped routes", abs(have - want) / max(want, 1), have, want, int(layer)))
    return sorted(found, key=lambda d: (d.layer, d.kind == "drops"))


def _slices(ours: dict[str, np.ndarray], truth: dict[str, np.ndarray]) -> list[Difference]:
    """The largest error of every parameter of every layer and expert, relative to what is large there."""
    if set(ours) != set(truth):
        raise ValueError(f"parameters differ: {sorted(set(ours) ^ set(truth))}")
    everywhere = max(float(np.abs(value).max(initial=0.0)) for value in truth.values())
    found = []
    for name, expected in truth.items():
        in_all = float(np.abs(expected).max(initial=0.0))
        for index in np.ndindex(expected.shape[: _depth(name)]):
            want, got = expected[index], ours[name][index].astype(np.float64)
            deviation = np.abs(got - want)
            at = np.unravel_index(int(np.argmax(np.where(np.isnan(deviation), np.inf, deviation))), want.shape)
            # A gradient that is small beside others is a sum of large terms, and as uncertain as they are.
            size = max(float(np.abs(want).max()), 0.1 * in_all, LIMITS.floor * everywhere, 1e-30)
            layer, expert = (*index, None, None)[:2]
            found.append(Difference("gradient", name, float(deviation[at]) / size, float(got[at]), float(want[at]), layer, expert))
    return found


def _depth(name: str) -> int:
    """Leading dims of a parameter that are looked at one by one: layers, and experts."""
    return 2 if ".experts." in name else 1 if "_blocks." in name else 0


def _from_the_end(piece: Difference) -> tuple:
    """The order in which a backward pass makes gradients, so that the first wrong one is nearest to its cause."""
    parts = ("head", "moe_blocks", "dense_blocks", "embed")
    inside = (".experts.", ".shared.", ".router.", "ffn", "mlp", "attention")
    part = next(i for i, name in enumerate((*parts, "")) if piece.what.startswith(name))
    place = next(i for i, name in enumerate((*inside, "")) if name in piece.what)
    return part, -(piece.layer or 0), place, piece.what, piece.expert or 0


def _worst(errors) -> float:
    return float(np.max([0.0, *errors]))  # NaN stays NaN
