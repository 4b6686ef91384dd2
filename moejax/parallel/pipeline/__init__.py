"""Pipeline schedules as tables, and what each costs."""

from moejax.parallel.pipeline.schedule import Order, Schedule
from moejax.parallel.pipeline.schedules import SCHEDULES, build

__all__ = ["SCHEDULES", "Order", "Schedule", "build"]
