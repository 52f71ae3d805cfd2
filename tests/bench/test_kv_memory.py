"""What the KV memory figures count."""

from __future__ import annotations

from pagefleet_engine.core.kv_groups import blocks_for_request, group_layers

from bench.kv_memory import BLOCK_SIZE, DECODED_TOKENS, SHAPES, Shape, hold, measure


def test_the_peak_is_a_chunk_with_its_window_and_decoding_holds_a_window() -> None:
    groups = group_layers([None, 64])
    held = hold(groups, 2048, chunk=256)
    assert held.peak == (2048 - DECODED_TOKENS) // BLOCK_SIZE + (64 + 256) // BLOCK_SIZE
    assert held.peak <= blocks_for_request(groups, 2048, BLOCK_SIZE, 256)
    assert held.decoding == 2048 // BLOCK_SIZE + 64 // BLOCK_SIZE + 1  # the window begins within a block


def test_without_windows_in_reach_nothing_is_saved() -> None:
    figures = measure(Shape(2, 100_000, 2, 8, 128), 1024, chunk=1024)
    assert figures["all_layers_full_gib"] == figures["decoding_gib"] == figures["peak_in_prompt_gib"]
    assert figures["saved_decoding"] == figures["saved_peak"] == 0.0


def test_gemma_saves_most_where_the_context_is_long() -> None:
    saved = [measure(SHAPES["gemma-3-27b"], thousands * 1024, 2048)["saved_decoding"] for thousands in (8, 32)]
    assert 0.7 < saved[0] < saved[1] < 1 - 10 / 62
