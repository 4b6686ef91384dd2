"""The step of a real shape, compiled ahead of time, and what must hold for it on any GPU."""

import dataclasses
import functools
import multiprocessing
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

from moejax.config import AttentionConfig, DataConfig, MeshConfig, ModelConfig, MoEConfig, RouterConfig, TrainConfig
from moejax.plan.activations import temp_bytes
from moejax.plan.aot import Program, compile_step
from moejax.plan.formula import argument_bytes
from moejax.plan.moves import route_bytes
from moejax.plan.payloads import step_traffic
from moejax.plan.traffic import table

MIB = 2**20
ROLES = ("gradient sums", "gradients", "kept activations", "working set")
METRICS_BYTES = 64 * 1024
"""More than all metrics that a step returns."""


def eight_layers(*, dp: int, ep: int, num_experts: int, microbatches: int = 2, seq_len: int = 8192, **model) -> TrainConfig:
    """The shape of Olmo-core's eight-layer benchmark, one dense layer among them; one sequence a GPU and microbatch."""
    moe = MoEConfig(
        num_experts=num_experts,
        top_k=4,
        expert_dim=4096,
        num_shared_experts=1,
        shared_expert_dim=4096,
        capacity_factor=1.25,
        router=RouterConfig(restore_scale=True, z_loss_weight=1e-4),
    )
    attention = AttentionConfig(num_heads=32, num_kv_heads=8, head_dim=128, qk_norm="head")
    shape = {"vocab_size": 100_352, "embed_dim": 4096, "num_layers": 8, "num_dense_layers": 1, "mlp_dim": 20_480, "norm_placement": "post"}
    return TrainConfig(
        name="eight_layers",
        steps=10,
        batch_size=dp * ep * microbatches,
        microbatches=microbatches,
        model=ModelConfig(**shape, attention=attention, moe=moe, dtype="bfloat16", **model),
        mesh=MeshConfig(dp=dp, ep=ep),
        data=DataConfig(source="files", paths=("none.npy",), seq_len=seq_len),
    )


def with_fsdp(config: TrainConfig) -> TrainConfig:
    return dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, weights="fsdp"))


@functools.cache
def compiled(config: TrainConfig, gpu: str) -> Program:
    """The step, compiled in a process of its own: one process compiles for one kind of GPU, and a compiler that aborts ends it alone."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(compile_step, config, gpu).result()


def show(config: TrainConfig, gpu: str) -> Program:
    """Compile and print the tables."""
    program = compiled(config, gpu)
    mesh, model = config.mesh, config.model
    print(f"\n{mesh.num_devices} x {gpu}, dp {mesh.dp} ep {mesh.ep}, weights {mesh.weights}, recompute {model.recompute}:", end=" ")
    print(f"lowered in {program.lower_s:.0f} s, compiled in {program.compile_s:.0f} s")
    print(table(program.collectives))
    print("kernels in one step:", ", ".join(f"{times} x {name}" for name, times in program.hlo.kernels().items()))
    print(f"conditionals {len(program.hlo.conditionals())}, host transfers {len(program.host_transfers)}")
    return program


def assert_traffic_is_minimal(config: TrainConfig, program: Program) -> None:
    """The formula's collectives with exactly its bytes, nothing else above 1 MiB, and nothing that makes a GPU wait for the host."""
    found = Counter()
    for c in program.collectives:
        for dtype in c.dtypes:
            found[c.kind, c.axes, dtype] += c.payload_of(dtype) * c.times
    expected = {tuple(line[:3]): line.payload for line in step_traffic(config)}
    loose = {key for key in expected if key[0] == "collective-permute"}  # XLA leaves out the last ones, which nobody reads
    assert all(found[key] <= expected[key] for key in loose)
    assert {key: found[key] for key in expected.keys() - loose} == {key: expected[key] for key in expected.keys() - loose}
    rest = [c for c in program.collectives if any((c.kind, c.axes, dtype) not in expected for dtype in c.dtypes)]
    assert all(c.payload < MIB for c in rest), rest
    assert program.hlo.conditionals() == []
    assert config.model.recompute == "offload" or program.host_transfers == []


def assert_rows_move(config: TrainConfig, program: Program, moves: int) -> None:
    """One gather of counts and that many row moves in each MoE layer and microbatch, each of exactly the routed rows."""
    runs = config.model.num_moe_layers * config.microbatches
    counts = [c for c in program.collectives if c.axes == ("ep",) and c.dtypes == ("s32",)]
    assert [(c.kind, c.times, c.shapes) for c in counts] == [
        ("all-gather", runs, (f"s32[{config.mesh.ep},{config.model.moe.num_experts}]",))
    ]
    rows = [c for c in program.collectives if c.kind == "ragged-all-to-all"]
    # XLA may take a layer's moves out of the loop, so executions are counted, not instructions.
    assert sum(c.times for c in rows) == runs * moves
    assert {c.payload for c in rows} == {route_bytes(config)}


def assert_weights_move_once(program: Program) -> None:
    """Resident weights: reductions and gathers of whole weights start once in a step, outside the loop over microbatches."""
    large = [c for c in program.collectives if c.payload >= MIB and c.kind != "ragged-all-to-all"]
    assert {c.kind for c in large} <= {"reduce-scatter", "all-gather"}
    assert all(c.times == 1 and "update" in c.op_name for c in large), large


def assert_arguments_equal_the_formula(config: TrainConfig, program: Program) -> None:
    given = argument_bytes(config)
    assert program.argument_bytes == sum(given.values())
    assert program.alias_bytes == sum(given.values()) - given["batch"]
    assert 0 < program.output_bytes - program.alias_bytes < METRICS_BYTES


def assert_memory_is_explained(config: TrainConfig, program: Program) -> None:
    """XLA's arena within 15 % of the formula; the buffers at the peak fill it, and each over 1 % has a name and a role."""
    parts, found = temp_bytes(config), Counter()
    for buffer in program.peak:
        found[buffer.role] += buffer.size_bytes
    print(f"arena {program.temp_bytes / 2**30:.2f} GiB; by arithmetic {sum(parts.values()) / 2**30:.2f}; buffers at the peak:")
    for role in ROLES:
        print(f"{found[role] / 2**30:8.2f} GiB {role}; by arithmetic {parts.get(role, 0) / 2**30:.2f}")
    large = [buffer for buffer in program.peak if buffer.size_bytes > program.temp_bytes / 100]
    for buffer in large:
        print(f"{buffer.size_bytes / MIB:8.0f} MiB {buffer.array}  {buffer.role}: {buffer.op_name.removeprefix('jit(step)/shard_map/')}")
    assert abs(program.temp_bytes / sum(parts.values()) - 1) < 0.15
    assert sum(found.values()) > 0.95 * program.temp_bytes
    assert all(buffer.op_name for buffer in large)
