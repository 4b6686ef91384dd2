"""Which implementation and tile are chosen for which device, also for a device that is not here."""

import contextlib

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, PartitionSpec

from moejax_kernels.device import platform
from moejax_kernels.grouped_matmul import choose_implementation, choose_tile, grouped_matmul


def traced_for(name: str) -> contextlib.AbstractContextManager:
    """A mesh of one device of that platform in scope, as when compiling ahead of time."""
    device = AbstractDevice(device_kind="a device", num_cores=None, platform=name)
    return jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("ep",), abstract_device=device))


@pytest.mark.parametrize(("name", "expected"), [("cpu", "cpu"), ("gpu", "gpu"), ("cuda", "gpu"), ("rocm", "gpu"), ("tpu", "tpu")])
def test_platform_is_that_of_the_mesh_in_scope(name, expected):
    assert platform() == "cpu"
    with traced_for(name):
        assert platform() == expected


def test_platform_is_known_inside_shard_map():
    seen = []

    def body(x):
        seen.append(platform())
        return x

    mesh = jax.make_mesh((2,), ("ep",), devices=jax.devices()[:2], axis_types=(AxisType.Auto,))
    jax.eval_shape(jax.shard_map(body, mesh=mesh, in_specs=PartitionSpec("ep"), out_specs=PartitionSpec("ep")), jnp.zeros(2))
    assert seen == ["cpu"]


def test_on_cpu_auto_takes_the_cpu_body():
    assert choose_implementation() == choose_implementation("auto") == choose_implementation("cpu") == "cpu"


def test_the_definition_runs_anywhere_by_name():
    assert choose_implementation("reference") == "reference"
    with traced_for("gpu"):
        assert choose_implementation("reference") == "reference"


def test_auto_without_a_kernel_for_the_device_says_what_to_do():
    with traced_for("gpu"), pytest.raises(NotImplementedError, match=r"no kernel for platform 'gpu'; run on CPU, or .*'reference'"):
        choose_implementation()


def test_a_name_never_falls_back():
    x, w = jax.ShapeDtypeStruct((8, 4), jnp.float32), jax.ShapeDtypeStruct((1, 4, 4), jnp.float32)

    def product(x, w, sizes):
        return grouped_matmul(x, w, sizes, tile=8, implementation="cpu")

    with traced_for("gpu"), pytest.raises(NotImplementedError, match="'cpu' was asked for on platform 'gpu'; use 'auto' or 'reference'"):
        jax.eval_shape(product, x, w, jax.ShapeDtypeStruct((1,), jnp.int32))


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="grouped_matmul='triton' is not one of auto, reference, cpu"):
        choose_implementation("triton")


@pytest.mark.parametrize(("rows", "tile"), [(0, 8), (63, 8), (64, 16), (127.9, 16), (128, 32), (512, 128), (1e6, 128)])
def test_the_tile_on_cpu_follows_the_rows_of_an_expert(rows, tile):
    assert choose_tile(rows) == tile


def test_the_tile_on_an_accelerator_is_fixed():
    with traced_for("gpu"):
        assert choose_tile(1) == choose_tile(1e6) == 128
