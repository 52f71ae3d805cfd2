"""`pagefleet quantize`: its flags, the text it takes, and what it prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pagefleet_engine.builtin import builtin_model_path
from pagefleet_engine.compression.calibration import read_text
from pagefleet_engine.compression.cli import main
from pagefleet_engine.compression.report import Tried
from pagefleet_engine.errors import ConfigError
from pagefleet_engine.text.model_files import load_text_model
from pagefleet_text.text_model import TextModel


@pytest.fixture(scope="module")
def tiny() -> TextModel:
    folder = builtin_model_path("tiny")
    return load_text_model(folder, folder)


def test_a_model_is_written_with_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, output = tmp_path / "text.txt", tmp_path / "out"
    text.write_text("\n".join(f"What is pagefleet number {number}? It serves models." for number in range(16)))
    flags = ["--scheme", "W4A16", "--algorithm", "rtn", "--dtype", "float32", "--calibration", str(text)]
    assert main(["builtin://tiny", "--output", str(output), *flags]) == 0
    told = capsys.readouterr()
    assert "layer 4 of 4: " in told.err
    assert "*.self_attn.o_proj" in told.out
    assert f"perplexity: none, as the model does not know {text}" in told.out, "it knows its own texts by heart alone"
    report = json.loads((output / "quantization_report.json").read_text())
    assert report["recipe"]["scheme"] == "w4a16"
    assert {"config.json", "tokenizer.json", "generation_config.json", "model.safetensors"} <= {
        file.name for file in output.iterdir()
    }


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--scheme", "nvfp4"], "--scheme is 'nvfp4': give one of"),
        (["--scheme", "fp8", "--algorithm", "gptq"], "--algorithm gptq is for whole numbers"),
        (["--scheme", "int8", "--algorithm", "awq"], "--algorithm awq is for weights alone"),
        (["--max-seq-length", "1"], "--max-seq-length"),
        (["--group-size", "0"], "--group-size is 0: give the inputs that share a scale, or -1 for whole rows"),
        (["--calibration", "/no/such.txt"], "--calibration /no/such.txt cannot be read (FileNotFoundError)"),
    ],
)
def test_a_mistake_is_one_line(flags: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["builtin://tiny", "--output", str(tmp_path / "out"), *flags]) == 2
    told = capsys.readouterr().err
    assert says in told
    assert told.count("\n") == 1
    assert [*tmp_path.iterdir()] == []


def test_a_model_that_is_not_there_has_a_status_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "none"), "--output", str(tmp_path / "out")]) == 3
    assert capsys.readouterr().err.startswith("pagefleet quantize: error: ")


def test_every_eighth_text_is_held_out(tiny: TextModel, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("\n\n".join(f"line {number} of the text" for number in range(20)))
    text = read_text(file, tiny, 100, 6)
    assert (len(text.calibration), len(text.held_out)) == (18, 2)
    assert text.held_out[0] == tiny.completion_tokens("line 7 of the text")[:6]


def test_conversations_are_rendered_by_the_template(tiny: TextModel, tmp_path: Path) -> None:
    file = tmp_path / "text.jsonl"
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi."}]
    file.write_text((json.dumps({"messages": messages}) + "\n" + json.dumps({"text": "plain words"}) + "\n") * 8)
    text = read_text(file, tiny, 100, 64)
    assert "<|im_start|>" in tiny.tokenizer.decode(text.calibration[0], skip_special_tokens=False)
    assert tiny.tokenizer.decode(text.calibration[1]) == "plain words"


@pytest.mark.parametrize("line", ["no json", '{"words": 1}', '{"messages": [{"role": "king"}]}'])
def test_a_line_that_is_no_text_is_named(line: str, tiny: TextModel, tmp_path: Path) -> None:
    file = tmp_path / "text.jsonl"
    file.write_text(f'{{"text": "fine"}}\n{line}\n')
    with pytest.raises(ConfigError, match=r"text\.jsonl:2: .*give an object with `text`"):
        read_text(file, tiny, 100, 64)


def test_too_little_text_is_refused(tiny: TextModel, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("one line\n")
    with pytest.raises(ConfigError, match="calibration takes at least 8 texts"):
        read_text(file, tiny, 100, 64)


def test_a_perplexity_worse_than_chance_is_none() -> None:
    known, unknown = Tried(10, 1.0, 1.1, "a.txt", 64), Tried(10, 9.0, 9.1, "a.txt", 64)
    assert known.describe() == "perplexity of 10 held-out tokens of a.txt: 2.718 before, 3.004 after"
    assert "perplexity: none, as the model does not know a.txt" in unknown.describe()
    assert "give --calibration FILE" in unknown.describe()
    assert unknown.as_json() == {"text": "a.txt", "tokens": 10, "before": None, "after": None}


def test_there_is_text_without_a_file(tiny: TextModel) -> None:
    text = read_text(None, tiny, 128, 32)
    assert text.source == "the description of Python's language"
    assert len(text.calibration) == 128
    assert 8 < len(text.held_out) <= 32
