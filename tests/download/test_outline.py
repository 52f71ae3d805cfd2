"""What is told of a mixture before it is downloaded: how many experts, and which bytes are theirs."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from pagefleet_download.download import inspect
from pagefleet_download.progress import ProgressMeter
from pagefleet_download.tensor_bytes import header_bytes
from pagefleet_protocol.model_facts import DownloadResult

from tests.fakes.downloads import fast

MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral",
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "num_local_experts": 4,
}
EXPERT = "model.layers.0.block_sparse_moe.experts.0.w1.weight"


def look(folder: Path) -> DownloadResult:
    return asyncio.run(inspect(folder.as_uri(), fast(), ProgressMeter()))


def save(folder: Path, header: bytes, num_bytes: int) -> None:
    (folder / "config.json").write_text(json.dumps(MIXTRAL))
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(num_bytes))


def test_experts_are_told_apart_from_what_all_tokens_go_through(tmp_path: Path) -> None:
    names = ["model.embed_tokens.weight", EXPERT, "model.layers.0.mlp.shared_experts.up_proj.weight"]
    sizes = {name: {"dtype": "U8", "shape": [4], "data_offsets": [4 * at, 4 * at + 4]} for at, name in enumerate(names)}
    save(tmp_path, json.dumps({"__metadata__": {"format": "pt"}, **sizes}).encode(), 12)
    facts = look(tmp_path).facts
    assert facts is not None
    assert (facts.num_experts, facts.experts_per_token, facts.expert_bytes, facts.weights_bytes) == (4, 2, 4, 12)


@pytest.mark.parametrize(
    "header",
    [
        b"{" * 40,
        b"[1, 2]",
        b"\xff\xfe",
        json.dumps({EXPERT: {"dtype": "U8"}}).encode(),
        json.dumps({EXPERT: 7}).encode(),
        json.dumps({EXPERT: {"data_offsets": [0, "9"]}}).encode(),
        json.dumps({EXPERT: {"data_offsets": [0, 10**9]}}).encode(),
        json.dumps({EXPERT: {"data_offsets": [9, 0]}}).encode(),
        b'{"a": ' + b"[" * 100_000,
    ],
)
def test_a_header_that_cannot_be_is_one_line(header: bytes, tmp_path: Path) -> None:
    save(tmp_path, header, 16)
    found = look(tmp_path)
    assert found.reason == "BadModel"
    assert "is truncated or not a safetensors file: repair the model" in found.message


@pytest.mark.parametrize(
    ("length", "size", "sound"),
    [
        (0, 100, False),
        (92, 100, True),
        (93, 100, False),
        (1 << 20, (1 << 20) + 8, True),
        ((1 << 20) + 1, 2 << 20, False),
        (2 << 20, 64 << 20, True),
        (100_000_000, 1 << 40, True),
        (100_000_001, 1 << 40, False),
    ],
)
def test_a_header_is_small_beside_its_file(length: int, size: int, sound: bool) -> None:
    assert header_bytes(length.to_bytes(8, "little"), size) == (length if sound else None)
