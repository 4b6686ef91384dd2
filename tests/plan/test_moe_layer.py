"""One MoE layer of a real shape for each GPU: 8,192 tokens of width 4,096, 16 local experts, top-4. Run with -s to see the tables."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest

from moejax.config import MoEConfig
from moejax.parallel.expert.plan import capacity
from moejax.plan.hlo import arrays_of
from moejax.plan.traffic import table
from moejax_kernels.grouped_matmul import buffer_rows
from tests.plan.moe_layer import compile_layer

TOKENS, DIM, HIDDEN, LOCAL, TOP_K, RANKS = 8192, 4096, 2048, 16, 4, 8
MOE = MoEConfig(num_experts=LOCAL * RANKS, top_k=TOP_K, expert_dim=HIDDEN, capacity_factor=1.25)
ROWS = buffer_rows(capacity(1.25, TOKENS, TOP_K), LOCAL, 128)


@pytest.mark.slow
@pytest.mark.parametrize(("gpu", "generation"), [("h200", "sm90"), ("b300", "sm100")])
def test_p01_forward_and_backward_hold_nothing_of_size_groups_by_rows(gpu, generation):
    """XLA's own grouped product would: a masked product of every row with every expert, 18 GiB for this layer."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        program = pool.submit(compile_layer, gpu, RANKS, TOKENS, DIM, MOE).result()
    print(f"\n{RANKS} x {gpu}: compiled in {program.compile_s:.0f} s, temp {program.temp_bytes / 2**30:.2f} GiB")
    print(table(program.collectives))
    print("kernels:", program.hlo.kernels())

    everything = [i for body in program.hlo.computations.values() for i in body]
    shapes = {shape for instruction in everything for _, shape in arrays_of(instruction.type)}
    assert (ROWS, DIM) in shapes
    assert not [shape for shape in shapes if {LOCAL, ROWS} <= set(shape) or {MOE.num_experts, ROWS} <= set(shape)]
    assert max(_elements(shape) for shape in shapes) == max(ROWS * DIM, LOCAL * DIM * 2 * HIDDEN)
    kernels = program.hlo.kernels()
    assert {name: kernels[name] for name in kernels if name.startswith("grouped")} == {
        f"grouped_forward_{generation}": 2,
        f"grouped_dgrad_{generation}": 2,
        f"grouped_wgrad_{generation}": 2,
    }
    moves = [c for c in program.collectives if c.kind == "ragged-all-to-all"]
    assert [(c.times, c.payload) for c in moves] == [(1, TOKENS * TOP_K * DIM * 2)] * 4
    assert [c.shapes for c in program.collectives if c.kind == "all-gather"] == [(f"s32[{RANKS},{LOCAL * RANKS}]",)]
    assert len(program.collectives) == 5
    assert program.hlo.conditionals() == []
    assert program.host_transfers == []
    # Rows in and out of the experts, their two hidden arrays, the gradients of all, and routes; nothing else of that size.
    assert program.temp_bytes < 2 * ROWS * (2 * DIM + 3 * HIDDEN) * 2 + 3 * TOKENS * TOP_K * DIM * 2


def _elements(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
