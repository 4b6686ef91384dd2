"""Row-wise expert parallelism: experts stay on their ranks and tokens travel to them."""

from moejax.parallel.expert.layer import Traffic, expert_parallel
from moejax.parallel.expert.move import choose_transport

__all__ = ["Traffic", "choose_transport", "expert_parallel"]
