"""What one rank of a pipeline runs and what waits on it, read from the table of its schedule.

The executor (`moejax.parallel.pipeline.executor`) runs ticks in which any rank has a forward pass, and ticks in which any has a backward
pass, on all ranks.
"""

import functools
from dataclasses import dataclass

from moejax.config import TrainConfig
from moejax.parallel.pipeline import Schedule, build
from moejax.parallel.pipeline.table import columns


@dataclass(frozen=True)
class Stages:
    """Numbers of one step.

    forward_ticks, backward_ticks: ticks of each kind, of one stage each.
    inputs, gradients: places for what came in, and for gradients that came in. kept: places for what forward passes keep.
    rings: places in what turns with the prologue's results and their gradients.
    neighbours: steps along the ranks on which stages follow each other, such as 1, or 1 and -1.
    bubble: share of the time in which a rank waits.
    """

    forward_ticks: int
    backward_ticks: int
    inputs: int
    gradients: int
    kept: int
    rings: int
    neighbours: int
    bubble: float

    @property
    def between(self) -> int:
        """Inputs of stages, and gradients of inputs, that lie on a rank at once."""
        return self.inputs + self.gradients + self.rings


def stages_of(config: TrainConfig) -> Stages | None:
    """The numbers of a config's pipeline; None without one."""
    mesh = config.mesh
    return None if mesh.pp == 1 else _numbers(mesh.schedule_name, mesh.pp, config.microbatches, mesh.virtual_stages)


@functools.lru_cache(maxsize=256)
def _numbers(name: str, ranks: int, microbatches: int, virtual_stages: int) -> Stages:
    schedule = build(name, ranks, microbatches, virtual_stages)
    return Stages(
        forward_ticks=_ticks(schedule, "F"),
        backward_ticks=_ticks(schedule, "B"),
        # Each kind has a place more for what nobody waits for; inputs and gradients one more for what is on its way.
        inputs=schedule.num_inputs + 2,
        gradients=schedule.num_gradients + 2,
        kept=int(columns(schedule)["keep"].max()) + 1,
        rings=2 * -(-microbatches // ranks) + 2,
        neighbours=len({(b - a) % ranks for a, b in zip(schedule.order.place, schedule.order.place[1:], strict=False)} - {0}),
        bubble=schedule.bubble(),
    )


def _ticks(schedule: Schedule, kind: str) -> int:
    return int((schedule.grid(kind)[:, :, 0] >= 0).any(axis=1).sum())
