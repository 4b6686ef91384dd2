"""Whether a run can fit into the machine that is to run it, by arithmetic, before anything is allocated."""

import os
from pathlib import Path

import jax

from moejax.config import TrainConfig
from moejax.errors import ConfigError
from moejax.plan.estimate import memory_bytes

TOO_HIGH = 1.2
"""Times what a step needs that arithmetic may say: the largest difference seen beside XLA, with pipeline stages."""

_GIB = 2**30
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def check_room(config: TrainConfig) -> None:
    """Refuse a run whose need by arithmetic is far above the memory of this machine; a CPU's fake devices share that of the host.

    Without it a run on a CPU fills the host's memory until the system kills it, without a word.

    Raises:
        ConfigError: with both figures and the way out.
    """
    devices = jax.local_devices()[: config.mesh.num_devices]
    each = sum(memory_bytes(config).values())
    if devices[0].platform == "cpu":
        need, there, whose = each * len(devices), host_bytes(), "this machine has"
        what = f"{len(devices)} x {each / _GIB:,.1f} GiB" if len(devices) > 1 else f"{need / _GIB:,.1f} GiB"
    else:
        need, there, whose = each, (devices[0].memory_stats() or {}).get("bytes_limit"), f"JAX may use of one {devices[0].device_kind}"
        what = f"{need / _GIB:,.1f} GiB for each device"
    if there is None or need <= TOO_HIGH * there:
        return
    verb = f"{whose} {there / _GIB:,.1f}" if whose.startswith("this") else f"{there / _GIB:,.1f} is what {whose}"
    raise ConfigError(
        f"{config.name} needs about {what} of memory for weights, optimizer, gradients and activations, but {verb}; take a smaller model "
        f"(model.num_layers, model.moe.num_experts) or batch; moejax plan, with the same words and --gpu b300, says what it needs of GPUs"
    )


def host_bytes() -> int | None:
    """Memory of this machine, or what a container may use of it; None where the system does not say."""
    if "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = [int(text) for path in _LIMITS if path.is_file() and (text := path.read_text().strip()).isdigit()]
    return min(physical, *limits) if limits else physical
