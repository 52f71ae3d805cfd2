"""From names to connectors, and all that is refused with one line."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from pagefleet_engine.config import CacheConfig, EngineConfig, KVTransferConfig, ModelConfig
from pagefleet_engine.core.kv_groups import group_layers
from pagefleet_engine.engine_core.build import build_core
from pagefleet_engine.errors import ConfigError, ModelLoadError
from pagefleet_engine.kv_transfer.build import build_connector, check_connectors, check_layers
from pagefleet_engine.kv_transfer.engine_side import EngineIdentity, EngineSide
from pagefleet_engine.kv_transfer.multi import MultiConnector

from tests.fakes.byte_pages import SHAPE, BytePages
from tests.fakes.free_ports import free_ports


def config(connector: str | None, **cache: Any) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model="nowhere"),
        cache=CacheConfig(**cache),
        kv_transfer=KVTransferConfig(kv_connector=connector),
    )


@pytest.mark.parametrize(
    ("connector", "said"),
    [
        ("nccl", "names 'nccl': give p2p, offload, file"),
        ("p2p,File", "names 'File'"),
        ("offload, offload", "names offload twice"),
    ],
)
def test_names_that_cannot_be(connector: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_connectors(config(connector), EngineIdentity())


def test_names_are_looked_at_before_the_model() -> None:
    with pytest.raises(ConfigError, match="kv_connector names 'lmcache'"):
        build_core(config("lmcache"))


def test_connectors_need_the_prefix_cache() -> None:
    with pytest.raises(ConfigError, match="needs the prefix cache"):
        check_connectors(config("file", enable_prefix_caching=False), EngineIdentity())
    check_connectors(config(None, enable_prefix_caching=False), EngineIdentity())


def test_windows_are_refused_with_a_connector_only() -> None:
    groups = group_layers([None, 64, 64, 64])
    with pytest.raises(ConfigError, match="sliding window"):
        check_layers(config("file"), groups)
    with pytest.raises(ConfigError, match="sliding window"):
        check_layers(config("file"), group_layers([64, 64]))
    check_layers(config("file"), group_layers([None, None]))
    check_layers(config(None), groups)


def test_windows_are_refused_before_the_weights_are_looked_for(tmp_path: Path) -> None:
    mistral = {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
        "max_position_embeddings": 512,
        "sliding_window": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps(mistral))
    made = EngineConfig(model=ModelConfig(model=str(tmp_path)), kv_transfer=KVTransferConfig(kv_connector="offload"))
    with pytest.raises(ConfigError, match="some of this one's have a sliding window") as refused:
        build_core(made)
    assert not isinstance(refused.value, ModelLoadError)


@pytest.mark.parametrize("given", [{"kv_role": "prefill"}, {"kv_peers": "file:/peers", "kv_connector": "offload"}])
def test_settings_of_p2p_need_p2p(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="is of kv_connector p2p, which is not on"):
        KVTransferConfig(**given)


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


def test_the_next_port_is_for_tcp_alone(member: EngineIdentity) -> None:
    port = free_ports(2)
    with socket.create_server(("127.0.0.1", port + 1)):
        check_connectors(p2p(kv_port=port, kv_data_plane="nccl"), member)
        with pytest.raises(ConfigError, match="give another kv_port"):
            check_connectors(p2p(kv_port=port, kv_data_plane="tcp"), member)


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1"], ids=["unknown", "elsewhere"])
def test_a_host_that_is_not_here_is_refused_before_the_model(member: EngineIdentity, host: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot listen for K/V on {host}"):
        build_core(p2p(kv_host=host), identity=member)


def test_a_fleet_key_is_asked_for_before_the_model() -> None:
    with pytest.raises(ConfigError, match="give fleet_key_file"):
        build_core(p2p())


def side() -> EngineSide:
    return EngineSide(EngineIdentity(), SHAPE, BytePages(8), 8)


def test_one_is_itself_and_several_are_one(tmp_path: Path) -> None:
    settings = {"kv_offload_dir": str(tmp_path / "kv"), "kv_offload_memory": 4096}
    one = build_connector(KVTransferConfig(kv_connector="file", **settings), side())  # type: ignore[arg-type]
    assert not isinstance(one.connector, MultiConnector)
    assert one.port is None
    one.connector.close()


def test_what_was_made_is_closed_when_another_cannot_be(tmp_path: Path) -> None:
    settings = {"kv_connector": "file,offload", "kv_offload_dir": str(tmp_path / "kv"), "kv_offload_memory": 1}
    with pytest.raises(ConfigError, match="kv_offload_memory"):
        build_connector(KVTransferConfig(**settings), side())  # type: ignore[arg-type]
    again = build_connector(KVTransferConfig(kv_connector="file", kv_offload_dir=str(tmp_path / "kv")), side())
    again.connector.close()


def test_an_identity_is_drawn_for_each_start() -> None:
    assert len({EngineIdentity().incarnation for _ in range(10)}) == 10
