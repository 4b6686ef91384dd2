"""What the microbatches of a step share, and what each of them is."""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from moejax.config import TrainConfig
from moejax.nn import MoEStats, Tokens, Transformer, tokens_of
from moejax.parallel import DATA_AXES


@dataclass(frozen=True)
class Microbatches:
    """batch: arrays [microbatch, sequence, T] of this device; the other arrays are scalars.

    router: bias of the MoE layers here. num_labels, num_real: of the global batch; losses are divided by them.
    rows_of_microbatch, rows_of_rank: how far apart in the global batch are the first rows of two microbatches, and of two data ranks.
    dropless: ignore the capacity.
    """

    config: TrainConfig
    model: Transformer
    router: dict
    step: Array
    batch: dict[str, Array]
    num_labels: Array
    num_real: Array
    rows_of_microbatch: int
    rows_of_rank: int
    dropless: bool = False

    def part(self, m: Array) -> dict[str, Array]:
        """The arrays of one microbatch."""
        return {name: lax.dynamic_index_in_dim(value, m, keepdims=False) for name, value in self.batch.items()}

    def tokens(self, m: Array, is_real: Array | None = None) -> Tokens:
        """Its tokens; all of them padding, which is routed nowhere and counted nowhere, if it is not real."""
        part = self.part(m)
        segment = part["segment_ids"] if is_real is None else jnp.where(is_real, part["segment_ids"], 0)
        return tokens_of(
            segment,
            part["positions"],
            first_row=m * self.rows_of_microbatch + lax.axis_index(DATA_AXES) * self.rows_of_rank,
            seed=self.config.seed,
            step=self.step,
            max_documents=self.config.data.documents,
        )

    def head_total(self, loss_sum: Array, z_sum: Array) -> Array:
        """The head's part of the loss to differentiate. All parts of the loss add up over devices and microbatches."""
        return (loss_sum + self.config.model.z_loss_weight * z_sum) / self.num_labels

    def router_total(self, stats: MoEStats | None) -> Array:
        """A MoE layer's part of the loss to differentiate."""
        if self.config.model.moe is None or stats is None:
            return jnp.float32(0)
        c = self.config.model.moe.router
        return (c.balance_loss_weight * stats.balance_loss + c.z_loss_weight * stats.z_loss) / self.num_real
