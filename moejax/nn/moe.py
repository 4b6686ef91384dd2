"""The mixture-of-experts module: router, routed experts over the `ep` axis, shared experts."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from moejax.config import MoEConfig, RouterConfig
from moejax.nn.mlp import Experts, SharedExperts, router_logits
from moejax.nn.param import param
from moejax.nn.tokens import Tokens
from moejax.ops import balance, routing
from moejax.parallel import DATA_AXES
from moejax.parallel.expert import Traffic, choose_transport, count_ranks, expert_parallel
from moejax_kernels.grouped_matmul import choose_tile


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MoEStats:
    """What one MoE layer reports of one microbatch on this rank, float32.

    counts: [E] routes of real tokens, before any capacity. balance_loss, z_loss: [] sums over real tokens, unweighted.
    traffic: what the rank sent and dropped.
    """

    counts: Array
    balance_loss: Array
    z_loss: Array
    traffic: Traffic


RunExperts = Callable[["MoE", jax.Array, routing.Routes, jax.Array, Tokens], tuple[jax.Array, Any]]
"""(module, x [BT, D], routes, router logits [BT, E], tokens) -> (sum of the routed experts' outputs [BT, D], report)."""


class Router(nnx.Module):
    """Scores tokens in float32, whatever the compute dtype, and chooses experts."""

    def __init__(self, dim: int, moe: MoEConfig, std: float):
        self.config, self.top_k = moe.router, moe.top_k
        self.w_router = param(dim, moe.num_experts, axes=("embed", "experts"), std=std, dtype="float32")

    def __call__(
        self, x: Float[Array, "BT D"], tokens: Tokens, bias: Float[Array, " E"], layer: Int[Array, ""]
    ) -> tuple[routing.Routes, Float[Array, "BT E"]]:
        """Routes of each token, and the logits behind them."""
        c: RouterConfig = self.config
        logits = router_logits(x, self.w_router[...])
        index, count = tokens.index.reshape(-1), logits.shape[1]
        fixed = replaced = None
        if c.assignment == "uniform":
            fixed = routing.uniform_experts(index, num_experts=count, top_k=self.top_k)
        elif c.assignment == "random":
            replaced = routing.random_scores(index, num_experts=count, seed=tokens.seed, step=tokens.step, layer=layer)
        routes = routing.route(logits, bias, top_k=self.top_k, gating=c.gating, fixed_experts=fixed, replaced_scores=replaced)
        weights = routing.rescale(routes.weights, normalize=c.normalize, restore_scale=c.restore_scale, scale=c.scale)
        return routes._replace(weights=weights), logits


class MoE(nnx.Module):
    """Routed plus shared experts of one block.

    Args:
        std: of the initial weights.
        expert_axis: mesh axis that splits the experts; None if all are here.
        token_axes: mesh axes that split the tokens, expert_axis included.
    """

    def __init__(self, dim: int, moe: MoEConfig, std: float, *, expert_axis: str | None = "ep", token_axes: tuple[str, ...] = DATA_AXES):
        self.config, self.expert_axis, self.token_axes = moe, expert_axis, token_axes
        self.router = Router(dim, moe, std)
        self.experts = Experts(dim, moe, std)
        if moe.num_shared_experts:
            self.shared = SharedExperts(dim, moe, std)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        tokens: Tokens,
        bias: Float[Array, " E"],
        layer: Int[Array, ""],
        *,
        dropless: bool,
        run_experts: RunExperts | None = None,
    ) -> tuple[Float[Array, "B T D"], Any]:
        """Runs inside shard_map, if there are axes; B is local. Returns the output and MoEStats, or what `run_experts` reports.

        Args:
            dropless: overrides the capacity, for evaluation.
            run_experts: takes the place of expert parallelism.
        """
        flat = x.reshape(-1, x.shape[-1])
        routes, logits = self.router(flat, tokens, bias, layer)
        if run_experts is None:
            y, stats = self._run_in_parallel(flat, routes, logits, tokens, dropless)
        else:
            y, stats = run_experts(self, flat, routes, logits, tokens)
        # One view of x for all who read it: with two, the backward pass would keep both.
        return (y + self.shared(flat) if self.config.num_shared_experts else y).reshape(x.shape), stats

    def _run_in_parallel(self, flat, routes, logits, tokens, dropless) -> tuple[jax.Array, MoEStats]:
        c, valid = self.config, tokens.valid.reshape(-1)
        ranks, tile = count_ranks(self.expert_axis), choose_tile()
        y, traffic = expert_parallel(
            flat,
            routes.experts,
            routes.weights,
            valid,
            lambda rows, group_sizes: self.experts(rows, group_sizes, tile),
            num_experts=c.num_experts,
            capacity_factor=None if dropless else c.capacity_factor,
            tile=tile,
            transport=choose_transport(c.transport, ranks),
            axis=self.expert_axis,
        )
        counts = lax.stop_gradient(balance.count_routes(routes.experts, valid, c.num_experts))
        stats = MoEStats(counts, self._balance_loss(routes, counts, tokens.valid), balance.router_z(logits, valid), traffic)
        return y, stats

    def _balance_loss(self, routes, counts, valid):
        kind, flat = self.config.router.balance_loss, valid.reshape(-1)
        if kind == "none":
            return jnp.float32(0)
        if kind == "local":
            return balance.local_balance(routes.shares, counts, flat, self.config.top_k)
        if kind == "instance":
            by_sequence = routes.shares.reshape(*valid.shape, -1), routes.experts.reshape(*valid.shape, -1)
            return balance.instance_balance(*by_sequence, valid)
        # Counts carry no gradient, so this psum is never transposed.
        group_counts, group_tokens = lax.psum((counts, flat.sum(dtype=jnp.float32)), self.token_axes)
        return balance.global_balance(routes.shares, group_counts, group_tokens, flat, self.config.top_k)
