"""One rank: every expert is here, so dispatch and combine are local permutations without a collective."""

from moejax.parallel.expert.transports.tokens import token_transport

LOCAL = token_transport("local", share=lambda x, axis: x, reduce=lambda x, axis: x)
