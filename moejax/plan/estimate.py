"""What one training step will need of a GPU, by arithmetic alone: memory by part, traffic by link, least time."""

import dataclasses
import math
from dataclasses import dataclass

from moejax.config import TrainConfig, pending
from moejax.errors import ConfigError
from moejax.parallel.pipeline import check_schedule
from moejax.plan.activations import offloaded_bytes, temp_bytes
from moejax.plan.choices import choices
from moejax.plan.formula import argument_bytes
from moejax.plan.gpus import Gpu, find_gpu
from moejax.plan.links import LinkBytes, link_bytes
from moejax.plan.moves import dispatch_buffer_bytes
from moejax.plan.stages import stages_of
from moejax.train.flops import count_parameters, flops_per_token

USABLE = 0.9
"""Share of a GPU's memory that a plan may fill. XLA's figures, and this arithmetic, leave out the rest's users: see LEFT_OUT."""

ERROR = 0.06
"""Share by which arithmetic was low, at most, of what a step holds beside its arguments: the largest difference seen beside XLA."""

PREALLOCATED = 0.75
"""Share of a GPU's memory that JAX hands out unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise."""

PEAK = {"bfloat16": ("bf16", 1.0), "float32": ("TF32", 0.5)}
"""Rate of products in each dtype: its name, and its share of the bf16 peak."""

_AGAIN = {"none": 0.0, "selective": 0.2, "block": 1 / 3, "offload": 1 / 3}
"""Arithmetic that each model.recompute adds, about."""

_PCIE = 50e9
"""Bytes/s between a GPU and its host, about."""

LEFT_OUT = "the CUDA context, communication buffers (NCCL), workspaces of cuDNN and cuBLAS, code, fragmentation"

ARGUMENTS = ("parameters", "optimizer", "router", "counters", "batch")
"""Parts of the memory that hold what the step is given. The other parts are its own."""


@dataclass(frozen=True)
class Estimate:
    """Figures for one GPU and one step, but for the model's own.

    memory: bytes by part; what the step is given comes first, named as in ARGUMENTS. host_bytes: pinned host memory (offload).
    dispatch_bytes: the buffer for routed rows of one MoE layer, part of the working set; 0 without experts.
    links: traffic, line by line. bubble: least share of a step in which a pipeline rank waits.
    choices: kernels and transport by setting. pending: settings that cannot run yet, and what is counted instead.
    """

    config: TrainConfig
    gpu: Gpu
    parameters: int
    active_parameters: int
    flops_per_token: float
    memory: dict[str, int]
    host_bytes: int
    dispatch_bytes: int
    links: list[LinkBytes]
    choices: dict[str, str]
    pending: dict[str, str]

    @property
    def total_bytes(self) -> int:
        return sum(self.memory.values())

    @property
    def tokens(self) -> int:
        """Tokens of a step over all GPUs."""
        return self.config.batch_size * self.config.data.seq_len

    @property
    def bubble(self) -> float:
        """By the table of the schedule, whose ranks keep step."""
        stages = stages_of(self.config)
        return 0.0 if stages is None else stages.bubble

    @property
    def compute_s(self) -> float:
        """Seconds of useful arithmetic at the peak of the dtype, without waiting for a pipeline."""
        return _compute_seconds(self.config, self.gpu)

    @property
    def send_s(self) -> float:
        """Seconds of traffic at the full rate of the links, one line after the other."""
        return sum(line.seconds(self.gpu) for line in self.links)


def usable_bytes(gpu: Gpu) -> int:
    """Memory of a GPU that a step may fill."""
    return int(USABLE * gpu.memory_bytes)


def estimate(config: TrainConfig, gpu: str) -> Estimate:
    """The arithmetic for a config on its mesh of these GPUs.

    Raises:
        ConfigError: if the GPU is not in the table, a kernel or transport of the config does not run on it, or its schedule does not exist.
    """
    check_schedule(config)
    kind, model, seq_len = find_gpu(gpu), config.model, config.data.seq_len
    total, active = count_parameters(model)
    return Estimate(
        config=config,
        gpu=kind,
        parameters=total,
        active_parameters=active,
        flops_per_token=sum(flops_per_token(model, seq_len).values()),
        memory=memory_bytes(config),
        host_bytes=offloaded_bytes(config),
        dispatch_bytes=0 if model.moe is None else dispatch_buffer_bytes(config),
        links=link_bytes(config, kind),
        choices=choices(config, kind),
        pending=pending(config),
    )


def step_seconds(config: TrainConfig, gpu: Gpu) -> float:
    """What orders configs by speed: arithmetic at the peak with what is computed again and the bubble, then traffic, then offloading."""
    stages = stages_of(config)
    busy = _compute_seconds(config, gpu) * (1 + _AGAIN[config.model.recompute]) / (1 - (stages.bubble if stages else 0))
    offload = 2 * offloaded_bytes(config) * config.microbatches / _PCIE
    return busy + sum(line.seconds(gpu) for line in link_bytes(config, gpu)) + offload


def _compute_seconds(config: TrainConfig, gpu: Gpu) -> float:
    flops = sum(flops_per_token(config.model, config.data.seq_len).values()) * config.batch_size * config.data.seq_len
    return flops / config.mesh.num_devices / (gpu.bf16_flops * PEAK[config.model.dtype][1])


def memory_bytes(config: TrainConfig) -> dict[str, int]:
    """Bytes of one GPU by part."""
    return argument_bytes(config) | temp_bytes(config)


def scaled(memory: dict[str, int], scale: float) -> dict[str, int]:
    """Bytes by part if what a step holds beside its arguments, which are exact, is that many times as much."""
    return {name: size if name in ARGUMENTS else int(size * scale) for name, size in memory.items()}


def merged(memory: dict[str, int]) -> dict[str, int]:
    """Bytes by part as people read them, those of small arguments in one."""
    small = ARGUMENTS[2:]
    given = {name: memory[name] for name in ARGUMENTS[:2]} | {", ".join(small): sum(memory[name] for name in small)}
    return given | {name: size for name, size in memory.items() if name not in ARGUMENTS}


def check_count(config: TrainConfig, num_gpus: int) -> None:
    """Refuse a number of GPUs that is not that of the mesh.

    Raises:
        ConfigError: with the settings that give the number, if any do.
    """
    mesh = config.mesh
    if num_gpus == mesh.num_devices:
        return
    given = f"num_gpus={num_gpus} is not {mesh.words} = {mesh.num_devices}"
    rest = mesh.pp * mesh.ep
    replicas = num_gpus // rest
    if replicas < 1 or num_gpus % rest:
        experts = config.model.moe.num_experts if config.model.moe else 1
        ep = math.gcd(num_gpus // mesh.pp, experts)
        other = f", or --mesh.dp {num_gpus // mesh.pp // ep} --mesh.ep {ep}" if num_gpus % mesh.pp == 0 and ep > 1 else ""
        raise ConfigError(
            f"{given}; with mesh.pp={mesh.pp} and mesh.ep={mesh.ep} it has to be a multiple of {rest}, times --mesh.dp{other}"
        )
    ranks = replicas * mesh.ep
    try:
        dataclasses.replace(config, mesh=dataclasses.replace(mesh, dp=replicas))
    except ConfigError:
        batch = -(-config.batch_size // (config.microbatches * ranks)) * config.microbatches * ranks
        fewer = next((n for n in range(config.microbatches, 0, -1) if config.batch_size % (n * ranks) == 0), None)
        other = f" and --microbatches {fewer}, or" if fewer else " and"
        raise ConfigError(f"{given}; add --mesh.dp {replicas}{other} a batch that splits evenly, such as --batch-size {batch}") from None
    raise ConfigError(f"{given}; add --mesh.dp {replicas}")
