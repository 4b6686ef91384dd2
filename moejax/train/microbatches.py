"""Gradients of one device added up over the microbatches of a step: one after the other, or through a pipeline."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from moejax.config import TrainConfig
from moejax.nn import MoEStats, Output, Tokens, Transformer, tokens_of
from moejax.parallel import DATA_AXES
from moejax.parallel.pipeline import schedule_of
from moejax.parallel.pipeline.executor import Parts, run

Sums = tuple[dict, Output, Array | None]
"""Float32 gradients like the parameters; sums of losses and router statistics [MoE layers here]; largest demand of any microbatch."""


@dataclass(frozen=True)
class Microbatches:
    """What a step's microbatches share. batch: arrays [microbatch, sequence, T]; the other arrays are scalars.

    router: bias of the MoE layers here. num_labels, num_real: of the global batch; losses are divided by them.
    """

    config: TrainConfig
    model: Transformer
    router: dict
    step: Array
    batch: dict[str, Array]
    num_labels: Array
    num_real: Array

    def part(self, index: Array) -> dict[str, Array]:
        """The arrays of one microbatch."""
        return {name: lax.dynamic_index_in_dim(value, index, keepdims=False) for name, value in self.batch.items()}

    def tokens(self, index: Array, part: dict[str, Array]) -> Tokens:
        config, rows = self.config, part["tokens"].shape[0]
        first_row = index * config.microbatch_size + lax.axis_index(DATA_AXES) * rows
        return tokens_of(
            part["segment_ids"],
            part["positions"],
            first_row=first_row,
            seed=config.seed,
            step=self.step,
            max_documents=config.data.documents,
        )

    def head_total(self, loss_sum: Array, z_sum: Array) -> Array:
        """The head's part of the loss to differentiate. All parts of the loss add up over devices and microbatches."""
        return (loss_sum + self.config.model.z_loss_weight * z_sum) / self.num_labels

    def router_total(self, stats: MoEStats | None) -> Array:
        """The routers' part of the loss to differentiate."""
        if self.config.model.moe is None or stats is None:
            return jnp.float32(0)
        c = self.config.model.moe.router
        return (c.balance_loss_weight * stats.balance_loss.sum() + c.z_loss_weight * stats.z_loss.sum()) / self.num_real


def one_by_one(micro: Microbatches, params: dict) -> Sums:
    """Forward and backward of the whole model for each microbatch."""

    def loss(params, index, part):
        tokens = micro.tokens(index, part)
        out = micro.model.loss(params, micro.router, part["tokens"], part["labels"], tokens, dropless=False)
        return micro.head_total(out.loss_sum, out.z_sum) + micro.router_total(out.moe), out

    def add(sums, indexed):
        grads, out = jax.grad(loss, has_aux=True)(params, *indexed)
        sums, peak = sums
        added = jax.tree.map(lambda total, new: total + new.astype(jnp.float32), sums, (grads, out))
        if out.moe is not None:
            peak = jnp.maximum(peak, out.moe.traffic.demand)
        return (added, peak), None

    first = jax.tree.map(lambda a: a[0], micro.batch)
    shapes = params, jax.eval_shape(lambda: loss(params, jnp.int32(0), first)[1])
    zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), shapes)
    peak = None if zeros[1].moe is None else zeros[1].moe.traffic.demand
    count = micro.config.microbatches
    ((grads, out), peak), _ = lax.scan(add, (zeros, peak), (jnp.arange(count), micro.batch))
    return grads, out, peak


def pipelined(micro: Microbatches, params: dict) -> Sums:
    """MoE blocks in stages over pp; embedding and dense blocks on the ranks in turn; the head on all ranks."""
    model, rank = micro.model, lax.axis_index("pp")

    def prologue(weights, index):
        part = micro.part(index)
        return model.prologue(weights, part["tokens"], micro.tokens(index, part), dropless=False)

    def stage(weights, x, index, is_real):
        part = micro.part(index)
        part["segment_ids"] = jnp.where(is_real, part["segment_ids"], 0)  # padding is routed nowhere and counted nowhere
        y, stats, _ = model.stack("moe_blocks", weights, micro.router, x, micro.tokens(index, part), dropless=False, rank=rank)
        assert stats is not None
        return y, micro.router_total(stats), (stats, stats.traffic.demand)

    def head(weights, x, m, first, is_real):
        flat = micro.part(m)["labels"].reshape(-1)
        flat = jnp.pad(flat, (0, len(x) * lax.axis_size("pp") - flat.size), constant_values=-1)
        labels = jnp.where(is_real, lax.dynamic_slice_in_dim(flat, first, len(x)), -1)
        sums = model.head_loss(weights, x[None], labels[None])
        return micro.head_total(*sums), sums

    def merge(sums, new):
        return jax.tree.map(jnp.add, sums[0], new[0]), jnp.maximum(sums[1], new[1])

    ends = {name: params[name] for name in ("embed", "dense_blocks") if name in params}
    top = {name: params[name] for name in ("head", *(("embed",) if micro.config.model.tie_embeddings else ()))}
    result = run(schedule_of(micro.config), Parts(prologue, stage, head, merge), (ends, params["moe_blocks"], top))
    grads = result.prologue | {"moe_blocks": result.stage, "head": result.head["head"]}
    if "embed" in result.head:
        grads["embed"] = jax.tree.map(jnp.add, grads["embed"], result.head["embed"])
    stats, peak = result.statistics
    loss_sum, z_sum = result.sums
    return grads, Output(loss_sum, z_sum, stats), peak
