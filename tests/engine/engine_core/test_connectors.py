"""What is refused of connectors before a model is looked at, in the engine's words."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
from pagefleet_engine.config import CacheConfig, EngineConfig, ModelConfig
from pagefleet_engine.engine_core.build import build_core
from pagefleet_engine.errors import ConfigError
from pagefleet_kv.config import KVTransferConfig
from pagefleet_kv.port import EngineIdentity

from tests.fakes.free_ports import free_ports


def config(connector: str | None, **cache: Any) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model="nowhere"),
        cache=CacheConfig(**cache),
        kv_transfer=KVTransferConfig(kv_connector=connector),
    )


def test_names_are_looked_at_before_the_model() -> None:
    with pytest.raises(ConfigError, match="kv_connector names 'lmcache'"):
        build_core(config("lmcache"))


def test_connectors_need_the_prefix_cache() -> None:
    with pytest.raises(ConfigError, match="needs the prefix cache"):
        build_core(config("file", enable_prefix_caching=False))


def test_what_a_connector_needs_is_asked_for_before_the_model() -> None:
    with pytest.raises(ConfigError, match="kv_connector file needs a folder"):
        build_core(config("file"))
    given = KVTransferConfig(kv_connector="p2p", kv_peers="prefill")
    with pytest.raises(ConfigError, match="kv_peers has 'prefill'"):
        build_core(EngineConfig(model=ModelConfig(model="nowhere"), kv_transfer=given))


def p2p(**given: Any) -> EngineConfig:
    """Of a model that is not there."""
    return EngineConfig(model=ModelConfig(model="nowhere"), kv_transfer=KVTransferConfig(kv_connector="p2p", **given))


@pytest.fixture
def member(tmp_path: Path) -> EngineIdentity:
    """Of a fleet."""
    key_file = tmp_path / "fleet-key"
    key_file.write_bytes(b"k" * 32)
    return EngineIdentity(fleet_key_file=str(key_file))


@pytest.mark.parametrize("behind", [0, 1], ids=["control", "data"])
def test_a_port_that_is_taken_is_refused_before_the_model(member: EngineIdentity, behind: int) -> None:
    port = free_ports(2)
    said = rf"port {port + behind} \(Address already in use.*give another kv_port"
    with socket.create_server(("127.0.0.1", port + behind)), pytest.raises(ConfigError, match=said):
        build_core(p2p(kv_port=port), identity=member)


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1"], ids=["unknown", "elsewhere"])
def test_a_host_that_is_not_here_is_refused_before_the_model(member: EngineIdentity, host: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot listen for K/V on {host}"):
        build_core(p2p(kv_host=host), identity=member)


def test_a_fleet_key_is_asked_for_before_the_model() -> None:
    with pytest.raises(ConfigError, match="give fleet_key_file"):
        build_core(p2p())
