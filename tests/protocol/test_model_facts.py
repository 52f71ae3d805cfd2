"""The result of a download fits where Kubernetes keeps it, and is read back as it was written."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagefleet_protocol.model_facts import (
    FINAL_REASONS,
    MAX_RESULT_BYTES,
    DownloadResult,
    DownloadResultError,
    ModelFacts,
    Reason,
    decode_result,
    encode_result,
)

FACTS = ModelFacts("abc", 10**12, 30, "qwen3", "bfloat16", "", 36, 0, 0, 32, 8, 128, 40960)


def test_a_success_is_read_back() -> None:
    result = DownloadResult(facts=FACTS)
    line = encode_result(result)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert decode_result(line) == result
    assert result.exit_code == 0


@given(st.text(max_size=6000), st.sampled_from([reason for reason in get_args(Reason) if reason]))
def test_any_message_fits_and_keeps_its_beginning(message: str, reason: Reason) -> None:
    line = encode_result(DownloadResult(reason=reason, message=message))
    assert len(line) <= MAX_RESULT_BYTES
    read = decode_result(line)
    assert read.reason == reason
    assert read.message == message or (read.message.endswith("...") and message.startswith(read.message[:-3]))
    if len(message.encode()) < 600:
        assert read.message == message


def test_a_long_message_uses_the_space() -> None:
    assert len(encode_result(DownloadResult(reason="BadModel", message="x" * 9000))) > MAX_RESULT_BYTES - 20


@pytest.mark.parametrize("reason", get_args(Reason))
def test_only_what_a_retry_may_mend_is_tried_again(reason: Reason) -> None:
    expected = 0 if not reason else 2 if reason in FINAL_REASONS else 1
    assert DownloadResult(reason=reason).exit_code == expected
    assert {"BadModel", "AccessDenied"} <= FINAL_REASONS
    assert not FINAL_REASONS & {"", "StoreUnreachable", "ChecksumMismatch", "DiskFull"}


def test_the_last_line_counts() -> None:
    line = encode_result(DownloadResult(facts=FACTS)).decode()
    assert decode_result(f"a warning\n{line}\n\n").facts == FACTS


@pytest.mark.parametrize(
    "data", ["", "\n", "no json", "{}x", '{"reason": "Odd"}', '{"format": 2}', b"\xff", '{"new": 1}']
)
def test_what_is_no_result(data: str | bytes) -> None:
    with pytest.raises(DownloadResultError, match="result of a download"):
        decode_result(data)


def test_facts_of_a_newer_program_can_be_read() -> None:
    more = msgspec.json.encode(FACTS)[:-1] + b',"num_towers":8}'
    assert msgspec.json.decode(more, type=ModelFacts) == FACTS
