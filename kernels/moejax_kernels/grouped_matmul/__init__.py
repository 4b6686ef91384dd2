"""Product of expert-sorted rows with one weight matrix per expert."""

from moejax_kernels.grouped_matmul.api import grouped_matmul
from moejax_kernels.grouped_matmul.choice import Choice, choose_implementation, choose_tile
from moejax_kernels.grouped_matmul.layout import align_up, aligned_starts, buffer_rows

__all__ = ["Choice", "align_up", "aligned_starts", "buffer_rows", "choose_implementation", "choose_tile", "grouped_matmul"]
