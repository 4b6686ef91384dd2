"""The device mesh. This is the only place that builds one."""

import math

import jax
from jax.sharding import AxisType, Mesh

from moejax.config import MeshConfig
from moejax.errors import ConfigError
from moejax.parallel.flags import store_no_programs

AXES = ("pp", "dp", "ep")
"""Pipeline stages (outermost), replicas of the experts, and ranks that split the experts (innermost)."""

DATA_AXES = ("dp", "ep")
"""Axes over which a batch is split; dense layers are replicated over them."""


def mesh_shape(config: MeshConfig) -> dict[str, int]:
    """Size of each axis."""
    return dict(zip(AXES, (config.pp, config.dp, config.ep), strict=True))


def make_mesh(config: MeshConfig, devices: list[jax.Device] | None = None) -> Mesh:
    """A mesh with axes ("pp", "dp", "ep") over the first devices, or over those given.

    A pipeline on CPU devices is no longer taken from a cache of compiled programs; see `store_no_programs`.

    Raises:
        ConfigError: if there are fewer devices than mesh.pp x mesh.dp x mesh.ep.
    """
    devices = jax.devices() if devices is None else devices
    if config.num_devices > len(devices):
        raise ConfigError(
            f"{config.words} needs {config.num_devices} devices, but there are {len(devices)} "
            f"({devices[0].device_kind}); use a smaller mesh, or start with more devices"
        )
    if config.pp > 1 and devices[0].platform == "cpu":
        store_no_programs()
    shape = tuple(mesh_shape(config).values())
    return jax.make_mesh(shape, AXES, devices=devices[: math.prod(shape)], axis_types=(AxisType.Auto,) * len(AXES))
