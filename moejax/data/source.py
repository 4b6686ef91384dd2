"""Where tokens come from: the shipped plays, your own token files, or nowhere."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import UInt16

from moejax.config import TrainConfig
from moejax.data.synthetic import SyntheticTokens
from moejax.data.token_files import TokenFiles, open_token_files
from moejax.data.tokenizer import ByteTokenizer
from moejax.errors import DataError

_CORPUS = Path(__file__).parent / "corpus"


@dataclass(frozen=True, kw_only=True)
class Source:
    name: str
    """What the user reads about it."""
    tokens: TokenFiles | SyntheticTokens | UInt16[np.ndarray, " T"]
    """All ids in order: anything with a length whose slices are arrays of ids below model.vocab_size."""
    eos_id: int | None
    """The id that ends a document."""
    tokenizer: ByteTokenizer | None
    """None: only ids are known, not their text."""


def open_source(config: TrainConfig) -> Source:
    """The source that config.data names.

    Raises:
        DataError: if its files cannot be used as they are.
    """
    match config.data.source:
        case "shakespeare":
            plays = load_plays()
            tokens = np.concatenate([np.append(np.frombuffer(play, np.uint8), np.uint16(ByteTokenizer.eos_id)) for play in plays])
            return Source(name=f"shakespeare ({len(plays)} plays)", tokens=tokens, eos_id=ByteTokenizer.eos_id, tokenizer=ByteTokenizer())
        case "files":
            _check_eos(config.data.eos_id, config.model.vocab_size)
            files = open_token_files(config.data.paths, config.data.token_dtype, config.model.vocab_size)
            return Source(name=f"{len(files.files)} token file(s)", tokens=files, eos_id=config.data.eos_id, tokenizer=None)
        case "synthetic":
            made_up = SyntheticTokens(config.model.vocab_size)
            return Source(name="synthetic", tokens=made_up, eos_id=made_up.eos_id, tokenizer=None)


def load_plays() -> list[bytes]:
    """The shipped plays, in the order of the token stream."""
    return [path.read_bytes() for path in sorted(_CORPUS.glob("*.txt"))]


def _check_eos(eos_id: int | None, vocab_size: int) -> None:
    if eos_id is not None and not 0 <= eos_id < vocab_size:
        raise DataError(
            f"data.eos_id={eos_id} is not an id below model.vocab_size={vocab_size}; give the id that ends documents in your files, or None"
        )
