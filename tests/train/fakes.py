"""A run without a model: the real loop around a step that adds one to four numbers. Compiles in no time."""

import dataclasses
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from moejax.config import CheckpointConfig, EvalConfig, LogConfig, TrainConfig, load_config
from moejax.train.state import TrainState


def fake_config(run_dir: object, **changes: Any) -> TrainConfig:
    """Twelve steps of the quickstart config on tiny batches, saved every four."""
    config = load_config("quickstart")
    settings = {
        "steps": 12,
        "batch_size": 2,
        "run_dir": str(run_dir),
        "data": dataclasses.replace(config.data, seq_len=8),
        "optim": dataclasses.replace(config.optim, schedule=dataclasses.replace(config.optim.schedule, warmup_steps=0)),
        "checkpoint": CheckpointConfig(every=4, keep=2),
        "eval": EvalConfig(every=None),
        "log": LogConfig(every=3),
    }
    return dataclasses.replace(config, **(settings | changes))


def install(
    patch: Callable[[ModuleType, str, Any], None],
    *,
    bad_steps: tuple[int, ...] = (),
    broken_weights_after: int | None = None,
    seconds: float = 0.0,
    is_drawn: bool = False,
    eval_loss: float | None = None,
    eval_seconds: float = 0.0,
) -> None:
    """Put the fake state, step and evaluation into moejax.train.loop.

    Steps in bad_steps are not finite and skipped; after broken_weights_after the weights are NaN. Each batch takes `seconds`,
    an evaluation eval_seconds at most.
    """
    from moejax.train import loop

    def put_batch(batch, config, mesh):
        time.sleep(seconds)
        return {"tokens": jnp.asarray(batch["tokens"])}

    def evaluate(config, mesh, eval_step, params, router, dataset, is_stopped):
        for _ in range(round(eval_seconds / 0.01)):
            time.sleep(0.01)
            if is_stopped():
                return None
        return {"eval/loss": 2.0 - float(params["w"][0]) / 100 if eval_loss is None else eval_loss, "eval/tokens": 1000}

    def make_train_step(config, mesh):
        return _make_step(bad_steps, broken_weights_after)

    patch(loop, "init_state", lambda config, mesh: _from_durable(config, mesh, jax.tree.map(_zeros, _abstract(mesh))))
    patch(loop, "abstract_durable", lambda config, mesh: _abstract(mesh))
    patch(loop, "durable", _durable)
    patch(loop, "from_durable", _from_durable)
    patch(loop, "make_train_step", make_train_step)
    patch(loop, "put_batch", put_batch)
    patch(loop, "make_eval_step", lambda config, mesh: None)
    patch(loop, "evaluate", evaluate)
    if not is_drawn:
        patch(loop, "draw_run", lambda run_dir: run_dir / "run.png")


def _make_step(bad_steps: tuple[int, ...], broken_weights_after: int | None):
    def train_step(state, batch):
        step = state.step + 1
        is_finite = ~jnp.isin(step, jnp.asarray(bad_steps, jnp.int32)) if bad_steps else jnp.bool_(True)
        with jax.named_scope("add_one"):
            w = state.master["w"] + is_finite
        if broken_weights_after is not None:
            w = jnp.where(step > broken_weights_after, jnp.nan, w)
        loss = 6.0 - 0.1 * step + 1e-6 * batch["tokens"].sum()
        metrics = {"train/loss": jnp.where(is_finite, loss, jnp.nan), "optim/finite": is_finite * 1.0, "optim/skipped": 1.0 - is_finite}
        fixed = {"train/tokens": 16.0, "optim/grad_norm": 1.0, "optim/lr": 1e-3, "moe/max_load": 1.25, "moe/rank_max_load": 1.0}
        fixed |= {"moe/drop_fraction": 0.0, "moe/balance_loss": 1.0}
        metrics |= {name: jnp.float32(value) for name, value in fixed.items()} | {"moe/expert_load": jnp.full((3, 8), 0.125)}
        return dataclasses.replace(state, params={"w": w}, master={"w": w}, step=step, updates=state.updates + is_finite), metrics

    chex.clear_trace_counter()  # it counts over the whole process; a run may trace its step once
    return jax.jit(chex.assert_max_traces(train_step, n=1), donate_argnums=0)


def _abstract(mesh) -> dict[str, Any]:
    def leaf(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    w = {"w": leaf((4,), jnp.float32)}
    counts = {"step": leaf((), jnp.int32), "updates": leaf((), jnp.int32)}
    return {"master": w, "moments": {"mu": w, "nu": w}, "router": {}, "history": {"count": leaf((), jnp.int32)}} | counts


def _zeros(leaf):
    return jax.device_put(jnp.zeros(leaf.shape, leaf.dtype), leaf.sharding)


def _durable(config, mesh, state):
    return {name: getattr(state, name) for name in _abstract(mesh)}


def _from_durable(config, mesh, saved):
    return TrainState(params=jax.tree.map(jnp.copy, saved["master"]), **saved)
