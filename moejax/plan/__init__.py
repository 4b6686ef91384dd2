"""What a run needs, found out without the GPUs: arithmetic, programs compiled ahead of time, their collectives and memory."""

from moejax.plan.plan import Plan, as_dict, plan_step

__all__ = ["Plan", "as_dict", "plan_step"]
