"""The training step: one jitted program, one shard_map over the whole mesh, local arrays and named collectives inside.

    1  loss and gradients of all microbatches, added up in float32, with no data-parallel traffic in between
    2  reduce-scatter -> clip -> skip or step -> optimizer on shards -> all-gather

Rules that keep it right. Nothing differentiates through a psum of traced values. The local loss is divided by the labels of
the global batch, and gradients are summed afterwards. An expert's gradient already holds every ep rank's tokens, so it is
summed over dp only and never divided again.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from moejax.config import TrainConfig
from moejax.nn import Output, Transformer
from moejax.ops.routing import update_bias
from moejax.optim import adamw, decide, make_schedule, parameter_groups
from moejax.parallel import AXES, DATA_AXES, zero
from moejax.parallel.pipeline import split_of
from moejax.train.documents import check_documents
from moejax.train.durable import in_block_order, in_place_order
from moejax.train.microbatches import Microbatches
from moejax.train.pieces import accumulate
from moejax.train.router_metrics import router_metrics
from moejax.train.state import Layout, TrainState, make_layout, state_specs

Batch = dict[str, jax.Array]
Step = Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]

BATCH_SPEC = P(None, DATA_AXES)
"""Batches are [microbatch, sequence, token]; sequences are split over the data axes."""


def put_batch(batch: dict[str, np.ndarray], config: TrainConfig, mesh: Mesh) -> Batch:
    """A host batch, [sequences, T] each, on the devices as [microbatches, sequences / microbatches, T].

    Raises:
        DataError: if it does not suit the program, as `check_documents` says.
    """
    check_documents(config, batch["segment_ids"])
    sharding = NamedSharding(mesh, BATCH_SPEC)

    def put(value):
        return jax.device_put(value.reshape(config.microbatches, -1, value.shape[-1]), sharding)

    return {name: put(value) for name, value in batch.items()}


def abstract_batch(config: TrainConfig, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and shardings of a batch on the devices, nothing allocated."""
    shape = (config.microbatches, config.microbatch_size, config.data.seq_len)
    array = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=NamedSharding(mesh, BATCH_SPEC))
    return dict.fromkeys(("tokens", "labels", "segment_ids", "positions"), array)


def make_train_step(config: TrainConfig, mesh: Mesh) -> Step:
    """The jitted step, (state, batch) -> (state, metrics). It donates the state, and never waits for the host.

    Metrics are device scalars named group/name, but for moe/expert_load [MoE layers, E] and moe/layer_drop [MoE layers].
    """
    layout = make_layout(config, mesh)
    update = _make_update(config, layout)
    specs = state_specs(config, layout)

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        grads, metrics, counts = _accumulate(config, layout.model, state.params, state.router, state.step, batch)
        with jax.named_scope("update"):
            state, more = update(state, zero.reduce_gradients(grads, layout.rules), metrics["train/loss"], counts)
        return state, metrics | more

    mapped = jax.shard_map(step, mesh=mesh, in_specs=(specs, BATCH_SPEC), out_specs=(specs, P()), check_vma=False)
    return jax.jit(mapped, donate_argnums=0)


def make_update_fn(config: TrainConfig, mesh: Mesh) -> Callable[[TrainState, dict], TrainState]:
    """The second half of the step but for the router's bias: (state, reduced gradients) -> state. It donates the state."""
    layout = make_layout(config, mesh)
    update = _make_update(config, layout)
    specs = state_specs(config, layout)

    def apply(state, grads):
        return update(state, grads, jnp.float32(1), None)[0]

    mapped = jax.shard_map(apply, mesh=mesh, in_specs=(specs, specs.master), out_specs=specs, check_vma=False)
    # Nothing reads the old parameters. Without them each result would take the memory of the one after it, and be copied on the way.
    return jax.jit(mapped, donate_argnums=0, keep_unused=True)


def make_grad_fn(config: TrainConfig, mesh: Mesh) -> Callable[[dict, dict, jax.Array, Batch], tuple[dict, dict[str, jax.Array]]]:
    """The first half of the step: (params, router state, step, batch) -> (float32 gradients of global shape, metrics).

    Arrays of MoE blocks are in the order of the model's blocks, whatever the mesh.
    """
    layout = make_layout(config, mesh)
    specs = state_specs(config, layout)

    def gradients(params, router, step, batch):
        grads, metrics, _ = _accumulate(config, layout.model, params, router, step, batch)
        return zero.reduce_gradients(grads, layout.rules), metrics

    mapped = jax.shard_map(
        gradients, mesh=mesh, in_specs=(specs.params, specs.router, P(), BATCH_SPEC), out_specs=(specs.master, P()), check_vma=False
    )
    if layout.split.is_natural:
        return jax.jit(mapped)

    def in_order(params, router, step, batch):
        held = in_place_order({"params": params, "router": router}, layout.split)
        grads, metrics = mapped(held["params"], held["router"], step, batch)
        return in_block_order(grads, layout.split), metrics

    return jax.jit(in_order)


def _make_update(config: TrainConfig, layout: Layout) -> Callable[..., tuple[TrainState, dict[str, jax.Array]]]:
    """(state, reduced gradients, loss, routes per layer and expert or None) -> (state, metrics): clip, skip or step, gather."""
    groups = parameter_groups(config.optim, layout.rules)
    schedule = make_schedule(config.optim, config.steps)

    def update(state: TrainState, grads: dict, loss: jax.Array, counts: jax.Array | None):
        norm = zero.global_norm(grads, layout.rules, AXES)
        is_applied, is_finite, history = decide(config.optim, state.history, loss, norm)
        scale = zero.clip_scale(norm, config.optim.max_grad_norm)
        grads = jax.tree.map(lambda g: g * scale, grads)
        lr = jnp.asarray(schedule(state.step + 1), jnp.float32)
        moves = {"lr": lr, "updates": state.updates, "is_applied": is_applied}
        master, moments = adamw(config.optim, groups, grads, state.master, state.moments, **moves)
        router = state.router if counts is None else _update_router(config, state.router, counts, is_applied)
        params = zero.gather_parameters(master, layout.rules, layout.dtypes)
        new = TrainState(params, master, moments, router, history, state.step + 1, state.updates + is_applied.astype(jnp.int32))
        return new, {
            "optim/grad_norm": norm,
            "optim/lr": lr,
            "optim/skipped": 1.0 - is_applied.astype(jnp.float32),
            "optim/finite": is_finite.astype(jnp.float32),
        }

    return update


def _accumulate(config: TrainConfig, model: Transformer, params: dict, router: dict, step: jax.Array, batch: Batch):
    """Unreduced float32 gradients of this device over all microbatches, reduced metrics, and routes per layer and expert here."""
    num_labels, num_real = lax.psum(
        ((batch["labels"] >= 0).sum(dtype=jnp.float32), (batch["segment_ids"] > 0).sum(dtype=jnp.float32)), DATA_AXES
    )
    num_labels, num_real = jnp.maximum(num_labels, 1.0), jnp.maximum(num_real, 1.0)
    rows = batch["tokens"].shape[1]
    micro = Microbatches(config, model, router, step, batch, num_labels, num_real, config.microbatch_size, rows)
    with jax.named_scope("microbatches"):
        grads, out, peak = accumulate(micro, params)
    return grads, *_reduced_metrics(config, out, peak, num_labels, num_real)


def _reduced_metrics(config, out, peak, num_labels, num_real):
    # Pipeline ranks share the tokens of the head, and each has its own layers.
    loss_sum, z_sum = lax.psum((out.loss_sum, out.z_sum), AXES)
    out = Output(loss_sum, z_sum, lax.psum(out.moe, DATA_AXES))
    metrics = {"train/loss": out.loss_sum / num_labels, "train/z_loss": out.z_sum / num_labels, "train/tokens": num_labels}
    if out.moe is None:
        return metrics, None
    stats, peak = out.moe, lax.pmax(peak, DATA_AXES)
    if config.mesh.pp > 1:
        places = split_of(config).places
        stats, peak = jax.tree.map(lambda a: lax.all_gather(a, "pp", tiled=True)[places], (stats, peak))
    return metrics | router_metrics(stats, peak, num_real, ranks=lax.axis_size("ep")), out.moe.counts


def _update_router(config, router, counts, is_applied):
    rate = None if config.model.moe is None else config.model.moe.router.bias_update_rate
    if rate is None:
        return router
    return {"bias": jnp.where(is_applied, update_bias(router["bias"], counts, rate), router["bias"])}
