"""The schedules by name, and the one way to build one."""

from moejax.config import TrainConfig
from moejax.errors import ConfigError
from moejax.parallel.pipeline.schedule import Schedule, finish
from moejax.parallel.pipeline.schedules.gpipe import GPIPE
from moejax.parallel.pipeline.schedules.kind import Kind
from moejax.parallel.pipeline.schedules.one_f_one_b import INTERLEAVED, ONE_F_ONE_B
from moejax.parallel.pipeline.schedules.v_shaped import V_SHAPED
from moejax.parallel.pipeline.schedules.zero_bubble import ZERO_BUBBLE
from moejax.parallel.pipeline.validate import violations

SCHEDULES = {kind.name: kind for kind in (GPIPE, ONE_F_ONE_B, INTERLEAVED, V_SHAPED, ZERO_BUBBLE)}


def build(name: str, ranks: int, microbatches: int, virtual_stages: int = 1, *, schedules: dict[str, Kind] = SCHEDULES) -> Schedule:
    """The schedule of that name, checked.

    Raises:
        ConfigError: if there is none of that name, or none with these numbers.
        ValueError: if a schedule breaks a rule: a fault of its file.
    """
    if name not in schedules:
        raise ConfigError(f"schedule={name} is not one of {', '.join(schedules)}")
    for setting, value in (("ranks", ranks), ("microbatches", microbatches), ("virtual_stages", virtual_stages)):
        if value < 1:
            raise ConfigError(f"{setting}={value} is below 1; give a number >= 1")
    if (why_not := schedules[name].refusal(virtual_stages)) is not None:
        raise ConfigError(f"schedule={name} with virtual_stages={virtual_stages} {why_not}")
    order = schedules[name].make(ranks, microbatches, virtual_stages)
    if fault := next(violations(order, ranks, microbatches), None):
        raise ValueError(f"schedule {name} for {ranks} ranks, {microbatches} microbatches, {virtual_stages} virtual stages: {fault}")
    return finish(name, ranks, microbatches, virtual_stages, order)


def schedule_of(config: TrainConfig) -> Schedule:
    """The schedule of a run.

    Raises:
        ConfigError: if mesh.schedule names none, or none for the mesh's numbers.
    """
    mesh = config.mesh
    return build(mesh.schedule_name, mesh.pp, config.microbatches, mesh.virtual_stages)
