"""Time of the whole training step, beside what this machine can do at all: dense products, and copies of memory."""

import time
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from moejax.config import AttentionConfig, DataConfig, MeshConfig, ModelConfig, MoEConfig, TrainConfig
from moejax.parallel import make_mesh
from moejax.train import flops
from moejax.train.state import init_state
from moejax.train.step import make_train_step, make_update_fn, put_batch
from moejax_kernels.timing import copying, interleaved_medians, overwriting

_GEMM = 1024
_COPY_BYTES = 128 * 2**20


@dataclass(frozen=True)
class Shape:
    """What is timed: width 256, 4 layers, 8 heads of 32, top-4, expert width 256, no shared expert, one device, dropless."""

    experts: int
    dtype: Literal["float32", "bfloat16"]
    batch: int
    seq: int
    vocab: int

    def config(self) -> TrainConfig:
        moe = MoEConfig(num_experts=self.experts, top_k=4, expert_dim=256)
        attention = AttentionConfig(num_heads=8, head_dim=32)
        model = ModelConfig(vocab_size=self.vocab, embed_dim=256, num_layers=4, attention=attention, moe=moe, dtype=self.dtype)
        data = DataConfig(source="files", paths=("none.npy",), seq_len=self.seq)
        return TrainConfig(name="bench", steps=1000, batch_size=self.batch, model=model, mesh=MeshConfig(), data=data)


def measure(shape: Shape, repeats: int) -> dict[str, Any]:
    """One flat dict: medians of `repeats` rounds, in which the step, its second half, a dense product and a copy run in turn.

    gemm_share: useful FLOPs (as `flops.flops_per_token` counts them) over time, as a share of the rate of the dense product.
    optimizer_bytes, weights_bytes: the least that a step must read and write, see `traffic`; optimizer_copy_s, weights_copy_s: their
    time at the measured copy rate; growth_s: the sum, all by which a step should grow with the number of experts.
    """
    config, mesh = shape.config(), make_mesh(MeshConfig())
    state = init_state(config, mesh)
    batch = put_batch(_batch(shape), config, mesh)
    jitted: Any = make_train_step(config, mesh)
    begin_s = time.perf_counter()
    step = jitted.lower(state, batch).compile()
    compile_s = time.perf_counter() - begin_s
    cpu_s: list[float] = []

    def whole_step():
        nonlocal state
        begin_s = time.process_time()
        state, metrics = jax.block_until_ready(step(state, batch))
        cpu_s.append(time.process_time() - begin_s)
        return metrics

    a = jnp.ones((_GEMM, _GEMM), jnp.float32)
    programs = {"step": whole_step, "update": _update(config, mesh), "gemm": overwriting(jnp.dot, a, a), "copy": copying(_COPY_BYTES)}
    seconds = interleaved_medians(programs, repeats)
    gemm_rate, copy_rate = 2 * _GEMM**3 / seconds["gemm"], 2 * _COPY_BYTES / seconds["copy"]
    tokens = shape.batch * shape.seq
    useful = tokens * sum(flops.flops_per_token(config.model, shape.seq).values())
    moved = traffic(config)
    copy_s = {name.replace("bytes", "copy_s"): size / copy_rate for name, size in moved.items()}
    return {
        "experts": shape.experts,
        "dtype": shape.dtype,
        "tokens": tokens,
        "tokens_per_s": tokens / seconds["step"],
        "step_s": seconds["step"],
        "cpu_s": float(np.median(cpu_s)),
        "compile_s": compile_s,
        "useful_flops": useful,
        "gemm_flops_per_s": gemm_rate,
        "gemm_share": useful / seconds["step"] / gemm_rate,
        "optimizer_share": seconds["update"] / seconds["step"],
        "copy_bytes_per_s": copy_rate,
        **moved,
        **copy_s,
        "growth_s": sum(copy_s.values()),
        "repeats": repeats,
        "jax": jax.__version__,
    }


def traffic(config: TrainConfig) -> dict[str, int]:
    """Bytes of memory that a step on one device must move for its parameters, whatever it computes.

    optimizer_bytes: gradient, master and two moments read in float32, master and moments written, parameters written.
    weights_bytes: parameters read forward and backward, gradients written.
    """
    count, _ = flops.count_parameters(config.model)
    item = jnp.dtype(config.model.dtype).itemsize
    return {"optimizer_bytes": count * (7 * 4 + item), "weights_bytes": count * 3 * item}


def _update(config: TrainConfig, mesh: Mesh):
    """A program that runs the second half of the step, each time on what the call before gave."""
    update, state = make_update_fn(config, mesh), init_state(config, mesh)
    grads = jax.tree.map(lambda master: master * 1e-3, state.master)

    def program():
        nonlocal state
        state = update(state, grads)
        return state.step

    return program


def _batch(shape: Shape) -> dict[str, np.ndarray]:
    drawn = np.random.default_rng(0).integers(0, shape.vocab, (shape.batch, shape.seq + 1), dtype=np.int32)
    ones = np.ones((shape.batch, shape.seq), np.int32)
    places = np.broadcast_to(np.arange(shape.seq, dtype=np.int32), ones.shape)
    return {"tokens": drawn[:, :-1], "labels": drawn[:, 1:], "segment_ids": ones, "positions": places}
