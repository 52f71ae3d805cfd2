from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pagefleet_engine.config import CacheConfig, EngineConfig, ExecutionConfig, ModelConfig
from pagefleet_engine.nodes.agreement import differences, model_digest, refusal_of, unlike_model
from pagefleet_engine.nodes.messages import Hello, Present
from pagefleet_engine.ranks.parallelism import Parallelism
from pagefleet_kv.config import KVTransferConfig
from pagefleet_protocol.version import VERSION

PARALLEL = Parallelism(tensor_parallel_size=2, nnodes=2, master_addr="10.0.0.1")
OWN = EngineConfig(model=ModelConfig(model="/m"), parallel=PARALLEL)


def hello(config: EngineConfig = OWN, version: str = VERSION) -> Hello:
    return Hello(version, 1, "b", "10.0.0.2", msgspec.Raw(msgspec.msgpack.encode(config)))


def test_nodes_may_differ_in_what_is_their_own() -> None:
    theirs = replace(
        OWN,
        model=ModelConfig(
            model="/elsewhere",
            tokenizer="/t",
            served_model_name="x",
            revision="v1",
            tokenizer_revision="v1",
            download_dir="/d",
        ),
        parallel=replace(PARALLEL, node_rank=1),
        execution=ExecutionConfig(cache_dir="/c"),
        kv_transfer=KVTransferConfig(kv_connector="p2p", kv_host="10.0.0.2", kv_port=8102, kv_peers="10.0.0.3:8102"),
    )
    assert refusal_of(hello(theirs), replace(OWN, kv_transfer=KVTransferConfig(kv_connector="p2p"))) is None


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"version": "0.0.9"}, f"it runs pagefleet 0.0.9, and the leader {VERSION}: install one version on all nodes"),
        (
            {"config": replace(OWN, cache=CacheConfig(block_size=32))},
            "block_size is 32 there, and 16 at the leader: give all nodes the same settings",
        ),
        (
            {"config": replace(OWN, kv_transfer=KVTransferConfig(kv_connector="offload"))},
            "kv_connector is 'offload' there, and None at the leader: give all nodes the same settings",
        ),
        (
            {"config": replace(OWN, parallel=replace(PARALLEL, pipeline_parallel_size=1, master_port=1))},
            "master_port is 1 there, and 29500 at the leader: give all nodes the same settings",
        ),
    ],
)
def test_what_a_leader_refuses(given: dict[str, Any], says: str) -> None:
    assert refusal_of(hello(**given), OWN) == says


def test_settings_that_cannot_be_read_are_refused() -> None:
    strange = Hello(VERSION, 1, "b", "10.0.0.2", msgspec.Raw(b"\x93"))
    assert "cannot be read" in str(refusal_of(strange, OWN))
    impossible = msgspec.to_builtins(OWN)
    impossible["parallel"]["node_rank"] = 7  # which no EngineConfig of this version has
    refused = Hello(VERSION, 1, "b", "10.0.0.2", msgspec.Raw(msgspec.msgpack.encode(impossible)))
    assert "install one version of pagefleet on all nodes" in str(refusal_of(refused, OWN))


def test_all_differences_are_named() -> None:
    other = replace(OWN, cache=CacheConfig(block_size=32, num_kv_blocks=7))
    assert list(differences(other, OWN)) == [("block_size", 32, 16), ("num_kv_blocks", 7, None)]


def test_a_model_is_known_by_its_shape_and_its_files(tmp_path: Path) -> None:
    def folder(name: str, config: str = "{}", weights: bytes = b"1234", index: str = "") -> Path:
        made = tmp_path / name
        made.mkdir()
        (made / "config.json").write_text(config)
        (made / "model.safetensors").write_bytes(weights)
        if index:
            (made / "model.safetensors.index.json").write_text(index)
        (made / "README.md").write_text(name)
        return made

    first = model_digest(folder("a"))
    assert model_digest(folder("b")) == first
    others = [folder("c", '{"a":1}'), folder("d", weights=b"12345"), folder("e", index="{}")]
    assert len({first, *map(model_digest, others)}) == 4
    present = Present(first, "cpu")
    assert unlike_model(present, present) is None
    assert "would compute on cuda" in str(unlike_model(Present(first, "cuda"), present))
    assert "files of the model are not the leader's" in str(unlike_model(Present("x", "cpu"), present))
