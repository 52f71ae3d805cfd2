"""From names to connectors, those of other packages too, and what is refused with one line."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pagefleet_kv.config import KVTransferConfig
from pagefleet_kv.connectors import build_connector, check_connectors
from pagefleet_kv.errors import KVConfigError
from pagefleet_kv.multi import MultiConnector
from pagefleet_kv.port import EngineIdentity

from tests.fakes.byte_pages import BytePages, engine_side
from tests.fakes.connector_scene import ConnectorScene, make_request
from tests.fakes.free_ports import free_ports

PLUGIN = Path(__file__).parent / "plugin"


def names(connector: str, **settings: Any) -> KVTransferConfig:
    return KVTransferConfig(kv_connector=connector, **settings)


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with connectors is installed."""
    monkeypatch.syspath_prepend(PLUGIN)


@pytest.mark.parametrize(
    ("connector", "said"),
    [
        ("nccl", "names 'nccl': give file, offload, p2p, or several with commas between"),
        ("p2p,File", "names 'File'"),
        ("offload, offload", "names offload twice"),
    ],
)
def test_names_that_cannot_be(connector: str, said: str) -> None:
    with pytest.raises(KVConfigError, match=said):
        check_connectors(names(connector), EngineIdentity())


@pytest.mark.parametrize("given", [{"kv_role": "prefill"}, {"kv_peers": "file:/peers", "kv_connector": "offload"}])
def test_settings_of_p2p_need_p2p(given: dict[str, Any]) -> None:
    with pytest.raises(KVConfigError, match="is of kv_connector p2p, which is not on"):
        KVTransferConfig(**given)


def test_the_next_port_is_for_tcp_alone(tmp_path: Path) -> None:
    key_file = tmp_path / "fleet-key"
    key_file.write_bytes(b"k" * 32)
    member = EngineIdentity(fleet_key_file=str(key_file))
    port = free_ports(2)
    with socket.create_server(("127.0.0.1", port + 1)):
        check_connectors(names("p2p", kv_port=port, kv_data_plane="nccl"), member)
        with pytest.raises(KVConfigError, match="give another kv_port"):
            check_connectors(names("p2p", kv_port=port, kv_data_plane="tcp"), member)


def test_one_is_itself_and_several_are_one(tmp_path: Path) -> None:
    settings = {"kv_offload_dir": str(tmp_path / "kv"), "kv_offload_memory": 4096}
    one = build_connector(names("file", **settings), engine_side(BytePages(8)))
    assert not isinstance(one.connector, MultiConnector)
    assert one.port is None
    one.connector.close()


def test_what_was_made_is_closed_when_another_cannot_be(tmp_path: Path) -> None:
    folder = str(tmp_path / "kv")
    with pytest.raises(KVConfigError, match="kv_offload_memory"):
        build_connector(names("file,offload", kv_offload_dir=folder, kv_offload_memory=1), engine_side(BytePages(8)))
    build_connector(names("file", kv_offload_dir=folder), engine_side(BytePages(8))).connector.close()


@pytest.mark.usefixtures("plugin")
def test_a_connector_of_another_package_serves() -> None:
    check_connectors(names("counting"), EngineIdentity())
    pages = BytePages(8)
    scene = ConnectorScene(build_connector(names("counting"), engine_side(pages)).connector, pages)
    assert scene.save(make_request(range(9))) is None
    assert scene.connector.stats().counters == {"counting_offered_blocks_total": 2.0}


@pytest.mark.usefixtures("plugin")
def test_a_connector_of_another_package_goes_together_with_ours(tmp_path: Path) -> None:
    with pytest.raises(KVConfigError, match="counting takes no folder"):
        check_connectors(names("counting,file", kv_offload_dir=str(tmp_path)), EngineIdentity())
    built = build_connector(names("counting,offload", kv_offload_memory=4096), engine_side(BytePages(8)))
    assert "counting_offered_blocks_total" in built.connector.stats().counters
    built.connector.close()


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize(
    ("connector", "said"),
    [
        ("broken", r"broken cannot be loaded \(No module named .*\): install its package again"),
        ("empty", "empty is no connector: pagefleet_counting_kv:METRIC has no check and build"),
        ("nobody", "names 'nobody': give broken, counting, empty, file, offload, p2p"),
    ],
)
def test_packages_whose_connector_cannot_be(connector: str, said: str) -> None:
    with pytest.raises(KVConfigError, match=said):
        check_connectors(names(connector), EngineIdentity())


@pytest.mark.usefixtures("plugin")
def test_one_name_in_two_packages_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other_kv-1.0.dist-info"
    shutil.copytree(PLUGIN / "pagefleet_counting_kv-1.0.dist-info", other)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: other-kv\nVersion: 1.0\n")
    (other / "entry_points.txt").write_text("[pagefleet.kv_connectors]\ncounting = other_kv\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(KVConfigError, match=r"in several packages \(other-kv, pagefleet-counting-kv\)"):
        check_connectors(names("counting"), EngineIdentity())


def test_nothing_is_loaded_before_it_is_named() -> None:
    program = (
        "import sys; from pagefleet_kv.config import KVTransferConfig; from pagefleet_kv.port import EngineIdentity\n"
        "from pagefleet_kv.connectors import check_connectors\n"
        "print('pagefleet_counting_kv' in sys.modules, 'torch' in sys.modules)\n"
        "check_connectors(KVTransferConfig(kv_connector='counting'), EngineIdentity())\n"
        "print('pagefleet_counting_kv' in sys.modules, 'torch' in sys.modules)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], env={"PYTHONPATH": str(PLUGIN)}, capture_output=True, text=True, check=True
    )
    assert ran.stdout == "False False\nTrue False\n"


def test_an_identity_is_drawn_for_each_start() -> None:
    assert len({EngineIdentity().incarnation for _ in range(10)}) == 10
