"""Pipeline schedules as tables, and what each costs."""

from moejax.parallel.pipeline.schedule import Order, Schedule
from moejax.parallel.pipeline.schedules import SCHEDULES, build, check_schedule, schedule_of, split_of

__all__ = ["SCHEDULES", "Order", "Schedule", "build", "check_schedule", "schedule_of", "split_of"]
