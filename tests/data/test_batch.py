import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.data.batch import fill_up, make_batch

END = 9


def test_documents_by_hand():
    windows = np.array([[5, 6, END, 7, END, END, 8, 4], [END, 1, 2, 3, 4, 5, END, 6]])
    batch = make_batch(windows, END)
    assert batch["tokens"].tolist() == [[5, 6, 9, 7, 9, 9, 8], [9, 1, 2, 3, 4, 5, 9]]
    assert batch["labels"].tolist() == [[6, 9, -1, 9, -1, -1, 4], [-1, 2, 3, 4, 5, 9, -1]]
    assert batch["segment_ids"].tolist() == [[1, 1, 1, 2, 2, 3, 4], [1, 2, 2, 2, 2, 2, 2]]
    assert batch["positions"].tolist() == [[0, 1, 2, 0, 1, 0, 0], [0, 0, 1, 2, 3, 4, 5]]


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=6, max_size=6), min_size=1, max_size=4))
def test_documents_equal_a_plain_loop(windows):
    batch = make_batch(np.array(windows), 0)
    for row, window in enumerate(windows):
        document, position = 1, 0
        for t in range(5):
            label = -1 if window[t] == 0 else window[t + 1]
            found = tuple(batch[name][row, t] for name in ("tokens", "labels", "segment_ids", "positions"))
            assert found == (window[t], label, document, position)
            document, position = (document + 1, 0) if window[t] == 0 else (document, position + 1)


def test_without_a_document_mask_a_sequence_is_one_document():
    batch = make_batch(np.array([[1, END, 2, 3]], np.uint16), None)
    assert batch["labels"].tolist() == [[END, 2, 3]]
    assert batch["segment_ids"].tolist() == [[1, 1, 1]]
    assert batch["positions"].tolist() == [[0, 1, 2]]
    assert all(rows.dtype == np.int32 for rows in batch.values())


@pytest.mark.parametrize("num_sequences", [2, 4])
def test_filling_up_adds_rows_without_labels(num_sequences):
    batch = make_batch(np.array([[1, 2, 3], [4, 5, 6]]), None)
    filled = fill_up(batch, num_sequences)
    for name, empty in {"tokens": 0, "labels": -1, "segment_ids": 0, "positions": 0}.items():
        assert filled[name][:2].tolist() == batch[name].tolist()
        assert filled[name][2:].tolist() == [[empty, empty]] * (num_sequences - 2)
        assert filled[name].dtype == np.int32
