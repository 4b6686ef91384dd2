"""More documents in a sequence than the compiled kernel holds stop a run with the way out; where no kernel counts them, nothing happens."""

import dataclasses

import numpy as np
import pytest

from moejax.config import DataConfig
from moejax.errors import DataError
from moejax.train import documents
from moejax.train.documents import check_documents
from moejax_kernels.attention import Choice
from tests.oracle.examples import model_config, train_config

CONFIG = train_config(model_config())
SEGMENTS = np.array([[1, 1, 1, 1, 1, 1], [1, 2, 2, 3, 0, 0]])
"""Three documents and padding."""


def masked(max_documents: int):
    data = DataConfig(source="files", paths=("none.npy",), eos_id=0, document_mask=True, max_documents=max_documents)
    return dataclasses.replace(CONFIG, data=data)


@pytest.fixture
def on_cudnn(monkeypatch):
    monkeypatch.setattr(documents, "choose_attention", lambda model: Choice("cudnn", "cudnn, because the test says so"))


def test_padding_counts_as_a_document_and_as_many_as_fit_pass(on_cudnn):
    check_documents(masked(4), SEGMENTS)
    check_documents(CONFIG, np.minimum(SEGMENTS, 1))


def test_more_documents_than_fit_are_refused_with_the_number_that_would_do(on_cudnn):
    with pytest.raises(DataError, match=r"holds 4 documents, .* data.max_documents=3; raise it to 4 or more, or set model"):
        check_documents(masked(3), SEGMENTS)


def test_documents_without_a_document_mask_are_refused(on_cudnn):
    with pytest.raises(DataError, match=r"holds 3 documents, but data\.document_mask=False"):
        check_documents(CONFIG, SEGMENTS)


def test_xla_has_no_limit():
    check_documents(masked(1), SEGMENTS)
    check_documents(CONFIG, SEGMENTS)


def test_the_mask_decides_how_many_documents_attention_tells_apart():
    assert masked(5).data.documents == 5
    assert CONFIG.data.documents == 1
