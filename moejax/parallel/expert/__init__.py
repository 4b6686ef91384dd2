"""Row-wise expert parallelism: experts stay on their ranks and tokens travel to them."""

from moejax.parallel.expert.choice import choose_kernel, choose_transport
from moejax.parallel.expert.layer import Traffic, expert_parallel
from moejax.parallel.expert.plan import count_ranks, receive_rows

__all__ = ["Traffic", "choose_kernel", "choose_transport", "count_ranks", "expert_parallel", "receive_rows"]
