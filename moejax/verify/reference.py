"""The truth of a step: the model's own layers in float64 on one device, every expert on every token, every loss from its definition.

Of the program under test it shares what the author of a model writes (embedding, attention, norms, router, one expert, head), and none of
what runs it: no mesh, dispatch, capacity plan, pipeline, microbatch loop, rematerialisation, kernel or custom derivative. What depends on
the mesh is taken from its definition: which routes of a microbatch find room on which rank, and over which tokens a balance loss is taken.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from moejax.config import TrainConfig
from moejax.nn import Transformer, tokens_of
from moejax.testing import named_leaves
from moejax.verify.float64 import in_float64

LOSSES = ("cross-entropy", "z-loss", "balance loss", "router z-loss")
"""Terms of the loss; the second and the router's two have weights."""


@dataclass(frozen=True)
class Layout:
    """What of a mesh a step's result may depend on: rank dp_index * ep + ep_index has that slice of each microbatch's sequences."""

    dp: int
    ep: int
    microbatches: int

    def places(self, sequences: int, tokens: int, kind: str, factor: float | None) -> "Places":
        """The same for a batch of that many sequences and tokens in each, a kind of balance loss, and a capacity factor."""
        row = np.arange(sequences, dtype=np.int32)
        of_rank = sequences // (self.microbatches * self.dp * self.ep)
        sharing = row // (of_rank * self.ep)
        losses = {"instance": row, "local": row // of_rank, "global": sharing // self.dp, "none": row}
        routes = of_rank * tokens
        rows = 2**30 if factor is None else max(1, math.ceil(Fraction(str(factor)) * routes))
        return Places(sharing, losses[kind], np.int32(self.ep), np.int32(rows))


class Places(NamedTuple):
    """sharing, loss_group: int32 [G], for each sequence those that share experts with it in one dispatch, and a balance loss.

    ranks, capacity: int32 [], that split the experts, and rows that each of them takes from a dispatch.
    """

    sharing: Any
    loss_group: Any
    ranks: Any
    capacity: Any


class Report(NamedTuple):
    """What one MoE layer did. experts, kept: [G, T, A]. counts: [E] routes of real tokens.

    dropped, overfull: [] routes without room, and ranks that had too little in a dispatch.
    balance, router_z: [] loss terms of the layer without weights.
    """

    experts: Any
    kept: Any
    counts: Any
    dropped: Any
    overfull: Any
    balance: Any
    router_z: Any


@dataclass(frozen=True)
class Truth:
    """What a step should come to.

    losses: by name in LOSSES, without weights, of layers the mean. gradients: of each weighted term by its name, and of "total"; dotted
    parameter name -> float64 array. report: `Report` stacked over MoE layers, NumPy; None in a dense model.
    """

    losses: dict[str, float]
    gradients: dict[str, dict[str, np.ndarray]]
    report: Report | None


class Reference:
    """A model, its parameters and a batch, to be evaluated for any layout.

    Args:
        params: nested dict of float32 arrays. bias: float32 [MoE layers, E], of the routers; None in a dense model.
        batch: int32 arrays [G, T], as `Dataset.batch` gives them.
    """

    def __init__(self, config: TrainConfig, params: dict, bias: np.ndarray | None, batch: dict[str, np.ndarray]):
        self.config, self.params, self.bias, self.batch = config, params, bias, batch

    def truth(self, layout: Layout) -> Truth:
        """Losses and gradients of the whole step."""
        with jax.enable_x64(True):
            terms, report, gradients = self._program(_wide(self.params), self._places(layout))
        by_name = {name: named_leaves(jax.tree.map(lambda g, i=i: g[i], gradients)) for i, name in enumerate(LOSSES)}
        by_name["total"] = {name: np.sum([by_name[loss][name] for loss in LOSSES], axis=0) for name in by_name[LOSSES[0]]}
        return Truth({name: float(value) for name, value in zip(LOSSES, terms, strict=True)}, by_name, jax.tree.map(np.asarray, report))

    def is_safe(self, *, spread: float = 1e-5) -> bool:
        """Whether rounding cannot route a token to another expert: weights that are a little different choose the same ones.

        Where routes are dropped, other layers see other inputs, so every layout would have to be asked; one without drops and one
        with most of them stand for all.
        """
        if self.bias is None:
            return True
        rng = np.random.default_rng(0)
        with jax.enable_x64(True):
            for places in map(self._places, (Layout(1, 1, 1), Layout(1, 8, 2))):
                chosen = np.asarray(self._program(_wide(self.params), places)[1].experts)
                for _ in range(2):
                    moved = jax.tree.map(lambda a: a * (1 + spread * rng.standard_normal(a.shape)), _wide(self.params))
                    if not np.array_equal(self._program(moved, places)[1].experts, chosen):
                        return False
        return True

    def _places(self, layout: Layout) -> Places:
        moe, (sequences, tokens) = self.config.model.moe, self.batch["tokens"].shape
        if moe is None:
            return layout.places(sequences, tokens, "none", None)
        return layout.places(sequences, tokens * moe.top_k, moe.router.balance_loss, moe.capacity_factor)

    @functools.cached_property
    def _program(self) -> Callable:
        narrow, places = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.float32), self.params), self._places(Layout(1, 1, 1))
        with jax.enable_x64(False):
            wide = in_float64(self._terms, narrow, places)
        jitted = jax.jit(lambda params, places: self._differentiated(lambda params: wide(params, places), params))
        with jax.enable_x64(True):
            return jitted.lower(_wide(self.params), places).compile()

    def _differentiated(self, wide: Callable, params: dict) -> tuple[Any, Any, Any]:
        """Terms without weights, reports, and the gradients of the weighted terms with a leading dim for the term."""
        model = self.config.model
        router = None if model.moe is None else model.moe.router
        layers = max(1, model.num_moe_layers)
        weights = (1.0, model.z_loss_weight, *((router.balance_loss_weight, router.z_loss_weight) if router else (0.0, 0.0)))
        scale = jnp.asarray([w * n for w, n in zip(weights, (1, 1, layers, layers), strict=True)])

        def weighted(params):
            terms, report = wide(params)
            return terms * scale, (terms, report)

        _, pullback, (terms, report) = jax.vjp(weighted, params, has_aux=True)
        (gradients,) = jax.vmap(pullback)(jnp.eye(len(LOSSES)))
        return terms, report, gradients

    def _terms(self, params: dict, places: Places) -> tuple[jax.Array, Report | None]:
        """The terms of LOSSES, [4]; balance and router z-loss are means over layers."""
        config, batch = self.config, {name: jnp.asarray(value) for name, value in self.batch.items()}
        model = Transformer(config.model)
        tokens = tokens_of(
            batch["segment_ids"],
            batch["positions"],
            first_row=0,
            seed=config.seed,
            step=jnp.int32(0),
            max_documents=config.data.documents,
        )
        router = {} if self.bias is None else {"bias": jnp.asarray(self.bias)}
        x = model.embed(params, batch["tokens"])
        x, report, _ = model.blocks(params, router, x, tokens, dropless=True, run_experts=_dense_experts(places))
        logits, labels = model.logits(params, x), batch["labels"]
        lse, is_labelled = jax.nn.logsumexp(logits, axis=-1), labels >= 0
        target = jnp.take_along_axis(logits, jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
        count = jnp.maximum(1, is_labelled.sum())
        ce, z = (jnp.sum(jnp.where(is_labelled, value, 0.0)) / count for value in (lse - target, lse**2))
        if report is None:
            return jnp.stack([ce, z, jnp.zeros_like(ce), jnp.zeros_like(ce)]), None
        return jnp.stack([ce, z, report.balance.mean(), report.router_z.mean()]), report


def _dense_experts(places: Places) -> Callable:
    """The routed part of a MoE layer from its definition; see `moejax.nn.moe.RunExperts`."""

    def run(moe, x, routes, logits, tokens):
        shape = tokens.segment.shape
        experts, is_real = routes.experts.reshape(*shape, -1), tokens.segment > 0
        kept, overfull = _kept(places, experts, is_real, moe.config.num_experts)
        weights = jnp.where(kept.reshape(routes.weights.shape), routes.weights, 0.0)

        def add(y, expert):
            weight = jnp.where(routes.experts == expert, weights, 0.0).sum(axis=-1, keepdims=True)
            return y + weight * moe.experts.alone(x, expert), None

        y, _ = lax.scan(add, jnp.zeros_like(x), jnp.arange(moe.config.num_experts, dtype=jnp.int32))
        chosen = jax.nn.one_hot(experts, moe.config.num_experts, dtype=jnp.float32).sum(axis=-2) * is_real[..., None]
        real = jnp.maximum(1, is_real.sum())
        z = jnp.where(is_real.reshape(-1), jax.nn.logsumexp(logits, axis=-1) ** 2, 0.0).sum() / real
        dropped = (is_real[..., None] & ~kept).sum()
        balance = _balance(places, moe.config, routes.shares.reshape(*shape, -1), chosen, is_real) / real
        return y, Report(experts, kept, chosen.sum(axis=(0, 1)), dropped, overfull, balance, z)

    return run


def _kept(places: Places, experts: jax.Array, is_real: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array]:
    """bool [G, T, A] routes that find room, and the number of ranks and dispatches that had too little.

    A rank takes the rows of a dispatch expert by expert of its own, and of each of them in the order of the batch, which is source rank by
    source rank and token by token.
    """
    real = jnp.broadcast_to(is_real[..., None], experts.shape).reshape(-1)
    expert, order = experts.reshape(-1), jnp.arange(experts.size, dtype=jnp.int32)
    owner = expert // (num_experts // places.ranks)
    buffer = jnp.broadcast_to(places.sharing[:, None, None], experts.shape).reshape(-1) * num_experts + owner
    is_before = (expert[None, :] < expert[:, None]) | ((expert[None, :] == expert[:, None]) & (order[None, :] < order[:, None]))
    place = (is_before & (buffer[None, :] == buffer[:, None]) & real[None, :]).sum(axis=1)
    wanted = jnp.zeros(experts.shape[0] * num_experts, jnp.int32).at[buffer].add(real.astype(jnp.int32))
    kept = (real & (place < places.capacity)).reshape(experts.shape)
    return kept, (wanted > places.capacity).sum()


def _balance(places: Places, moe, shares: jax.Array, chosen: jax.Array, is_real: jax.Array) -> jax.Array:
    """Sum over groups of tokens of (E / A) sum_e count_e mean_t(share_te), with counts as constants. shares, chosen: [G, T, E]."""
    if moe.router.balance_loss == "none":
        return jnp.float32(0)

    def in_groups(a):
        return jnp.zeros_like(a).at[places.loss_group].add(a)

    counts = in_groups(lax.stop_gradient(chosen).sum(axis=1))
    shares = in_groups(jnp.where(is_real[..., None], shares, 0.0).sum(axis=1))
    tokens = jnp.maximum(1, in_groups(is_real.sum(axis=1)))
    return moe.num_experts / moe.top_k * (counts * shares / tokens[:, None]).sum()


def _wide(tree: Any) -> Any:
    return jax.tree.map(lambda a: np.asarray(a, np.float64), tree)
