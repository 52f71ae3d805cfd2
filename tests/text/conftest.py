import pytest
from pagefleet_text.tokenizer import Tokenizer

from tests.fakes.small_tokenizers import byte_fallback_backend, byte_level_backend


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    settings = {"eos_token": "<|im_end|>", "bos_token": {"content": "<|endoftext|>"}}
    return Tokenizer(byte_level_backend(), settings, (2,))


@pytest.fixture(scope="session")
def byte_fallback() -> Tokenizer:
    return Tokenizer(byte_fallback_backend(), {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True})
