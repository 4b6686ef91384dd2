"""Token files and text as deterministic batches. Needs NumPy only."""

from moejax.data.batch import Batch
from moejax.data.dataset import Dataset, open_data
from moejax.data.prefetch import Prefetch, prefetch
from moejax.data.tokenizer import ByteTokenizer

__all__ = ["Batch", "ByteTokenizer", "Dataset", "Prefetch", "open_data", "prefetch"]
