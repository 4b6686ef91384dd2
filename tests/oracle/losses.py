"""One step's losses and their gradients in float64, over the whole global batch at once."""

import math
from dataclasses import dataclass

import autograd.numpy as np
from autograd import grad

from moejax.config import ModelConfig
from tests.oracle.layout import Layout
from tests.oracle.model import Routes, Routing, forward, largest_demand, logsumexp


@dataclass
class StepOracle:
    """Everything one step should report. Per-layer values have one entry per MoE layer."""

    total: float
    """Cross-entropy plus the weighted other losses, summed over layers: what is differentiated."""
    ce: float
    z_loss: float
    """Mean squared logsumexp of the head's logits, without its weight."""
    balance: np.ndarray
    router_z: np.ndarray
    counts: np.ndarray
    """Routes of real tokens before any drop, [L_moe, E]."""
    dropped: np.ndarray
    """Routes of real tokens that were dropped, [L_moe]."""
    demand: float
    """Rows asked for over capacity, of the most wanted rank in any layer and microbatch."""
    margin: float
    """Smallest relative gap in any router between the last expert chosen and the first one left out."""
    routes: list[Routes]
    logits: np.ndarray
    gradients: dict[str, np.ndarray]
    """Of total, by dotted parameter name; empty if they were not asked for."""


def flatten(tree, prefix="") -> dict:
    """Dotted name -> leaf of a nested dict."""
    flat = {}
    for name, value in tree.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


def nest(names, leaves) -> dict:
    """Undo flatten."""
    tree = {}
    for name, leaf in zip(names, leaves, strict=True):
        *folders, last = name.split(".")
        place = tree
        for folder in folders:
            place = place.setdefault(folder, {})
        place[last] = leaf
    return tree


def balance_loss(routing: Routing, segment_ids, config: ModelConfig, layout: Layout):
    """Sum over groups of (E / k) * sum_e count_e * mean score_e, over the step's real tokens. Counts carry no gradient."""
    moe, kind = config.moe, config.moe.router.balance_loss
    if kind == "none":
        return 0.0
    batch_size, length = segment_ids.shape
    scores = routing.balance_scores.reshape(batch_size, length, moe.num_experts)
    experts = routing.routes.experts.reshape(batch_size, length, moe.top_k)
    total = 0.0
    for rows in layout.groups(batch_size, kind):
        real = segment_ids[rows] != 0
        if real.any():
            counts = np.bincount(experts[rows][real].reshape(-1), minlength=moe.num_experts)
            total = total + moe.num_experts / moe.top_k * np.sum(counts * np.mean(scores[rows][real], axis=0))
    return total / max(1, np.sum(segment_ids != 0))


def losses(params, bias, batch, config: ModelConfig, layout: Layout, routes: list[Routes] | None):
    logits, trace = forward(params, bias, batch, config, layout, routes)
    labels, real = batch["labels"].reshape(-1), (batch["segment_ids"] != 0).reshape(-1)
    labelled = labels >= 0
    flat = logits.reshape(len(labels), -1)
    lse = logsumexp(flat)
    target = flat[np.arange(len(labels)), np.maximum(labels, 0)]
    num_labels, num_real = max(1, labelled.sum()), max(1, real.sum())
    ce = np.sum(np.where(labelled, lse - target, 0.0)) / num_labels
    z_loss = np.sum(np.where(labelled, lse**2, 0.0)) / num_labels
    balance = [balance_loss(routing, batch["segment_ids"], config, layout) for routing in trace]
    router_z = [np.sum(np.where(real, logsumexp(r.logits) ** 2, 0.0)) / num_real for r in trace]
    total = ce + config.z_loss_weight * z_loss
    for of_layer, z_of_layer in zip(balance, router_z, strict=True):
        total = total + config.moe.router.balance_loss_weight * of_layer + config.moe.router.z_loss_weight * z_of_layer
    return total, (ce, z_loss, balance, router_z, trace, logits)


def step_oracle(
    params, bias, batch, config: ModelConfig, layout: Layout | None = None, *, routes: list[Routes] | None = None, gradients: bool = True
) -> StepOracle:
    """Losses, counts and gradients of one step on the global batch [G, T]; params a nested dict, bias [L_moe, E] or None."""
    layout = layout or Layout()
    batch = {name: np.asarray(value) for name, value in batch.items()}
    flat = {name: np.asarray(leaf).astype(np.float64) for name, leaf in flatten(params).items()}
    bias = np.zeros((config.num_moe_layers, 1)) if bias is None else np.asarray(bias).astype(np.float64)
    total, (ce, z_loss, balance, router_z, trace, logits) = losses(nest(flat, flat.values()), bias, batch, config, layout, routes)
    routes = [routing.routes for routing in trace]
    derivative = {}
    if gradients:
        values = grad(lambda leaves: losses(nest(flat, leaves), bias, batch, config, layout, routes)[0])(list(flat.values()))
        derivative = dict(zip(flat, values, strict=True))
    real = (batch["segment_ids"] != 0).reshape(-1)
    num_experts = config.moe.num_experts if config.moe else 0
    return StepOracle(
        total=float(total),
        ce=float(ce),
        z_loss=float(z_loss),
        balance=np.array([float(x) for x in balance]),
        router_z=np.array([float(x) for x in router_z]),
        counts=np.array([np.bincount(r.experts[real].reshape(-1), minlength=num_experts) for r in routes]),
        dropped=np.array([(~r.kept[real]).sum() for r in routes]),
        demand=largest_demand(routes, batch["segment_ids"], config.moe, layout) if config.moe else 0.0,
        margin=min((routing.margin for routing in trace), default=math.inf),
        routes=routes,
        logits=logits,
        gradients=derivative,
    )
