"""The devices of a run: fake ones on CPU, asked for before JAX starts; real ones counted. The only place that makes fake devices."""

import os
import re
import sys

from moejax.config import MeshConfig
from moejax.errors import ConfigError

_COUNT = "--xla_force_host_platform_device_count"
# Devices that share few cores reach a collective far apart; XLA's own limit of 40 s ends the process.
_TIMEOUT = "--xla_cpu_collective_call_terminate_timeout_seconds"


def set_cpu_devices(count: int) -> None:
    """Let JAX start with this many CPU devices. Call it before the first use of a device; importing jax earlier is fine.

    Does nothing on a machine where JAX finds a GPU. More devices than asked for, already set in XLA_FLAGS, stay.

    Raises:
        ConfigError: if XLA_FLAGS asks for fewer devices, or JAX already runs with fewer.
    """
    if _jax_runs():
        running = _cpu_devices_running()
        if running < count:
            raise ConfigError(
                f"{count} CPU devices are needed, but JAX already runs with {running}; "
                f"call set_cpu_devices({count}) before the first use of a device, or ask for a mesh of {running}"
            )
        return
    flags = os.environ.get("XLA_FLAGS", "")
    present = re.findall(rf"{_COUNT}=(\d+)", flags)
    if present and int(present[-1]) < count:
        raise ConfigError(
            f"{count} CPU devices are needed, but XLA_FLAGS holds {_COUNT}={present[-1]}; "
            f"remove it from XLA_FLAGS (moejax sets it) or ask for a mesh of at most {present[-1]}"
        )
    added = [] if present else [f"{_COUNT}={count}"]
    if _TIMEOUT not in flags:
        added.append(f"{_TIMEOUT}=600")
    os.environ["XLA_FLAGS"] = " ".join([*flags.split(), *added])


def store_no_programs() -> None:
    """From now on, keep compiled programs of this process out of JAX's persistent cache (JAX_COMPILATION_CACHE_DIR).

    XLA keeps collectives on CPU devices in one order by a resource that they share. In a program that comes from the cache those inside a
    loop no longer share it with those outside, and a pipeline has both: one device may enter a loop while the others wait for it in a
    collective-permute, for ever (seen with jaxlib 0.12.0).
    """
    import jax

    jax.config.update("jax_persistent_cache_min_compile_time_secs", float("inf"))


def require_devices(mesh: MeshConfig) -> str:
    """Return a sentence on the devices that the mesh will use. Starts JAX's backends.

    Raises:
        ConfigError: if the mesh needs more devices than there are.
    """
    import jax

    devices, needed = jax.devices(), mesh.num_devices
    platform, kind = devices[0].platform, devices[0].device_kind
    shape = mesh.words
    if needed > len(devices):
        way_out = "or call set_cpu_devices before JAX starts" if platform == "cpu" else "more devices, or JAX_PLATFORMS=cpu for fake ones"
        raise ConfigError(f"{shape} needs {needed} devices, but JAX sees {len(devices)} ({kind}); use a smaller mesh, {way_out}")
    if platform == "cpu":
        return f"using {needed} fake CPU devices for {shape}" if needed > 1 else "using the CPU"
    unused = f" ({len(devices) - needed} more stay unused)" if len(devices) > needed else ""
    return f"using {needed} x {kind} for {shape}{unused}"


def _jax_runs() -> bool:
    """Whether JAX's backends have started. JAX has no public question for this; both tested versions have this one."""
    xla_bridge = sys.modules.get("jax._src.xla_bridge")
    return xla_bridge is not None and xla_bridge.backends_are_initialized()


def _cpu_devices_running() -> int:
    import jax

    return len(jax.devices("cpu"))
