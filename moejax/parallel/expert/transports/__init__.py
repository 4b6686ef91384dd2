"""Transports: how rows reach the experts and come back. To add one, write its file and name it in table.py and in MoEConfig.transport."""

from moejax.parallel.expert.transports.rows import row_transport, take_or_zero
from moejax.parallel.expert.transports.table import LOCAL, TRANSPORTS
from moejax.parallel.expert.transports.tokens import token_transport
from moejax.parallel.expert.transports.transport import Transport

__all__ = ["LOCAL", "TRANSPORTS", "Transport", "row_transport", "take_or_zero", "token_transport"]
