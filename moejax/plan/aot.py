"""Compiling ahead of time for GPUs that are not here: real HLO, PTX and memory figures on a machine with a CPU only.

Needs JAX's CUDA plugin (the extra cuda13), no driver and no GPU. Nothing compiled here can run. Compile for one kind of GPU in a
process: Mosaic keeps compiled kernels without the architecture in the key.
"""

import functools
import importlib.util
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from moejax.config import MeshConfig, TrainConfig
from moejax.errors import ConfigError
from moejax.parallel import make_mesh
from moejax.plan.gpus import find_gpu, target_config
from moejax.plan.hlo import Hlo
from moejax.plan.memory import Buffer, peak_buffers
from moejax.plan.traffic import Collective, HostTransfer, collectives, host_transfers
from moejax.train.state import abstract_state
from moejax.train.step import abstract_batch, make_train_step

_OPTIONS = {
    # Above about three quarters of a GPU's memory XLA computes, and sends, results again to need less. This limit, in percent of the
    # usual one, is never reached: a plan shall say what the step needs without that.
    "xla_gpu_memory_limit_slop_factor": 1000,
    # CUB's sort asks a GPU for the size of its scratch, or knows none; XLA's own sort does not.
    "xla_gpu_enable_cub_radix_sort": False,
}


@dataclass(frozen=True)
class Program:
    """A program compiled for GPUs, and what XLA says of it for one of them; bytes, seconds.

    peak: buffers alive when most memory is needed, arguments included.
    """

    hlo: Hlo
    collectives: list[Collective]
    host_transfers: list[HostTransfer]
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    peak: list[Buffer]
    lower_s: float
    compile_s: float


def compile_step(config: TrainConfig, gpu: str) -> Program:
    """The training step of a config, the one that trains, compiled for its mesh of these GPUs.

    Raises:
        ConfigError: if the GPU is not in the table, the CUDA plugin is not installed, or a setting does not work on this GPU.
    """
    mesh = gpu_mesh(gpu, config.mesh)
    return compile_program(make_train_step(config, mesh), mesh, abstract_state(config, mesh), abstract_batch(config, mesh))


def compile_program(jitted: Any, mesh: Mesh, *args: Any) -> Program:
    """A jitted function compiled for a mesh from `gpu_mesh`; args are `jax.ShapeDtypeStruct`s with shardings, or trees of them."""
    start = time.perf_counter()
    lowered = jitted.lower(*args)
    middle = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        compiled = lowered.compile(compiler_options=_OPTIONS | {"xla_dump_to": folder})
        end = time.perf_counter()
        live_ranges, assignment = (_read(Path(folder), kind) for kind in ("live-range", "after_optimizations-buffer-assignment"))
    hlo, stats = Hlo(compiled.as_text()), compiled.memory_analysis()
    return Program(
        hlo=hlo,
        collectives=collectives(hlo, dict(mesh.shape)),
        host_transfers=host_transfers(hlo),
        argument_bytes=stats.argument_size_in_bytes,
        output_bytes=stats.output_size_in_bytes,
        alias_bytes=stats.alias_size_in_bytes,
        temp_bytes=stats.temp_size_in_bytes,
        peak=peak_buffers(live_ranges, assignment, hlo),
        lower_s=middle - start,
        compile_s=end - middle,
    )


def gpu_mesh(gpu: str, config: MeshConfig) -> Mesh:
    """The mesh of a config over as many GPUs of this kind as it needs, none of them here; the last host may be filled in part.

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


def _read(folder: Path, kind: str) -> str:
    (file,) = folder.glob(f"*{kind}.txt")
    return file.read_text()


@functools.cache
def _devices(gpu: str, count: int) -> tuple:
    plugins = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
    if importlib.util.find_spec("jax_plugins") is None or not any(map(importlib.util.find_spec, plugins)):
        raise ConfigError(f"compiling for gpu={gpu} needs JAX's CUDA plugin (no GPU): pip install 'moejax[cuda13]'")
    kind = find_gpu(gpu)
    local = min(count, kind.host)
    topology = f"1x{-(-count // local)}x{local}"
    return tuple(topologies.get_topology_desc(platform="cuda", target_config=target_config(kind), topology=topology).devices)[:count]
