"""Layers with known windows: how a stack is cut, that loops over segments equal one loop, and that they keep no weights."""

import dataclasses
import itertools
from functools import partial

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

from moejax.nn import attention as attention_module
from moejax.nn import transformer
from moejax.nn.recompute import recomputed
from moejax.nn.segments import Segment, scan_segments, split
from moejax.testing import assert_trees_close
from moejax_kernels.attention import Choice, attention
from tests.oracle.compare import check
from tests.oracle.examples import batch, model_config, parameters, train_config

F = -1


@pytest.mark.parametrize(
    ("windows", "expected"),
    [
        ((F,) * 7, [((F,), 7)]),
        ((4, F) * 3, [((4, F), 3)]),
        ((4, 4, 4, F) * 2, [((4, 4, 4, F), 2)]),
        ((F, 4, 4, F, 4, 4, 4, F, 4, 4, 4, F), [((F,), 1), ((4,), 2), ((F, 4, 4, 4), 2), ((F,), 1)]),
        ((F, 4, 4, 4, F), [((F,), 1), ((4,), 3), ((F,), 1)]),
        ((4, 2), [((4, 2), 1)]),
    ],
)
def test_a_stack_is_cut_into_the_fewest_compiled_blocks(windows, expected):
    segments = split(windows)
    assert sum(len(s.period) for s in segments) == sum(len(period) for period, _ in expected)
    assert len(segments) == len(expected)
    assert laid_out(segments) == windows


@given(st.lists(st.integers(1, 3), min_size=1, max_size=12).map(tuple))
def test_segments_give_the_windows_back_and_never_more_blocks_than_runs(windows):
    segments = split(windows)
    runs = 1 + sum(a != b for a, b in itertools.pairwise(windows))
    assert laid_out(segments) == windows
    assert sum(len(s.period) for s in segments) <= runs


def laid_out(segments: tuple[Segment, ...]) -> tuple[int, ...]:
    return sum((s.period * s.repeats for s in segments), ())


WINDOWS = (F, 4, 4, F, 4, 4, 4, F, 4, 4, 4, F)
STACK = {"a": np.linspace(-1, 1, 12 * 3 * 5).reshape(12, 3, 5), "b": np.linspace(1, -1, 12 * 5 * 3).reshape(12, 5, 3)}
LAYERS = {"index": np.arange(12), "bias": np.linspace(0, 1, 24).reshape(12, 2)}
X = np.linspace(0, 1, 6).reshape(1, 2, 3)


def block(x, read, layer, window):
    weights = read()
    h = jnp.tanh(x @ weights["a"] + window)
    return x + h @ weights["b"] * layer["bias"][0], {"index": layer["index"], "window": jnp.int32(window), "mean": h.mean()}


def in_segments(stack, x, mode, windows=WINDOWS):
    config = dataclasses.replace(model_config(), recompute=mode)

    def make_block(window, repeats):
        return recomputed(partial(block, window=window), config, num_layers=repeats, is_gathered=True)

    return scan_segments(make_block, x, stack, LAYERS, windows)


def by_loop(stack, x, windows=WINDOWS):
    outs = []
    for i, window in enumerate(windows):
        weights, layer = ({name: a[i] for name, a in tree.items()} for tree in (stack, LAYERS))
        x, out = block(x, lambda weights=weights: weights, layer, window)
        outs.append(out)
    return x, jax.tree.map(lambda *rows: jnp.stack(rows), *outs)


@pytest.mark.parametrize("mode", ["none", "block"])
@pytest.mark.parametrize("windows", [WINDOWS, (F, 4) * 6, (F,) * 12], ids=["cut", "periodic", "uniform"])
def test_loops_over_segments_equal_a_plain_loop(mode, windows):
    stack = jax.tree.map(jnp.float32, STACK)

    def results(run):
        (x, outs), pull = jax.vjp(run, stack, jnp.float32(X))
        ones = jax.tree.map(lambda a: jnp.ones_like(a) if a.dtype == jnp.float32 else np.zeros(a.shape, jax.dtypes.float0), (x, outs))
        stack_gradient, x_gradient = pull(ones)
        return {"x": x, "outs": outs, "dstack": stack_gradient, "dx": x_gradient}

    ours = jax.jit(lambda: results(lambda stack, x: in_segments(stack, x, mode, windows)))()
    truth = results(lambda stack, x: by_loop(stack, x, windows))
    assert ours["outs"]["index"].tolist() == list(range(12))
    assert ours["outs"]["window"].tolist() == list(windows)
    assert_trees_close(ours, truth, "float32", "segments")


@pytest.mark.parametrize("mode", ["none", "block"])
def test_what_is_kept_for_the_backward_pass_holds_no_copy_of_the_weights(mode):
    def kept(stack):
        _, pull = jax.vjp(lambda stack: in_segments(stack, jnp.float32(X), mode)[0], stack)
        return pull.opaque_residuals

    shapes = [a.shape for a in jax.eval_shape(kept, jax.tree.map(jnp.float32, STACK))]
    weights = [shape for shape in shapes if shape[-2:] in ((3, 5), (5, 3))]
    assert all(shape[0] == 12 and len(shape) == 3 for shape in weights)  # the stack itself, read again
    assert len(weights) <= 2


WINDOWED = {"num_heads": 2, "num_kv_heads": 1, "window_pattern": (3, 3, -1), "full_attention_ends": False}
DENSE = model_config(num_layers=3, num_dense_layers=3, mlp_dim=20, attention=WINDOWED)
EXPERTS = model_config(num_layers=3, recompute="selective", attention=WINDOWED)


@pytest.mark.parametrize("model", [DENSE, pytest.param(EXPERTS, marks=pytest.mark.slow)], ids=["dense", "experts"])
def test_a_model_in_segments_equals_the_oracle(model, monkeypatch):
    """Windows as numbers, as cuDNN needs them, here with the kernel that runs anywhere. Two loops: a window twice, and full attention."""
    seen = []

    def with_numbers(*arrays, window, implementation, max_documents):
        assert implementation == "cudnn"
        seen.append((window, max_documents))
        return attention(*arrays, window=window)

    monkeypatch.setattr(transformer, "choose_attention", lambda config: Choice("cudnn", "cudnn, because the test says so"))
    monkeypatch.setattr(attention_module, "attention", with_numbers)
    config = train_config(model, name="segments")
    check(config, parameters(config.model), batch(documents=True, padding=True))
    assert set(seen) == {(3, 1), (-1, 1)}
