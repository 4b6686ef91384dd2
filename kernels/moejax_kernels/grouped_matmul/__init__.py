"""Product of expert-sorted rows with one weight matrix per expert."""

from moejax_kernels.grouped_matmul.api import choose_implementation, choose_tile, grouped_matmul
from moejax_kernels.grouped_matmul.layout import align_up, aligned_starts, buffer_rows

__all__ = ["align_up", "aligned_starts", "buffer_rows", "choose_implementation", "choose_tile", "grouped_matmul"]
