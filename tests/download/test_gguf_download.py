"""Models in GGUF from a hub: one file of many, with its parts; and what is known of it before it is here."""

from __future__ import annotations

import asyncio
import struct
from pathlib import Path
from unittest.mock import Mock

import pytest
from pagefleet_download import gguf_outline, selection
from pagefleet_download.bring import Caches, FleetDownload, bring
from pagefleet_download.download import inspect
from pagefleet_download.errors import BadModel
from pagefleet_download.progress import ProgressMeter
from pagefleet_download.selection import choose_gguf
from pagefleet_download.settings import DownloadSettings
from pagefleet_protocol.model_config.gguf_header import parts_named
from pagefleet_protocol.model_uri import parse_model_uri

from tests.fakes.downloads import fast, run, visible
from tests.fakes.gguf_headers import LLAMA, Header, entry, llama, tensor, text
from tests.fakes.hub_server import HubServer
from tests.fakes.model_files import sharded

Q8, Q4 = "model-Q8_0.gguf", "model-Q4_0.gguf"
FILES = {
    Q8: llama(),
    Q4: llama(2, 18),
    "mmproj-model-Q8_0.gguf": b"x",
    "config.json": b"{}",
    "big/model-BF16-00001-of-00002.gguf": llama(),
    "big/model-BF16-00002-of-00002.gguf": Header([], [tensor("output.weight", (320, 256), 8, 0)]).data(320 * 8 * 34),
}

MIXTURE = Header(
    [entry("llama.expert_count", 8), *(entry(name, value) for name, value in LLAMA.items())],
    [tensor("token_embd.weight", (32, 32), 2, 0), tensor("blk.0.ffn_gate_exps.weight", (30000, 1, 32), 2, 576)],
)


def have(uri: str, root: Path, settings: DownloadSettings) -> Path:
    return asyncio.run(bring(parse_model_uri(uri), settings, Caches(root, root), ProgressMeter()))


@pytest.mark.parametrize(
    ("uri", "files"),
    [
        ("hf://org/model:Q4_0", [Q4]),
        ("hf://org/model:q8_0", [Q8]),
        (f"hf://org/model/{Q4}", [Q4]),
        ("hf://org/model:BF16", ["model-BF16-00001-of-00002.gguf", "model-BF16-00002-of-00002.gguf"]),
        (
            "hf://org/model/big/model-BF16-00002-of-00002.gguf",
            ["model-BF16-00001-of-00002.gguf", "model-BF16-00002-of-00002.gguf"],
        ),
    ],
)
def test_the_file_that_is_meant_arrives_and_nothing_else(
    hub: HubServer, tmp_path: Path, uri: str, files: list[str]
) -> None:
    sha = hub.repositories["org/model"].commit(FILES)
    result = run(uri, tmp_path / "m", fast(endpoint=hub.url))
    assert (result.message, visible(tmp_path / "m")) == ("", set(files))
    found = have(uri, tmp_path / "hub", fast(endpoint=hub.url))
    snapshot = tmp_path / "hub" / "models--org--model" / "snapshots" / sha
    contents = {name.rpartition("/")[2]: data for name, data in FILES.items()}
    assert str(found.relative_to(snapshot)) in FILES
    assert (found.name, visible(found.parent)) == (files[0], set(files))
    for folder in (tmp_path / "m", found.parent):
        assert all((folder / name).read_bytes() == contents[name] for name in files)


def test_several_of_a_repository_lie_beside_each_other(hub: HubServer, tmp_path: Path) -> None:
    hub.repositories["org/model"].commit(FILES)
    settings = fast(endpoint=hub.url)
    first = [have(f"hf://org/model:{kind}", tmp_path, settings) for kind in ("Q4_0", "Q8_0")]
    assert [path.name for path in first] == [Q4, Q8]
    hub.seen.clear()
    assert [have(f"hf://org/model:{kind}", tmp_path, settings) for kind in ("Q4_0", "Q8_0")] == first
    assert hub.seen == []
    offline = fast(endpoint=hub.url, offline=True)
    for manifest in first[0].parent.glob(".pagefleet*"):
        manifest.unlink()  # as another tool leaves it
    assert have("hf://org/model:Q4_0", tmp_path, offline) == first[0]


@pytest.mark.parametrize("offline", [False, True])
def test_files_of_one_name_lie_in_their_folders(hub: HubServer, tmp_path: Path, offline: bool) -> None:
    files = {f"{folder}/{Q4}": llama(2, 18, [entry("general.name", folder)]) for folder in ("v1", "v2")}
    hub.repositories["org/model"].commit(files)
    settings = fast(endpoint=hub.url)
    for _ in range(2):
        for name, data in files.items():
            found = have(f"hf://org/model/{name}", tmp_path, settings)
            assert (found.parts[-2:], found.read_bytes()) == (tuple(name.split("/")), data)
        if offline:
            settings = fast(endpoint=hub.url, offline=True)
            for manifest in found.parents[1].glob(".pagefleet*"):
                manifest.unlink()  # as another tool leaves it
    first, second = (found.parents[1] / name for name in files)
    second.unlink()
    second.symlink_to(first.readlink())
    if not offline:  # of the same size, and another content
        assert have(f"hf://org/model/v2/{Q4}", tmp_path, settings).read_bytes() == files[f"v2/{Q4}"]


def test_a_fleet_has_the_file_in_a_folder_of_its_own(hub: HubServer, tmp_path: Path) -> None:
    hub.repositories["org/model"].commit(FILES)
    fleet, settings, folder = FleetDownload(tmp_path / "hub"), fast(endpoint=hub.url), tmp_path / "m"
    looked = asyncio.run(fleet.look("hf://org/model:Q4_0", folder, settings))
    done = asyncio.run(fleet("hf://org/model:Q4_0", folder, settings, ProgressMeter()))
    assert looked.facts == done.facts
    assert visible(folder) == {Q4}


def test_what_is_known_of_it_before_it_is_here(hub: HubServer) -> None:
    """The header is read alone, however long; memory is counted as the weights are kept."""
    words = [f"token{i}" for i in range(200_000)]
    tokens = text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, len(words)) + b"".join(map(text, words))
    whole = llama(2, 18, [tokens])
    hub.repositories["org/model"].commit({Q4: whole + bytes(4 << 20)})
    result = asyncio.run(inspect("hf://org/model", fast(endpoint=hub.url), ProgressMeter()))
    facts = result.facts
    assert facts is not None
    assert (facts.architecture, facts.quantization, facts.dtype) == ("llama", "gguf", "bfloat16")
    assert (facts.num_layers, facts.num_kv_heads, facts.head_dim, facts.num_files) == (2, 2, 32, 1)
    assert facts.weights_bytes == (320 + 512) * 256 // 32 * 18
    embedding, matrix = 320 * 256, 512 * 256
    assert facts.cpu_bytes == (2 * embedding + matrix) // 32 * 18
    assert facts.gpu_bytes == 2 * embedding + matrix // 32 * 20
    assert hub.num_body_bytes < len(whole) + (1 << 20)


def test_one_that_is_alone_needs_no_name(hub: HubServer, tmp_path: Path) -> None:
    hub.repositories["org/model"].commit({Q4: FILES[Q4], "mmproj.gguf": b"x"})
    result = run("hf://org/model", tmp_path / "m", fast(endpoint=hub.url))
    assert (result.message, visible(tmp_path / "m")) == ("", {Q4})


@pytest.mark.parametrize("wanted", ["Q4_K_M", "big/model.gguf"])
def test_a_repository_without_any(wanted: str) -> None:
    with pytest.raises(BadModel, match="has no file in GGUF: give it as organization/name"):
        choose_gguf(["config.json", "model.safetensors"], wanted)


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("hf://org/model", "has 2 models in GGUF"),
        ("hf://org/model:Q5_K_M", "has 0 models in GGUF of type Q5_K_M"),
        ("hf://org/model:Q8", "has 0 models"),
        ("hf://org/model/other.gguf", "lacks other.gguf"),
        ("hf://org/model/big/model-BF16-00001-of-00003.gguf", "lacks big/model-BF16-00001-of-00003.gguf"),
    ],
)
def test_what_is_not_there(hub: HubServer, tmp_path: Path, uri: str, words: str) -> None:
    hub.repositories["org/model"].commit(FILES)
    result = run(uri, tmp_path / "m", fast(endpoint=hub.url))
    assert (result.reason, words in result.message) == ("BadModel", True), result.message
    assert "\n" not in result.message
    assert visible(tmp_path / "m") == set()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"<html>", "model-Q4_0.gguf is truncated or no sound GGUF file"),
        (llama()[:-1], "is truncated or no sound GGUF file"),
        (llama()[:100], "its header ends at byte"),
        (Header(count=1 << 40).data(), "tensors and 0 entries"),
        (Header([entry("general.architecture", "mamba")]).data(), "models of the architecture 'mamba' are not run"),
        (
            Header(tensors=[tensor("\u202e", (2, 256), 41, 0)]).data(512),
            r"'\u202e' is of type Q1_0, which is not read",
        ),
        (MIXTURE.data(1 << 20), "llama.expert_count is 8, and 'blk.0.ffn_gate_exps.weight' has 30000: convert"),
        (
            Header([*MIXTURE.entries[1:], entry("llama.expert_count", 30000)], MIXTURE.tensors).data(1 << 20),
            "up to 4096",
        ),
    ],
)
def test_a_file_that_is_none_is_told_before_it_is_read(hub: HubServer, tmp_path: Path, data: bytes, words: str) -> None:
    hub.repositories["org/model"].commit({Q4: data})
    result = run("hf://org/model:Q4_0", tmp_path / "m", fast(endpoint=hub.url))
    assert (result.reason, words in result.message) == ("BadModel", True), result.message
    assert visible(tmp_path / "m") == set()
    assert result.message.isascii()


def test_only_as_much_is_read_as_a_header_may_have(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_outline, "_FIRST_BYTES", 1 << 10)
    monkeypatch.setattr(gguf_outline, "_MOST_BYTES", 1 << 11)
    hub.repositories["org/model"].commit({Q4: llama(2, 18, [entry("long", "x" * 4000)])})
    result = asyncio.run(inspect("hf://org/model", fast(endpoint=hub.url), ProgressMeter()))
    assert "has a header of over 2048 bytes" in result.message
    hub.seen.clear()
    before = hub.num_body_bytes
    hub.repositories["org/model"].commit({Q4: llama(2, 18, [entry("long", "x" * 700)])})
    result = asyncio.run(inspect("hf://org/model", fast(endpoint=hub.url), ProgressMeter()))
    assert result.message == ""
    assert hub.num_body_bytes - before < 4 << 10


def test_weights_in_gguf_are_not_streamed(hub: HubServer, tmp_path: Path) -> None:
    hub.repositories["org/model"].commit(FILES)
    result = run("hf://org/model:Q4_0", tmp_path / "m", fast(endpoint=hub.url, parts="small"))
    assert (result.reason, "is not streamed" in result.message) == ("BadModel", True)


def test_names_that_lead_elsewhere_are_refused_here_too(hub: HubServer, tmp_path: Path) -> None:
    hub.repositories["org/model"].commit({**FILES, "../x-Q5_0.gguf": b""})
    result = run("hf://org/model:Q5_0", tmp_path / "m", fast(endpoint=hub.url))
    assert (result.reason, "could lead out of the folder" in result.message) == ("BadModel", True)


def test_safetensors_come_first(hub: HubServer, tmp_path: Path) -> None:
    hub.repositories["org/model"].commit({**sharded(), Q4: FILES[Q4]})
    result = run("hf://org/model", tmp_path / "m", fast(endpoint=hub.url))
    assert (result.message, Q4 in visible(tmp_path / "m")) == ("", False)


def test_types_are_whole_words() -> None:
    names = ["m.Q4_K_M.gguf", "m-Q4_K_S.gguf", "IQ4_K_M.gguf", "a-q4_0.gguf"]
    assert choose_gguf(names, "Q4_K_M") == ["m.Q4_K_M.gguf"]
    assert choose_gguf(names, "Q4_0") == ["a-q4_0.gguf"]
    with pytest.raises(BadModel, match=r"has 2 models in GGUF of type Q4_0 \(a-q4_0\.gguf, b-Q4_0\.gguf\)"):
        choose_gguf([*names, "b-Q4_0.gguf"], "Q4_0")
    assert choose_gguf(["m_Q4_0.gguf"], "q4_0") == ["m_Q4_0.gguf"]
    for middle in ("0", "K_M", "M", "K_S"):
        with pytest.raises(BadModel, match="has 0 models"):
            choose_gguf(names, middle)


def test_what_lies_beside_a_model_is_none() -> None:
    model = "llama-imatrix-Q4_K_M.gguf"
    beside = ["mmproj.gguf", "model-mmproj-F16.gguf", "a/imatrix.gguf", "llama-imatrix.gguf", "llama.imatrix.gguf"]
    assert choose_gguf([*beside, model], None) == [model]


def test_a_listing_of_ten_thousand_parts_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    spied = Mock(side_effect=parts_named)
    monkeypatch.setattr(selection, "parts_named", spied)
    names = [f"m-{part:05}-of-10000.gguf" for part in range(1, 10001)]
    with pytest.raises(BadModel, match="has 10000 files"):
        choose_gguf(names, None)
    assert spied.call_count == 1
