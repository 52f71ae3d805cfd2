"""The engines of both revisions on one machine while the new one is tried out."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from pagefleet_operator.local.trial import FIRST_NUMBER, LocalTrial
from pagefleet_operator.plan.canary import RevisionFigures, TrialFigures, step_of
from pagefleet_operator.plan.pair_rollout import Rollout
from pagefleet_operator.plan.rollout import Drain, Instance, Start, State
from pagefleet_operator.plan.workloads import Workload
from pagefleet_protocol.endpoints import OnTrial
from pagefleet_protocol.inference_status import EngineRole, PairRole

from tests.operator.plan.kube_world import service
from tests.operator.plan.test_rollout import workload

START = datetime(2026, 11, 22, tzinfo=UTC)
CANARY = {"steps": [{"percent": 40, "seconds": 10}], "analysis": {"minRequests": 5, "patience": 20}}
SERVICE = service(rollout={"canary": CANARY})
WELL = RevisionFigures(answered=10)
OLD, NEW = (workload(3, Rollout(1, 0), version) for version in ("old", "new"))
SERVING = [Instance(number, OLD.revision, State.READY, served=True) for number in range(3)]


class Scene:
    """A machine whose engines do at once what they are told."""

    def __init__(self) -> None:
        self.trial, self.engines, self.now = LocalTrial(), list(SERVING), START
        assert self.look() is None
        self.wanted = NEW

    wanted = OLD

    def look(self, seconds: float = 0.0, figures: RevisionFigures | None = WELL) -> list[tuple[str, object]] | None:
        """Decide, and return what is to be done by revision; None: what is always done."""
        self.now += timedelta(seconds=seconds)
        heard = TrialFigures(figures, WELL, step_of(self.trial.status)) if figures else None
        led = self.trial.steps(SERVICE, (self.wanted,), {"engine": self.engines}, (heard, self.now))
        if led is None:
            return None
        done = [(workload.revision, step) for workload, steps in led for step in steps]
        for revision, step in done:
            if isinstance(step, Drain):
                self.engines = [one for one in self.engines if one.number != step.number]
            else:
                self.engines.append(Instance(step.number, revision, State.READY, served=True))
        return list(done)

    @property
    def phase(self) -> str:
        return self.trial.status.phase if self.trial.status else ""


def test_engines_come_beside_those_that_serve_and_replace_them_in_the_end() -> None:
    scene = Scene()
    new = NEW.revision
    assert scene.look() == [(new, Start(FIRST_NUMBER)), (new, Start(FIRST_NUMBER + 1))]
    assert scene.trial.share(new) == OnTrial(new, 0)
    assert scene.look() == []
    assert (scene.phase, scene.trial.share(new)) == ("Analysing", OnTrial(new, 40))
    assert scene.trial.share(OLD.revision) is None
    assert scene.look(9) == []
    assert scene.look(1) is None
    assert (scene.phase, scene.trial.share(new)) == ("Promoted", None)
    assert scene.look() is None


def test_a_number_that_the_trial_before_has_left_is_not_given_again() -> None:
    scene = Scene()
    scene.look()
    scene.look()
    assert scene.look(10) is None
    scene.wanted = workload(3, Rollout(1, 0), "newer")
    led = scene.look()
    assert led is not None
    starts = [step.number for revision, step in led if revision == scene.wanted.revision and isinstance(step, Start)]
    assert starts == [FIRST_NUMBER + 2, FIRST_NUMBER + 3]


def test_what_is_worse_goes_and_stays_away() -> None:
    scene = Scene()
    scene.look()
    scene.look()
    gone = scene.look(1, RevisionFigures(answered=5, failed=5))
    assert gone == [(NEW.revision, Drain(FIRST_NUMBER)), (NEW.revision, Drain(FIRST_NUMBER + 1))]
    assert (scene.phase, scene.engines) == ("RolledBack", SERVING)
    assert scene.look(9999) == []
    scene.wanted = OLD
    assert scene.look() is None
    assert scene.phase == ""


def test_old_engines_are_still_scaled_and_a_lost_one_comes_again_as_it_was() -> None:
    scene = Scene()
    scene.look()
    scene.engines = [one for one in scene.engines if one.number != 1]
    assert scene.look() == [(OLD.revision, Start(1))]


def test_an_engine_that_ends_sends_the_revision_back() -> None:
    scene = Scene()
    scene.look()
    failed = Instance(FIRST_NUMBER, NEW.revision, State.FAILED, restarts=1, detail="no such flag")
    scene.engines = [*SERVING, failed]
    assert scene.look() == [(NEW.revision, Drain(FIRST_NUMBER))]
    assert scene.phase == "RolledBack"


def test_without_an_engine_that_serves_there_is_nothing_to_compare_with() -> None:
    scene = Scene()
    scene.engines = [Instance(0, OLD.revision, State.FAILED, restarts=3)]
    assert scene.look() is None
    assert scene.phase == ""


def pair(version: str) -> tuple[Workload, ...]:
    """Return two prefill and three decode engines of one revision."""
    parts: list[tuple[PairRole, int]] = [("prefill", 2), ("decode", 3)]
    return tuple(
        replace(workload(count, Rollout(1, 0), version), role=role, pair_revision=version) for role, count in parts
    )


def test_both_parts_are_tried_out_together() -> None:
    trial, (old, new) = LocalTrial(), (pair("old"), pair("new"))
    existing: dict[EngineRole, list[Instance]] = {
        one.role: [Instance(number, "old", State.READY, served=True) for number in range(one.replicas)]
        for one in old
        if one.role != "router"
    }
    assert trial.steps(SERVICE, old, existing, (None, START)) is None
    led = trial.steps(SERVICE, new, existing, (None, START))
    assert led is not None
    starts = [(one.role, one.revision, list(steps)) for one, steps in led if steps]
    both = [Start(FIRST_NUMBER), Start(FIRST_NUMBER + 1)]
    assert starts == [("prefill", "new", both[:1]), ("decode", "new", both)]
    assert trial.share("new") == OnTrial("new", 0)
    existing["decode"] += [Instance(one.number, "new", State.READY, served=True) for one in both]
    trial.steps(SERVICE, new, existing, (None, START))
    assert trial.share("new") == OnTrial("new", 0), "its prefill engine is not there yet"
    existing["prefill"].append(Instance(FIRST_NUMBER, "new", State.READY, served=True))
    trial.steps(SERVICE, new, existing, (None, START))
    assert trial.share("new") == OnTrial("new", 40)
    later = START + timedelta(seconds=10)
    heard = TrialFigures(WELL, WELL, step_of(trial.status))
    assert trial.steps(SERVICE, new, existing, (heard, later)) is None
    assert trial.status is not None
    assert trial.status.phase == "Promoted"


def test_engines_for_whole_requests_and_pairs_are_not_compared() -> None:
    trial = LocalTrial()
    assert trial.steps(SERVICE, (OLD,), {"engine": SERVING}, (None, START)) is None
    existing: dict[EngineRole, list[Instance]] = {"engine": SERVING, "prefill": [], "decode": []}
    assert trial.steps(SERVICE, pair("new"), existing, (None, START)) is None
    assert trial.status is None
