"""Models by their names: `LLM("org/name")`, `pagefleet serve org/name`, and what is told where there is none."""

from __future__ import annotations

import io
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pagefleet_download.progress import ProgressMeter
from pagefleet_engine.builtin import builtin_model_path
from pagefleet_engine.cli import main
from pagefleet_engine.engine_core.model_folder import served_names
from pagefleet_engine.errors import ConfigError, ModelLoadError
from pagefleet_engine.llm import LLM
from pagefleet_engine.local_model import drawn, with_local_model
from pagefleet_engine.settings import engine_config
from pagefleet_protocol.exit_status import MODEL_NOT_LOADED
from pagefleet_protocol.sampling_params import SamplingParams

from tests.fakes.hub_server import HubServer, Repository, tiny_hub
from tests.fakes.model_files import sharded
from tests.fakes.modelscope_server import ModelScopeServer


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with tiny_hub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield server


def test_a_name_of_the_hub_is_downloaded_and_answers_as_the_folder_does(hub: HubServer) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=6)
    answers = []
    for model, revision in (("org/tiny", "main"), ("builtin://tiny", None)):
        with LLM(model, revision=revision, device="cpu", max_model_len=128) as llm:
            (output,) = llm.generate("What are you?", greedy, use_tqdm=False)
            answers.append(output.outputs[0].token_ids)
    assert answers[0] == answers[1]
    assert len(answers[0]) == 6


def test_clients_call_it_as_the_hub_does(hub: HubServer) -> None:
    model = with_local_model(engine_config({"model": "org/tiny"}), os.environ).model
    assert Path(model.model).is_dir()
    assert served_names(model.model, model.served_model_name) == ("org/tiny", "tiny")
    named = with_local_model(engine_config({"model": "hf://org/tiny", "served_model_name": "mine"}), os.environ).model
    assert served_names(named.model, named.served_model_name) == ("mine",)


def test_a_folder_is_what_exists(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "tiny").mkdir(parents=True)
    config = engine_config({"model": "org/tiny"})
    assert with_local_model(config, os.environ) == config
    assert hub.seen == []


def test_a_tokenizer_has_a_name_and_a_revision_of_its_own(hub: HubServer) -> None:
    files = hub.repositories["org/tiny"].commits[hub.repositories["org/tiny"].branches["main"]]
    text = {name: data for name, data in files.items() if not name.endswith(".safetensors")}
    hub.repositories["org/text"] = Repository()
    sha = hub.repositories["org/text"].commit(text, "v2")
    given = engine_config({"model": "builtin://tiny", "tokenizer": "org/text", "tokenizer_revision": "v2"})
    model = with_local_model(given, os.environ).model
    assert (Path(model.tokenizer or "").name, model.model) == (sha, "builtin://tiny")
    hub.repositories["org/tiny"].commit(text, "words")
    given = engine_config({"model": "org/tiny", "tokenizer_revision": "words"})
    model = with_local_model(given, os.environ).model
    assert Path(model.tokenizer or "").name == hub.repositories["org/tiny"].branches["words"] != Path(model.model).name
    again = engine_config({"model": "org/tiny", "revision": "main", "tokenizer_revision": "main"})
    assert with_local_model(again, os.environ).model.tokenizer is None


def test_a_tokenizer_of_this_machine(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "text").mkdir(parents=True)
    for name, folder in (("org/text", tmp_path / "org" / "text"), ("builtin://tiny", builtin_model_path("tiny"))):
        config = engine_config({"model": "builtin://tiny", "tokenizer": name})
        assert with_local_model(config, os.environ).model.tokenizer == str(folder)
    assert hub.seen == []
    with pytest.raises(
        ModelLoadError, match=r"tokenizer /nowhere: no such folder; give one that holds tokenizer\.json"
    ):
        with_local_model(engine_config({"model": "builtin://tiny", "tokenizer": "/nowhere"}), os.environ)
    with pytest.raises(ModelLoadError, match=r"tokenizer org/absent: the repository .* no folder org/absent here"):
        with_local_model(engine_config({"model": "builtin://tiny", "tokenizer": "org/absent"}), os.environ)
    revised = {"model": "builtin://tiny", "tokenizer": str(tmp_path), "tokenizer_revision": "v1"}
    with pytest.raises(ConfigError, match=r"tokenizer_revision is 'v1', and .* is no model of the hub"):
        with_local_model(engine_config(revised), os.environ)


def test_downloads_go_where_they_shall_with_the_token_that_is_given(hub: HubServer, tmp_path: Path) -> None:
    hub.repositories["org/tiny"].private = True
    named = {"model": "org/tiny", "download_dir": str(tmp_path / "models")}
    with pytest.raises(ModelLoadError, match="if it is private, put a token"):
        with_local_model(engine_config(named), os.environ)
    given = engine_config({**named, "hf_token": "hf_right"})
    assert "hf_right" not in repr(given)
    model = with_local_model(given, os.environ).model
    assert Path(model.model).parents[1] == tmp_path / "models" / "models--org--tiny"
    assert model.hf_token is None
    assert not (tmp_path / "hf" / "hub").exists()


def test_the_configuration_is_what_the_overrides_say() -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=6)
    settings: dict[str, Any] = {"device": "cpu", "num_kv_blocks": 64}
    with LLM("builtin://tiny", **settings) as llm:
        (plain,) = llm.generate("What are you?", greedy, use_tqdm=False)
        made_for = llm.llm_engine.max_model_len
    third = plain.outputs[0].token_ids[2]
    overrides = {"max_position_embeddings": made_for // 2, "eos_token_id": third}
    with LLM("builtin://tiny", hf_overrides=overrides, **settings) as llm:
        assert llm.llm_engine.max_model_len == made_for // 2
        (ended,) = llm.generate("What are you?", greedy, use_tqdm=False)
    assert list(ended.outputs[0].token_ids) == list(plain.outputs[0].token_ids[:3])
    with pytest.raises(ModelLoadError, match=r"config\.json with hf_overrides: .*num_attention_heads"):
        LLM("builtin://tiny", hf_overrides={"num_attention_heads": "many"}, **settings)
    with pytest.raises(ConfigError, match=r"hf_overrides is '<function .*': give a JSON object"):
        LLM("builtin://tiny", hf_overrides=lambda config: config, **settings)


@pytest.mark.parametrize("name", ["org/model", "modelscope://org/model"])
def test_a_name_of_modelscope(hub: HubServer, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True" if "://" not in name else "")
    with ModelScopeServer() as scope:
        scope.commit(sharded(), "v1")
        monkeypatch.setenv("MODELSCOPE_DOMAIN", scope.url)
        model = with_local_model(engine_config({"model": name, "revision": "v1"}), os.environ).model
    assert (Path(model.model) / "model.safetensors.index.json").is_file()
    assert served_names(model.model, model.served_model_name) == ("org/model", "model")
    assert hub.seen == []


@pytest.mark.parametrize("model", ["builtin://tiny", "/models/qwen", "s3://bucket/model"])
def test_a_revision_is_of_the_hub_alone(model: str) -> None:
    with pytest.raises(ConfigError, match=r"revision is 'v1', and .* is no model of the hub"):
        with_local_model(engine_config({"model": model, "revision": "v1"}), os.environ)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("org/absent", r"org/absent: the repository org/absent does not exist on .*no folder org/absent here either"),
        ("hf://org/absent", r"hf://org/absent: the repository .* check the name"),
        ("../../etc/passwd/..", "no such folder"),
        ("no-such-model", "no such folder, and no name of a model: give a folder, or one of organization/name, "),
        ("org/../name", "no such folder, and no name of a model"),
        ("hf://../name", "write hf://organization/name"),
        ("pvc://claim/model", "only a cluster mounts pvc://"),
        ("https://huggingface.co/org/name/tree/main", "write 'org/name', which is the model's name on the hub"),
    ],
)
def test_what_cannot_be_had_is_one_line_at_once(
    hub: HubServer, model: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([model, "--port", "0", "--device", "cpu"]) == MODEL_NOT_LOADED
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    assert line.startswith("pagefleet serve: error: ")
    with pytest.raises(ModelLoadError, match=says) as caught:
        LLM(model, device="cpu")
    assert str(caught.value) in line


def test_a_download_is_drawn_with_its_bytes_and_speed() -> None:
    stream, meter = io.StringIO(), ProgressMeter()
    with drawn(meter, "org/tiny", stream):
        meter.expect(4 << 20, 2)
        meter.begin("downloading")
        meter.add_bytes(1 << 20)
        wait_for(lambda: "25 %" in stream.getvalue())
    assert re.search(r"org/tiny:  25 %\|.*\| 1\.00MB of 4\.00MB , downloading, .*B/s", stream.getvalue())
    nothing = io.StringIO()
    with drawn(ProgressMeter(), "org/tiny", nothing):
        pass
    assert "%" not in nothing.getvalue()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
