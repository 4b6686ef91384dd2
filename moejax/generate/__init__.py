"""Text from a trained model."""

from moejax.generate.run import run_generate
from moejax.generate.sample import make_sampler

__all__ = ["make_sampler", "run_generate"]
