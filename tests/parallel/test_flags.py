import os
import subprocess
import sys

import jax
import pytest

from moejax.config import MeshConfig
from moejax.errors import ConfigError
from moejax.parallel import flags, make_mesh
from moejax.parallel.flags import require_devices, set_cpu_devices

COUNT = "--xla_force_host_platform_device_count"
TIMEOUT = "--xla_cpu_collective_call_terminate_timeout_seconds"


def added(monkeypatch: pytest.MonkeyPatch, count: int, present: str) -> list[str]:
    """XLA_FLAGS after asking for devices in a process where JAX has not started."""
    monkeypatch.setattr(flags, "_jax_runs", lambda: False)
    monkeypatch.setenv("XLA_FLAGS", present)
    flags.set_cpu_devices(count)
    flags.set_cpu_devices(count)
    return os.environ["XLA_FLAGS"].split()


def test_devices_are_made_before_jax_starts_even_if_jax_is_imported() -> None:
    # XLA ends a process that passes a flag it does not know, so this also shows that both flags exist.
    program = """
import jax
from moejax.config import MeshConfig
from moejax.parallel import flags, make_mesh
from moejax.parallel.flags import require_devices, set_cpu_devices
set_cpu_devices(6)
print(len(jax.devices()), require_devices(MeshConfig(dp=3, ep=2)))
"""
    environment = os.environ | {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout == "6 using 6 fake CPU devices for mesh.dp=3 x mesh.ep=2\n"


def test_other_flags_are_kept_and_nothing_is_set_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    assert added(monkeypatch, 2, "--xla_other=1") == ["--xla_other=1", f"{COUNT}=2", f"{TIMEOUT}=600"]


def test_more_devices_than_needed_and_another_timeout_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    present = [f"{COUNT}=4", f"{TIMEOUT}=90"]
    assert added(monkeypatch, 2, " ".join(present)) == present


def test_fewer_devices_in_xla_flags_are_refused_naming_both(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=f"8 CPU devices are needed, but XLA_FLAGS holds {COUNT}=4; remove it"):
        added(monkeypatch, 8, f"{COUNT}=4")


def test_one_device_is_no_fake_device() -> None:
    assert require_devices(MeshConfig()) == "using the CPU"


def test_running_jax_with_too_few_devices_is_refused() -> None:
    set_cpu_devices(8)
    with pytest.raises(ConfigError, match=r"16 CPU devices are needed, but JAX already runs with 8; call set_cpu_devices\(16\) before"):
        set_cpu_devices(16)


class Gpu:
    platform = "gpu"
    device_kind = "NVIDIA H200"


def test_mesh_larger_than_the_gpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jax.devices", lambda: [Gpu()] * 4)
    with pytest.raises(ConfigError) as caught:
        require_devices(MeshConfig(dp=2, ep=4))
    assert str(caught.value) == (
        "mesh.dp=2 x mesh.ep=4 needs 8 devices, but JAX sees 4 (NVIDIA H200); "
        "use a smaller mesh, more devices, or JAX_PLATFORMS=cpu for fake ones"
    )


def test_mesh_smaller_than_the_gpus_leaves_some_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jax.devices", lambda: [Gpu()] * 4)
    assert require_devices(MeshConfig(ep=2)) == "using 2 x NVIDIA H200 for mesh.dp=1 x mesh.ep=2 (2 more stay unused)"
    assert require_devices(MeshConfig(ep=4)) == "using 4 x NVIDIA H200 for mesh.dp=1 x mesh.ep=4"


def test_a_pipeline_on_cpu_devices_is_kept_out_of_the_cache_of_programs():
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    try:
        make_mesh(MeshConfig(dp=2))
        assert getattr(jax.config, name) == before
        make_mesh(MeshConfig(pp=2))
        assert getattr(jax.config, name) == float("inf")
    finally:
        jax.config.update(name, before)
