from typing import Any

import pytest
from pagefleet_engine.core.outputs import RequestUpdate, Waits
from pagefleet_engine.core.request import FinishReason
from pagefleet_engine.engine_core.messages import RequestOutput, WireLogprobs
from pagefleet_engine.engine_core.output_text import Chunk, OutputText, merge_chunks, spell_bad_words
from pagefleet_engine.engine_core.wire import to_wire
from pagefleet_engine.errors import (
    EngineError,
    InvalidRequest,
    KVLoadFailed,
    OwnFailure,
    QueueFull,
    RequestFailed,
    StepOutOfMemory,
)
from pagefleet_protocol.sampling_params import SamplingParams
from pagefleet_text.tokenizer import Tokenizer

from tests.fakes.small_tokenizers import byte_level_backend

TOKENIZER = Tokenizer(byte_level_backend(), {"eos_token": "<|im_end|>"})
EOS = 1


def ids(text: str) -> list[int]:
    return [TOKENIZER.encode(char)[0] for char in text]


def run(outputs: list[RequestOutput], **sampling: Any) -> list[Chunk]:
    text = OutputText(TOKENIZER, SamplingParams(max_tokens=99, **sampling))
    chunks = []
    for output in outputs:
        chunk = text.push(output)
        if chunk is not None:
            chunks.append(chunk)
            if chunk.finish_reason is not None:
                break
    return chunks


def one_by_one(text: str, last: str = "length") -> list[RequestOutput]:
    tokens = ids(text)
    return [RequestOutput("r", [token], last if i == len(tokens) - 1 else None) for i, token in enumerate(tokens)]


def shown(chunks: list[Chunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


def test_text_follows_the_tokens() -> None:
    chunks = run(one_by_one("abc"))
    assert [chunk.text for chunk in chunks] == ["a", "b", "c"]
    assert chunks[-1].finish_reason == "length"


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "abcd")])
def test_a_stop_string_ends_the_output_while_the_core_goes_on(include: bool, text: str) -> None:
    chunks = run(one_by_one("abcdef"), stop=("cd",), include_stop_str_in_output=include)
    assert shown(chunks) == text
    assert (chunks[-1].finish_reason, chunks[-1].stop_reason) == ("stop", "cd")
    assert sum(len(chunk.token_ids) for chunk in chunks) == 4


def test_tokens_after_a_stop_string_do_not_count() -> None:
    entries = [WireLogprobs([token], [-1.0], 1) for token in ids("abcdef")]
    (chunk,) = run([RequestOutput("r", ids("abcdef"), logprobs=entries)], stop=("cd",), logprobs=0)
    assert list(chunk.token_ids) == ids("abcd")
    assert chunk.logprobs == entries[:4]


def test_what_was_held_back_comes_at_the_end() -> None:
    chunks = run(one_by_one("ab<"), stop=("<end>",))
    assert [chunk.text for chunk in chunks] == ["a", "b", "<"]


def test_stop_strings_wait_for_min_tokens() -> None:
    assert shown(run(one_by_one("xxxxxx"), stop=("x",), min_tokens=3)) == "xxx"


@pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "ab")])
def test_a_stop_token_is_not_part_of_the_text(include: bool, text: str) -> None:
    outputs = [RequestOutput("r", ids("a")), RequestOutput("r", ids("b"), "stop", stop_token_id=ids("b")[0])]
    chunks = run(outputs, stop_token_ids=(ids("b")[0],), include_stop_str_in_output=include)
    assert shown(chunks) == text
    assert chunks[-1].stop_reason == ids("b")[0]


def test_the_end_of_text_token_is_not_shown_even_with_special_tokens() -> None:
    outputs = [RequestOutput("r", ids("a")), RequestOutput("r", [EOS], "stop")]
    chunks = run(outputs, skip_special_tokens=False)
    assert shown(chunks) == "a"
    assert chunks[-1].stop_reason is None


def test_an_unfinished_character_is_flushed_at_the_end() -> None:
    first_byte = next(token for token in range(400) if TOKENIZER.token_bytes(token) == b"\xf0")
    assert shown(run([RequestOutput("r", [first_byte]), RequestOutput("r", [], "abort")])) == "\ufffd"
    assert shown(run([RequestOutput("r", [first_byte], "length")])) == "\ufffd"


def test_prompt_logprobs_are_collected_until_the_first_token() -> None:
    entry = WireLogprobs([1], [-1.0], 1)
    outputs = [
        RequestOutput("r", [], prompt_logprobs=[entry]),
        RequestOutput("r", [], prompt_logprobs=[entry, entry]),
        RequestOutput("r", ids("a"), num_cached_tokens=0),
        RequestOutput("r", ids("b"), "length"),
    ]
    first, second = run(outputs, prompt_logprobs=0)
    assert first.prompt_logprobs == [entry] * 3
    assert first.num_cached_tokens == 0
    assert second.prompt_logprobs is None


def test_without_a_tokenizer_there_are_tokens_only() -> None:
    chunk = OutputText(None, SamplingParams()).push(RequestOutput("r", [5], "length"))
    assert chunk is not None
    assert (chunk.text, list(chunk.token_ids)) == ("", [5])


def test_detokenize_false_gives_no_text() -> None:
    assert shown(run(one_by_one("abc"), detokenize=False)) == ""


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("invalid", InvalidRequest),
        ("queue_full", QueueFull),
        ("failed", RequestFailed),
        ("failed_alone", OwnFailure),
        ("out_of_memory", StepOutOfMemory),
        ("kv_load_failed", KVLoadFailed),
    ],
)
def test_errors_come_out_as_what_they_were(kind: str, error: type[EngineError]) -> None:
    output = RequestOutput(
        "r", [], "error", error="why", error_kind=kind, error_param="p", error_code="c", retry_after_s=7.0,
        kv_fault="unreachable",
    )  # fmt: skip
    with pytest.raises(error, match="why") as caught:
        OutputText(TOKENIZER, SamplingParams()).push(output)
    if isinstance(caught.value, InvalidRequest):
        assert (caught.value.param, caught.value.code) == ("p", "c")
    if isinstance(caught.value, QueueFull):
        assert caught.value.retry_after_s == 7.0
    if isinstance(caught.value, KVLoadFailed):
        assert caught.value.fault == "unreachable"


def test_what_the_first_output_tells_goes_through_both_kinds_of_messages() -> None:
    waits = Waits(1.0, 2.0, 0.25)
    for reason in (None, FinishReason.LENGTH):
        update = RequestUpdate("r", [5], reason, num_cached_tokens=3, waits=waits)
        chunk = OutputText(None, SamplingParams()).push(to_wire(update))
        assert chunk is not None
        assert (chunk.num_cached_tokens, chunk.waits) == (3, waits)


def test_chunks_merge_to_what_they_say_together() -> None:
    chunks = run(one_by_one("abcd"))
    merged = merge_chunks(chunks)
    assert (merged.text, list(merged.token_ids), merged.finish_reason) == ("abcd", ids("abcd"), "length")
    entry = WireLogprobs([1], [-1.0], 1)
    both = merge_chunks(
        [
            Chunk("a", [1], [entry], [entry], num_cached_tokens=3, waits=Waits(1.0, 2.0)),
            Chunk("b", [2], [entry], None, "stop", "x"),
        ]
    )
    assert both == Chunk("ab", [1, 2], [entry, entry], [entry], "stop", "x", 3, Waits(1.0, 2.0))


def test_an_end_without_tokens_takes_no_logprobs_away() -> None:
    entry = WireLogprobs([1], [-1.0], 1)
    merged = merge_chunks([Chunk("a", [1], [entry]), Chunk("", [], None, finish_reason="abort")])
    assert (list(merged.token_ids), merged.logprobs, merged.finish_reason) == ([1], [entry], "abort")


def test_bad_words_are_spelled_at_the_start_and_after_a_space() -> None:
    spelled = spell_bad_words(SamplingParams(bad_words=("fox", " fox", "fox")), TOKENIZER).bad_words_token_ids
    assert {TOKENIZER.decode(ids) for ids in spelled} == {"fox", " fox"}
    assert len(spelled) == 2


def test_bad_words_need_a_tokenizer() -> None:
    sampling = SamplingParams(bad_words=("fox",))
    assert spell_bad_words(sampling, TOKENIZER).bad_words_token_ids
    with pytest.raises(InvalidRequest, match="tokenizer"):
        spell_bad_words(sampling, None)
    assert spell_bad_words(SamplingParams(), None) == SamplingParams()
