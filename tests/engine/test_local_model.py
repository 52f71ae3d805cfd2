"""Models by their names: `LLM("org/name")`, `pagefleet serve org/name`, and what is told where there is none."""

from __future__ import annotations

import io
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pagefleet_download.progress import ProgressMeter
from pagefleet_engine.cli import main
from pagefleet_engine.engine_core.model_folder import served_names
from pagefleet_engine.errors import ConfigError, ModelLoadError
from pagefleet_engine.llm import LLM
from pagefleet_engine.local_model import drawn, with_local_model
from pagefleet_engine.settings import engine_config
from pagefleet_protocol.exit_status import MODEL_NOT_LOADED
from pagefleet_protocol.sampling_params import SamplingParams

from tests.fakes.hub_server import HubServer, tiny_hub


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
        ("https://huggingface.co/org/name", "give one of organization/name"),
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
