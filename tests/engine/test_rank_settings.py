"""What each data rank with a port of its own is told, and which settings cannot be."""

from __future__ import annotations

from typing import Any

import pytest
from pagefleet_engine.cli import read_configuration
from pagefleet_engine.client.data_ranks import rank_configs
from pagefleet_engine.config import EngineConfig, ServerConfig
from pagefleet_engine.errors import ConfigError
from pagefleet_engine.llm_keywords import known_settings
from pagefleet_engine.rank_settings import events_port, rank_settings, supervisor_port

OWN = "--data-parallel-multi-port-external-lb"


def configured(*flags: str) -> tuple[EngineConfig, ServerConfig]:
    return read_configuration(["/m", *flags], {})


def test_ranks_have_ports_of_their_own_and_folders() -> None:
    flags = ("-dp", "2", OWN, "--port", "9000", "--kv-events-port", "9100", "--profiler-dir", "/p")
    config, server = configured(*flags, "--kv-connector", "p2p", "--kv-port", "9102", "--fleet-key-file", "/key")
    found = rank_settings(config, server)
    assert [one.port for _, one in found] == [9000, 9001]
    assert [one.kv_events_port for _, one in found] == [9100, 9104]
    assert [one.kv_transfer.kv_port for one, _ in found] == [9102, 9106]
    assert [one.profiler_dir for _, one in found] == ["/p/rank-0", "/p/rank-1"]
    assert supervisor_port(config, server) == 9002
    for rank, (own, _) in enumerate(found):
        assert own.parallel.data_parallel_rank == rank
        assert own.max_requests == config.scheduler.max_num_seqs, "an engine of one copy"


def test_ports_that_are_chosen_by_the_system_stay_so() -> None:
    config, server = configured("-dp", "2", OWN, "--port", "9000", "--data-parallel-supervisor-port", "8999")
    assert supervisor_port(config, server) == 8999
    assert [(own.kv_events_port, one.kv_transfer.kv_port) for one, own in rank_settings(config, server)] == [(0, 0)] * 2


def test_ranks_behind_one_port_have_kv_ports_of_their_own() -> None:
    p2p = ("--kv-connector", "p2p", "--kv-port", "9102", "--fleet-key-file", "/key")
    config, server = configured("-dp", "2", "--kv-events-port", "9100", *p2p)
    assert rank_settings(config, server) == ()
    assert [own.kv_transfer.kv_port for own in rank_configs(config)] == [9102, 9106]
    assert [events_port(server.kv_events_port, rank) for rank in range(2)] == [9100, 9104]
    alone, _ = configured("-dp", "2", "--data-parallel-rank", "1", *p2p)
    assert [own.kv_transfer.kv_port for own in rank_configs(alone)] == [9102], "as it was given"
    chosen, _ = configured("-dp", "2", "--kv-connector", "p2p")
    assert [own.kv_transfer.kv_port for own in rank_configs(chosen)] == [0, 0]


def test_a_rank_by_itself_has_its_share_and_no_other_copy() -> None:
    config, _ = configured("-dp", "2", "--data-parallel-rank", "1", "--num-threads", "4", "--device", "cpu")
    (own,) = rank_configs(config)
    assert own.model.num_threads == 2
    assert own.model.seed == 1 << 32
    assert own.parallel.data_ranks == 1


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ((OWN,), "data_parallel_size is 1: change either"),
        ((OWN, "-dp", "2", "--data-parallel-rank", "1"), "data_parallel_rank names one copy"),
        (("-dp", "2", "--data-parallel-rank", "2"), "data_parallel_rank is 2, and data_parallel_size 2: give 0 to 1"),
        ((OWN, "-dp", "2", "--port", "0"), "port is 0: give one"),
        ((OWN, "-dp", "3", "--port", "65534"), "port of the last data rank would be 65536"),
        ((OWN, "-dp", "2", "--kv-events-port", "65531"), "kv_events_port of the last data rank would be 65536"),
        (("-dp", "2", "--kv-events-port", "65531"), "kv_events_port of the last data rank would be 65536"),
        (("-dp", "2", "--port", "9000", "--kv-events-port", "8995"), "kv_events_port of rank 1 and port are both 9000"),
        (
            ("-dp", "2", "--kv-connector", "p2p", "--kv-port", "9104", "--kv-events-port", "9100"),
            "kv_events_port of rank 1 and kv_port of rank 0 are both 9104",
        ),
        (
            (OWN, "-dp", "4", "--port", "9000", "--data-parallel-supervisor-port", "9002"),
            "port of rank 2 and data_parallel_supervisor_port are both 9002",
        ),
        (
            (OWN, "-dp", "4", "--port", "9000", "--kv-events-port", "9002"),
            "are both 9002: ranks count on from port by 1",
        ),
        ((OWN, "-dp", "2", "--kv-connector", "p2p", "--kv-port", "9104", "--kv-events-port", "9100"), "are both 9104"),
    ],
)
def test_refusals(flags: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        configured(*flags)
    assert says in str(refusal.value)


def test_scripts_have_no_ports() -> None:
    given: dict[str, Any] = {"model": "m", "data_parallel_size": 2, "data_parallel_multi_port_external_lb": True}
    with pytest.raises(ConfigError, match="is for `pagefleet serve`"):
        known_settings(given)
