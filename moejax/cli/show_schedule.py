"""Draw a pipeline schedule: moejax show-schedule NAME [--ranks P] [--microbatches M] [--virtual-stages V] [--picture FILE].

NAME is gpipe, 1f1b, interleaved, v_shaped or zero_bubble (mesh.schedule of a run). The table says what each rank runs in each tick; below
it stand the share of the time in which ranks wait, beside the formula of the schedule's paper, and how many activations wait on each rank.

  moejax show-schedule 1f1b
  moejax show-schedule interleaved --ranks 8 --microbatches 16 --virtual-stages 2
  moejax show-schedule zero_bubble --picture zero_bubble.png

Options:
  --ranks P            pipeline ranks, mesh.pp (4)
  --microbatches M     microbatches of a step (8)
  --virtual-stages V   stages of a rank (as few as the schedule can have)
  --picture FILE       draw it too: .png, .pdf or .svg
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moejax.cli.words import check_picture, split_subject
from moejax.config.overrides import apply_overrides
from moejax.config.pending import TABLES_ONLY


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions:
    ranks: int = 4
    """Pipeline ranks, mesh.pp."""
    microbatches: int = 8
    """Microbatches of a step."""
    virtual_stages: int | None = None
    """Stages of a rank. None: as few as the schedule can have."""
    picture: str | None = None
    """File for a picture: .png, .pdf or .svg."""

    def __post_init__(self) -> None:
        check_picture(self.picture)


def which_train() -> str:
    """A sentence on which schedules a run can have."""
    from moejax.parallel.pipeline import SCHEDULES

    names = [name for name in SCHEDULES if name not in TABLES_ONLY]
    return f"Training runs {', '.join(names)}; {', '.join(TABLES_ONLY)} can be shown and planned (moejax plan)."


def run(words: Sequence[str]) -> int:
    """Print the schedule, and draw it if that is asked for."""
    name, settings, wants_help = split_subject(words, "a schedule", "moejax show-schedule 1f1b")
    if wants_help:
        print(f"{__doc__.strip()}\n\n{which_train()}")
        return 0
    options = apply_overrides(ScheduleOptions(), settings)
    from moejax.parallel.pipeline import SCHEDULES, build
    from moejax.plan.schedule_text import lines

    stages = options.virtual_stages
    if stages is None:
        stages = SCHEDULES[name].least_stages if name in SCHEDULES else 1
    schedule = build(name, options.ranks, options.microbatches, stages)
    print("\n".join(lines(schedule)))
    if options.picture is not None:
        from moejax.plan.schedule_picture import draw_schedule

        print(f"picture: {draw_schedule(schedule, Path(options.picture))}", file=sys.stderr)
    return 0
