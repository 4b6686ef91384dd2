import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.data import ByteTokenizer

TOKENIZER = ByteTokenizer()


@settings(deadline=None)
@given(st.text())
def test_any_text_comes_back(text):
    ids = TOKENIZER.encode(text)
    assert ids.dtype == np.int32
    assert TOKENIZER.decode(ids) == text


@settings(deadline=None)
@given(st.lists(st.integers(-1, 300)))
def test_any_ids_can_be_shown(ids):
    expected = bytes(i for i in ids if 0 <= i < 256).decode("utf-8", errors="replace")
    assert TOKENIZER.decode(ids) == expected


def test_ids_are_utf8_bytes_and_two_more():
    assert TOKENIZER.encode("Ä!").tolist() == [0xC3, 0x84, 0x21]
    assert (TOKENIZER.eos_id, TOKENIZER.pad_id, TOKENIZER.vocab_size) == (256, 257, 258)
    assert TOKENIZER.decode([104, 105, TOKENIZER.eos_id, TOKENIZER.pad_id]) == "hi"


def test_broken_utf8_and_lone_surrogates_are_replaced():
    assert TOKENIZER.decode([0xC3]) == "\ufffd"
    assert TOKENIZER.decode(TOKENIZER.encode("a\udc80b")) == "a?b"
