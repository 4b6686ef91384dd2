"""Which device a traced function is for, read from the mesh it is traced under. The only place that asks."""

import re

import jax
from jax.sharding import AbstractDevice

_GENERATIONS = {"sm90": r"\bG?H(100|200)\b", "sm100": r"\bG?B(200|300)\b"}


def abstract_device() -> AbstractDevice:
    """Kind, platform and number of cores of the device that is being traced for.

    Inside `jax.shard_map` and in custom_vjp backward passes the mesh names the device that the program is compiled for, also when
    it is compiled ahead of time for a device that is not here. Outside any mesh it is the first device of this process.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None:
        return device
    here = jax.local_devices()[0]
    return AbstractDevice(device_kind=here.device_kind, num_cores=getattr(here, "core_count", None), platform=here.platform)


def platform() -> str:
    """Platform of the device that is being traced for: "cpu", "gpu", ..."""
    name = abstract_device().platform
    return "gpu" if name in ("cuda", "rocm") else name


def device_kind() -> str:
    """Name of the device that is being traced for, such as "NVIDIA H200"."""
    return abstract_device().device_kind


def num_cores() -> int:
    """Streaming multiprocessors of the GPU that is being traced for."""
    cores = abstract_device().num_cores
    if cores is None:
        raise ValueError(f"the number of cores of {device_kind()!r} is unknown; give the mesh an abstract device with num_cores")
    return cores


def gpu_generation() -> str | None:
    """The NVIDIA architecture that a kernel is written for: "sm90" (H100, H200, GH200), "sm100" (B200, B300, GB200, GB300) or None."""
    if platform() != "gpu":
        return None
    return next((name for name, pattern in _GENERATIONS.items() if re.search(pattern, device_kind())), None)
