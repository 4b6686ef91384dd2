"""Loss on held-out text: the forward half of the step, always dropless."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from moejax.config import TrainConfig
from moejax.data import Dataset
from moejax.parallel import AXES, DATA_AXES
from moejax.train.documents import check_documents
from moejax.train.microbatches import Microbatches
from moejax.train.pieces import loss_sums
from moejax.train.state import make_layout, state_specs

EvalStep = Callable[[dict, dict, dict[str, jax.Array]], dict[str, jax.Array]]

_SPEC = P(DATA_AXES)


def make_eval_step(config: TrainConfig, mesh: Mesh) -> EvalStep:
    """The jitted forward pass, (params, router state, batch [B, T]) -> {"loss_sum", "tokens"}, float32 sums over all devices."""
    layout = make_layout(config, mesh)
    model, specs = layout.model, state_specs(config, layout)

    def forward(params, router, batch):
        rows, one = batch["tokens"].shape[0], jnp.float32(1)
        count = lax.psum((batch["labels"] >= 0).sum(dtype=jnp.float32), DATA_AXES)
        # On a pipeline each sequence is a microbatch; else all of them are one.
        shape = (rows, 1, -1) if config.mesh.pp > 1 else (1, rows, -1)
        parts = {name: value.reshape(shape) for name, value in batch.items()}
        micro = Microbatches(config, model, router, jnp.int32(0), parts, one, one, 1, rows, dropless=True)
        loss_sum, _ = loss_sums(micro, params)
        return {"loss_sum": lax.psum(loss_sum, AXES), "tokens": count}

    mapped = jax.shard_map(forward, mesh=mesh, in_specs=(specs.params, specs.router, _SPEC), out_specs=P(), check_vma=False)
    return jax.jit(mapped)


def put_eval_batch(batch: dict[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """A host batch [B, T] on the devices; B divides by mesh.dp x mesh.ep."""
    return {name: jax.device_put(value, NamedSharding(mesh, _SPEC)) for name, value in batch.items()}


def evaluate(
    config: TrainConfig,
    mesh: Mesh,
    eval_step: EvalStep,
    params: dict,
    router: dict,
    dataset: Dataset,
    is_stopped: Callable[[], bool] = lambda: False,
) -> dict[str, float | int] | None:
    """Mean loss in nats and bits per token over the first eval.sequences held-out sequences; None if stopped in between.

    Random assignment (a benchmark setting) counts tokens from the start of each batch, so there the batch size matters.
    """
    size, parts = config.eval.batch_size or config.microbatch_size, []
    for batch in dataset.eval_batches(size, config.eval.sequences):
        if is_stopped():
            return None
        check_documents(config, batch["segment_ids"])
        parts.append(eval_step(params, router, put_eval_batch(batch, mesh)))
        jax.block_until_ready(parts[-2:-1])  # one batch ahead of the device, not all of them
    tokens = int(sum(float(part["tokens"]) for part in parts))
    loss = math.fsum(float(part["loss_sum"]) for part in parts) / max(tokens, 1)
    return {"eval/loss": loss, "eval/bits_per_token": loss / math.log(2), "eval/tokens": tokens}
