"""The model in the pieces that the pipeline's executor runs: prologue, stages, head; each forward and backward for one microbatch."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from moejax.config import ModelConfig
from moejax.nn import MoEStats, Output, Rows, layers
from moejax.parallel.pipeline import executor, schedule_of, split_of
from moejax.parallel.pipeline.executor import Parts, Weights
from moejax.parallel.pipeline.split import Split
from moejax.parallel.scopes import GRADIENT_SUMS
from moejax.train.microbatches import Microbatches

Tree = Any


def accumulate(micro: Microbatches, params: dict) -> tuple[dict, Output, Array | None]:
    """Gradients of this device over all microbatches.

    Returns:
        Float32 gradients like the parameters; sums of losses and router statistics [places of MoE blocks here]; largest demand of any
        microbatch, alike.
    """
    pieces = Pieces(micro, split_of(micro.config))
    weights = Weights(*(_only(params, *names) for names in _names(micro.config.model)))
    result = executor.run(schedule_of(micro.config), pieces.parts(), weights, pieces.no_statistics(weights))
    grads = result.gradients.prologue | result.gradients.stage | _only(result.gradients.head, "head")
    if "embed" in result.gradients.head:
        grads["embed"] = jax.tree.map(jnp.add, grads["embed"], result.gradients.head["embed"])
    stats, peak = result.statistics if result.statistics is not None else (None, None)
    loss_sum, z_sum = result.sums
    return grads, Output(loss_sum, z_sum, stats), peak


def loss_sums(micro: Microbatches, params: dict) -> tuple[Array, Array]:
    """Sums over this device's tokens of the loss and of logsumexp^2, by the forward passes alone."""
    pieces = Pieces(micro, split_of(micro.config))
    weights = Weights(*(_only(params, *names) for names in _names(micro.config.model)))
    return executor.evaluate(schedule_of(micro.config, len(micro.batch["tokens"])), pieces.parts(), weights)


@dataclass(frozen=True)
class Pieces:
    """Functions for `executor.Parts`. split: which blocks are on which rank."""

    micro: Microbatches
    split: Split

    def parts(self) -> Parts:
        return Parts(
            prologue=self.prologue,
            prologue_backward=self.prologue_backward,
            stage=self.stage,
            stage_backward=self.stage_backward,
            stage_forward=self.stage_forward,
            head=self.head,
            merge=self.merge,
        )

    def prologue(self, weights: dict, m: Array) -> tuple[Float[Array, "B T D"], Tree]:
        """Embedding and dense blocks."""
        x = self.micro.model.embed(weights, self.micro.part(m)["tokens"])
        if "dense_blocks" not in weights:
            return x, None
        x, _, kept = layers.keep(self._dense(weights, m), x)
        return x, kept

    def prologue_backward(self, weights: dict, kept: Tree, m: Array, dx: Array, sums: dict, is_real: Array | None) -> dict:
        sums = dict(sums)
        if "dense_blocks" in weights:
            run = self._dense(weights, m)
            dx, sums["dense_blocks"] = layers.backward(run, kept, dx, sums["dense_blocks"], is_real=is_real)
        ids = self.micro.part(m)["tokens"]
        _, vjp = jax.vjp(lambda embed: self.micro.model.embed({"embed": embed}, ids), weights["embed"])
        with jax.named_scope(GRADIENT_SUMS):
            sums["embed"] = jax.tree.map(lambda total, part: total + part.astype(total.dtype), sums["embed"], vjp(dx)[0])
        return sums

    def stage(self, weights, x, m, number, is_real, slots) -> tuple[Array, Tree, Tree]:
        if not weights:
            return x, None, None
        y, (stats, _), kept = layers.keep(self._moe(weights, m, number, is_real), x, slots)
        return y, (stats, stats.traffic.demand), kept

    def stage_backward(self, weights, kept, slot, m, number, is_real, dy, sums) -> tuple[Array, dict]:
        if not weights:
            return dy, sums
        run = self._moe(weights, m, number, is_real)
        is_only = slot is None and self.micro.config.microbatches == 1
        dx, blocks = layers.backward(run, kept, dy, sums["moe_blocks"], is_real=is_real, slot=slot, is_only=is_only)
        return dx, {"moe_blocks": blocks}

    def stage_forward(self, weights: dict, x: Array, m: Array, number: Array, is_real: Array | None) -> Array:
        if not weights:
            return x
        return layers.forward(self._moe(weights, m, number, is_real), x)[0]

    def head(self, weights: dict, y: Float[Array, "n D"], m: Array, first: Array, is_real: Array) -> tuple[Array, tuple[Array, Array]]:
        flat = self.micro.part(m)["labels"].reshape(-1)
        ranks = self.split.blocks.shape[0]
        flat = jnp.pad(flat, (0, len(y) * ranks - flat.size), constant_values=-1)
        labels = jnp.where(is_real, lax.dynamic_slice_in_dim(flat, first, len(y)), -1)
        sums = self.micro.model.head_loss(weights, y[None], labels[None])
        return self.micro.head_total(*sums), sums

    def merge(self, sums: Tree, new: Tree, number: Array) -> Tree:
        """Statistics of one stage added to those of all blocks here; of demands the larger."""
        if sums is None:
            return None

        def into(how):
            def merged(total, part):
                row = number * len(part)
                old = lax.dynamic_slice_in_dim(total, row, len(part))
                return lax.dynamic_update_slice_in_dim(total, how(old, part), row, axis=0)

            return merged

        return jax.tree.map(into(jnp.add), sums[0], new[0]), into(jnp.maximum)(sums[1], new[1])

    def no_statistics(self, weights: Weights) -> tuple[MoEStats, Array] | None:
        """Where their sums start: zeros for each place of a block here."""
        if not weights.stage:
            return None
        _, stages, room = self.split.blocks.shape
        x = jax.eval_shape(lambda w: self.prologue(w, jnp.int32(0))[0], weights.prologue)
        shapes = jax.eval_shape(lambda w, x: self.stage(w, x, jnp.int32(0), jnp.int32(0), None, None)[1], weights.stage, x)
        return jax.tree.map(lambda a: jnp.zeros((stages * room, *a.shape[1:]), a.dtype), shapes)

    def _dense(self, weights: dict, m: Array) -> layers.Layers:
        return self.micro.model.layers("dense_blocks", weights["dense_blocks"], {}, self.micro.tokens(m), dropless=self.micro.dropless)

    def _moe(self, weights: dict, m: Array, number: Array, is_real: Array | None) -> layers.Layers:
        micro = self.micro
        rows = rows_of(micro.config.model, self.split, number) if self.split.blocks.shape[:2] != (1, 1) else None
        return micro.model.layers(
            "moe_blocks",
            weights["moe_blocks"],
            micro.router,
            micro.tokens(m, is_real),
            dropless=micro.dropless,
            rows=rows,
            scalar=micro.router_total,
        )


def rows_of(model: ModelConfig, split: Split, number: Array) -> Rows:
    """The blocks of this rank's stage of that number, inside shard_map over pp."""
    depths = np.where(split.blocks < 0, -1, split.blocks + model.num_dense_layers)
    room = depths.shape[-1]
    alike = [sorted(set(depths[..., i].reshape(-1).tolist()) - {-1}) for i in range(room)]
    is_known = all(len({model.window(depth) for depth in here}) == 1 for here in alike)
    return Rows(
        places=number * room + jnp.arange(room, dtype=jnp.int32),
        depths=jnp.asarray(depths)[lax.axis_index("pp"), number],
        known_depths=tuple(here[0] for here in alike) if is_known else None,
        is_padded=split.is_padded,
    )


def _names(model: ModelConfig) -> tuple[tuple[str, ...], ...]:
    """Parameters of prologue, stages and head."""
    return ("embed", "dense_blocks"), ("moe_blocks",), ("head", "embed") if model.tie_embeddings else ("head",)


def _only(params: dict, *names: str) -> dict:
    return {name: params[name] for name in names if name in params}
