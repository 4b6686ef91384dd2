"""moejax: training of sparse mixture-of-experts language models in JAX."""

__version__ = "0.1.0"
