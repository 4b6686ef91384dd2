"""Compile the grouped matmul and its gradients for one GPU that is not here, and print what came out as JSON.

Run with the GPU's name (h200, b300, ...) and MOSAIC_GPU_DUMP_TO, MOSAIC_GPU_DUMP_PTX, MOSAIC_GPU_DUMP_PTXAS set; one GPU in a process.
"""

import json
import os
import re
import sys
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp

from moejax.plan.aot import compile_for
from moejax_kernels.grouped_matmul import buffer_rows, choose_implementation, grouped_matmul

ROWS, K, N, EXPERTS, TILE = 16384, 1024, 2048, 64, 128
BUFFER = buffer_rows(ROWS, EXPERTS, TILE)
INSTRUCTIONS = r"(?:tcgen05\.(?:mma|ld)|wgmma\.mma_async|cp\.async\.bulk\.tensor)[\w.:]*"
CHOICES = []


def forward(x, w, sizes):
    CHOICES.append(choose_implementation(dtype=x.dtype, widths=w.shape[1:]).reason)
    return grouped_matmul(x, w, sizes, tile=TILE)


def with_gradients(x, w, dy, sizes):
    y, pullback = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, tile=TILE), x, w)
    return y, *pullback(dy)


def report(compiled) -> dict:
    """Memory of a program in bytes, the shape of every array in it, and what it copies or transposes."""
    memory, text = compiled.memory_analysis(), compiled.as_text()
    shapes = set(re.findall(r"\b[a-z]+\d+\[([\d,]+)\]", text))
    return {
        "temp_bytes": memory.temp_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "shapes": sorted([int(size) for size in shape.split(",")] for shape in shapes),
        "moved": re.findall(r"= (\S+) (?:copy|transpose)\(", text),
    }


def kernel(name: str, folder: Path) -> dict:
    """What ptxas and the PTX say of one Mosaic kernel."""
    ptx, ptxas, resources = (min(folder.glob(f"*{name}*{end}")).read_text() for end in (".ptx", ".ptxas", ".resources.txt"))
    return {
        "target": re.search(r"\.target (\w+)", ptx)[1],
        "registers": int(re.search(r"Used (\d+) registers", ptxas)[1]),
        "spilled_bytes": int(re.search(r"(\d+) bytes spill stores", ptxas)[1]),
        "shared_bytes": int(re.search(r"smem_scratch_bytes=(\d+)", resources)[1]),
        "tensor_memory_columns": int(re.search(r"tmem_scratch_cols=(\d+)", resources)[1]),
        "instructions": dict(Counter(re.findall(INSTRUCTIONS, ptx))),
    }


def main() -> None:
    gpu, folder = sys.argv[1], Path(os.environ["MOSAIC_GPU_DUMP_TO"])
    x, dy, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((BUFFER, K), (BUFFER, N), (EXPERTS, K, N)))
    sizes = jax.ShapeDtypeStruct((EXPERTS,), jnp.int32)
    programs = {"forward": report(compile_for(forward, gpu, x, w, sizes)), "vjp": report(compile_for(with_gradients, gpu, x, w, dy, sizes))}
    kernels = {kind: kernel(f"grouped_{kind}", folder) for kind in ("forward", "dgrad", "wgrad")}
    print(json.dumps({"choice": CHOICES[0], "programs": programs, "kernels": kernels}))


if __name__ == "__main__":
    main()
