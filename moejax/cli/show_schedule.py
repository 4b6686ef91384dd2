"""Draw a pipeline schedule: moejax show-schedule NAME [--ranks P] [--microbatches M] [--virtual-stages V] [--picture FILE].

NAME is gpipe, 1f1b, interleaved, v_shaped or zero_bubble. The table says what each rank runs in each tick; below it stand the share of
the time in which ranks wait, beside the formula of the schedule's paper, and how many activations wait on each rank.

  moejax show-schedule 1f1b
  moejax show-schedule interleaved --ranks 8 --microbatches 16 --virtual-stages 2
  moejax show-schedule zero_bubble --picture zero_bubble.png
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moejax.cli.words import check_picture, split_subject
from moejax.config.overrides import apply_overrides


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions:
    ranks: int = 4
    """Pipeline ranks, mesh.pp."""
    microbatches: int = 8
    """Microbatches of a step."""
    virtual_stages: int | None = None
    """Stages of a rank. None: one, or two if the schedule needs more than one."""
    picture: str | None = None
    """File for a picture: .png, .pdf or .svg."""

    def __post_init__(self) -> None:
        check_picture(self.picture)


def run(words: Sequence[str]) -> int:
    """Print the schedule, and draw it if that is asked for."""
    name, settings, wants_help = split_subject(words, "a schedule", "moejax show-schedule 1f1b")
    if wants_help:
        print(__doc__.strip())
        return 0
    options = apply_overrides(ScheduleOptions(), settings)
    from moejax.parallel.pipeline import SCHEDULES, build
    from moejax.plan.schedule_text import lines

    stages = options.virtual_stages
    if stages is None:
        stages = 1 if name not in SCHEDULES or SCHEDULES[name].refusal(1) is None else 2
    schedule = build(name, options.ranks, options.microbatches, stages)
    print("\n".join(lines(schedule)))
    if options.picture is not None:
        from moejax.plan.schedule_picture import draw_schedule

        print(f"picture: {draw_schedule(schedule, Path(options.picture))}", file=sys.stderr)
    return 0
