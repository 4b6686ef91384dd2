"""The schedules by name, and the one way to build one."""

import functools
import importlib
import pkgutil
import sys
from types import ModuleType

import numpy as np

from moejax.config import TrainConfig
from moejax.config.check import at_least, check, one_of
from moejax.config.pending import TABLES_ONLY
from moejax.parallel.pipeline.schedule import Schedule, finish
from moejax.parallel.pipeline.schedules.kind import Kind
from moejax.parallel.pipeline.split import Split, split_blocks
from moejax.parallel.pipeline.validate import violations


def kinds_in(package: ModuleType) -> dict[str, Kind]:
    """The schedules that the files of a package define, by name."""
    found: dict[str, Kind] = {}
    for file in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        if file.name != __name__:
            found |= {value.name: value for value in vars(importlib.import_module(file.name)).values() if isinstance(value, Kind)}
    return found


SCHEDULES = kinds_in(sys.modules[__name__.rpartition(".")[0]])
"""Those of this folder: a file is all that a new one needs."""


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


def schedule_of(config: TrainConfig, microbatches: int | None = None) -> Schedule:
    """The schedule of a run, for its own number of microbatches or another.

    Raises:
        ConfigError: as `check_schedule`.
    """
    check_schedule(config)
    mesh = config.mesh
    return _build(mesh.schedule_name, mesh.pp, microbatches or config.microbatches, mesh.virtual_stages)


def split_of(config: TrainConfig) -> Split:
    """Which MoE blocks are where in a run.

    Raises:
        ConfigError: as `check_schedule`.
    """
    if config.mesh.pp == 1:
        return Split(np.arange(config.model.num_moe_layers, dtype=np.int32)[None, None])
    return split_blocks(config.model.num_moe_layers, schedule_of(config, 1).order.place, config.mesh.pp)


_build = functools.lru_cache(build)


def _refuse(name: str, virtual_stages: int, schedules: dict[str, Kind], *, group: str) -> None:
    one_of(f"{group}schedule", name, [*schedules, *(["auto"] if group else [])])
    kind = schedules[name]
    nearest = max(kind.least_stages, min(virtual_stages, kind.most_stages or virtual_stages))
    has = f"{kind.least_stages} or more stages" if kind.most_stages is None else "1 stage" if kind.most_stages == 1 else f"{nearest} stages"
    others = [other.name for other in schedules.values() if other.takes(virtual_stages) and not (group and other.name in TABLES_ONLY)]
    check(
        kind.takes(virtual_stages),
        f"{group}schedule={name} has {has} on each rank, not {group}virtual_stages={virtual_stages}; "
        f"use {group}virtual_stages={nearest}, or schedule {' or '.join(others)}",
    )
