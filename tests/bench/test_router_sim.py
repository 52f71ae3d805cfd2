"""The simulator of fleets: a case small enough to be worked out by hand, and that no request is lost or made up."""

from __future__ import annotations

import copy
import random
from dataclasses import replace

import pytest

from bench.fleet_sim.engine import EngineModel
from bench.fleet_sim.jobs import BLOCK, Job
from bench.fleet_sim.peers import PEERS
from bench.fleet_sim.run import Fleet, Replicas, Simulation, outcome_of
from bench.fleet_sim.traces import TRACES, Trace
from bench.router_sim import OURS, make_router

PLAIN = EngineModel(
    prefill_rate=1000.0, context_tokens=1e12, step=0.0, per_request=0.1, per_kv_token=0.0, num_blocks=100,
    max_num_seqs=2, max_batched_tokens=10 * BLOCK,
)  # fmt: skip


def play(trace: Trace, model: EngineModel, num_engines: int = 1, name: str = "least-load") -> Simulation:
    models = [model] * num_engines
    simulation = Simulation(Fleet(models, limit=1e6), make_router(name, models, 0))
    simulation.run(trace)
    return simulation


def test_a_case_worked_out_by_hand() -> None:
    first, again, other = Job(list(range(10)), 3), Job(list(range(10)), 1), Job(list(range(50, 55)), 1)
    play([(0.0, first), (2.0, again), (2.0, other)], PLAIN)
    assert first.first_token_at == pytest.approx(0.64), "640 tokens at 1,000 a second"
    assert first.ended_at == pytest.approx(0.84), "two more tokens at 0.1 s"
    assert (first.num_hit, again.num_hit, other.num_hit) == (0, 9 * BLOCK, 0)
    assert again.first_token_at == pytest.approx(2.0 + 0.064), "the last block is computed again"
    assert other.first_token_at == pytest.approx(2.064 + 0.32), "it came when a step had begun"


def test_a_prompt_is_matched_in_the_step_that_begins_it() -> None:
    model = replace(PLAIN, max_num_seqs=8)
    first, second, third = (Job([*range(10), 100 + number], 1) for number in range(3))
    play([(0.0, first), (0.1, second), (0.1, third)], model)
    assert [job.num_hit // BLOCK for job in (first, second, third)] == [0, 10, 10], "the first was computed by then"
    jobs = [Job([*range(200, 210)], 1) for _ in range(2)]
    play([(0.0, Job([1], 1)), *((0.01, job) for job in jobs)], model)
    assert [job.num_hit // BLOCK for job in jobs] == [0, 9], "one fills a step, the other comes into the next"


def test_replicas_share_events_and_no_history() -> None:
    models = [EngineModel()] * 4
    prompts = [list(range(100 * number, 100 * number + 50)) for number in range(8)]
    trace = [(2.0 * turn + 0.2 * number, Job(prompts[number], 5)) for turn in range(10) for number in range(8)]

    def hits(name: str) -> float:
        routers = Replicas([make_router(name, models, seed) for seed in range(3)], 0)
        jobs = Simulation(Fleet(models, limit=1e6), routers).run(copy.deepcopy(trace))
        return outcome_of(jobs, 4.0, 20.0, 4).hit_rate

    assert hits("auto, KV events") > 0.95
    assert hits("llm-d precise") > 0.95
    assert hits("llm-d approximate") < 0.9


def test_the_estimated_scorer_looks_at_the_first_4096_tokens_only() -> None:
    router = PEERS["llm-d estimated (2025)"](2, 100, 0)
    at = router.route(Job(list(range(200)), 1), 0.0)
    assert router.history.match(at, range(200)) == 64
    router.kv_usage[at] = 0.9
    assert router.route(Job([*range(64), *range(900, 1_000)], 1), 0.0) == at, "all that it looks at matches"
    assert router.route(Job([*range(40), *range(900, 960)], 1), 0.0) == 1 - at, "0.63 of it does: 0.9 of the KV is more"


def test_no_more_than_the_limit_runs_at_once_and_the_rest_waits() -> None:
    jobs = [Job([number], 11) for number in range(3)]
    play([(0.0, job) for job in jobs], PLAIN)
    ends = [job.ended_at for job in jobs]
    assert jobs[2].first_token_at is not None
    assert ends[0] is not None
    assert jobs[2].first_token_at > ends[0]


def test_a_cache_that_is_too_small_forgets_the_end_of_the_oldest() -> None:
    prompts = [list(range(40 * number, 40 * number + 40)) for number in range(3)]
    jobs = [Job(prompts[number], 1) for number in (0, 1, 2, 2, 0)]
    play([(100.0 * at, job) for at, job in enumerate(jobs)], PLAIN)
    assert [job.num_hit // BLOCK for job in jobs] == [0, 0, 0, 39, 19], "120 blocks and one for the answer in 100"


def test_answers_that_outgrow_the_kv_are_put_back_and_still_end() -> None:
    model = EngineModel(num_blocks=40, max_num_seqs=8)
    jobs = [Job(list(range(20 * number, 20 * number + 12)), 1_000) for number in range(3)]
    simulation = play([(0.0, job) for job in jobs], model)
    assert simulation.engines[0].num_preemptions > 0
    assert all(job.ended_at is not None for job in jobs)
    assert simulation.engines[0].kv_usage == 0.0


@pytest.mark.parametrize("name", [*OURS, *PEERS])
def test_every_request_ends_once_under_every_policy(name: str) -> None:
    rng = random.Random(1)
    trace = TRACES["chats"][0](rng, 2.0, 5.0)
    wanted = 0
    for _, job in trace:
        turn: Job | None = job
        while turn is not None:
            wanted, turn = wanted + 1, turn.then
    simulation = play(trace, EngineModel(num_blocks=1_000), 3, name)
    jobs = simulation.jobs
    assert len({job.number for job in jobs}) == len(jobs) == wanted
    assert all(job.sent_at < (job.first_token_at or 0.0) <= (job.ended_at or 0.0) for job in jobs)
    assert sum(engine.num_generated for engine in simulation.engines) >= sum(job.num_output for job in jobs)
    assert not any(engine.has_work() or engine.kv_usage for engine in simulation.engines)
    outcome = outcome_of(jobs, 0.0, simulation.now, 3)
    assert 0.0 < outcome.hit_rate < 1.0
    assert outcome.ttft_p50 <= outcome.ttft_p90 <= outcome.ttft_p99


def test_the_same_seed_gives_the_same_figures() -> None:
    def run() -> list[float | None]:
        trace = TRACES["bursts"][0](random.Random(3), 10.0, 5.0)
        return [job.first_token_at for job in play(trace, EngineModel(), 4, "auto, KV events").jobs]

    assert run() == run()


def test_nothing_to_measure_is_said() -> None:
    with pytest.raises(ValueError, match="longer"):
        outcome_of([], 0.0, 1.0, 1)
