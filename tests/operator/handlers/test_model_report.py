"""What a job found out is kept once, and only when it is something."""

from __future__ import annotations

from typing import Any

import pytest
from pagefleet_operator.handlers.reconciler import to_keep
from pagefleet_operator.plan.observed import Child, ContainerSeen, PodSeen
from pagefleet_protocol.model_facts import DownloadResult, ModelFacts, decode_result, encode_result

FACTS = ModelFacts("c0ffee", 1, 1, "llama", "bfloat16", "", 1, 0, 0, 1, 1, 64, 4096)
GOOD = encode_result(DownloadResult(facts=FACTS)).decode()
JOB = "qwen-model-01234567"


def jobs(ours: bool = True, kept: str = "") -> dict[tuple[str, str], Child]:
    annotations = {"pagefleet.dev/facts": kept} if kept else {}
    return {("Job", JOB): Child({"metadata": {"name": JOB, "annotations": annotations}}, ours)}


def pod(message: str, exit_code: int | None = 0, name: str = f"{JOB}-abcde", **fields: Any) -> PodSeen:
    container = ContainerSeen("download", state="terminated", exit_code=exit_code, message=message)
    return PodSeen(name=name, component="model", revision="", containers=(container,), **fields)


def test_a_result_is_kept_on_its_job() -> None:
    found = to_keep(jobs(), [pod(f"chatter\n{GOOD}")])
    assert list(found) == [JOB]
    assert decode_result(found[JOB]).facts == FACTS


@pytest.mark.parametrize(
    "seen",
    [
        pod("no result"),
        pod(""),
        pod(GOOD, exit_code=1),
        pod(GOOD, name="qwen-model-76543210-abcde"),
        pod(encode_result(DownloadResult(reason="ModelNotFound", message="no")).decode(), exit_code=2),
    ],
)
def test_what_is_no_good_result_is_not(seen: PodSeen) -> None:
    assert to_keep(jobs(), [seen]) == {}


def test_what_is_kept_already_or_not_ours_is_left() -> None:
    assert to_keep(jobs(kept="{}"), [pod(GOOD)]) == {}
    assert to_keep(jobs(ours=False), [pod(GOOD)]) == {}
