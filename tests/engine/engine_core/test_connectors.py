"""What is refused of connectors before a model is looked at, in the engine's words."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pagefleet_engine.config import CacheConfig, EngineConfig, ModelConfig
from pagefleet_engine.engine_core import build
from pagefleet_engine.engine_core.build import build_core
from pagefleet_engine.errors import ConfigError
from pagefleet_kv.config import KVTransferConfig
from pagefleet_kv.connectors import build_connector
from pagefleet_kv.port import BuiltConnector, EngineIdentity, EngineSide

from tests.fakes.free_ports import free_ports
from tests.fakes.small_model import write_small_model


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


@pytest.mark.parametrize("is_one_of_several", [False, True])
def test_connectors_are_told_whether_steps_wait_for_other_copies(
    is_one_of_several: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sides: list[EngineSide] = []
    group = object() if is_one_of_several else None
    load: Any = build._load
    monkeypatch.setattr(build, "data_group", lambda *_: group)
    monkeypatch.setattr(build, "_load", lambda *given: load(*given[:-1], None))

    def connect(given: KVTransferConfig, side: EngineSide) -> BuiltConnector:
        sides.append(side)
        return build_connector(given, side)

    monkeypatch.setattr(build, "build_connector", connect)
    model = ModelConfig(model=str(write_small_model(tmp_path / "model")), device="cpu", load_format="dummy")
    offload = KVTransferConfig(kv_connector="offload", kv_offload_memory=2**20)
    core, _ = build_core(replace(config(None, num_kv_blocks=8), model=model, kv_transfer=offload))
    core.shutdown()
    assert [side.steps_with_copies for side in sides] == [is_one_of_several]
