from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pagefleet_kv.config import KVTransferConfig, OffloadPolicy
from pagefleet_kv.errors import KVConfigError
from pagefleet_kv.offload.build import build_offload
from pagefleet_kv.port import LoadDone
from pagefleet_kv.store.manifest import claim_folder
from pagefleet_protocol.sampling_params import SamplingParams

from tests.example_counts import examples
from tests.fakes.byte_pages import SHAPE, BytePages, engine_side
from tests.fakes.connector_scene import ConnectorScene, make_request

SIZE = 64
FILE = 4096
METRIC = "pagefleet_engine_kv_transfer_offload"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def make_scene(
    memory: int,
    folder: Path | None = None,
    disk: int = 0,
    policy: OffloadPolicy = "lru",
    clock: Callable[[], float] = time.monotonic,
) -> ConnectorScene:
    """A scene with so many blocks in memory and on disk."""
    config = KVTransferConfig(
        kv_connector="offload",
        kv_offload_memory=memory * SIZE,
        kv_offload_dir=None if folder is None else str(folder),
        kv_offload_disk=disk * FILE,
        kv_offload_policy=policy,
    )
    pages = BytePages(4096, SIZE)
    return ConnectorScene(build_offload(config, engine_side(pages), clock), pages)


@pytest.fixture
def scene() -> Iterator[ConnectorScene]:
    scene = make_scene(16)
    yield scene
    scene.pages.gate.set()
    scene.connector.close()


def counter(scene: ConnectorScene, name: str) -> float:
    return scene.connector.stats().counters[f"{METRIC}_{name}_total"]


def num_bytes(scene: ConnectorScene, tier: str) -> float:
    return scene.connector.stats().gauges[f'{METRIC}_bytes{{tier="{tier}"}}']


def test_saved_blocks_come_back(scene: ConnectorScene) -> None:
    request = make_request(scene.prompt(5))
    assert scene.loadable(request) == 0
    scene.save_and_wait(request)
    assert scene.loadable(request) == 20
    assert scene.load_and_wait(request, 5) == 5
    assert (counter(scene, "hits"), counter(scene, "misses"), counter(scene, "evictions")) == (5, 5, 0)
    assert num_bytes(scene, "host") == 5 * SIZE


def test_only_what_the_pool_has_not_is_offered(scene: ConnectorScene) -> None:
    request = make_request(scene.prompt(5))
    scene.save_and_wait(request, 0, 3)
    assert scene.loadable(request, 8) == 12
    assert scene.loadable(request, 12) == 12
    assert scene.loadable(request, 16) == 16
    assert scene.load_and_wait(request, 1, first=2) == 1


def test_a_gap_ends_what_is_offered(scene: ConnectorScene) -> None:
    request = make_request(scene.prompt(5))
    scene.save_and_wait(request, 0, 2)
    scene.save_and_wait(request, 3, 5)
    assert scene.loadable(request) == 8
    assert scene.loadable(request, 12) == 20


def test_one_token_is_left_to_compute(scene: ConnectorScene) -> None:
    request = make_request(scene.prompt(3)[:-1])
    scene.save_and_wait(request)
    assert request.num_tokens == 12
    assert scene.loadable(request) == 8


def test_prompt_logprobs_need_all_tokens_computed(scene: ConnectorScene) -> None:
    request = make_request(scene.prompt(3))
    scene.save_and_wait(request)
    request.sampling = SamplingParams(prompt_logprobs=1)
    assert scene.loadable(request) == 0


def test_salts_keep_tenants_apart(scene: ConnectorScene) -> None:
    scene.save_and_wait(make_request(scene.prompt(3), salt="a"))
    assert scene.loadable(make_request(scene.prompt(3), salt="b")) == 0
    assert scene.loadable(make_request(scene.prompt(3))) == 0
    assert scene.loadable(make_request(scene.prompt(3), salt="a")) == 12


def test_equal_blocks_are_kept_once(scene: ConnectorScene) -> None:
    first, second = make_request(scene.prompt(3), "a"), make_request([*scene.prompt(3)[:-1], 7, 7, 7, 7, 7], "b")
    number = scene.save(first)
    assert scene.save(make_request(scene.prompt(3), "c")) is None, "they are being saved already"
    scene.wait_for(lambda: number in scene.saved)
    assert scene.save(first) is None
    scene.save_and_wait(second)
    assert num_bytes(scene, "host") == 4 * SIZE


def test_blocks_are_offered_once_they_are_copied(scene: ConnectorScene) -> None:
    request = make_request(scene.prompt(3))
    scene.pages.gate.clear()
    number = scene.save(request)
    assert number is not None
    assert scene.loadable(request) == 0
    scene.settle()
    assert scene.saved == []
    scene.pages.gate.set()
    scene.wait_for(lambda: scene.saved == [number])
    assert scene.loadable(request) == 12


def test_preempted_request_gets_its_output_back_too(scene: ConnectorScene) -> None:
    request = make_request(scene.prompt(2))
    scene.save_and_wait(request)
    request.token_ids += range(500, 508)
    request.block_hashes.clear()
    scene.loadable(request)  # hashes them again
    scene.save_and_wait(request, 2, 4)
    request.preempt()
    assert scene.loadable(request) == 16
    assert scene.load_and_wait(request, 4) == 4
    assert counter(scene, "misses") == 2, "output is no miss"


def test_memory_is_bounded_and_the_least_recently_used_goes(scene: ConnectorScene) -> None:
    requests = [make_request(scene.prompt(4, start=100 * number), str(number)) for number in range(5)]
    for request in requests[:4]:
        scene.save_and_wait(request)
        scene.connector.ended(request, True)
    assert scene.load_and_wait(requests[0], 4) == 4
    scene.save_and_wait(requests[4])
    assert [scene.loadable(request) for request in requests] == [16, 0, 16, 16, 16]
    assert counter(scene, "evictions") == 4
    assert num_bytes(scene, "host") == 16 * SIZE


def test_tail_of_a_prompt_goes_before_its_head(scene: ConnectorScene) -> None:
    long = make_request(scene.prompt(16), "long")
    for first in range(0, 16, 4):
        scene.save_and_wait(long, first, first + 4)
    scene.connector.ended(long, True)
    scene.save_and_wait(make_request(scene.prompt(6, start=900), "other"))
    assert scene.loadable(long) == 40


def test_blocks_that_are_loaded_or_saved_are_never_evicted(scene: ConnectorScene) -> None:
    loaded, saved = make_request(scene.prompt(8), "a"), make_request(scene.prompt(8, start=100), "b")
    scene.save_and_wait(loaded)
    scene.pages.gate.clear()
    run = scene.load(loaded, 8)
    number = scene.save(saved)
    assert number is not None
    assert scene.save(make_request(scene.prompt(8, start=200), "c")) is None, "there is no room, and nobody waits"
    scene.pages.gate.set()
    scene.wait_for(lambda: "a" in scene.loaded and number in scene.saved)
    scene.check(loaded, run, 8)
    assert scene.load_and_wait(saved, 8) == 8
    assert counter(scene, "evictions") == 0
    scene.save_and_wait(make_request(scene.prompt(8, start=200), "c"))
    assert counter(scene, "evictions") == 8


def test_what_went_since_it_was_offered_is_not_loaded(scene: ConnectorScene) -> None:
    request = make_request(scene.prompt(3))
    scene.load(request, 3)
    scene.wait_for(lambda: "r" in scene.loaded)
    assert scene.loaded["r"] == LoadDone("r", 0)


def test_cancelled_load_ends(scene: ConnectorScene) -> None:
    request = make_request(scene.prompt(8))
    scene.save_and_wait(request)
    scene.pages.gate.clear()
    scene.load(request, 8)
    scene.connector.cancel("r")
    scene.connector.cancel("nobody")
    assert scene.settle().loads == []
    scene.pages.gate.set()
    scene.wait_for(lambda: "r" in scene.loaded)
    assert scene.loaded["r"].failure is None
    assert scene.load_and_wait(request, 8) == 8


def test_reset_forgets_all_but_what_is_waited_for(scene: ConnectorScene) -> None:
    loaded, saved = make_request(scene.prompt(4), "a"), make_request(scene.prompt(4, start=100), "b")
    kept = make_request(scene.prompt(4, start=200), "c")
    scene.save_and_wait(loaded)
    scene.save_and_wait(kept)
    scene.pages.gate.clear()
    run = scene.load(loaded, 4)
    number = scene.save(saved)
    scene.connector.reset()
    assert [scene.loadable(request) for request in (loaded, saved, kept)] == [0, 0, 0]
    scene.pages.gate.set()
    scene.wait_for(lambda: "a" in scene.loaded and number in scene.saved)
    assert scene.loaded["a"].num_blocks == 4
    scene.check(loaded, run, 4)
    assert [scene.loadable(request) for request in (loaded, saved, kept)] == [0, 0, 0]
    assert num_bytes(scene, "host") == 0
    scene.save_and_wait(kept)
    assert scene.loadable(kept) == 16


def test_what_may_be_wrong_is_given_to_nobody(scene: ConnectorScene) -> None:
    wrong, kept = make_request(scene.prompt(4), "a"), make_request(scene.prompt(4, start=200), "b")
    scene.save_and_wait(wrong, 0, 2)
    scene.save_and_wait(kept)
    scene.pages.gate.clear()
    number = scene.save(wrong, 2)
    scene.connector.discard(wrong)
    scene.connector.ended(wrong, False)
    assert [scene.loadable(request) for request in (wrong, kept)] == [0, 16]
    scene.pages.gate.set()
    scene.wait_for(lambda: number in scene.saved)
    assert [scene.loadable(request) for request in (wrong, kept)] == [0, 16]
    scene.save_and_wait(wrong)
    assert scene.load_and_wait(wrong, 4) == 4, "it was computed anew"


def test_device_that_fails_costs_a_load_and_nothing_else(
    scene: ConnectorScene, caplog: pytest.LogCaptureFixture
) -> None:
    request = make_request(scene.prompt(4))
    scene.save_and_wait(request)
    scene.pages.broken = True
    with caplog.at_level(logging.WARNING, "pagefleet_kv"):
        assert scene.load_and_wait(request, 4) == 0
        scene.save_and_wait(make_request(scene.prompt(4, start=100), "b"))
    scene.pages.broken = False
    assert scene.load_and_wait(request, 4) == 4
    assert scene.loadable(make_request(scene.prompt(4, start=100), "b")) == 0


# --- with a disk


def is_idle(scene: ConnectorScene) -> bool:
    return not scene.connector._jobs  # type: ignore[attr-defined]


def save_prompts(scene: ConnectorScene, numbers: Iterable[int]) -> None:
    """Save prompts of two blocks, one after the other, and wait each time for what goes to the disk."""
    for number in numbers:
        scene.save_and_wait(make_request(scene.prompt(2, start=100 * number), f"s{number}"))
        scene.wait_for(lambda: is_idle(scene))


def start_with_four_on_disk(folder: Path) -> ConnectorScene:
    """A second start over the folder of a first, which has left there the prompts 0 and 1."""
    scene = make_scene(8, folder, 64)
    save_prompts(scene, range(4))
    assert num_bytes(scene, "disk") == 4 * FILE
    scene.connector.close()
    return make_scene(8, folder, 64)


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_memory_gives_to_the_disk_and_both_give_back(tmp_path: Path, policy: OffloadPolicy) -> None:
    scene = make_scene(8, tmp_path, 64, policy)
    save_prompts(scene, range(8))
    assert num_bytes(scene, "host") == 8 * SIZE
    for number in range(8):
        request = make_request(scene.prompt(2, start=100 * number), f"l{number}")
        assert scene.loadable(request) == 8
        assert scene.load_and_wait(request, 2) == 2
    assert counter(scene, "hits") == 16
    assert counter(scene, "misses") == 16
    scene.connector.close()


def test_prefix_may_be_half_in_memory_and_half_on_disk(tmp_path: Path) -> None:
    scene = make_scene(8, tmp_path, 64)
    long = make_request(scene.prompt(12), "long")
    for first in range(0, 12, 2):
        scene.save_and_wait(long, first, first + 2)
        scene.wait_for(lambda: is_idle(scene))
    assert scene.loadable(long) == 48
    assert scene.load_and_wait(long, 12) == 12
    scene.connector.close()


def test_what_may_be_wrong_is_deleted_from_disk(tmp_path: Path) -> None:
    scene = make_scene(8, tmp_path, 64)
    save_prompts(scene, range(4))
    wrong = make_request(scene.prompt(2), "wrong")
    paths = [path for path in tmp_path.glob("??/*.kv") if bytes.fromhex(path.stem) in wrong.block_hashes]
    assert len(paths) == 2
    scene.connector.discard(wrong)
    assert scene.loadable(wrong) == 0
    scene.wait_for(lambda: not any(path.exists() for path in paths))
    assert scene.loadable(make_request(scene.prompt(2, start=100), "other")) == 8
    scene.connector.close()


def test_disk_is_bounded(tmp_path: Path) -> None:
    scene = make_scene(4, tmp_path, 6)
    save_prompts(scene, range(12))
    assert num_bytes(scene, "disk") == 6 * FILE
    scene.connector.close()
    assert len(list(tmp_path.glob("??/*.kv"))) <= 6


def test_next_start_finds_the_disk(tmp_path: Path) -> None:
    scene = start_with_four_on_disk(tmp_path)
    scene.wait_for(lambda: num_bytes(scene, "disk") == 4 * FILE)
    request = make_request(scene.prompt(2), "again")
    assert scene.loadable(request) == 8
    assert scene.load_and_wait(request, 2) == 2
    scene.connector.close()


def test_damaged_block_is_a_miss_and_deleted(tmp_path: Path) -> None:
    scene = start_with_four_on_disk(tmp_path)
    scene.wait_for(lambda: num_bytes(scene, "disk") == 4 * FILE)
    request = make_request(scene.prompt(2), "again")
    name = request.block_hashes[1].hex()
    path = tmp_path / name[:2] / f"{name}.kv"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert scene.loadable(request) == 8
    assert scene.load_and_wait(request, 2) == 1
    assert not path.exists()
    assert counter(scene, "damaged") == 1
    assert scene.loadable(request) == 4
    scene.save_and_wait(request, 1)
    assert scene.loadable(request) == 8
    scene.connector.close()


def test_full_disk_is_told_of_once_and_the_memory_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    scene = make_scene(8, tmp_path, 64, clock=clock)

    def refuse(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    with caplog.at_level(logging.INFO, "pagefleet_kv"):
        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", refuse)
            save_prompts(scene, range(10))
        assert len(caplog.records) == 1
        assert "No space left on device" in caplog.text
        assert num_bytes(scene, "disk") == 0
        assert counter(scene, "failed_writes") > 1
        last = make_request(scene.prompt(2, start=900), "again")
        assert scene.load_and_wait(last, 2) == 2

        clock.now += 1000.0
        save_prompts(scene, range(10, 14))
        assert num_bytes(scene, "disk") > 0
        assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    scene.connector.close()


def test_reset_empties_the_disk_also_of_what_the_scan_finds_later(tmp_path: Path) -> None:
    scene = start_with_four_on_disk(tmp_path)
    scene.connector.reset()  # before it has heard of the scan
    scene.save_and_wait(make_request(scene.prompt(2), "a"))
    scene.wait_for(lambda: not list(tmp_path.glob("??/*.kv")))
    assert scene.loadable(make_request(scene.prompt(2, start=100), "b")) == 0
    scene.connector.close()


@pytest.mark.parametrize(
    ("memory", "disk", "said"),
    [
        (SIZE - 1, FILE, "kv_offload_memory is 63 and one block takes 64 bytes"),
        (SIZE, FILE - 1, "kv_offload_disk is 4095 and one block takes 4096 bytes"),
    ],
)
def test_bounds_too_small_for_a_block_are_refused(tmp_path: Path, memory: int, disk: int, said: str) -> None:
    config = KVTransferConfig(kv_offload_dir=str(tmp_path), kv_offload_memory=memory, kv_offload_disk=disk)
    with pytest.raises(KVConfigError, match=said):
        build_offload(config, engine_side(BytePages(8, SIZE)))
    claim_folder(tmp_path, SHAPE, alone=True).release()


def test_folder_of_another_model_is_refused(tmp_path: Path) -> None:
    config = KVTransferConfig(kv_offload_dir=str(tmp_path), kv_offload_memory=SIZE)
    build_offload(config, engine_side(BytePages(8, SIZE))).close()
    with pytest.raises(KVConfigError, match="holds K/V of another model or setting"):
        build_offload(config, engine_side(BytePages(8, SIZE), msgspec.structs.replace(SHAPE, model="11" * 32)))


def test_disk_of_zero_bytes_is_no_disk(tmp_path: Path) -> None:
    scene = make_scene(4, tmp_path / "none", 0)
    assert list(scene.connector.stats().gauges) == [f'{METRIC}_bytes{{tier="host"}}']
    assert not (tmp_path / "none").exists()
    scene.connector.close()


@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    policy=st.sampled_from(["lru", "arc"]),
    with_disk=st.booleans(),
    trace=st.lists(
        st.tuples(st.sampled_from(["save", "load", "cancel", "reset", "end", "settle"]), st.integers(0, 5)),
        max_size=40,
    ),
)
def test_whatever_happens_what_is_loaded_is_right_and_everything_ends(
    tmp_path_factory: pytest.TempPathFactory,
    policy: OffloadPolicy,
    with_disk: bool,
    trace: list[tuple[str, int]],
) -> None:
    scene = make_scene(8, tmp_path_factory.mktemp("kv") if with_disk else None, 8, policy)
    prompts = [scene.prompt(1 + number, start=50 * (number % 3)) for number in range(6)]
    saves: set[int] = set()
    loads = {}
    for step, (what, number) in enumerate(trace):
        request = make_request(prompts[number], f"{number}")
        if what == "save":
            saves |= {saved for saved in [scene.save(request)] if saved is not None}
        elif what == "load":
            request = make_request(prompts[number], f"{number} {step}")
            loads[request.request_id] = (request, scene.load(request, number + 1))
        elif what == "cancel" and loads:
            scene.connector.cancel(list(loads)[number % len(loads)])
        elif what == "reset":
            scene.connector.reset()
        elif what == "end":
            scene.connector.ended(request, True)
        else:
            scene.settle()
    scene.wait_for(lambda: saves <= set(scene.saved) and loads.keys() <= scene.loaded.keys())
    for request, run in loads.values():
        scene.check(request, run, scene.loaded[request.request_id].num_blocks)
    assert len(scene.saved) == len(saves)
    scene.connector.close()
