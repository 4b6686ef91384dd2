"""The schedules by name, and the one way to build one."""

from moejax.config import TrainConfig
from moejax.config.check import at_least, check, one_of
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
    for setting, value in (("ranks", ranks), ("microbatches", microbatches), ("virtual_stages", virtual_stages)):
        at_least(setting, value, 1)
    _refuse(name, virtual_stages, schedules, group="")
    order = schedules[name].make(ranks, microbatches, virtual_stages)
    if fault := next(violations(order, ranks, microbatches), None):
        raise ValueError(f"schedule {name} for {ranks} ranks, {microbatches} microbatches, {virtual_stages} virtual stages: {fault}")
    return finish(name, ranks, microbatches, virtual_stages, order)


def check_schedule(config: TrainConfig) -> None:
    """Refuse a mesh.schedule that cannot have the mesh's stages, before anything is built.

    Raises:
        ConfigError: with the settings as they are typed.
    """
    if config.mesh.pp > 1:
        _refuse(config.mesh.schedule_name, config.mesh.virtual_stages, SCHEDULES, group="mesh.")


def schedule_of(config: TrainConfig) -> Schedule:
    """The schedule of a run.

    Raises:
        ConfigError: as `check_schedule`.
    """
    check_schedule(config)
    return build(config.mesh.schedule_name, config.mesh.pp, config.microbatches, config.mesh.virtual_stages)


def _refuse(name: str, virtual_stages: int, schedules: dict[str, Kind], *, group: str) -> None:
    one_of(f"{group}schedule", name, list(schedules))
    kind = schedules[name]
    nearest = max(kind.least_stages, min(virtual_stages, kind.most_stages or virtual_stages))
    has = f"{kind.least_stages} or more stages" if kind.most_stages is None else "1 stage" if kind.most_stages == 1 else f"{nearest} stages"
    others = [other.name for other in schedules.values() if other.takes(virtual_stages)]
    check(
        kind.takes(virtual_stages),
        f"{group}schedule={name} has {has} on each rank, not {group}virtual_stages={virtual_stages}; "
        f"use {group}virtual_stages={nearest}, or schedule {' or '.join(others)}",
    )
