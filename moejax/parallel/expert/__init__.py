"""Row-wise expert parallelism: experts stay on their ranks and tokens travel to them."""

from moejax.parallel.expert.choice import choose_kernel, choose_transport
from moejax.parallel.expert.layer import Traffic, expert_parallel

__all__ = ["Traffic", "choose_kernel", "choose_transport", "expert_parallel"]
