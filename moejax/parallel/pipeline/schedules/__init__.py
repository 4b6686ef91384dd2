"""One file for each schedule, and the table of them by name."""

from moejax.parallel.pipeline.schedules.table import SCHEDULES, build, check_schedule, schedule_of, split_of

__all__ = ["SCHEDULES", "build", "check_schedule", "schedule_of", "split_of"]
