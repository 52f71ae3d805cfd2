"""Headers are read; one that lies is one line, and no memory of the size that it claims."""

from __future__ import annotations

import contextlib
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter
from hypothesis import given
from hypothesis import strategies as st
from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.gguf.file import read_gguf
from pagefleet_engine.gguf.folder import gguf_at, plain_name
from pagefleet_protocol.model_config import gguf_header

from tests.fakes.gguf_headers import Header, entry, tensor, text

_HUGE = 1 << 40


def _array(kind: int, count: int, values: bytes) -> bytes:
    return struct.pack("<IIQ", 9, kind, count) + values


def refusal(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(ModelLoadError) as error:
            read_gguf(path)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)
    return str(error.value)


def test_what_the_formats_own_package_writes_is_read(tmp_path: Path) -> None:
    path, numbers = tmp_path / "model.gguf", np.arange(96, dtype=np.float32).reshape(3, 32)
    writer = GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 3)
    writer.add_float32("llama.rope.freq_base", 1e6)
    writer.add_bool("tokenizer.ggml.add_bos_token", False)
    writer.add_array("tokenizer.ggml.tokens", ["a", "Ġb"])
    writer.add_array("tokenizer.ggml.token_type", [1, 3])
    writer.add_custom_alignment(64)
    writer.add_tensor("a.weight", numbers)
    writer.add_tensor("b.weight", numbers.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model = read_gguf(path)
    assert model.metadata["general.architecture"] == "llama"
    assert model.metadata["llama.block_count"] == 3
    assert model.metadata["tokenizer.ggml.add_bos_token"] is False
    assert model.metadata["tokenizer.ggml.tokens"] == ["a", "Ġb"]
    assert model.metadata["tokenizer.ggml.token_type"].tolist() == [1, 3]
    first, second = model.tensors.values()
    assert (first.shape, first.type.name, second.type.name) == ((3, 32), "F32", "F16")
    assert first.start % 64 == second.start % 64 == 0
    assert (np.fromfile(path, np.float32, 96, offset=first.start) == numbers.ravel()).all()


@pytest.mark.parametrize(
    ("header", "num_bytes", "words"),
    [
        (Header(magic=b"GGML"), 0, "does not begin with GGUF"),
        (Header(version=1), 0, "GGUF version 1"),
        (Header(version=3 << 24), 0, "another byte order"),
        (Header(count=_HUGE), 0, "tensors and 0 entries"),
        (Header(num_entries=_HUGE), 0, "entries"),
        (Header(num_entries=3), 0, "its header ends"),
        (Header([struct.pack("<Q", _HUGE)]), 0, "a text of"),
        (Header([text("key") + struct.pack("<IQ", 8, 1 << 23)]), 0, "its header ends"),
        (Header([text("key") + struct.pack("<IIQ", 9, 4, _HUGE)]), 0, "an array of"),
        (Header([text("key") + struct.pack("<IIQ", 9, 10, 1 << 21)]), 0, "its header ends"),
        (Header([text("key") + struct.pack("<IIQ", 9, 9, 4)]), 0, "an array of type 9"),
        (Header([text("key") + struct.pack("<I", 77)]), 0, "a value of type 77"),
        (Header([entry("key", 1), entry("key", 1)]), 0, "there twice"),
        (Header([entry("general.alignment", 0)]), 0, "general.alignment is 0"),
        (Header([entry("general.alignment", "no")]), 0, "general.alignment"),
        (Header(tensors=[tensor("a", (2, 32), 0, 0)]), 255, "ends at byte"),
        (Header(tensors=[tensor("a", (2, 32), 0, _HUGE)]), 256, "ends at byte"),
        (Header(tensors=[tensor("a", (2, 32), 0, 8)]), 512, "off the alignment"),
        (Header(tensors=[tensor("a", (2, 32), 0, 0), tensor("b", (2, 32), 0, 128)]), 512, "within another"),
        (Header(tensors=[tensor("a", (2, 32), 0, 0), tensor("a", (2, 32), 0, 256)]), 512, "there twice"),
        (Header(tensors=[tensor("a", (2, 33), 8, 0)]), 512, "is [2, 33] in Q8_0"),
        (Header(tensors=[tensor("a", (0, 32), 8, 0)]), 512, "is [0, 32]"),
        (Header(tensors=[tensor("a", (1 << 62, 32), 8, 0)]), 512, "in Q8_0"),
        (Header(tensors=[tensor("a", (1,) * 9, 0, 0)]), 512, "9 dimensions"),
        (Header(tensors=[tensor("a", (2, 256), 41, 0)]), 512, "of type Q1_0, which is not read"),
        (Header(tensors=[tensor("a", (2, 256), 99, 0)]), 512, "unknown type 99"),
    ],
)
def test_a_lie_is_one_line(header: Header, num_bytes: int, words: str, tmp_path: Path) -> None:
    assert words in refusal(tmp_path / "model.gguf", header.data(num_bytes))


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([_array(0, 6, bytes(6)), _array(0, 8, bytes(8))], "an array of 8 values, in all over 10"),
        ([_array(8, 2, text("x") * 2), _array(8, 6, text("x") * 6), b""], "a text of 1 bytes; texts"),
        ([_array(8, 3, text("x" * 8) * 3)], "a text of 8 bytes; texts come to over 20"),
    ],
)
def test_a_header_has_one_measure_for_all_its_arrays_and_texts(
    entries: list[bytes], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_header, "_MOST_VALUES", 10)
    monkeypatch.setattr(gguf_header, "_MOST_TEXT_BYTES", 20)
    data = [text(str(number)) + entry for number, entry in enumerate(entries)]
    assert words in refusal(tmp_path / "model.gguf", Header(data).data())


def test_files_that_are_none(tmp_path: Path) -> None:
    assert "it is empty" in refusal(tmp_path / "model.gguf", b"")
    with pytest.raises(ModelLoadError, match="cannot be read"):
        read_gguf(tmp_path / "absent.gguf")


@given(st.integers(0, 200), st.binary(min_size=1, max_size=8))
def test_no_damage_raises_anything_else(tmp_path_factory: pytest.TempPathFactory, at: int, noise: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "noise.gguf"
    entries = [entry("general.architecture", "llama"), entry("llama.block_count", 3)]
    data = bytearray(Header(entries, [tensor("a", (2, 32), 8, 0)]).data(96))
    data[at : at + len(noise)] = noise
    path.write_bytes(data)
    with contextlib.suppress(ModelLoadError):
        read_gguf(path)


def parts(folder: Path, names: list[str], count: int = 2) -> Path:
    for number, name in enumerate(names):
        header = Header([entry("split.count", count)], [tensor(name, (1, 32), 0, 0)])
        (folder / f"model-{number + 1:05}-of-00002.gguf").write_bytes(header.data(128))
    return folder / "model-00001-of-00002.gguf"


def test_parts_are_one_model(tmp_path: Path) -> None:
    first = parts(tmp_path, ["a", "b"])
    model = read_gguf(first)
    assert [tensor.path.name for tensor in model.tensors.values()] == [path.name for path in model.files]
    assert gguf_at(tmp_path) == first
    assert plain_name(first) == "model"


def test_parts_that_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="holds 'a', and so does another part"):
        read_gguf(parts(tmp_path, ["a", "a"]))
    with pytest.raises(ModelLoadError, match="says that it has 5 parts"):
        read_gguf(parts(tmp_path, ["a", "b"], 5))
    (tmp_path / "model-00002-of-00002.gguf").unlink()
    with pytest.raises(ModelLoadError, match=r"lacks model-00002-of-00002\.gguf"):
        read_gguf(tmp_path / "model-00001-of-00002.gguf")


def test_a_folder_of_several_models_is_refused(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(Header().data())
    with pytest.raises(ModelLoadError, match="2 models in GGUF"):
        gguf_at(tmp_path)
    (tmp_path / "b.gguf").rename(tmp_path / "mmproj-b.gguf")
    (tmp_path / "imatrix.gguf").touch()
    assert gguf_at(tmp_path) == tmp_path / "a.gguf"
    (tmp_path / "model.safetensors").touch()
    assert gguf_at(tmp_path) is None
