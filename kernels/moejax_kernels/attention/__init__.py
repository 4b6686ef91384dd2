"""Causal grouped-query attention with sliding windows and document masks."""

from moejax_kernels.attention.api import attention
from moejax_kernels.attention.choice import Choice, choose_implementation
from moejax_kernels.attention.places import Places

__all__ = ["Choice", "Places", "attention", "choose_implementation"]
