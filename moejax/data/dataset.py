"""Training and held-out sequences by number.

    tokens   |---------- training ----------------|- held out -|
    windows  |0....|
                  |1....|                              T + 1 tokens each, the last one shared with the next window:
                        |2....|                        every token but the first is a label exactly once

A run sees sequence 0, 1, 2, ...; batch_size of them are a step. In epoch e (each num_train_sequences long), sequence number
i is the window permute(i). Nothing else decides what a step sees: not the mesh, not the number of processes, not what was read before.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from moejax.config import TrainConfig
from moejax.data.batch import Batch, fill_up, make_batch
from moejax.data.shuffle import mix, permute
from moejax.data.source import Source, open_source
from moejax.data.tokenizer import ByteTokenizer
from moejax.errors import DataError

_COUNTED_BLOCKS, _BLOCK = 128, 1 << 16
# Held-out windows are shuffled the same way in every run, so that losses of runs with different seeds compare.
_EVAL_KEY = 0


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """The sequences of a run. Build it with open_data."""

    source: Source
    seq_len: int
    batch_size: int
    seed: int
    vocab_size: int
    document_mask: bool
    num_train_tokens: int
    """Tokens before the held-out split."""

    @property
    def tokenizer(self) -> ByteTokenizer | None:
        return self.source.tokenizer

    @property
    def num_eval_tokens(self) -> int:
        return len(self.source.tokens) - self.num_train_tokens

    @property
    def num_train_sequences(self) -> int:
        """Sequences of an epoch."""
        return (self.num_train_tokens - 1) // self.seq_len

    @property
    def num_eval_sequences(self) -> int:
        return max(0, self.num_eval_tokens - 1) // self.seq_len

    def batch(self, step: int) -> Batch:
        """The batch of a step, counted from 0 over the whole run; arrays [batch_size, seq_len]."""
        return self.sequences(step * self.batch_size, self.batch_size)

    def sequences(self, first: int, count: int) -> Batch:
        """Training sequences number first to first + count of the run, such as the part of a step's batch that one process reads."""
        if first < 0:
            raise ValueError(f"first={first} is negative; training sequences are counted from 0")
        epoch, index = np.divmod(np.arange(first, first + count), self.num_train_sequences)
        key = mix(mix(np.full(count, self.seed, np.uint64)) + epoch.astype(np.uint64))
        return self._read(permute(index, self.num_train_sequences, key) * self.seq_len)

    def eval_batches(self, batch_size: int, max_sequences: int | None = None) -> Iterator[Batch]:
        """Held-out sequences, each once and always in the same order; arrays [batch_size, seq_len].

        The order is shuffled, so that the first max_sequences are a sample of the whole split. The last batch is filled up with padding.

        Raises:
            DataError: if nothing is held out.
        """
        if self.num_eval_sequences == 0:
            raise DataError("data.eval_fraction=0 holds nothing out to evaluate on; set it to a share such as 0.05")
        count = self.num_eval_sequences if max_sequences is None else min(max_sequences, self.num_eval_sequences)
        index = np.arange(count)
        windows = permute(index, self.num_eval_sequences, np.full(count, _EVAL_KEY, np.uint64))
        for first in range(0, count, batch_size):
            starts = self.num_train_tokens + windows[first : first + batch_size] * self.seq_len
            yield fill_up(self._read(starts), batch_size)

    def unigram_entropy(self) -> float:
        """Entropy in nats of the frequencies of training tokens: the loss of a model that knows nothing else.

        Counted on at most 2**23 tokens, in blocks spread evenly.
        """
        num_blocks = -(-self.num_train_tokens // _BLOCK)
        counts = np.zeros(self.vocab_size, np.int64)
        for block in range(0, num_blocks, -(-num_blocks // _COUNTED_BLOCKS)):
            ids = self.source.tokens[block * _BLOCK : min((block + 1) * _BLOCK, self.num_train_tokens)]
            counts += np.bincount(ids, minlength=self.vocab_size)
        share = counts[counts > 0] / counts.sum()
        return float(-(share * np.log(share)).sum())

    def describe(self) -> str:
        """One line for the console."""
        return (
            f"{self.source.name}: {len(self.source.tokens):,} tokens, {self.num_train_sequences:,} training sequences of {self.seq_len} "
            f"and {self.num_eval_sequences:,} held out"
        )

    def _read(self, starts: Int[np.ndarray, " B"]) -> Batch:
        """The windows that begin at these tokens, as a batch."""
        windows = np.stack([self.source.tokens[start : start + self.seq_len + 1] for start in starts.tolist()])
        return make_batch(windows, self.source.eos_id if self.document_mask else None)


def open_data(config: TrainConfig) -> Dataset:
    """The dataset of a run, its files and sizes checked.

    Raises:
        DataError: if a file cannot be used, or a split has too few tokens for one sequence.
    """
    source, data = open_source(config), config.data
    num_tokens = len(source.tokens)
    num_eval_tokens = int(num_tokens * data.eval_fraction)
    num_train_tokens = num_tokens - num_eval_tokens
    if data.eval_fraction > 0 and num_eval_tokens <= data.seq_len:
        raise DataError(
            f"data.eval_fraction={data.eval_fraction} holds out {num_eval_tokens} of {num_tokens} tokens, but one sequence of "
            f"data.seq_len={data.seq_len} needs {data.seq_len + 1}; shorten data.seq_len, give more tokens, raise data.eval_fraction, "
            "or set data.eval_fraction=0 and eval.every=None"
        )
    if num_train_tokens <= data.seq_len:
        raise DataError(
            f"data.seq_len={data.seq_len} needs {data.seq_len + 1} tokens for one sequence, but {num_train_tokens} of {num_tokens} "
            f"are for training with data.eval_fraction={data.eval_fraction}; "
            "shorten data.seq_len, give more tokens or lower data.eval_fraction"
        )
    return Dataset(
        source=source,
        seq_len=data.seq_len,
        batch_size=config.batch_size,
        seed=config.seed,
        vocab_size=config.model.vocab_size,
        document_mask=data.document_mask,
        num_train_tokens=num_train_tokens,
    )
