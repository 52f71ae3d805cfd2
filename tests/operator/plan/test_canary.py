"""The trial of a new revision: goes on, ends well, or goes back, by figures alone."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pagefleet_operator.plan.canary import (
    Latency,
    RevisionFigures,
    TrialFigures,
    TrialSeen,
    at_least,
    engines_on_trial,
    next_status,
    step_of,
)
from pagefleet_protocol.canary import Canary, CanaryAnalysis, CanaryStep
from pagefleet_protocol.inference_status import CanaryStatus

from tests.example_counts import examples

START = datetime(2026, 11, 22, tzinfo=UTC)
RULES = CanaryAnalysis(min_requests=40, patience=600)
CANARY = Canary(steps=(CanaryStep(percent=10, seconds=60), CanaryStep(percent=50, seconds=120)), analysis=RULES)
PROGRESS_S = 300


def figures(
    requests: int = 100, failed: int = 0, refused: int = 0, first: float = 0.2, token: float = 0.02
) -> RevisionFigures:
    good = requests - failed - refused
    return RevisionFigures(good, refused, failed, Latency(good, good * first), Latency(good, good * token))


EQUAL = TrialFigures(figures(), figures(900, failed=1))


class Trial:
    """A trial, and the clock of whoever leads it."""

    def __init__(self, canary: Canary = CANARY, replicas: int = 4) -> None:
        self.canary, self.replicas = canary, replicas
        self.status: CanaryStatus | None = None
        self.now = START

    def look(self, seconds: float = 0.0, ready: int = 9, seen: TrialFigures | None = EQUAL, **more: object) -> str:
        """Let time pass and decide; returns phase and step."""
        self.now += timedelta(seconds=seconds)
        seen = replace(seen, step=step_of(self.status)) if seen else None
        what = TrialSeen("new", self.now, ((self.replicas, ready),), seen, **more)  # type: ignore[arg-type]
        self.status = next_status(self.canary, PROGRESS_S, self.status, what)
        return f"{self.status.phase} {self.status.step} {self.status.percent}"

    def analysing(self) -> Trial:
        self.look(ready=0)
        assert self.look() == "Analysing 1 10"
        return self


def test_step_by_step_to_the_new_revision() -> None:
    trial = Trial()
    assert trial.look(ready=0) == "Starting 1 0"
    assert trial.look(ready=0) == "Starting 1 0"
    assert trial.look(ready=1) == "Analysing 1 10"
    assert trial.look(59) == "Analysing 1 10"
    assert trial.look(1) == "Starting 2 10"
    assert trial.look(ready=1) == "Starting 2 10"
    assert trial.look(ready=2) == "Analysing 2 50"
    assert trial.look(119) == "Analysing 2 50"
    assert trial.look(1) == "Promoted 2 50"
    assert trial.status is not None
    assert "0 of 100 requests failed, of the old revision's 1 of 900; first tokens took 0.200 s" in trial.status.message
    assert trial.look(9999, seen=TrialFigures(figures(failed=100), figures())) == "Promoted 2 50"


@pytest.mark.parametrize(("replicas", "engines"), [(0, [1, 1]), (1, [1, 1]), (4, [1, 2]), (30, [3, 15])])
def test_each_step_has_engines_for_its_share(replicas: int, engines: list[int]) -> None:
    trial = Trial(replicas=replicas).analysing()
    assert trial.status is not None
    steps = [trial.status.model_copy(update={"step": step}) for step in (1, 2)]
    assert [engines_on_trial(CANARY, one, replicas) for one in steps] == engines
    over = trial.status.model_copy(update={"phase": "RolledBack"})
    assert engines_on_trial(CANARY, over, replicas) == 0


@pytest.mark.parametrize(
    ("new", "why"),
    [
        (figures(failed=6), "6 of its 100 requests fail, of the old revision's 0.1 %"),
        (figures(20, failed=3), "3 of its 20 requests fail"),
        (figures(refused=14), "14 of its 100 requests are refused"),
        (figures(first=0.31), "its first tokens take 0.310 s, the old revision's 0.200 s"),
        (figures(token=0.04), "its tokens take 0.040 s, the old revision's 0.020 s"),
    ],
)
def test_goes_back_as_soon_as_it_is_worse(new: RevisionFigures, why: str) -> None:
    trial = Trial().analysing()
    assert trial.look(1, seen=TrialFigures(new, EQUAL.old)) == "RolledBack 1 0"
    assert trial.status is not None
    assert why in trial.status.message
    assert trial.look(9999) == "RolledBack 1 0"


def test_a_slow_revision_that_had_few_streams_yet_is_no_better_for_it() -> None:
    few = replace(figures(), first_token=Latency(19, 19 * 1.6))
    trial = Trial().analysing()
    assert trial.look(60, seen=TrialFigures(few, EQUAL.old)) == "Analysing 1 10", "19 streams are too few to compare"
    assert trial.look(1, seen=TrialFigures(replace(few, first_token=Latency(20, 32.0)), EQUAL.old)) == "RolledBack 1 0"


def test_streams_are_waited_for_as_long_as_requests_and_then_a_few_decide() -> None:
    few = replace(figures(), first_token=Latency(3, 0.6))
    slow, none = (replace(few, first_token=latency) for latency in (Latency(3, 4.8), Latency()))
    for new, end in ((few, "Starting 2 10"), (none, "Starting 2 10"), (slow, "RolledBack 1 0")):
        trial = Trial().analysing()
        assert trial.look(60 + 599, seen=TrialFigures(new, EQUAL.old)) == "Analysing 1 10"
        assert trial.look(1, seen=TrialFigures(new, EQUAL.old)) == end
    whole = replace(figures(900), first_token=Latency(), between_tokens=Latency())
    assert Trial().analysing().look(60, seen=TrialFigures(replace(none, between_tokens=Latency()), whole)) == (
        "Starting 2 10"
    ), "where nobody streams there is nothing to wait for"


@pytest.mark.parametrize(
    "new",
    [
        figures(failed=1),
        figures(2, failed=2),
        figures(40, failed=1),
        figures(refused=5),
        figures(first=0.29),
        figures(token=0.029),
        figures(19, first=9.0),
    ],
)
def test_chance_and_what_nobody_notices_are_no_reason(new: RevisionFigures) -> None:
    trial = Trial().analysing()
    assert trial.look(1, seen=TrialFigures(new, EQUAL.old)) == "Analysing 1 10"


def test_an_old_revision_that_fails_as_often_is_no_better() -> None:
    trial = Trial().analysing()
    assert trial.look(60, seen=TrialFigures(figures(failed=10), figures(900, failed=90))) == "Starting 2 10"


@pytest.mark.parametrize(("seen", "why"), [(None, "no router said"), (TrialFigures(figures(39)), "had 39 requests of")])
def test_missing_figures_are_waited_for_and_then_it_goes_back(seen: TrialFigures | None, why: str) -> None:
    trial = Trial().analysing()
    assert trial.look(60 + 599, seen=seen) == "Analysing 1 10"
    assert trial.look(1, seen=seen) == "RolledBack 1 0"
    assert trial.status is not None
    assert why in trial.status.message


def test_figures_of_the_step_before_are_none_of_this_one() -> None:
    trial = Trial().analysing()
    before = replace(TrialFigures(figures(failed=50), EQUAL.old), step=("new", "Starting", 1))
    after = next_status(CANARY, PROGRESS_S, trial.status, TrialSeen("new", trial.now, ((4, 1),), before))
    assert after == trial.status


def test_figures_that_come_late_are_enough() -> None:
    trial = Trial().analysing()
    assert trial.look(600, seen=None) == "Analysing 1 10"
    assert trial.look(1) == "Starting 2 10"


def test_engines_that_do_not_get_ready_go_back() -> None:
    trial = Trial()
    trial.look(ready=0)
    assert trial.look(299, ready=0, trouble="no GPU is free") == "Starting 1 0"
    assert trial.look(1, ready=0, trouble="no GPU is free") == "RolledBack 1 0"
    assert trial.status is not None
    assert "within rollout.progressSeconds: no GPU is free" in trial.status.message


def test_engines_that_fail_go_back_at_once() -> None:
    trial = Trial().analysing()
    assert trial.look(1, ready=0, trouble="engine-1 stopped", hopeless=True) == "RolledBack 1 0"


def test_another_revision_begins_anew() -> None:
    trial = Trial().analysing()
    trial.look(1, seen=TrialFigures(figures(failed=50)))
    seen = TrialSeen("newer", trial.now, ((4, 0),), figures=EQUAL)
    after = next_status(CANARY, PROGRESS_S, trial.status, seen)
    assert (after.phase, after.step, after.revision) == ("Starting", 1, "newer")


def test_fewer_steps_than_before_end_with_the_last() -> None:
    trial = Trial().analysing()
    trial.look(60)
    assert trial.look() == "Analysing 2 50"
    trial.canary = Canary(steps=CANARY.steps[:1], analysis=RULES)
    assert trial.look(120) == "Promoted 2 50"


COUNTS = st.integers(0, 200)
SIDES = st.builds(
    RevisionFigures,
    COUNTS,
    COUNTS,
    COUNTS,
    st.builds(Latency, COUNTS, st.floats(0, 500)),
    st.builds(Latency, COUNTS, st.floats(0, 50)),
)
LOOKS = st.tuples(
    st.integers(0, 400), st.integers(0, 4), st.none() | st.builds(TrialFigures, SIDES, SIDES), st.booleans()
)


@settings(max_examples=examples(200))
@given(st.lists(LOOKS, max_size=30))
def test_whatever_comes_it_ends_once_and_never_skips_a_step(
    looks: list[tuple[int, int, TrialFigures | None, bool]],
) -> None:
    trial = Trial()
    trial.look(ready=0)
    for seconds, ready, seen, hopeless in looks:
        before = trial.status
        assert before is not None
        trial.look(seconds, ready, seen, hopeless=hopeless)
        after = trial.status
        assert after is not None
        if before.phase in ("Promoted", "RolledBack"):
            assert after == before
            continue
        assert after.step - before.step in (0, 1)
        assert after.percent in (0, 10, 50)
        if after.step > before.step or after.phase == "Promoted":
            assert before.phase == "Analysing"
            assert seen is not None
            assert seen.new.requests >= RULES.min_requests
        if after.phase == "RolledBack":
            assert after.percent == 0
        if after == before and after.phase == "Analysing":
            assert (trial.now - datetime.fromisoformat(after.since)).total_seconds() < 120 + 600 or (
                seen is not None and seen.new.requests >= RULES.min_requests
            )


@settings(max_examples=examples(200))
@given(st.integers(0, 1000), st.integers(1, 1000))
def test_the_lower_end_is_below_the_share_and_rises_with_evidence(hits: int, trials: int) -> None:
    hits = min(hits, trials)
    assert 0 <= at_least(hits, trials) <= hits / trials + 1e-9
    assert at_least(10 * hits, 10 * trials) >= at_least(hits, trials) - 1e-9
