"""cuDNN attention inside documents that are packed into sequences: tables of where each one starts and how long it is.

    segment    1 1 1 2 2 2 2 3 0 0        padding counts as a document, so that every token is written
    lengths    3 4 1 2 -1 -1              of at most max_documents = 6
    starts     0 3 7 8 -1 -1 -1           one more, as cuDNN wants it

The only file that uses jax._src: JAX's public attention takes no packed layout. tests/kernels/test_documents.py pins what is used of it.
"""

import contextlib
import threading
from collections.abc import Generator
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as fused

from moejax_kernels.device import device_kind, gpu_generation

_LOCK = threading.RLock()


class Packed(NamedTuple):
    """lengths: int32 [B, M], -1 where there is no document. starts: int32 [B, M + 1], likewise, the last one always -1."""

    lengths: jax.Array
    starts: jax.Array


def pack(segment: jax.Array, max_documents: int) -> tuple[Packed, jax.Array]:
    """Tables of the documents, runs of equal segments [B, T], and whether those of a sequence fit into them, bool [B]."""
    is_first = jnp.concatenate([jnp.ones_like(segment[:, :1], bool), segment[:, 1:] != segment[:, :-1]], axis=1)
    document = jnp.cumsum(is_first, axis=1, dtype=jnp.int32) - 1
    slots = jnp.arange(max_documents + 1, dtype=jnp.int32)
    starts = (document[:, :, None] < slots[None, None, :]).sum(
        axis=1, dtype=jnp.int32
    )  # tokens before each document; XLA fuses the comparison
    lengths = starts[:, 1:] - starts[:, :-1]
    starts = jnp.where(jnp.pad(lengths, ((0, 0), (0, 1))) > 0, starts, -1)
    return Packed(jnp.where(lengths > 0, lengths, -1), starts), document[:, -1] < max_documents


def refuse(k: jax.Array, fits: jax.Array) -> jax.Array:
    """Keys, NaN in sequences of more documents than the tables hold: their result could only be wrong."""
    return jnp.where(fits[:, None, None, None], k, jnp.nan)


def packed_attention(q: jax.Array, k: jax.Array, v: jax.Array, packed: Packed, window: int | None) -> jax.Array:
    """Causal attention inside each document, over the last `window` keys if given. Differentiate it where it is called."""
    with _capability_of_the_traced_device():
        y = fused.dot_product_attention(
            q,
            k,
            v,
            q_seqlen=packed.lengths,
            kv_seqlen=packed.lengths,
            q_offsets=packed.starts,
            kv_offsets=packed.starts,
            scale=q.shape[3] ** -0.5,
            mask_type=fused.MaskType.PADDING_CAUSAL,
            sliding_window_length=window,
        )
        return cast(jax.Array, y)


@contextlib.contextmanager
def _capability_of_the_traced_device() -> Generator[None]:
    """JAX asks the GPU of this machine what it can do; meanwhile the device that is being traced for answers, present or not."""
    present = {"sm90": (9, 0), "sm100": (10, 3 if "300" in device_kind() else 0), None: (0, 0)}[gpu_generation()]
    with _LOCK:
        saved = fused.check_compute_capability, fused.is_cuda_compute_capability_equal
        fused.check_compute_capability = lambda capability: present >= tuple(map(int, capability.split(".")))
        fused.is_cuda_compute_capability_equal = lambda capability: present == tuple(map(int, capability.split(".")))
        try:
            yield
        finally:
            fused.check_compute_capability, fused.is_cuda_compute_capability_equal = saved
