"""The program that `helm test` runs."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tests.fakes.helm_chart import CHART, find, render

PROGRAM = CHART / "files" / "check_installation.py"
OPERATOR = "http://pagefleet-operator.models.svc:8080"


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    specification = importlib.util.spec_from_file_location("check_installation", PROGRAM)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    (tmp_path / "token").write_text("secret\n")
    monkeypatch.setattr(module, "ACCOUNT", tmp_path)
    monkeypatch.setattr(module.ssl, "create_default_context", lambda cafile: cafile)
    return module


def answers(*kinds: str, asked: list[tuple[str, str]]) -> Callable[..., bytes]:
    def get(url: str, token: str = "", authority: object = None) -> bytes:
        asked.append((url, token))
        return json.dumps({"resources": [{"kind": kind} for kind in kinds]}).encode()

    return get


def test_asks_the_operator_and_the_api_server(
    program: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, str]] = []
    monkeypatch.setattr(program, "get", answers("InferenceService", "InferenceProfile", asked=asked))
    program.main(OPERATOR)
    assert asked == [(f"{OPERATOR}/readyz", ""), (program.GROUP, "secret")]
    assert "API server: knows InferenceProfile and InferenceService" in capsys.readouterr().out


def test_names_a_kind_that_is_missing(program: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "get", answers("InferenceService", asked=[]))
    with pytest.raises(SystemExit, match=r"does not know InferenceProfile: set crds\.install, or apply crds/"):
        program.main(OPERATOR)


def test_the_pod_runs_exactly_this_program() -> None:
    (container,) = find(render(), "Pod")["spec"]["containers"]
    assert container["command"] == ["python", "-c"]
    assert container["args"][0].strip() == PROGRAM.read_text().strip()
    assert container["args"][1] == OPERATOR
