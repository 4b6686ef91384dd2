"""The transports by the names of model.moe.transport."""

from moejax.parallel.expert.transports.dense import DENSE
from moejax.parallel.expert.transports.gather import GATHER
from moejax.parallel.expert.transports.local import LOCAL
from moejax.parallel.expert.transports.ragged import RAGGED
from moejax.parallel.expert.transports.ring import RING

__all__ = ["LOCAL", "TRANSPORTS"]

TRANSPORTS = {transport.name: transport for transport in (RAGGED, GATHER, DENSE, RING)}
