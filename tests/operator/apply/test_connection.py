"""How the API server is found, and what is said when it is not."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import yaml
from pagefleet_operator.apply.connection import credentials_of, load_configuration, own_namespace
from pagefleet_operator.errors import SettingsError


def kubeconfig(folder: Path, **user: str) -> Path:
    path = folder / "kubeconfig"
    path.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "here",
                "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
                "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1234"}}],
                "users": [{"name": "u", "user": user}],
            }
        )
    )
    return path


def test_a_kubeconfig_gives_server_and_token(tmp_path: Path) -> None:
    credentials = credentials_of(asyncio.run(load_configuration(kubeconfig(tmp_path, token="secret"))))
    assert (credentials.server, credentials.token) == ("http://127.0.0.1:1234", "secret")
    assert not credentials.insecure


def test_a_kubeconfig_without_a_user_gives_no_token(tmp_path: Path) -> None:
    assert credentials_of(asyncio.run(load_configuration(kubeconfig(tmp_path)))).token is None


def test_a_kubeconfig_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="nothing: there is no such file"):
        asyncio.run(load_configuration(tmp_path / "nothing"))


def test_a_kubeconfig_that_is_none_is_named(tmp_path: Path) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text("apiVersion: v1\nkind: Config\ncurrent-context: gone\n")
    with pytest.raises(SettingsError, match="--kubeconfig"):
        asyncio.run(load_configuration(path))


def test_outside_a_cluster_the_flag_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(SettingsError, match="give --kubeconfig FILE"):
        asyncio.run(load_configuration(None))


def test_the_namespace_comes_from_the_pod(tmp_path: Path) -> None:
    assert own_namespace({}, tmp_path) == ""
    (tmp_path / "namespace").write_text("here\n")
    assert own_namespace({}, tmp_path) == "here"
    assert own_namespace({"POD_NAMESPACE": "there"}, tmp_path) == "there"
