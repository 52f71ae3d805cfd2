"""Edits of a manifest while a fleet runs: when they count, and that each mistake is told once."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from pagefleet_operator.errors import CommandMissing, ManifestError
from pagefleet_operator.local.fleet import ManifestWatch
from pagefleet_operator.local.settings import Commands, LocalSettings


@pytest.fixture
def settings(tmp_path: Path, commands: Commands) -> LocalSettings:
    return LocalSettings(
        manifest=tmp_path / "fleet.yaml",
        state_dir=tmp_path / "state",
        models_dir=tmp_path / "models",
        commands=commands,
    )


def write(settings: LocalSettings, *documents: dict[str, Any]) -> None:
    settings.manifest.write_text(yaml.safe_dump_all(documents))


def names(watch: ManifestWatch) -> list[str] | None:
    manifest = watch.look()
    return None if manifest is None else [service.name for service in manifest.services]


def test_an_edit_counts_once_two_looks_agree(settings: LocalSettings, document: Any) -> None:
    write(settings, document("a"))
    watch = ManifestWatch(settings)
    assert [service.name for service in watch.first().services] == ["a"]
    assert names(watch) is None
    write(settings, document("b"))
    assert names(watch) is None, "an editor may still be writing"
    write(settings, document("b"), document("c"))
    assert names(watch) is None
    assert names(watch) == ["b", "c"]
    assert names(watch) is None


def test_a_mistake_is_told_once_and_its_correction_counts(settings: LocalSettings, document: Any) -> None:
    write(settings, document())
    watch = ManifestWatch(settings)
    watch.first()
    settings.manifest.write_text("a: [")
    assert watch.look() is None
    with pytest.raises(ManifestError, match="is not valid YAML"):
        watch.look()
    assert watch.look() is None
    write(settings, document("b"))
    assert watch.look() is None
    assert names(watch) == ["b"]


def test_a_file_that_vanishes_is_told_once_and_may_return(settings: LocalSettings, document: Any) -> None:
    write(settings, document("a"))
    watch = ManifestWatch(settings)
    watch.first()
    settings.manifest.unlink()
    assert watch.look() is None
    with pytest.raises(ManifestError, match="there is no such file"):
        watch.look()
    assert watch.look() is None
    write(settings, document("a"))
    assert watch.look() is None
    assert names(watch) == ["a"]


def test_a_folder_is_followed_file_by_file(settings: LocalSettings, document: Any, tmp_path: Path) -> None:
    folder = tmp_path / "fleet"
    folder.mkdir()
    settings = dataclasses.replace(settings, manifest=folder)
    (folder / "a.yaml").write_text(yaml.safe_dump(document("a")))
    watch = ManifestWatch(settings)
    watch.first()
    (folder / "b.yaml").write_text(yaml.safe_dump(document("b")))
    assert names(watch) is None
    assert names(watch) == ["a", "b"]


def test_programs_are_found_beside_python_then_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beside, elsewhere = tmp_path / "env", tmp_path / "path"
    for folder in (beside, elsewhere):
        folder.mkdir()
        for name in ("pagefleet-serve", "pagefleet-route"):
            (folder / name).touch(mode=0o755)
    (beside / "pagefleet-route").unlink()
    monkeypatch.setattr(sys, "executable", str(beside / "python"))
    monkeypatch.setenv("PATH", str(elsewhere))
    found = Commands.installed()
    assert found.serve == (str(beside / "pagefleet-serve"),)
    assert found.of("route") == (str(elsewhere / "pagefleet-route"),)
    (elsewhere / "pagefleet-route").unlink()
    with pytest.raises(CommandMissing, match="pagefleet-route is not installed"):
        Commands.installed()
