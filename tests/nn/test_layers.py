"""Loops over layers: outputs, reports and gradients are those of a plain loop, and nothing that is kept holds weights."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.nn import attention as attention_module
from moejax.nn import transformer
from moejax.nn.layers import Layers, backward, forward, keep
from moejax.nn.recompute import recomputed
from moejax.testing import assert_trees_close
from moejax_kernels.attention import Choice, attention
from tests.oracle.compare import check
from tests.oracle.examples import batch, model_config, parameters, train_config

F = -1
WINDOWS = (F, 4, 4, F, 4, 4, 4, F, 4, 4, 4, F)
PLACES = (0, 1, 2, 3, 4, 5, 9, 8, 7, 6, 10, 12)
STACK = {"a": np.linspace(-1, 1, 13 * 3 * 5).reshape(13, 3, 5), "b": np.linspace(1, -1, 13 * 5 * 3).reshape(13, 5, 3)}
NUMBERS = {"index": np.arange(12), "bias": np.linspace(0, 1, 24).reshape(12, 2).astype(np.float32)}
X = np.linspace(0, 1, 6).reshape(1, 2, 3).astype(np.float32)
SHARED = np.float32(0.5)
DY = np.linspace(1, -1, 6).reshape(1, 2, 3).astype(np.float32)


def block(weights, x, numbers, shared, window):
    """One with a loss of its own: the sum of h times the layer's second number."""
    h = jnp.tanh(x @ weights["a"] + window * shared)
    report = {"index": numbers["index"], "window": jnp.int32(window), "mean": h.mean()}
    return (x + h @ weights["b"] * numbers["bias"][0], h.sum() * numbers["bias"][1]), report


def layers_of(mode, windows=WINDOWS, stack=STACK):
    config = dataclasses.replace(model_config(), recompute=mode)

    def make_block(window, repeats):
        return recomputed(partial(block, window=window), config, num_layers=repeats, is_gathered=True)

    numbers, shared = jax.tree.map(jnp.asarray, NUMBERS), jnp.asarray(SHARED)
    return Layers("layers", make_block, jax.tree.map(jnp.float32, stack), jnp.asarray(PLACES), numbers, shared, windows)


def by_hand(stack, x, windows):
    total, reports = jnp.float32(0), []
    for i, window in enumerate(windows):
        weights, numbers = ({name: a[j] for name, a in tree.items()} for tree, j in ((stack, PLACES[i]), (NUMBERS, i)))
        (x, scalar), report = block(weights, x, numbers, SHARED, window)
        total += scalar
        reports.append(report)
    return (x * DY).sum() + total, (x, jax.tree.map(lambda *rows: jnp.stack(rows), *reports))


@pytest.mark.parametrize("mode", ["none", "block"])
@pytest.mark.parametrize("windows", [WINDOWS, (F, 4) * 6, (F,) * 12], ids=["cut", "periodic", "uniform"])
def test_layers_equal_a_plain_loop(mode, windows):
    """Gradients are added to what the sums held before; a place that no layer reads keeps it."""
    stack = jax.tree.map(jnp.float32, STACK)
    (truth_stack, truth_x), (y, reports) = jax.grad(lambda *a: by_hand(*a, windows), argnums=(0, 1), has_aux=True)(stack, jnp.asarray(X))

    @jax.jit
    def ours():
        layers = layers_of(mode, windows)
        y, reports, kept = keep(layers, jnp.asarray(X))
        dx, sums = backward(layers, kept, jnp.asarray(DY), jax.tree.map(jnp.ones_like, stack))
        alone = forward(layers, jnp.asarray(X))
        return {"y": y, "reports": reports, "dx": dx, "sums": sums}, {"y": alone[0], "reports": alone[1]}

    found, alone = ours()
    assert found["reports"]["index"].tolist() == list(range(12))
    assert found["reports"]["window"].tolist() == list(windows)
    wanted = {"y": y, "reports": reports, "dx": truth_x, "sums": jax.tree.map(lambda g: 1 + g, truth_stack)}
    assert_trees_close(found, wanted, "float32", "layers")
    assert_trees_close(alone, {"y": y, "reports": reports}, "float32", "forward alone")
    assert (found["sums"]["a"][11] == 1).all()


def test_what_waits_in_a_slot_is_found_there_and_a_pass_that_is_none_adds_nothing():
    @jax.jit
    def run(slot, is_real):
        layers = layers_of("block")
        _, _, kept = keep(layers, jnp.asarray(X))
        empty = jax.tree.map(lambda a: jnp.full((3, *a.shape), jnp.nan if a.dtype == jnp.float32 else 0, a.dtype), kept)
        _, _, slots = keep(layers, jnp.asarray(X), (empty, jnp.int32(2)))
        sums = jax.tree.map(lambda a: jnp.ones(a.shape, jnp.float32), STACK)
        direct = backward(layers, kept, jnp.asarray(DY), sums)
        return direct, backward(layers, slots, jnp.asarray(DY), sums, slot=slot, is_real=is_real)

    direct, found = run(jnp.int32(2), jnp.bool_(True))
    jax.tree.map(np.testing.assert_array_equal, found, direct)
    _, (_, sums) = run(jnp.int32(0), jnp.bool_(False))
    assert all((a == 1).all() for a in jax.tree.leaves(sums))


@pytest.mark.parametrize("mode", ["none", "block"])
def test_what_is_kept_holds_no_weights_nor_what_layers_share(mode):
    shapes = [a.shape for a in jax.tree.leaves(jax.eval_shape(lambda: keep(layers_of(mode), jnp.asarray(X))[2]))]
    assert not [shape for shape in shapes if shape[-2:] in ((3, 5), (5, 3))]
    assert (len(shapes) == 7) == (mode == "block")  # with block, the input of each compiled block


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
