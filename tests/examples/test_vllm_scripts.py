"""Scripts in the manner of vLLM's offline examples run with `pagefleet` in the place of `vllm`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).with_name("vllm")
IMPORT = re.compile(r"^from vllm[\w.]* import", re.MULTILINE)
"""Every name is one of the package's own, wherever vLLM keeps it."""
MODEL = ("facebook/opt-125m", "builtin://tiny")
PRINTED = {
    "basic": r"(Prompt: '.*'\nOutput: '.*'\n){4}",
    "generate": r"(5 .*\n){2}",
    "chat": r".+\n",
    "llm_engine_example": r"(?=(.*\n)*0 1 length)(?=(.*\n)*1 1 \w+)(?=(.*\n)*2 2 \w+)(.*\n){3}",
    "async_llm_streaming": r"(.*\n)*?\[finished\]\n(.*\n)*?\[finished\]\n(.*\n)*?\[finished\]\n",
    "async_engine_abort": r"\['request-0 length', 'request-1 abort', 'request-2 length'\]\n",
    "prefix_caching": "same: True\ncached: True\nafter a reset: 0\n",
    "structured_outputs": "all forms held\n",
    "beam_search": r"(-\d+\.\d+ .*\n+){3}",
    "tools": r"(stop|length)\n",
    "tokens_and_metrics": "6 True\n",
}


def test_every_script_is_run() -> None:
    assert {path.stem for path in SCRIPTS.glob("*.py")} == PRINTED.keys()


@pytest.mark.parametrize("name", PRINTED)
def test_a_script_runs_with_its_import_changed(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # a script sets it; this takes it back
    source, num_imports = IMPORT.subn("from pagefleet import", (SCRIPTS / f"{name}.py").read_text())
    assert num_imports
    exec(compile(source.replace(*MODEL), name, "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out
    assert re.fullmatch(PRINTED[name], printed), printed
