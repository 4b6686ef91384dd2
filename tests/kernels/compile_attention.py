"""Compile attention and its gradients for one GPU that is not here, and print what came out as JSON. Run with the GPU's name."""

import json
import re
import sys
from collections import Counter

import jax
import jax.numpy as jnp

from moejax.plan.aot import compile_for
from moejax.plan.hlo import Hlo
from moejax_kernels.attention import Places, attention, choose_implementation

LENGTHS = (8192, 32768)
DOCUMENTS, WINDOW, ROWS, HEADS, KV_HEADS, HEAD_DIM = 16, 512, 2, 16, 4, 128
KINDS = {
    "causal": ("bfloat16", -1, 1),
    "window": ("bfloat16", WINDOW, 1),
    "documents": ("bfloat16", -1, DOCUMENTS),
    "both": ("bfloat16", WINDOW, DOCUMENTS),
    "float32": ("float32", WINDOW, DOCUMENTS),
}
"""dtype, window and most documents of a sequence."""
REASONS = {}


def compiled(gpu: str, kind: str, length: int):
    """Forward and backward pass, in a program of its own."""
    dtype, window, max_documents = KINDS[kind]

    def step(q, k, v, dy, segment):
        choice = choose_implementation(dtype=q.dtype, head_dim=HEAD_DIM)
        REASONS[kind] = choice.reason
        at = Places(jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), segment.shape), segment)
        settings = {"window": window, "implementation": choice.name, "max_documents": max_documents}
        y, pullback = jax.vjp(lambda q, k, v: attention(q, k, v, at, at, **settings), q, k, v)
        return y, pullback(dy)

    queries, keys = (jax.ShapeDtypeStruct((ROWS, length, heads, HEAD_DIM), dtype) for heads in (HEADS, KV_HEADS))
    return compile_for(step, gpu, queries, keys, keys, queries, jax.ShapeDtypeStruct((ROWS, length), jnp.int32))


def report(gpu: str, kind: str, length: int) -> dict:
    """What the program holds and calls."""
    program = compiled(gpu, kind, length)
    text, shapes = program.as_text(), []
    for dims in set(re.findall(r"\b[a-z]+\d*\[([\d,]+)\]", text)):
        shapes.append([int(size) for size in dims.split(",")])
    return {
        "temp_bytes": program.memory_analysis().temp_size_in_bytes,
        "kernels": Hlo(text).kernels(),
        "conditionals": len(Hlo(text).conditionals()),
        "most_scores": max((Counter(shape)[length] for shape in shapes), default=0),
    }


def main() -> None:
    gpu = sys.argv[1]
    found = {kind: {length: report(gpu, kind, length) for length in LENGTHS} for kind in KINDS}
    print(json.dumps({"reports": found, "reasons": REASONS}))


if __name__ == "__main__":
    main()
