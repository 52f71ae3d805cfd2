"""`pagefleet up MODEL`: which InferenceService a name stands for, and what is refused before anything starts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pagefleet_download.bring import FleetDownload
from pagefleet_download.progress import ProgressMeter
from pagefleet_operator.cli import main
from pagefleet_operator.errors import ManifestError, SettingsError
from pagefleet_operator.local.manifest import Manifest, Source, parse_manifest
from pagefleet_operator.local.named import fleet_source, service_name
from pagefleet_protocol.model_uri import ModelUri

from tests.fakes.downloads import fast
from tests.fakes.hub_server import HubServer, Repository
from tests.fakes.model_files import sharded


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        server.repositories["Org/Model-0.6B"] = Repository()
        server.repositories["Org/Model-0.6B"].commit(sharded())
        yield server


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {"XDG_STATE_HOME": str(tmp_path / "state")}


def manifest_of(document: str | None) -> Manifest:
    assert document is not None
    return parse_manifest((Source(Path("named.yaml"), document.encode()),))


def test_a_name_stands_for_five_lines(environment: dict[str, str], tmp_path: Path) -> None:
    source = fleet_source("Qwen/Qwen3-0.6B", "v1.2", 2, environment)
    (service,) = manifest_of(source.document).services
    assert service.name == "qwen3-0-6b"
    model = service.spec.model
    assert (model.uri, model.revision, service.spec.replicas) == ("hf://Qwen/Qwen3-0.6B", "v1.2", 2)
    assert (service.model_name, model.aliases) == ("Qwen/Qwen3-0.6B", ("Qwen3-0.6B",))
    assert source.state_dir.parent == tmp_path / "state" / "pagefleet"
    assert source.manifest.parent == source.state_dir
    assert fleet_source("hf://Qwen/Qwen3-0.6B", None, None, environment).state_dir != source.state_dir


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("Qwen/Qwen2.5-VL_7B", "qwen2-5-vl-7b"),
        ("a/" + "long-" * 20, "long-long-long-long-long-long-long-l"),
        ("a/7B", "model-7b"),
        ("a/router", "router"),
        ("a/my-router", "my-router-llm"),
        ("a/it-x0123456789", "it-x0123456789-llm"),
    ],
)
def test_every_name_of_the_hub_makes_a_name_of_a_resource(path: str, name: str, environment: dict[str, str]) -> None:
    assert service_name(ModelUri("hf", path)) == name
    (service,) = manifest_of(fleet_source(path, None, None, environment).document).services
    assert service.name == name


def test_files_folders_and_models_are_told_apart(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fleets").mkdir()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    for given in ("fleets", "absent.yaml", "./absent.yml"):
        assert fleet_source(given, None, None, environment).document is None
    (service,) = manifest_of(fleet_source("model", None, None, environment).document).services
    assert service.spec.model.uri == f"file://{tmp_path}/model"
    (service,) = manifest_of(fleet_source("builtin://tiny", None, None, environment).document).services
    assert service.name == "tiny"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("no-such-fleet", "there is no such file, and 'no-such-fleet': no such folder, and no name of a model"),
        ("./absent", "./absent: there is no such file or folder"),
        ("hf://one", "write hf://organization/name"),
    ],
)
def test_what_is_neither(given: str, says: str, environment: dict[str, str]) -> None:
    with pytest.raises(ManifestError, match=says):
        fleet_source(given, None, None, environment)


def test_flags_about_a_model_do_not_go_with_a_file(environment: dict[str, str]) -> None:
    with pytest.raises(SettingsError, match="write them into the file instead"):
        fleet_source("fleet.yaml", None, 2, environment)


@pytest.mark.parametrize(
    ("arguments", "state", "says"),
    [
        (["Org/Absent"], {}, "the repository Org/Absent does not exist on "),
        (["Org/Model-0.6B", "--revision", "v9"], {}, "has no revision v9: give one of its branches"),
        (["Org/Model-0.6B"], {"gated": True}, "is gated: accept the licence at "),
        (["Org/Model-0.6B"], {"away": True}, "is not in "),
        (["Org/Model-0.6B"], {"offline": True}, "HF_HUB_OFFLINE is set, so nothing is downloaded: unset it"),
    ],
)
def test_a_model_that_cannot_be_had_is_refused_before_anything_starts(
    hub: HubServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    state: dict[str, bool],
    says: str,
) -> None:
    places = {"HF_HOME": tmp_path / "hf", "XDG_STATE_HOME": tmp_path / "state", "XDG_CACHE_HOME": tmp_path / "cache"}
    url = "http://127.0.0.1:9" if state.pop("away", False) else hub.url
    offline = "1" if state.pop("offline", False) else "0"
    for name, value in {**places, "HF_ENDPOINT": url, "HF_HUB_OFFLINE": offline}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    for name, value in state.items():
        setattr(hub.repositories["Org/Model-0.6B"], name, value)
    assert main([*arguments, "--port", "0"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("pagefleet up: error: ")
    assert says in line
    assert not list(tmp_path.glob("state/pagefleet/*/logs/*"))
    assert not (tmp_path / "hf").exists()


def test_looking_asks_nobody_for_what_is_here(hub: HubServer, tmp_path: Path) -> None:
    fleet, folder, settings = FleetDownload(tmp_path / "hub"), tmp_path / "link", fast(endpoint=hub.url)

    async def scenario() -> Any:
        looked = await fleet.look("hf://Org/Model-0.6B", folder, settings)
        brought = await fleet("hf://Org/Model-0.6B", folder, settings, ProgressMeter())
        hub.seen.clear()
        assert looked == brought == await fleet.look("hf://Org/Model-0.6B", folder, settings)
        assert hub.seen == []

    asyncio.run(scenario())
