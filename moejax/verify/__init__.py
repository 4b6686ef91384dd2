"""Gradient truth for any config: its program, on every mesh and in every mode that it could use, against a dense float64 reference."""

from moejax.verify.cases import DEVICES, Case, all_cases, covering_cases
from moejax.verify.verifier import Outcome, Verifier

__all__ = ["DEVICES", "Case", "Outcome", "Verifier", "all_cases", "covering_cases"]
