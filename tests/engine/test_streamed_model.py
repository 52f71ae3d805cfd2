"""`load_format="runai_streamer"`: weights go from a store into place, and nothing of them onto a disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pagefleet_engine.builtin import builtin_model_path
from pagefleet_engine.errors import ConfigError, ModelLoadError
from pagefleet_engine.llm import LLM
from pagefleet_engine.local_model import with_local_model
from pagefleet_engine.settings import engine_config
from pagefleet_protocol.sampling_params import SamplingParams

from tests.fakes.http_faults import Fault
from tests.fakes.hub_server import tiny_hub
from tests.fakes.object_store import ObjectStoreServer

URI = "s3://models/team/tiny"
SETTINGS: dict[str, Any] = {"device": "cpu", "num_kv_blocks": 64, "num_threads": 1}
STREAMED: dict[str, Any] = {**SETTINGS, "load_format": "runai_streamer"}
WEIGHTS = "model.safetensors"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStoreServer]:
    with ObjectStoreServer("right") as server:
        files = (file for file in builtin_model_path("tiny").iterdir() if file.is_file())
        server.buckets["models"] = {f"team/tiny/{file.name}": file.read_bytes() for file in files}
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "right")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield server


def answer(model: str, **settings: Any) -> list[int]:
    greedy = SamplingParams(temperature=0.0, max_tokens=6)
    with LLM(model, **settings) as llm:
        (output,) = llm.generate("What are you?", greedy, use_tqdm=False)
        return list(output.outputs[0].token_ids)


def weights_below(folder: Path) -> list[Path]:
    return [file for file in folder.rglob("*") if file.is_file() and file.stat().st_size > 1 << 20]


def test_it_answers_as_the_folder_does_and_leaves_no_weights(store: ObjectStoreServer, tmp_path: Path) -> None:
    store.faults[WEIGHTS] = [Fault("ignore-range"), Fault("ignore-range"), Fault("cut", after=100_000)]
    plain = answer("builtin://tiny", **SETTINGS)
    assert answer(URI, **STREAMED) == plain
    assert weights_below(tmp_path) == []
    assert (answer(URI, **SETTINGS), len(weights_below(tmp_path))) == (plain, 1)
    store.seen.clear()
    assert answer(URI, **STREAMED) == plain
    assert store.requests_for(WEIGHTS) != []


@pytest.mark.fleet
def test_each_rank_reads_its_own_part(store: ObjectStoreServer, tmp_path: Path) -> None:
    two: dict[str, Any] = {"tensor_parallel_size": 2, "dtype": "float32"}
    assert answer(URI, **STREAMED, **two) == answer("builtin://tiny", **SETTINGS, **two)
    assert weights_below(tmp_path) == []


def test_a_model_of_the_hub_is_streamed_at_its_commit(
    store: ObjectStoreServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tiny_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        assert answer("org/tiny", **STREAMED) == answer("builtin://tiny", **SETTINGS)
        repository = hub.repositories["org/tiny"]
        files = repository.commits[repository.branches["main"]]
        repository.commit({**files, WEIGHTS: b"of another model"})
        assert answer("org/tiny", **STREAMED) == answer("builtin://tiny", **SETTINGS)
        assert weights_below(tmp_path) == []
        given = engine_config({"model": "org/tiny", "hf_token": "hf_right", **STREAMED})
        with pytest.raises(ConfigError, match=r"hf_token is not passed on to who streams weights: set .* HF_TOKEN"):
            with_local_model(given, os.environ)


def test_weights_that_changed_since_are_refused(store: ObjectStoreServer) -> None:
    folder = with_local_model(engine_config({"model": URI, **STREAMED}), os.environ).model.model
    key = f"team/tiny/{WEIGHTS}"
    store.buckets["models"][key] = store.buckets["models"][key][:-1] + b"x"
    with pytest.raises(ModelLoadError, match=f"{URI} has changed since it was looked at: start again"):
        LLM(folder, **STREAMED)
    assert answer(URI, **STREAMED)


def test_a_damaged_file_is_one_line(store: ObjectStoreServer) -> None:
    key = f"team/tiny/{WEIGHTS}"
    whole = store.buckets["models"][key]
    store.buckets["models"][key] = whole[:-100]
    with pytest.raises(ModelLoadError, match=f"{WEIGHTS} .*is truncated or not a safetensors file: upload it again"):
        LLM(URI, **STREAMED)


def test_a_folder_is_read_as_ever() -> None:
    assert answer("builtin://tiny", **STREAMED) == answer("builtin://tiny", **SETTINGS)
