"""The one limit of attention that only the data can break: documents of a sequence, where a kernel has room for so many."""

import numpy as np
from jaxtyping import Int

from moejax.config import TrainConfig
from moejax.errors import DataError
from moejax.nn.attention import choose_attention


def check_documents(config: TrainConfig, segment_ids: Int[np.ndarray, "B T"]) -> None:
    """Refuse sequences of more documents than cuDNN attention was compiled for, before they reach a device.

    Raises:
        DataError: with the number that would do.
    """
    if choose_attention(config.model).name != "cudnn":
        return
    most = int((1 + np.count_nonzero(np.diff(segment_ids, axis=1), axis=1)).max())
    if config.data.document_mask and most > config.data.max_documents:
        raise DataError(
            f"a sequence holds {most} documents, its padding counted as one, but data.max_documents={config.data.max_documents}; "
            f"raise it to {most} or more, or set model.attention.implementation=xla"
        )
    if not config.data.document_mask and segment_ids.max() > 1:
        raise DataError(
            f"a sequence holds {segment_ids.max()} documents, but data.document_mask=False; set it, or number all tokens as one document"
        )
