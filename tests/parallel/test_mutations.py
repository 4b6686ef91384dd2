"""With check_vma=False a missing reduction is no error, so each one is left out once, and a comparison with the oracle must notice.

So must it where a gradient is divided once more than it should be.
"""

import dataclasses
import functools
import importlib
import pkgutil
from unittest import mock

import jax
import numpy as np
import pytest
from jax import lax

from moejax.parallel import zero
from moejax.parallel.expert import transports
from moejax.parallel.expert.transports import TRANSPORTS
from moejax.testing import assert_scalar_close, assert_trees_close, named_leaves
from moejax.train.step import put_batch
from tests.oracle import Optimizer, flatten
from tests.oracle.compare import compiled_step, oracle_of, start
from tests.oracle.examples import batch, model_config, parameters, train_config
from tests.oracle.losses import nest
from tests.parallel.ragged_model import ragged_all_to_all

pytestmark = pytest.mark.slow

MODEL = model_config(
    num_layers=1,
    moe={"capacity_factor": 0.9},
    router={"balance_loss": "global", "balance_loss_weight": 1.0, "z_loss_weight": 0.1, "bias_update_rate": 0.01},
)
DATA = {"documents": True, "padding": True, "seed": 2}

REDUCTIONS = [
    # module, collective, which of the module's calls to it
    ("moejax.parallel.zero", "psum_scatter", None),
    ("moejax.parallel.zero", "psum", 0),  # gradients of small leaves
    ("moejax.parallel.zero", "psum", 1),  # gradient norm
    ("moejax.parallel.zero", "all_gather", None),
    ("moejax.train.step", "psum", 0),  # labels and real tokens
    ("moejax.train.step", "psum", 1),  # metrics and loads
    ("moejax.train.step", "pmax", None),
    ("moejax.nn.moe", "psum", None),
    ("moejax.parallel.expert.plan", "all_gather", None),
    ("moejax.parallel.expert.transports.gather", "all_gather", None),
    ("moejax.parallel.expert.transports.dense", "all_to_all", None),
    ("moejax.parallel.expert.transports.ring", "all_gather", None),
    ("moejax.parallel.expert.transports.ring", "psum_scatter", None),
    ("moejax.parallel.expert.transports.ragged", "ragged_all_to_all", None),
    ("moejax.train.step", "all_gather", None),  # loads of the blocks of other stages
    ("moejax.parallel.pipeline.executor", "ppermute", None),
    ("moejax.parallel.pipeline.executor", "psum_scatter", None),
    ("moejax.parallel.pipeline.executor", "all_gather", None),
]

ON_STAGES = {("moejax.train.step", "all_gather")} | {("moejax.parallel.pipeline.executor", name) for _, name, _ in REDUCTIONS}
"""Collectives that only a pipeline has."""


def dropped(collective: str):
    """What a rank sees when the collective does nothing: its own part, in the shape that it expects."""

    def scatter(x, axes, *, scatter_dimension, tiled):
        size = x.shape[scatter_dimension] // lax.axis_size(axes)
        return lax.dynamic_slice_in_dim(x, lax.axis_index(axes) * size, size, scatter_dimension)

    def gather(x, axes, *, axis=0, tiled=False):
        copies = [x] * lax.axis_size(axes)
        return jax.numpy.concatenate(copies, axis) if tiled else jax.numpy.stack(copies, axis)

    return {
        "psum": lambda x, axes: x,
        "ppermute": lambda x, axes, perm: x,
        "pmax": lambda x, axes: x,
        "psum_scatter": scatter,
        "all_gather": gather,
        "all_to_all": lambda x, axes, **dims: x,
        "ragged_all_to_all": lambda x, output, *chunks, axis_name: output,
    }[collective]


class Lax:
    """jax.lax, but for one collective."""

    def __init__(self, collective: str, which: int | None):
        self._collective, self._which, self.calls = collective, which, 0

    def __getattr__(self, name):
        real = getattr(lax, name)
        return functools.partial(self._call, real) if name == self._collective else real

    def _call(self, real, *args, **kwargs):
        index, self.calls = self.calls, self.calls + 1
        return dropped(self._collective)(*args, **kwargs) if self._which in (None, index) else real(*args, **kwargs)


@pytest.fixture(autouse=True)
def ragged_on_cpu(monkeypatch):
    monkeypatch.setattr(lax, "ragged_all_to_all", ragged_all_to_all)
    monkeypatch.setitem(TRANSPORTS, "ragged", dataclasses.replace(TRANSPORTS["ragged"], refusal=lambda platform, ranks: None))


def compare_with_oracle(name: str, transport: str = "gather", pp: int = 1) -> None:
    """Two whole steps: losses, demand, loads, gradient norm, bias and masters. A new name compiles anew."""
    model = dataclasses.replace(MODEL, num_layers=pp, moe=dataclasses.replace(MODEL.moe, transport=transport))
    config = train_config(
        model, dp=2, ep=2, microbatches=2, name=name, optim={"eps": 1e-3, "lr": 0.05, "weight_decay": 0.0, "no_decay": ()}
    )
    config = dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, pp=pp))
    params, bias = parameters(model), np.zeros((pp, 8))
    optimizer = Optimizer(config.optim, config.steps, flatten(params))
    mesh, step = compiled_step(config)
    state = start(config, params)
    for number in range(2):
        data = batch(**DATA | {"seed": 2 + number})
        truth = oracle_of(config, nest(optimizer.master, optimizer.master.values()), data, bias)
        optimizer.apply(truth.gradients, truth.ce)
        bias = bias + 0.01 * np.sign(truth.counts.mean(axis=1, keepdims=True) - truth.counts)
        state, metrics = step(state, put_batch(data, config, mesh))
        norm = np.sqrt(sum(np.sum(g**2) for g in truth.gradients.values()))
        assert_scalar_close(metrics["optim/grad_norm"], norm, "float32", "gradient norm")
        assert_scalar_close(metrics["train/loss"], truth.ce, "float32", "loss")
        assert_scalar_close(metrics["moe/buffer_demand"], truth.demand, "float32", "demand")
        load = truth.counts / truth.counts.sum(axis=1, keepdims=True)
        np.testing.assert_allclose(metrics["moe/expert_load"], load, rtol=1e-6)
        np.testing.assert_allclose(state.router["bias"], bias, atol=1e-6)
        assert_trees_close(named_leaves(state.master), optimizer.master, "float32", "masters")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_comparison_passes_as_it_is(transport):
    compare_with_oracle("whole", transport)


def test_the_comparison_passes_as_it_is_on_stages():
    compare_with_oracle("stages", pp=2)


@pytest.mark.parametrize(("module", "collective", "which"), REDUCTIONS, ids=lambda value: str(value).removeprefix("moejax."))
def test_a_dropped_reduction_is_noticed(module, collective, which):
    replacement = Lax(collective, which)
    with mock.patch.object(importlib.import_module(module), "lax", replacement), pytest.raises(AssertionError):
        compare_with_oracle(f"{module}-{collective}-{which}", transport_of(module), 1 + ((module, collective) in ON_STAGES))
    assert replacement.calls > (which or 0), "the reduction is no longer there: mend the list"


def transport_of(module: str) -> str:
    """The transport that a module holds, or gather."""
    return last if (last := module.split(".")[-1]) in TRANSPORTS else "gather"


@pytest.mark.parametrize("factor", [0.5, 2.0], ids=["divided by the ranks of ep", "summed over the ranks of ep"])
def test_an_expert_gradient_scaled_once_more_is_noticed(factor):
    def reduce(grads, rules, original=zero.reduce_gradients):
        grads = original(grads, rules)
        experts = grads["moe_blocks"]["moe"]["experts"]
        return grads | {"moe_blocks": nested(grads["moe_blocks"], jax.tree.map(lambda g: g * factor, experts))}

    def nested(blocks, experts):
        return blocks | {"moe": blocks["moe"] | {"experts": experts}}

    with mock.patch.object(zero, "reduce_gradients", reduce), pytest.raises(AssertionError):
        compare_with_oracle(f"experts-{factor}")


def test_every_collective_of_the_step_is_in_the_list():
    """Each module that names a collective is listed, so that a new one is mutated too."""
    found = set()
    others = {"moejax.parallel.expert.layer", "moejax.nn.block", "moejax.nn.transformer", "moejax.nn.layers", "moejax.train.pieces"}
    others |= {f"{transports.__name__}.{module.name}" for module in pkgutil.iter_modules(transports.__path__)}
    names = ("psum", "pmax", "pmean", "psum_scatter", "all_gather", "all_to_all", "ragged_all_to_all", "ppermute")
    for module in {name for name, _, _ in REDUCTIONS} | others:
        with open(importlib.import_module(module).__file__) as file:
            text = file.read()
        found |= {(module, name) for name in names if f"lax.{name}(" in text}
    assert found == {(module, name) for module, name, _ in REDUCTIONS}
