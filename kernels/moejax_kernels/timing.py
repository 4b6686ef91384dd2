"""Times of several programs as medians of interleaved runs, so that whatever else the machine does hits all of them alike."""

import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

_SAMPLE_S = 0.005  # a sample repeats a program until it takes about this long, so that dispatch is not what is timed
_MAX_CALLS = 200


def interleaved_medians(programs: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median seconds of one call of each program; every round runs each of them once, in turn.

    A program returns the arrays that its call makes. The first calls, which compile, are not timed.
    """
    calls = {}
    for name, program in programs.items():
        jax.block_until_ready(program())
        calls[name] = min(_MAX_CALLS, max(1, math.ceil(_SAMPLE_S / max(_sample(program, 1), 1e-9))))
    samples: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(repeats):
        for name, program in programs.items():
            samples[name].append(_sample(program, calls[name]))
    return {name: statistics.median(times) for name, times in samples.items()}


def overwriting(function: Callable, *args: Any) -> Callable[[], Any]:
    """A program that computes function(*args) under jit, each call into the memory of the results of the call before.

    Fresh memory costs a page fault for every 4 KiB: on a virtual machine with two cores a copy of 64 MiB into fresh memory ran at
    1.1 GB/s (read and write counted), into used memory at 3.8 GB/s. A training step reuses its memory, so kernels are compared there.
    """
    run = jax.jit(lambda _, *args: function(*args), donate_argnums=0, keep_unused=True)
    results = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(function, *args))

    def program():
        nonlocal results
        results = run(results, *args)
        return results

    return program


def copying(num_bytes: int) -> Callable[[], Any]:
    """A program that reads `num_bytes`, a multiple of 4, and writes as many; the rate is 2 * num_bytes over its time."""
    return overwriting(lambda x: x + 1, jnp.ones(num_bytes // 4, jnp.float32))


def _sample(program: Callable[[], Any], calls: int) -> float:
    results = None
    start = time.perf_counter()
    for _ in range(calls):
        results = program()
    jax.block_until_ready(results)
    return (time.perf_counter() - start) / calls
