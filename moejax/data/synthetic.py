"""Made-up tokens for benchmarks: endless, of any vocabulary, each a pure function of its place in the row.

    place     ... |  7  |  8  |  9  | 10  | 11  | 12  | 13  | ...
    token         |  a  | a+1 |  b  |  c  | c+1 | end |  d  |
                   fresh linked fresh fresh linked       fresh

* One place in 512, anywhere, ends a document: lengths are geometric.
* The other tokens follow Zipf's law in steps. Ids lie in octaves, 2^k - 1 up to 2^(k+1) - 2; all octaves are equally likely (the last one
  as far as the vocabulary fills it), and so are all ids of an octave. All of it is whole numbers: every machine makes the same tokens.
* A quarter of the tokens repeat the one before, moved to the next id of its octave. So the loss can fall below the unigram entropy; and as
  moves inside an octave leave frequencies as they are, that entropy is known exactly.
"""

import functools
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int32, Int64, UInt64

from moejax.data.shuffle import mix

NUM_TOKENS = 1 << 40

DOCUMENT_TOKENS = 512
"""Mean length of a document, its end included. A power of two."""

_END_BITS = DOCUMENT_TOKENS.bit_length() - 1


@dataclass(frozen=True)
class SyntheticTokens:
    """Made-up ids below vocab_size: len() and slices, as of a NumPy array."""

    vocab_size: int

    def __len__(self) -> int:
        return NUM_TOKENS

    def __getitem__(self, span: slice) -> Int32[np.ndarray, " T"]:
        """The ids of a span."""
        start, stop, _ = span.indices(len(self))
        bits = mix(np.arange(start - 1, max(start, stop)).astype(np.uint64))  # from the token before, which the first may repeat
        is_end = (bits & np.uint64(DOCUMENT_TOKENS - 1)) == 0
        may_link = (bits >> np.uint64(_END_BITS) & np.uint64(1)) == 1
        octave, offset = self._draw(bits >> np.uint64(_END_BITS + 1))
        # Of two tokens in a row that may, only the first is linked: what a token repeats is always fresh.
        is_linked = may_link[1:] & ~may_link[:-1] & ~is_end[:-1]
        moved = offset[:-1] + 1
        moved[moved == self._sizes[octave[:-1]]] = 0
        ids = (1 << np.where(is_linked, octave[:-1], octave[1:])) - 1 + np.where(is_linked, moved, offset[1:])
        if self.eos_id is not None:
            ids[is_end[1:]] = self.eos_id
        return ids.astype(np.int32)

    @property
    def eos_id(self) -> int | None:
        """The last id. None for a vocabulary of one, which has nothing but words."""
        return self.vocab_size - 1 if self.vocab_size > 1 else None

    def probabilities(self) -> Float64[np.ndarray, " V"]:
        """How often each id comes."""
        octave = np.frexp(np.arange(1, self._num_words + 1, dtype=np.float64))[1] - 1
        words = (self._width >> octave) / self._num_slots
        return words if self.eos_id is None else np.append(words * (1 - 1 / DOCUMENT_TOKENS), 1 / DOCUMENT_TOKENS)

    def unigram_entropy(self) -> float:
        """Entropy in nats of these frequencies: the loss of a model that knows nothing else."""
        share = self.probabilities()
        return float(-(share * np.log(share)).sum())

    def _draw(self, bits: UInt64[np.ndarray, " T"]) -> tuple[Int64[np.ndarray, " T"], Int64[np.ndarray, " T"]]:
        """Octave and place in it of the words that these random bits stand for."""
        slot = (bits % np.uint64(self._num_slots)).astype(np.int64)
        octave = slot >> self._last
        return octave, (slot & (self._width - 1)) >> (self._last - octave)

    @property
    def _num_words(self) -> int:
        return max(1, self.vocab_size - 1)

    @property
    def _last(self) -> int:
        """Number of the last octave."""
        return self._num_words.bit_length() - 1

    @property
    def _width(self) -> int:
        """Slots of an octave, as many as the last would have ids were it whole; each id of octave k has width / 2^k of them."""
        return 1 << self._last

    @functools.cached_property
    def _sizes(self) -> Int64[np.ndarray, " octaves"]:
        """Ids of each octave."""
        return np.array([*(1 << k for k in range(self._last)), self._num_words - self._width + 1])

    @property
    def _num_slots(self) -> int:
        """Slots of all octaves; the last has one for each of its ids."""
        return self._last * self._width + int(self._sizes[-1])
