from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from pagefleet_kv.config import KVTransferConfig
from pagefleet_kv.errors import KVConfigError
from pagefleet_kv.file import build
from pagefleet_protocol.sampling_params import SamplingParams

from tests.fakes.byte_pages import SHAPE, BytePages, engine_side
from tests.fakes.connector_scene import ConnectorScene, make_request

METRIC = "pagefleet_engine_kv_transfer_file"


def make_scene(folder: Path, *, on_host: bool = True) -> ConnectorScene:
    pages = BytePages(256, on_host=on_host)
    return ConnectorScene(build(KVTransferConfig(kv_offload_dir=str(folder)), engine_side(pages)).connector, pages)


@pytest.fixture(params=[True, False], ids=["host", "device"])
def scene(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[ConnectorScene]:
    scene = make_scene(tmp_path, on_host=request.param)
    yield scene
    scene.pages.gate.set()
    scene.connector.close()


def counter(scene: ConnectorScene, name: str) -> float:
    return scene.connector.stats().counters[f"{METRIC}_{name}_total"]


def test_every_block_is_a_file_and_comes_back(scene: ConnectorScene, tmp_path: Path) -> None:
    request = make_request(scene.prompt(5))
    assert scene.loadable(request) == 0
    scene.save_and_wait(request)
    assert {path.stem for path in tmp_path.glob("??/*.kv")} == {digest.hex() for digest in request.block_hashes}
    again = make_request(scene.prompt(5), "again")
    assert scene.loadable(again) == 20
    assert scene.load_and_wait(again, 5) == 5
    assert (counter(scene, "saved_blocks"), counter(scene, "loaded_blocks")) == (5, 5)
    scene.save_and_wait(again)
    assert counter(scene, "saved_blocks") == 5, "the folder has them"


def test_what_it_has_is_not_known_at_once(scene: ConnectorScene) -> None:
    request = make_request(scene.prompt(2))
    assert scene.connector.loadable(request, 0) is None
    assert scene.loadable(request) == 0
    assert scene.connector.loadable(request, 8) == 8, "there is nothing to look for"


def test_a_preempted_request_is_looked_up_again(scene: ConnectorScene) -> None:
    request = make_request(scene.prompt(3))
    assert scene.loadable(request) == 0
    scene.save_and_wait(request)
    request.token_ids += [1, 2, 3, 4]
    request.preempt()
    assert scene.loadable(request) == 12


def test_ended_requests_leave_nothing_behind(scene: ConnectorScene) -> None:
    request = make_request(scene.prompt(3))
    scene.loadable(request)
    scene.connector.ended(request, True)
    scene.save_and_wait(make_request(scene.prompt(3), "other"))
    assert scene.loadable(request) == 12


def test_what_may_be_wrong_is_deleted(scene: ConnectorScene, tmp_path: Path) -> None:
    wrong = make_request(scene.prompt(3))
    scene.save(wrong)
    scene.save_and_wait(make_request(scene.prompt(2, start=200), "other"))
    scene.connector.discard(wrong)
    scene.connector.ended(wrong, False)
    scene.wait_for(lambda: len(list(tmp_path.glob("??/*.kv"))) == 2)
    assert scene.loadable(make_request(scene.prompt(3), "again")) == 0
    assert scene.loadable(make_request(scene.prompt(2, start=200), "others")) == 8


def test_engines_share_a_folder(scene: ConnectorScene, tmp_path: Path) -> None:
    other = make_scene(tmp_path)
    request = make_request(scene.prompt(4))
    scene.save_and_wait(request)
    assert other.loadable(request) == 16
    assert other.load_and_wait(request, 4) == 4
    other.connector.close()


def test_salts_and_prompt_logprobs(scene: ConnectorScene) -> None:
    scene.save_and_wait(make_request(scene.prompt(3), salt="a"))
    assert scene.loadable(make_request(scene.prompt(3), "b")) == 0
    same = make_request(scene.prompt(3), "c", salt="a")
    same.sampling = SamplingParams(prompt_logprobs=1)
    assert scene.loadable(same) == 0


def test_blocks_are_kept_until_they_are_written(scene: ConnectorScene) -> None:
    scene.pages.gate.clear()
    number = scene.save(make_request(scene.prompt(3)))
    assert number is not None
    scene.settle()
    assert scene.saved == []
    scene.pages.gate.set()
    scene.wait_for(lambda: scene.saved == [number])
    assert scene.connector.save(make_request([1, 2]), []) is None


@pytest.mark.parametrize("damage", ["torn", "gone", "other"])
def test_damaged_file_ends_the_load_before_it(scene: ConnectorScene, tmp_path: Path, damage: str) -> None:
    request = make_request(scene.prompt(4))
    scene.save_and_wait(request)
    names = [digest.hex() for digest in request.block_hashes]
    paths = [tmp_path / name[:2] / f"{name}.kv" for name in names]
    if damage == "torn":
        os.truncate(paths[2], 90)
    elif damage == "gone":
        paths[2].unlink()
    else:
        paths[3].replace(paths[2])
    assert scene.load_and_wait(request, 4) == 2
    assert counter(scene, "damaged") == (damage != "gone")


def test_cancelled_load_ends(scene: ConnectorScene) -> None:
    request = make_request(scene.prompt(4))
    scene.save_and_wait(request)
    scene.pages.gate.clear()
    scene.load(request, 4)
    scene.connector.cancel("r")
    scene.pages.gate.set()
    scene.wait_for(lambda: "r" in scene.loaded)
    assert scene.loaded["r"].failure is None
    scene.connector.cancel("r")
    assert scene.load_and_wait(request, 4) == 4, "what comes after its end cancels no other load"


def test_reset_empties_the_folder_after_the_loads_under_way(scene: ConnectorScene, tmp_path: Path) -> None:
    request = make_request(scene.prompt(4))
    scene.save_and_wait(request)
    assert scene.loadable(request) == 16
    scene.pages.gate.clear()
    run = scene.load(request, 4)
    scene.connector.reset()
    scene.pages.gate.set()
    scene.wait_for(lambda: "r" in scene.loaded and not list(tmp_path.glob("??/*.kv")))
    scene.check(request, run, 4)
    assert scene.loaded["r"].num_blocks == 4
    assert scene.loadable(request) == 0


def test_a_folder_is_needed_and_must_be_of_the_model(tmp_path: Path) -> None:
    with pytest.raises(KVConfigError, match="give kv_offload_dir"):
        build(KVTransferConfig(), engine_side(BytePages(8)))
    config = KVTransferConfig(kv_offload_dir=str(tmp_path))
    build(config, engine_side(BytePages(8))).connector.close()
    with pytest.raises(KVConfigError, match="num_layers 2 here, 1 there"):
        build(config, engine_side(BytePages(8), msgspec.structs.replace(SHAPE, num_layers=2)))
