"""Declarations of parameters: names, shapes, dtypes and axes; and modules that get their arrays from outside."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moejax.nn import ParamSpec, Transformer, is_spec
from moejax.nn.norm import RMSNorm
from moejax.nn.param import make_template, param
from tests.oracle.examples import model_config, parameter_shapes

CONFIGS = {
    "plain": model_config(),
    "dense": model_config(num_dense_layers=2, mlp_dim=7),
    "everything": model_config(
        num_layers=5,
        num_dense_layers=2,
        mlp_dim=7,
        norm_placement="peri",
        embed_norm=True,
        moe={"num_shared_experts": 3, "shared_expert_dim": 6},
        attention={"num_heads": 4, "num_kv_heads": 2, "head_dim": 6, "qk_norm": "width"},
    ),
    "tied, post-norm, one shared expert": model_config(
        tie_embeddings=True,
        norm_placement="post",
        moe={"num_shared_experts": 1, "shared_expert_dim": 6},
        attention={"qk_norm": "head"},
    ),
}


def specs_of(config) -> dict[str, ParamSpec]:
    leaves = jax.tree_util.tree_leaves_with_path(Transformer(config).specs, is_leaf=is_spec)
    return {jax.tree_util.keystr(path, simple=True, separator="."): spec for path, spec in leaves}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_names_and_shapes_are_those_of_the_parameter_tree(config):
    assert {name: spec.shape for name, spec in specs_of(config).items()} == parameter_shapes(config)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_every_dim_has_a_name_and_only_experts_and_layers_are_stacks(config):
    for name, spec in specs_of(config).items():
        assert len(spec.logical_axes) == len(spec.shape), name
        assert (spec.logical_axes[0] == "layer") == name.startswith("dense_blocks."), name
        assert (spec.logical_axes[0] == "stage") == name.startswith("moe_blocks."), name
        assert ("expert" in spec.logical_axes) == (".moe.experts." in name), name


def test_scales_are_ones_in_float32_and_routers_are_float32():
    for name, spec in specs_of(dataclasses.replace(CONFIGS["everything"], dtype="bfloat16", init_std=0.3)).items():
        assert spec.dtype == ("float32" if name.endswith(("scale", "w_router")) else None), name
        assert (spec.init, spec.std) == (("ones", 0.0) if name.endswith("scale") else ("normal", 0.3)), name


class Doubled(nnx.Module):
    def __init__(self):
        self.w = param(3, 4, axes=("embed", "mlp"), std=0.5)
        self.norm = RMSNorm(4, 1e-6)

    def __call__(self, x):
        return 2 * self.norm(x @ self.w[...])


def test_a_template_holds_no_arrays():
    template = make_template(Doubled)
    assert template.specs == {
        "w": ParamSpec((3, 4), ("embed", "mlp"), "normal", 0.5, None),
        "norm": {"scale": ParamSpec((4,), ("norm",), "ones", 0.0, "float32")},
    }
    assert not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(template.state))


def test_bind_takes_these_arrays_and_leaves_the_template_as_it_was():
    template, x = make_template(Doubled), np.ones((2, 3), np.float32)
    first = template.bind({"w": jnp.ones((3, 4)), "norm": {"scale": jnp.full(4, 3.0)}})
    second = template.bind({"w": jnp.ones((3, 4)), "norm": {"scale": jnp.full(4, 5.0)}})
    np.testing.assert_allclose(first(x), 6.0, rtol=1e-5)
    np.testing.assert_allclose(second(x), 10.0, rtol=1e-5)
    np.testing.assert_allclose(first(x), 6.0, rtol=1e-5)
    assert not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(template.state))


def test_bound_arrays_may_have_the_size_of_a_shard():
    half = make_template(Doubled).bind({"w": jnp.ones((3, 2)), "norm": {"scale": jnp.ones(2)}})
    assert half(np.ones((5, 3), np.float32)).shape == (5, 2)


def test_gradients_come_back_in_the_tree_that_was_bound():
    template = make_template(Doubled)
    arrays = {"w": jnp.arange(12.0).reshape(3, 4), "norm": {"scale": jnp.ones(4)}}
    grads = jax.grad(lambda arrays: template.bind(arrays)(jnp.ones((2, 3))).sum())(arrays)
    assert jax.tree.map(jnp.shape, grads) == jax.tree.map(jnp.shape, arrays)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(grads))
