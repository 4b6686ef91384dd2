"""The GPUs that a program can be compiled for on a machine that has none.

Cores, clocks, caches and memory are those of XLA's own target descriptions (openxla/xla, xla/backends/gpu/target_config/specs);
they decide what XLA compiles. Rates of arithmetic and links are NVIDIA's data sheets (HGX H100/H200, HGX B200/B300, GB200/GB300
NVL72), dense, per GPU; they decide estimates. XLA describes no GH200.
"""

import difflib
from dataclasses import dataclass

from moejax.errors import ConfigError
from moejax.train.flops import peak_flops


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU.

    device_kind: name under which JAX knows it. capability: CUDA compute capability. cores: streaming multiprocessors.
    matrix_ops: bf16 multiply-adds per clock of one of the four tensor cores of a multiprocessor; matrix_clock_ghz: their clock.
    nvlink, network: bytes/s of one GPU in one direction. host: GPUs of one host. domain: GPUs that
    NVLink joins; of the 72 of a rack 64, which is what a mesh of powers of two takes of it.
    """

    name: str
    device_kind: str
    capability: tuple[int, int]
    cores: int
    memory_bytes: int
    memory_bandwidth: int
    l2_bytes: int
    clock_ghz: float
    matrix_clock_ghz: float
    matrix_ops: int
    nvlink: float
    network: float
    host: int = 8
    domain: int = 8

    @property
    def bf16_flops(self) -> float:
        """Dense peak in FLOP/s, from the table that training reads."""
        peak = peak_flops(self.device_kind)
        assert peak is not None
        return peak

    @property
    def arch(self) -> str:
        """Name of the architecture in PTX, such as sm_90a."""
        return f"sm_{self.capability[0]}{self.capability[1]}a"


_HOPPER = {
    "capability": (9, 0),
    "cores": 132,
    "l2_bytes": 52_428_800,
    "clock_ghz": 1.98,
    "matrix_clock_ghz": 1.8295201,
    "matrix_ops": 1024,
    "nvlink": 450e9,
    "network": 50e9,
}
_BLACKWELL = {
    "clock_ghz": 1.965,
    "matrix_clock_ghz": 1.8353101,
    "matrix_ops": 2048,
    "nvlink": 900e9,
}
_GRACE_BLACKWELL = {
    "cores": 152,
    "memory_bandwidth": 7_928_064_000_000,
    "l2_bytes": 135_528_448,
    "matrix_ops": 2048,
    "nvlink": 900e9,
    "host": 4,
    "domain": 64,
}

GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu(name="h100", device_kind="NVIDIA H100 80GB HBM3", memory_bytes=84_942_979_072, memory_bandwidth=3_352_320_000_000, **_HOPPER),
        Gpu(name="h200", device_kind="NVIDIA H200", memory_bytes=151_397_597_184, memory_bandwidth=4_800_000_000_000, **_HOPPER),
        Gpu(
            name="b200",
            device_kind="NVIDIA B200",
            capability=(10, 0),
            cores=148,
            memory_bytes=191_514_411_008,
            memory_bandwidth=7_672_320_000_000,
            l2_bytes=132_644_864,
            network=50e9,
            **_BLACKWELL,
        ),
        Gpu(
            name="b300",
            device_kind="NVIDIA B300",
            capability=(10, 3),
            cores=158,
            memory_bytes=297_021_865_984,
            memory_bandwidth=7_936_000_000_000,
            l2_bytes=135_528_448,
            network=100e9,
            **_BLACKWELL,
        ),
        Gpu(
            name="gb200",
            device_kind="NVIDIA GB200",
            capability=(10, 0),
            memory_bytes=197_897_748_480,
            clock_ghz=2.062,
            matrix_clock_ghz=1.9259081,
            network=50e9,
            **_GRACE_BLACKWELL,
        ),
        Gpu(
            name="gb300",
            device_kind="NVIDIA GB300",
            capability=(10, 3),
            memory_bytes=297_021_079_552,
            clock_ghz=2.07,
            matrix_clock_ghz=1.93338,
            network=100e9,
            **_GRACE_BLACKWELL,
        ),
    )
}


def find_gpu(name: str) -> Gpu:
    """The GPU of this name.

    Raises:
        ConfigError: if there is no such GPU in the table.
    """
    if name.lower() not in GPUS:
        near = difflib.get_close_matches(name.lower(), GPUS, n=1, cutoff=0.8)
        hint = f"; the nearest is {near[0]}" if near else ""
        raise ConfigError(f"gpu={name} is not in the table{hint}; use one of {', '.join(GPUS)}, or add it to moejax/plan/gpus.py")
    return GPUS[name.lower()]


def link_rate(device_kind: str, *, hosts: int) -> float | None:
    """Bytes/s that leave one GPU of this kind: over NVLink in one domain, over the network beyond; None if not in the table."""
    gpu = next((gpu for gpu in GPUS.values() if gpu.device_kind == device_kind), None)
    if gpu is None:
        return None
    return gpu.nvlink if hosts == 1 or hosts * gpu.host <= gpu.domain else gpu.network


def target_config(gpu: Gpu) -> str:
    """XLA's description of the GPU, a GpuTargetConfigProto in text form."""
    # XLA's cost model reads rates by element type (xla_data.proto): 10 f16, 16 bf16, 11 f32, 12 f64, the rest 8 bits and less.
    half, single, double, byte = (10, 16), (11,), (12,), (2, 6, 19, 20, 23, 24, 25, 28, 29, 33, 35, 36)
    scalar = _rates((*half, *single), gpu.clock_ghz, 128, 1) + _rates((4, 8, *double), gpu.clock_ghz, 64, 1)
    matrix = (
        _rates(byte, gpu.matrix_clock_ghz, 4, gpu.matrix_ops)
        + _rates(half, gpu.matrix_clock_ghz, 4, gpu.matrix_ops // 2)
        + _rates(single, gpu.matrix_clock_ghz, 4, gpu.matrix_ops // 4)
    )
    return f"""gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: {gpu.cores} fpus_per_core: 128 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: {gpu.memory_bandwidth} l2_cache_size: {gpu.l2_bytes}
  clock_rate_ghz: {gpu.clock_ghz} device_memory_size: {gpu.memory_bytes} shared_memory_per_block_optin: 232448
  cuda_compute_capability {{ major: {gpu.capability[0]} minor: {gpu.capability[1]} feature_extension: ACCELERATED_FEATURES }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  scalar_unit_description {{ {scalar} }} matrix_unit_description {{ {matrix} }}
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64 device_vendor: "NVIDIA Corporation"
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0" dnn_version: "9.10.0" cub_version: "3.1.2"
  collective_memory_granularity: 2097152
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 patch: 0 }} device_description_str: "{gpu.device_kind}"
"""


def _rates(types: tuple[int, ...], clock_ghz: float, units: int, ops: int) -> str:
    value = f"{{ clock_rate_ghz: {clock_ghz} units_per_core: {units} ops_per_clock: {ops} }}"
    return " ".join(f"rate_infos {{ key: {key} value {value} }}" for key in types)
