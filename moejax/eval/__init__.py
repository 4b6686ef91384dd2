"""Evaluation of a finished or running run from its checkpoints."""

from moejax.eval.run import run_eval

__all__ = ["run_eval"]
