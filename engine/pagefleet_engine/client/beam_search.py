"""Runs the beam search of a request: each turn asks the engine for one token after every open beam."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

from pagefleet_protocol.beam_search import BeamSearchParams
from pagefleet_text.detokenizer import Detokenizer
from pagefleet_text.tokenizer import Tokenizer

from pagefleet_engine.beam_search import BeamSearch
from pagefleet_engine.client.stream import Chunks, Generation
from pagefleet_engine.engine_core.messages import WireLogprobs
from pagefleet_engine.engine_core.output_text import Chunk


async def beam_answers(
    generate: Callable[[Generation], Chunks], asked: Generation, params: BeamSearchParams, tokenizer: Tokenizer
) -> AsyncGenerator[tuple[int, Chunk], None]:
    """Yield each choice once, whole: the best beams of every prompt. Closing it early aborts what runs.

    Args:
        generate: runs a generation.
        asked: whose beams are searched; `sampling.n` is the width.
        params: of the search.
        tokenizer: makes the text.
    """
    searches = [BeamSearch(params, tokenizer.eos_token_ids) for _ in asked.prompts]
    num_cached: int | None = None
    while any(search.open for search in searches):
        beams = [
            [*prompt, *beam.token_ids]
            for prompt, search in zip(asked.prompts, searches, strict=True)
            for beam in search.open
        ]
        step = replace(asked, prompts=beams, sampling=searches[0].one_token, beams=None)
        candidates, cached = await _next_tokens(generate, step)
        num_cached = cached if num_cached is None else num_cached
        first = 0
        for search in searches:
            last = first + len(search.open)
            if last > first:
                search.advance(candidates[first:last])
            first = last
    for number, search in enumerate(searches):
        for place, beam in enumerate(search.answers()):
            token_ids = search.shown(beam)
            detokenizer = Detokenizer(tokenizer, asked.sampling.skip_special_tokens)
            pieces = [detokenizer.push((token,)) for token in token_ids]
            text = "".join(pieces) + detokenizer.finish()
            reason = "stop" if beam.has_ended else "length"
            told = num_cached if number == place == 0 else None
            yield (
                number * asked.sampling.n + place,
                Chunk(text, token_ids, None, None, reason, None, told, lengths=[len(piece) for piece in pieces]),
            )


async def _next_tokens(
    generate: Callable[[Generation], Chunks], step: Generation
) -> tuple[Sequence[WireLogprobs], int]:
    """Return the likeliest next tokens of each prompt, and how many tokens of them were cached."""
    found: dict[int, WireLogprobs] = {}
    num_cached = 0
    async with aclosing(generate(step)) as chunks:
        async for index, chunk in chunks:
            num_cached += chunk.num_cached_tokens or 0
            if chunk.logprobs:
                found[index] = chunk.logprobs[0]
    return [found[index] for index in range(len(step.prompts))], num_cached
