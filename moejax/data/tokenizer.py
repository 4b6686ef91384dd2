"""Text as bytes: a tokenizer without a vocabulary file, for the shipped text and for small experiments."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxtyping import Int32


@dataclass(frozen=True)
class ByteTokenizer:
    """Ids 0..255 are the bytes of UTF-8; one id ends a document and one is padding."""

    eos_id: ClassVar[int] = 256
    pad_id: ClassVar[int] = 257
    vocab_size: ClassVar[int] = 258

    def encode(self, text: str) -> Int32[np.ndarray, " T"]:
        """The text's UTF-8 bytes, without an end-of-document id. What UTF-8 cannot hold (a lone surrogate) becomes "?"."""
        return np.frombuffer(text.encode("utf-8", errors="replace"), np.uint8).astype(np.int32)

    def decode(self, ids: Iterable[int] | Int32[np.ndarray, " T"]) -> str:
        """The text of the ids. Ids that are no byte are left out; broken UTF-8 shows as U+FFFD."""
        return bytes(int(i) for i in ids if 0 <= i < 256).decode("utf-8", errors="replace")
