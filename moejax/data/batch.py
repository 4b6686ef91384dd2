"""From windows of token ids to what a step reads: tokens, labels, document numbers and positions."""

import numpy as np
from jaxtyping import Int32, Integer

type Batch = dict[str, Int32[np.ndarray, "B T"]]
"""tokens; labels (the next token, -1 where there is none); segment_ids (document in the sequence, from 1; 0 is padding);
positions (from 0 in each document)."""


def make_batch(windows: Integer[np.ndarray, "B window"], document_end_id: int | None) -> Batch:
    """The batch of windows of T + 1 tokens each.

    document_end_id None: each sequence is one document. Otherwise that id ends a document and belongs to it, and the token
    that ends a document has no label: the next one belongs to another document.
    """
    tokens, labels = windows[:, :-1].astype(np.int32), windows[:, 1:].astype(np.int32)
    segment_ids = np.ones_like(tokens)
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape).copy()
    if document_end_id is not None:
        is_end = tokens == document_end_id
        labels[is_end] = -1
        segment_ids[:, 1:] += np.cumsum(is_end[:, :-1], axis=1, dtype=np.int32)
        first = np.zeros_like(tokens)
        first[:, 1:] = np.where(is_end[:, :-1], positions[:, 1:], 0)
        positions -= np.maximum.accumulate(first, axis=1)
    return {"tokens": tokens, "labels": labels, "segment_ids": segment_ids, "positions": positions}


def fill_up(batch: dict[str, Int32[np.ndarray, "some T"]], num_sequences: int) -> Batch:
    """The batch with padding below its sequences: no labels, segment 0."""
    missing = num_sequences - len(batch["tokens"])
    padding = {"tokens": 0, "labels": -1, "segment_ids": 0, "positions": 0}
    return {name: np.pad(rows, ((0, missing), (0, 0)), constant_values=padding[name]) for name, rows in batch.items()}
