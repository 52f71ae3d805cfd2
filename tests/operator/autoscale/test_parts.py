"""Prefill and decode engines of one service are scaled by what each is for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pagefleet_operator.autoscale.demand import EnginesSeen, Learned, load_demands, of_part, pressure_demands
from pagefleet_operator.autoscale.policy import ScalingPolicy, scaling_policy
from pagefleet_operator.autoscale.signals import FleetSignals
from pagefleet_protocol.inference_service import Autoscaling, ScalingTarget

from tests.operator.autoscale.scaling_scene import BUSY, Scene, arriving

PROMPTS = replace(arriving(5), running=0.0, kv_usage=0.1)
ANSWERS = replace(BUSY, running=60.0, kv_usage=1.0, engines=4.0, generated_per_s=10.0)


def names(policy: ScalingPolicy, signals: FleetSignals) -> set[str]:
    engines, learned = EnginesSeen(ready=2), Learned(rate=10_000.0)
    both = (*load_demands(policy, signals, engines, learned), *pressure_demands(policy, signals, engines, learned))
    return {one.name for one in of_part(policy, both)}


def test_each_part_hears_its_own_demands_alone() -> None:
    signals = replace(arriving(5), running=30.0, kv_usage=0.9, generated_per_s=200.0, queued=9.0, queued_tokens=9000.0)
    whole = ScalingPolicy(max=8, ttft_s=2.0, itl_s=0.05, queue=4.0)
    prefill, decode = names(replace(whole, part="prefill"), signals), names(replace(whole, part="decode"), signals)
    assert prefill == {"prefill", "backlog", "queue"}
    assert decode == {"kv", "decode"}
    assert names(whole, signals) == prefill | decode


def test_prompts_ask_for_prefill_engines_alone() -> None:
    scenes = {part: Scene(part=part) for part in ("prefill", "decode")}
    for scene in scenes.values():
        for _ in range(20):
            scene.decide(PROMPTS)
    assert scenes["prefill"].desired >= 5
    assert scenes["decode"].desired == 2


def test_answers_ask_for_decode_engines_alone() -> None:
    scenes = {part: Scene(part=part, ttft_s=None) for part in ("prefill", "decode")}
    for scene in scenes.values():
        for _ in range(20):
            scene.decide(ANSWERS)
    assert scenes["decode"].desired == 5, "a full cache of four, at most 0.8"
    assert scenes["prefill"].desired == 2


@pytest.mark.parametrize("part", ["prefill", "decode"])
def test_both_parts_rest_by_the_same_silence(part: str) -> None:
    scene = Scene(part=part, idle_after_s=20.0, now=1000.0)
    quiet = replace(BUSY, running=0.0, arrivals=0.0)
    for _ in range(15):
        scene.decide(quiet)
    assert scene.desired == 0
    scene.decide(replace(quiet, held=1.0, arrivals=1.0))
    assert scene.desired == 1


def test_targets_of_a_part_reach_its_policy() -> None:
    prefill = scaling_policy(Autoscaling(max=4, target=ScalingTarget(ttft_ms=500)), "prefill")
    decode = scaling_policy(Autoscaling(max=4, target=ScalingTarget(kv_usage=0.6)), "decode")
    assert (prefill.part, prefill.ttft_s) == ("prefill", 0.5)
    assert (decode.part, decode.kv_usage) == ("decode", 0.6)
