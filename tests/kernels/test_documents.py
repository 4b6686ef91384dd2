"""Packed documents for cuDNN: the tables against the segment ids, by an emulation in NumPy, and the private parts of JAX behind them."""

import inspect

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from jax.sharding import AbstractDevice, AbstractMesh

from moejax_kernels.attention import documents

LENGTH = 12


def packed(segments, max_documents):
    tables, fits = jax.jit(documents.pack, static_argnums=1)(jnp.asarray(segments, jnp.int32), max_documents)
    return np.asarray(tables.lengths), np.asarray(tables.starts), np.asarray(fits)


def visible_as_cudnn_reads(lengths, starts, length):
    """Bool [B, query, key], from what JAX hands to cuDNN: lengths and first elements of documents, of all sequences one after the other."""
    rows, heads, kv_heads, head_dim = len(lengths), 4, 2, 8
    q, k = (jnp.zeros((rows, length, n, head_dim), jnp.bfloat16) for n in (heads, kv_heads))
    q_length, k_length, q_start, k_start = (np.asarray(a).reshape(-1) for a in _fixed(lengths, lengths, starts, starts, q, k))
    np.testing.assert_array_equal(q_length, k_length)
    np.testing.assert_array_equal(q_start // (heads * head_dim), k_start // (kv_heads * head_dim))  # keys have fewer heads
    assert not (q_start % (heads * head_dim)).any()
    mask = np.zeros((rows * length, rows * length), bool)
    for first, n in zip(q_start // (heads * head_dim), q_length, strict=False):
        mask[first : first + n, first : first + n] = np.tri(n, dtype=bool)
    whole = mask.reshape(rows, length, rows, length)
    assert not any(whole[a, :, b].any() for a in range(rows) for b in range(rows) if a != b), "a document reaches into another sequence"
    return np.stack([whole[row, :, row] for row in range(rows)])


@jax.jit
def _fixed(*tables):
    with jax.numpy_rank_promotion("allow"):
        return documents.fused._fix_seqlen_offsets(*tables)


def visible_by_segments(segments):
    return (segments[:, :, None] == segments[:, None, :]) & np.tri(segments.shape[1], dtype=bool)


@st.composite
def sequences(draw):
    """Rows of documents in a row, numbered from 1, with padding behind them or alone."""
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        lengths = draw(st.lists(st.integers(1, LENGTH), max_size=5))
        row = np.repeat(np.arange(1, len(lengths) + 1), lengths)[:LENGTH]
        rows.append(np.pad(row, (0, LENGTH - len(row))))
    return np.stack(rows)


@given(sequences())
def test_the_tables_show_each_query_the_keys_of_its_document(segments):
    lengths, starts, fits = packed(segments, 6)
    assert lengths.dtype == starts.dtype == np.int32
    assert lengths.shape == (len(segments), 6)
    assert starts.shape == (len(segments), 7)
    assert (starts[:, -1] == -1).all()
    assert ((lengths > 0) == (starts[:, :-1] >= 0)).all()
    assert fits.all()
    np.testing.assert_array_equal(visible_as_cudnn_reads(lengths, starts, LENGTH), visible_by_segments(segments))


def test_tables_of_an_example():
    lengths, starts, _ = packed(np.array([[1, 1, 1, 2, 2, 2, 2, 3, 0, 0], [0] * 10]), 6)
    assert lengths.tolist() == [[3, 4, 1, 2, -1, -1], [10, -1, -1, -1, -1, -1]]
    assert starts.tolist() == [[0, 3, 7, 8, -1, -1, -1], [0, -1, -1, -1, -1, -1, -1]]


def test_more_documents_than_the_tables_hold_make_the_sequence_nan_and_leave_the_others():
    segments = np.array([[1, 2, 3, 3], [1, 1, 2, 2]])
    *_, fits = packed(segments, 2)
    assert fits.tolist() == [False, True]
    k = documents.refuse(jnp.ones((2, 4, 1, 8), jnp.bfloat16), jnp.asarray(fits))
    assert k.dtype == jnp.bfloat16
    assert np.isnan(np.asarray(k[0], np.float32)).all()
    assert (np.asarray(k[1], np.float32) == 1).all()


def test_what_is_used_of_jax_is_still_there():
    """If this fails, JAX has moved its cuDNN attention. Look in jax/_src/cudnn and in the function behind jax.nn.dot_product_attention for
    q_offsets and kv_offsets, adapt kernels/moejax_kernels/attention/documents.py, and compile ahead of time with tests/kernels -m slow."""
    taken = inspect.signature(documents.fused.dot_product_attention).parameters
    used = ("q_seqlen", "kv_seqlen", "q_offsets", "kv_offsets", "scale", "mask_type", "sliding_window_length")
    assert [name for name in used if name not in taken] == []
    assert list(taken)[:3] == ["query", "key", "value"]
    assert documents.fused.MaskType.PADDING_CAUSAL
    source = inspect.getsource(documents.fused.check_is_flash_attention)
    assert "check_compute_capability(" in source
    assert "is_cuda_compute_capability_equal(" in source
    assert callable(documents.fused._fix_seqlen_offsets)  # only used here, to see what reaches cuDNN


@pytest.mark.parametrize(
    ("kind", "answers"),
    [
        ("NVIDIA H200", (True, False, False)),
        ("NVIDIA B200", (True, True, False)),
        ("NVIDIA GB300", (True, True, True)),
        ("A100", (False,) * 3),
    ],
)
def test_the_traced_device_answers_what_it_can_do_and_jax_is_left_as_it_was(kind, answers):
    fused, before = documents.fused, (documents.fused.check_compute_capability, documents.fused.is_cuda_compute_capability_equal)
    device = AbstractDevice(device_kind=kind, num_cores=1, platform="gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("ep",), abstract_device=device)):
        with documents._capability_of_the_traced_device():
            found = (*(fused.check_compute_capability(c) for c in ("9.0", "10.0")), fused.is_cuda_compute_capability_equal("10.3"))
        assert found == answers
        with pytest.raises(ZeroDivisionError), documents._capability_of_the_traced_device():
            raise ZeroDivisionError
    assert (fused.check_compute_capability, fused.is_cuda_compute_capability_equal) == before
