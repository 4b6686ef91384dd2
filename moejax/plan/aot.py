"""Compiling ahead of time for GPUs that are not here: real HLO, PTX and memory figures on a machine with a CPU only.

Needs JAX's CUDA plugin (the extra cuda13), no driver and no GPU. Nothing compiled here can run. Compile for one kind of GPU in a
process: Mosaic keeps compiled kernels without the architecture in the key.
"""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from moejax.config import MeshConfig
from moejax.errors import ConfigError
from moejax.parallel import make_mesh
from moejax.plan.gpus import find_gpu, gpus_per_host, target_config


def gpu_mesh(gpu: str, config: MeshConfig) -> Mesh:
    """The mesh of a config over as many GPUs of this kind as it needs, eight to a host, none of them here.

    Raises:
        ConfigError: if the GPU is not in the table, or JAX's CUDA plugin is not installed.
    """
    return make_mesh(config, list(_devices(find_gpu(gpu).name, config.num_devices)))


def compile_for(fn: Callable, gpu: str, *args: Any) -> Any:
    """`fn` compiled for one GPU, a `jax.stages.Compiled`; args are arrays or `jax.ShapeDtypeStruct`s, or trees of them.

    The function is traced inside shard_map, so kernels see the GPU that they are compiled for.
    """
    mesh = gpu_mesh(gpu, MeshConfig())
    sharding = NamedSharding(mesh, P())
    args = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), args)
    return jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)).lower(*args).compile()


@functools.cache
def _devices(gpu: str, count: int) -> tuple:
    if importlib.util.find_spec("jax_plugins.xla_cuda13") is None and importlib.util.find_spec("jax_plugins.xla_cuda12") is None:
        raise ConfigError(f"compiling for gpu={gpu} needs JAX's CUDA plugin (no GPU): pip install 'moejax[cuda13]'")
    local = gpus_per_host(count)
    description = topologies.get_topology_desc(
        platform="cuda", target_config=target_config(find_gpu(gpu)), topology=f"1x{count // local}x{local}"
    )
    return tuple(description.devices)
