"""Repositories, names and endpoints that are not what they should be: told before anything large is read."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from pagefleet_download.download import inspect
from pagefleet_download.progress import ProgressMeter

from tests.fakes import hub_server
from tests.fakes.downloads import fast, run, visible
from tests.fakes.http_faults import Fault
from tests.fakes.hub_server import HubServer, Repository
from tests.fakes.model_files import QWEN3, sharded

URI = "hf://org/model"


def test_inspecting_reads_a_few_kilobytes_and_writes_nothing(hub: HubServer, tmp_path: Path) -> None:
    files = sharded(3_000_000)
    sha = hub.repositories["org/model"].commit(files)
    result = asyncio.run(inspect(URI, fast(endpoint=hub.url), ProgressMeter()))
    assert result.facts is not None
    assert (result.facts.revision, result.facts.weights_bytes) == (sha, 6_000_001)
    assert (result.facts.num_layers, result.facts.num_kv_heads, result.facts.head_dim) == (4, 2, 16)
    assert hub.num_body_bytes < 5000
    assert list(tmp_path.iterdir()) == []


def test_only_pickled_weights(hub: HubServer, tmp_path: Path) -> None:
    hub.repositories["org/model"].commit({"config.json": json.dumps(QWEN3).encode(), "pytorch_model.bin": b"x"})
    result = asyncio.run(inspect(URI, fast(endpoint=hub.url), ProgressMeter()))
    assert (result.reason, result.exit_code) == ("BadModel", 2)
    assert "pytorch_model.bin" in result.message
    assert "safetensors" in result.message


@pytest.mark.parametrize(
    "name", ["../evil.json", "/etc/evil.json", "a\\..\\evil.json", "x/../../evil.json", "e\nvil.json"]
)
def test_a_name_that_leads_out_of_the_folder_is_refused(hub: HubServer, tmp_path: Path, name: str) -> None:
    hub.repositories["org/model"].commit({**sharded(), name: b"{}"})
    result = run(URI, tmp_path / "m", fast(endpoint=hub.url))
    assert result.reason == "BadModel"
    assert "could lead out of the folder" in result.message
    assert {path.name for path in tmp_path.rglob("*")} <= {"m", ".compiled", ".pagefleet.lock"}


def test_an_index_that_names_a_file_elsewhere_is_refused(hub: HubServer, tmp_path: Path) -> None:
    index = {"weight_map": {"a": "../model.safetensors"}}
    hub.repositories["org/model"].commit({**sharded(), "model.safetensors.index.json": json.dumps(index).encode()})
    result = run(URI, tmp_path, fast(endpoint=hub.url))
    assert result.reason == "BadModel"
    assert "must be *.safetensors files that lie beside it" in result.message


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"config.json": b"["}, "cannot be read as JSON"),
        ({"config.json": b"[]"}, "does not hold a JSON object"),
        ({"config.json": b""}, "has 0 bytes"),
        ({"config.json": b" " * (5 << 20)}, "at most 4194304"),
        ({"config.json": b'{"a":' * 100_000}, "is nested too deeply"),
        ({"config.json": b'{"model_type": "mamba"}'}, "pagefleet runs bloom, "),
        ({"model-00001-of-00002.safetensors": b"<html>not found</html>"}, "not a safetensors file"),
        ({"model-00001-of-00002.safetensors": b"12345678"}, "not a safetensors file"),
        ({"model.safetensors.index.json": b'{"weight_map": {"a": "b.safetensors"}}'}, "lacks b.safetensors"),
        ({"model.safetensors.index.json": b"{}"}, "has no weight_map"),
    ],
)
def test_models_that_are_none(hub: HubServer, tmp_path: Path, files: dict[str, bytes], words: str) -> None:
    hub.repositories["org/model"].commit({**sharded(), **files})
    result = run(URI, tmp_path, fast(endpoint=hub.url))
    assert (result.reason, result.exit_code) == ("BadModel", 2)
    assert words in result.message
    assert visible(tmp_path) == set()


def test_a_mirror_without_sizes_is_refused(tmp_path: Path) -> None:
    with HubServer(sizes=False) as poor:
        poor.repositories["org/model"] = Repository()
        poor.repositories["org/model"].commit(sharded())
        result = run(URI, tmp_path, fast(endpoint=poor.url))
    assert result.reason == "BadSettings"
    assert "use another" in result.message


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model-00001-of-00002.safetensors"])
def test_a_file_that_is_shorter_than_the_list_says_is_not_the_networks_fault(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, ranges: bool
) -> None:
    hub.repositories["org/model"].commit(sharded())
    honest = hub_server._sibling

    def longer(file: str, data: bytes, with_sizes: bool) -> dict[str, object]:
        return honest(file, data + b"0123456789" if file == name else data, with_sizes)

    monkeypatch.setattr(hub_server, "_sibling", longer)
    hub.faults[name] = [] if ranges else [Fault("ignore-range")] * 20
    result = run(URI, tmp_path, fast(endpoint=hub.url))
    assert (result.reason, result.exit_code) == ("ChecksumMismatch", 1)
    assert f"{name} ends before byte" in result.message
    assert "and the store lists more: upload the file again, or name another mirror" in result.message
    assert visible(tmp_path) == set()


@pytest.mark.parametrize("path", ["/nothing", "/org"])
def test_an_endpoint_that_is_no_hub(hub: HubServer, tmp_path: Path, path: str) -> None:
    result = run(URI, tmp_path, fast(endpoint=hub.url + path))
    assert result.reason in ("ModelNotFound", "BadSettings")
    assert hub.url in result.message


@pytest.mark.parametrize("endpoint", ["hub.example", "ftp://hub.example", "https://", "https://me:hidden@hub.example"])
def test_an_endpoint_must_be_a_url_without_credentials(tmp_path: Path, endpoint: str) -> None:
    result = run(URI, tmp_path, fast(endpoint=endpoint))
    assert (result.reason, "give https://" in result.message) == ("BadSettings", True)
    assert "hidden" not in result.message


def test_a_name_that_no_repository_can_have(hub: HubServer, tmp_path: Path) -> None:
    result = run("hf://org/a--b", tmp_path, fast(endpoint=hub.url))
    assert (result.reason, result.exit_code) == ("BadSettings", 2)
    assert "hf://org/a--b is no name of a repository" in result.message


def test_credentials_of_netrc_do_not_mix_with_a_token(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password hidden\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    hub.repositories["org/model"].commit(sharded())
    result = run(URI, tmp_path / "m", fast(endpoint=hub.url, token="hf_right"))
    assert (result.reason, "~/.netrc" in result.message) == ("BadSettings", True)
    assert "hidden" not in result.message
