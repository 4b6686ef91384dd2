"""What XLA says of the step it compiled for GPUs that are not here, in the words of the arithmetic."""

import dataclasses
from collections import Counter
from dataclasses import dataclass

from moejax.config import TrainConfig
from moejax.plan.aot import Program, compile_step
from moejax.plan.payloads import Traffic


@dataclass(frozen=True)
class Compiled:
    """Figures of one GPU; bytes, seconds.

    argument_bytes: what the step is given; its results lie in the same memory, but for metrics_bytes.
    arena_bytes: everything else at the peak, packed. roles: the same by part, as `moejax.plan.activations` names them.
    buffers: each above 1 % of the arena, as (bytes, array, part, what fills it).
    traffic: every collective, those of one kind, group and dtype added up.
    """

    argument_bytes: int
    arena_bytes: int
    metrics_bytes: int
    roles: dict[str, int]
    buffers: list[tuple[int, str, str, str]]
    traffic: list[Traffic]
    kernels: dict[str, int]
    conditionals: int
    host_transfers: int
    lower_s: float
    compile_s: float

    @property
    def packing_bytes(self) -> int:
        """What the arena holds beyond the buffers that are in use at the peak, and the metrics."""
        return max(0, self.arena_bytes - sum(self.roles.values())) + self.metrics_bytes

    @property
    def total_bytes(self) -> int:
        return self.argument_bytes + self.arena_bytes + self.metrics_bytes


def compile_plan(config: TrainConfig, gpu: str) -> Compiled:
    """Compile the step that trains, by the function that training calls, for the config's mesh of these GPUs; MXFP8 as plain bfloat16.

    Raises:
        ConfigError: as `compile_step`.
    """
    return _summary(compile_step(as_planned(config), gpu))


def as_planned(config: TrainConfig) -> TrainConfig:
    """The config that is compiled: MXFP8 is not built yet, and is planned as plain bfloat16."""
    return dataclasses.replace(config, model=dataclasses.replace(config.model, precision="plain"))


def _summary(program: Program) -> Compiled:
    roles: Counter[str] = Counter()
    for buffer in program.peak:
        roles[buffer.role] += buffer.size_bytes
    large = [buffer for buffer in program.peak if buffer.size_bytes > program.temp_bytes / 100]
    return Compiled(
        argument_bytes=program.argument_bytes,
        arena_bytes=program.temp_bytes,
        metrics_bytes=program.output_bytes - program.alias_bytes,
        roles=dict(roles),
        buffers=[(b.size_bytes, b.array, b.role, b.op_name.removeprefix("jit(step)/shard_map/")) for b in large],
        traffic=_traffic(program),
        kernels=program.hlo.kernels(),
        conditionals=len(program.hlo.conditionals()),
        host_transfers=sum(transfer.times for transfer in program.host_transfers),
        lower_s=program.lower_s,
        compile_s=program.compile_s,
    )


def _traffic(program: Program) -> list[Traffic]:
    found: dict[tuple, Traffic] = {}
    for c in program.collectives:
        for dtype in c.dtypes:
            key = c.kind, c.axes, dtype
            before = found.get(key, Traffic(*key, payload=0, times=0))
            found[key] = before._replace(payload=before.payload + c.payload_of(dtype) * c.times, times=before.times + c.times)
    return sorted(found.values(), key=lambda line: -line.payload)
