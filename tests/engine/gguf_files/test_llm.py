"""A GGUF file through the offline door and the command: tokens, tokenizer, template, names, refusals."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from pagefleet_engine import LLM, SamplingParams
from pagefleet_engine.builtin import builtin_model_path
from pagefleet_engine.cli import main
from pagefleet_engine.engine_core.model_folder import served_names
from pagefleet_engine.local_model import with_local_model
from pagefleet_engine.settings import engine_config
from pagefleet_protocol.exit_status import MODEL_NOT_LOADED

from tests.fakes.gguf_files import Type, write_gguf
from tests.fakes.hub_server import HubServer, Repository

TINY = builtin_model_path("tiny")
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
CHAT = [{"role": "user", "content": "What are you?"}]


def tokenizer_metadata(folder: Path) -> dict[str, Any]:
    """That of a byte-level tokenizer, as llama.cpp's converter writes it."""
    stored = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = {**stored["model"]["vocab"], **{one["content"]: one["id"] for one in stored["added_tokens"]}}
    special = {one["content"] for one in stored["added_tokens"]}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in stored["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": (folder / "chat_template.jinja").read_text(),
    }


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The built-in model in Q8_0, with projections of another type in matrices that are computed as one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "models").mkdir()
    path = tmp_path / "models" / "tiny-Q8_0.gguf"
    write_gguf(TINY, path, matrices=Type.Q8_0, types={"attn_v": Type.Q5_1}, others=tokenizer_metadata(TINY))
    return path


def test_one_of_a_repository_by_its_name(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with HubServer() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        hub.repositories["org/tiny-GGUF"] = Repository()
        hub.repositories["org/tiny-GGUF"].commit({model.name: model.read_bytes(), "tiny-Q4_0.gguf": b"x"})
        settled = []
        for name in ("org/tiny-GGUF:Q8_0", "org/tiny-GGUF/tiny-Q8_0.gguf"):
            found = with_local_model(engine_config({"model": name, "revision": "main"}), os.environ).model
            settled.append((Path(found.model), served_names(found.model, found.served_model_name)))
    (first, names), (second, others) = settled
    assert first == second
    assert json.loads((first / "config.json").read_text())["model_type"] == "llama"
    assert (first / model.name).read_bytes() == model.read_bytes()
    assert names == ("org/tiny-GGUF:Q8_0", "tiny-GGUF")
    assert others == ("org/tiny-GGUF/tiny-Q8_0.gguf", "tiny-Q8_0.gguf")


def test_it_answers_as_the_checkpoint_does(model: Path) -> None:
    answers = []
    for name in (str(model), "builtin://tiny"):
        with LLM(name, device="cpu", max_model_len=256) as llm:
            (output,) = llm.chat(CHAT, GREEDY, use_tqdm=False)
            answers.append((output.prompt_token_ids, output.outputs[0].text))
    assert answers[0] == answers[1]
    assert answers[0][1]


def test_its_name_and_its_folder(model: Path) -> None:
    for given in (model, model.parent):
        local = with_local_model(engine_config({"model": str(given)}), os.environ).model
        assert served_names(local.model, local.served_model_name) == ("tiny-Q8_0",)
        found = Path(local.model)
        assert sorted(file.name for file in found.iterdir()) == [
            "config.json",
            "generation_config.json",
            model.name,
            "tokenizer.json",
            "tokenizer_config.json",
        ]
    assert json.loads((found / "generation_config.json").read_text()) == {"eos_token_id": [2, 0]}


def test_another_tokenizer_may_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_gguf(TINY, tmp_path / "bare.gguf", matrices=Type.Q8_0)
    with LLM(str(tmp_path / "bare.gguf"), tokenizer="builtin://tiny", device="cpu", max_model_len=256) as llm:
        (output,) = llm.chat(CHAT, GREEDY, use_tqdm=False)
    assert output.outputs[0].text


def test_the_command_looks_at_the_header(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(model), "--check"]) == 0
    model.write_bytes(model.read_bytes()[:-100])
    assert main([str(model), "--check"]) == MODEL_NOT_LOADED
    assert "ends at byte" in capsys.readouterr().err
