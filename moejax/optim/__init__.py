"""Optimizer, learning-rate schedules, parameter groups and the rule for skipping steps."""

from moejax.optim.adamw import adamw, init_moments
from moejax.optim.groups import Group, parameter_groups, path_name
from moejax.optim.schedule import make_schedule
from moejax.optim.skip import History, decide, empty_history

__all__ = ["Group", "History", "adamw", "decide", "empty_history", "init_moments", "make_schedule", "parameter_groups", "path_name"]
