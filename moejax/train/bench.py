"""Times of a training step beside what the machine can do: its dense products, and its copies.

Everything is timed in one interleaved run, so that whatever else the machine does hits all of it alike.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from moejax.config import AttentionConfig, DataConfig, EvalConfig, ModelConfig, MoEConfig, OptimConfig, TrainConfig
from moejax.parallel import make_mesh
from moejax.train.flops import count_parameters, flops_per_token
from moejax.train.state import init_state
from moejax.train.step import make_train_step, make_update_fn, put_batch
from moejax_kernels.device import device_kind
from moejax_kernels.timing import copying, interleaved_medians, overwriting

_GEMM_DIM = 2048
_COPY_BYTES = 128 * 2**20


def bench_config(*, experts: int, dtype: Literal["float32", "bfloat16"], batch: int, seq: int, vocab: int) -> TrainConfig:
    """The step that is timed: width 256, 4 layers, 8 heads of 32, top-4 of experts of width 256, AdamW.

    The learning rate is so small that every timed step routes alike.
    """
    return TrainConfig(
        name="bench",
        steps=1_000_000,
        batch_size=batch,
        model=ModelConfig(
            vocab_size=vocab,
            embed_dim=256,
            num_layers=4,
            attention=AttentionConfig(num_heads=8),
            moe=MoEConfig(num_experts=experts, top_k=4, expert_dim=256),
            dtype=dtype,
        ),
        data=DataConfig(seq_len=seq),
        optim=OptimConfig(lr=1e-7),
        eval=EvalConfig(every=None),
    )


def weight_traffic(config: TrainConfig) -> int:
    """Bytes that a step on one device has to move for weights and optimizer, whatever it computes with them.

    Weights are read forward and backward and written by the update, in the compute dtype. Gradients are written, and read for the norm and
    for the update; masters and both moments are read and written: all float32.
    """
    return count_parameters(config.model)[0] * (3 * jnp.dtype(config.model.dtype).itemsize + (3 + 6) * 4)


@dataclass
class _Run:
    """A training state that programs take turns to move on, and the CPU seconds of each of their calls."""

    state: Any
    cpu_s: dict[str, list[float]] = field(default_factory=dict)
    metrics: dict[str, jax.Array] = field(default_factory=dict)

    def program(self, name: str, advance: Callable[[Any], tuple[Any, dict[str, jax.Array]]]) -> Callable[[], Any]:
        times = self.cpu_s[name] = []

        def call():
            start = time.process_time()
            self.state, self.metrics = jax.block_until_ready(advance(self.state))
            times.append(time.process_time() - start)
            return self.metrics

        return call


def measure(config: TrainConfig, *, repeats: int) -> dict:
    """One flat dict on the step of `config`; times are medians of interleaved rounds.

    gemm_share is the rate of useful FLOPs over that of a dense product in the compute dtype. copy_bytes_per_s counts bytes read and
    bytes written. max_load is that of the busiest expert over the mean of its layer, in the busiest layer. compile_s is tracing,
    lowering and compiling; JAX's persistent cache, if it is on, makes it short.
    """
    mesh = make_mesh(config.mesh)
    batch = put_batch(_random_batch(config), config, mesh)
    run = _Run(init_state(config, mesh))
    start = time.perf_counter()
    jitted: Any = make_train_step(config, mesh)
    step = jitted.lower(run.state, batch).compile()
    compile_s = time.perf_counter() - start
    gradients = jax.tree.map(jnp.copy, run.state.master)
    update = make_update_fn(config, mesh)
    seconds = interleaved_medians(
        {
            "step": run.program("step", lambda state: step(state, batch)),
            "update": run.program("update", lambda state: (update(state, gradients), run.metrics)),
            "gemm": overwriting(jnp.dot, *jnp.ones((2, _GEMM_DIM, _GEMM_DIM), config.model.dtype)),
            "copy": copying(_COPY_BYTES),
        },
        repeats,
    )
    tokens = config.batch_size * config.data.seq_len
    flops = tokens * sum(flops_per_token(config.model, config.data.seq_len).values())
    gemm_rate, copy_rate = 2 * _GEMM_DIM**3 / seconds["gemm"], 2 * _COPY_BYTES / seconds["copy"]
    traffic = weight_traffic(config)
    return {
        "experts": config.model.moe.num_experts if config.model.moe else 0,
        "dtype": config.model.dtype,
        "tokens": tokens,
        "parameters": count_parameters(config.model)[0],
        "tokens_per_s": tokens / seconds["step"],
        "step_s": seconds["step"],
        "step_cpu_s": float(np.median(run.cpu_s["step"])),
        "compile_s": compile_s,
        "flops": flops,
        "gemm_flops_per_s": gemm_rate,
        "gemm_share": flops / seconds["step"] / gemm_rate,
        "update_s": seconds["update"],
        "update_share": seconds["update"] / seconds["step"],
        "copy_bytes_per_s": copy_rate,
        "weight_traffic_bytes": traffic,
        "weight_traffic_s": traffic / copy_rate,
        "max_load": float(run.metrics["moe/max_load"]) if "moe/max_load" in run.metrics else 1.0,
        "temp_bytes": step.memory_analysis().temp_size_in_bytes,
        "repeats": repeats,
        "device": device_kind(),
        "jax": jax.__version__,
    }


def time_steps(configs: dict[str, TrainConfig], *, repeats: int) -> dict[str, float]:
    """Seconds of the step of each config, medians of interleaved rounds."""
    calls = {}
    for name, config in configs.items():
        mesh = make_mesh(config.mesh)
        batch, run = put_batch(_random_batch(config), config, mesh), _Run(init_state(config, mesh))
        step = make_train_step(config, mesh)
        calls[name] = run.program(name, lambda state, step=step, batch=batch: step(state, batch))
    return interleaved_medians(calls, repeats)


def _random_batch(config: TrainConfig) -> dict[str, np.ndarray]:
    rng, shape = np.random.default_rng(0), (config.batch_size, config.data.seq_len)
    tokens, labels = rng.integers(0, config.model.vocab_size, (2, *shape), dtype=np.int32)
    positions = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
    return {"tokens": tokens, "labels": labels, "segment_ids": np.ones(shape, np.int32), "positions": positions}
