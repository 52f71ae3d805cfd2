"""What stages of Gemma 3n need: the first has tables of all layers' inputs, and the last layers keep nothing."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from pagefleet_operator.plan.gpu_fit import Fit
from pagefleet_operator.plan.reasons import Reason
from pagefleet_protocol.model_facts import StageFacts

from tests.operator.plan.kube_world import FACTS, GIB
from tests.operator.plan.test_gpu_fit import fit

STAGES = StageFacts(
    first=6 * GIB, last=1 * GIB, both=2 * GIB, layers=(GIB,) * 8, windows=(512, 0, 512, 0, 512, 0, 512, 0)
)
"""Of eight layers the last four read what the third and fourth keep, so these six are together. Encoders take 3 GiB."""
GEMMA = msgspec.structs.replace(
    FACTS,
    architecture="gemma3n",
    weights_bytes=20 * GIB,
    num_layers=8,
    num_kv_shared_layers=4,
    num_experts=0,
    num_window_layers=2,
    window=512,
    stages=STAGES,
)
LENGTH = 65536
LAYER = 2 * 8 * 128 * 2
"""Bytes of a token in one layer: keys and values, 8 heads of 128 numbers of 16 bits."""


def kept(whole: int, windowed: int) -> float:
    return round(LAYER * (whole * LENGTH + windowed * 512) / GIB, 2)


def of(facts: Any = GEMMA, gpus: int = 0, args: tuple[str, ...] = (), **spec: Any) -> Fit:
    engine = {"maxModelLen": LENGTH, "args": [*args]}
    return fit(facts, gpus=gpus, engine=engine, resources={"memory": "1Ti"}, **spec)


@pytest.mark.parametrize(
    ("spec", "weights", "kv"),
    [
        # Encoders are on no device.
        ({"gpus": 1}, 17.0, kept(2, 2)),
        ({"gpus": 2}, 8.5, kept(2, 2) / 2),
        # The first has its tables and two layers, the last six layers and a head of its own.
        ({"gpus": 2, "parallelism": {"pipeline": 2}}, 10.0, kept(1, 1)),
        ({"gpus": 3, "parallelism": {"pipeline": 3}}, 9.0, kept(1, 1)),
        ({"gpus": 4, "parallelism": {"pipeline": 2}}, 5.0, kept(1, 1) / 2),
        ({"gpus": 2, "parallelism": {"pipeline": 2}, "args": ("--pipeline-layers", "1,7")}, 10.0, kept(2, 1)),
        # The head's matrix is there twice, for the processes of both stages.
        ({"parallelism": {"pipeline": 2}}, 19.0, kept(2, 2)),
        ({"parallelism": {"pipeline": 2}, "nodes": 2}, 10.0, kept(1, 1)),
        ({"parallelism": {"pipeline": 2, "tensor": 2}, "nodes": 2}, 10.0, kept(1, 1)),
        ({"parallelism": {"pipeline": 2, "tensor": 2}, "nodes": 4}, 5.0, kept(1, 1) / 2),
    ],
)
def test_of_uneven_stages_the_one_that_needs_most_is_told(spec: Any, weights: float, kv: float) -> None:
    found = of(**spec)
    assert found.refusal is None
    assert found.memory is not None
    assert found.memory.weights == weights
    assert found.memory.kv == pytest.approx(kv, abs=0.006)


def test_the_longest_sequence_fits_each_stage() -> None:
    """The first stage has the most weights, and one of the windows alone; the second takes most where sequences are
    long."""
    device: dict[str, Any] = {"memory": "16Gi", "gpus": 2, "parallelism": {"pipeline": 2}}

    def asked(tokens: int) -> Fit:
        return fit(GEMMA, engine={"maxModelLen": tokens, "args": ["--pipeline-layers", "1,7"]}, **device)

    told = [asked(tokens).memory for tokens in (1024, 131072)]
    assert [(one.weights, one.kv) for one in told if one] == [(10.0, 0.01), (10.0, 1.0)]
    most = msgspec.structs.replace(GEMMA, max_position_embeddings=10**7)
    refusal = fit(most, engine={"maxModelLen": 400_000, "args": ["--pipeline-layers", "1,7"]}, **device).refusal
    assert refusal is not None
    assert refusal.reason is Reason.DOES_NOT_FIT


@pytest.mark.parametrize(
    ("facts", "stages", "said"),
    [
        (GEMMA, 4, "is 4, and the model has 8 layers, the last 6 of which have to be together: give 3 at most"),
        (msgspec.structs.replace(GEMMA, stages=None), 9, "is 9, and the model has 8 layers: give 8 at most"),
    ],
)
def test_layers_that_read_each_other_are_not_parted(facts: Any, stages: int, said: str) -> None:
    refusal = of(facts, parallelism={"pipeline": stages}).refusal
    assert refusal is not None
    assert (refusal.path, refusal.message) == ("spec.parallelism.pipeline", said)


def test_what_an_older_program_saw_is_divided_evenly() -> None:
    found = of(msgspec.structs.replace(GEMMA, stages=None), gpus=2, parallelism={"pipeline": 2}).memory
    assert found is not None
    assert found.weights == 10.0
    assert found.kv == pytest.approx(kept(2, 2) / 2, abs=0.006)
