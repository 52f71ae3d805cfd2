"""Headers of safetensors files that are read from afar: as the library reads them, and none that lies."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pagefleet_download.errors import StoreUnreachable
from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.loader.checkpoint import TensorFile
from pagefleet_engine.loader.streamed import read_header, streamed_files
from safetensors.torch import save


def reading(data: bytes) -> Callable[[int, int], bytes]:
    def read(start: int, stop: int) -> bytes:
        assert 0 <= start < stop <= len(data), "never beyond the file"
        return data[start:stop]

    return read


def file_of(header: Any, num_bytes: int = 8) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(num_bytes)


def tensor(start: int, stop: int, shape: Any = None, dtype: Any = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [stop - start] if shape is None else shape, "data_offsets": [start, stop]}


def test_a_header_is_read_as_the_library_reads_it(tmp_path: Path) -> None:
    tensors = {
        "b.weight": torch.ones(3, 5, dtype=torch.bfloat16),
        "a.weight": torch.ones(7),
        "none": torch.ones(0, 4),
        "scalar": torch.tensor(2, dtype=torch.int8),
        "small": torch.ones(4, dtype=torch.float8_e4m3fn),
    }
    data = save(tensors, {"format": "pt"})
    (tmp_path / "x.safetensors").write_bytes(data)
    theirs, (ours, metadata) = TensorFile(tmp_path / "x.safetensors", None), read_header(reading(data), len(data))
    assert metadata == theirs.metadata == {"format": "pt"}
    assert sorted(ours) == sorted(theirs.names)
    for name, entry in ours.items():
        assert (entry.dtype, entry.shape, entry.start) == (theirs.dtype(name), theirs.shape(name), theirs.offset(name))
    assert [entry.start for entry in ours.values()] == sorted(entry.start for entry in ours.values())


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\1" * 8,
        b"\xff" * 64,
        (100_000_001).to_bytes(8, "little") + bytes(64),
        file_of(b"{"),
        file_of(b"[" * 100_000),
        file_of([]),
        file_of({"a": 1}),
        file_of({"a": tensor(0, 8), "b": tensor(4, 8)}),
        file_of({"a": tensor(1, 8)}),
        file_of({"a": tensor(0, 7)}),
        file_of({"a": tensor(0, 9)}),
        file_of({"a": tensor(8, 0, [0])}),
        file_of({"a": tensor(0, 8, [7])}),
        file_of({"a": tensor(0, 8, [2], "F16")}),
        file_of({"a": tensor(0, 8, [2], "F12")}),
        file_of({"a": tensor(0, 8, [-2, -4])}),
        file_of({"a": tensor(0, 8, [8.0])}),
        file_of({"a": tensor(0, 8, [True, 8])}),
        file_of({"a": tensor(0, 8, "8")}),
        file_of({"a": tensor(0, 8, [2**64])}),
    ],
)
def test_a_header_that_lies_is_one_line(data: bytes) -> None:
    said = f"({len(data)} bytes) is truncated or not a safetensors file: upload it again"
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        read_header(reading(data), len(data))


def test_a_store_that_went_away_is_told_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*arguments: object) -> None:
        raise StoreUnreachable("s3://b: no answer (6 attempts)")

    monkeypatch.setattr("pagefleet_engine.loader.streamed.WeightStream", away)
    with pytest.raises(
        ModelLoadError, match=r"^s3://b: no answer \(6 attempts\): check the address, network and proxy"
    ):
        streamed_files(tmp_path).__enter__()
