"""What these tests share: the data as it is read, and the tokenizer as it is committed."""

import pytest
from pagefleet_engine.builtin import builtin_model_path
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tiny.dataset import Knowledge, load_knowledge


@pytest.fixture(scope="session")
def knowledge() -> Knowledge:
    return load_knowledge()


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    loaded: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(builtin_model_path("tiny"))
    return loaded
