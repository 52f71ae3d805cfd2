"""What of a model each device has: of the stages of a pipeline, which some models need memory unevenly for."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from pagefleet_protocol.model_config.stages import latest_start, stage_sizes
from pagefleet_protocol.model_facts import ModelFacts, StageFacts


@dataclass(frozen=True, slots=True)
class Share:
    """Of one stage, or of one device."""

    weights: Fraction
    """Of the bytes that tensors without experts take."""
    whole: Fraction
    """Layers that keep something of every token, once for each rank."""
    windowed: Fraction
    """Layers that keep something of the last tokens only."""


def latest_stage(facts: ModelFacts) -> int:
    """Return the last layer that a stage may begin with."""
    if facts.stages is None:
        return facts.num_layers - 1
    return latest_start(facts.stages.windows, facts.num_kv_shared_layers)


def stage_shares(facts: ModelFacts, stages: int, given: str) -> list[Share]:
    """Return each stage's part of the model; `given` are layers of each with commas between them, where someone did.

    Where nothing is known of layers, stages are even: no engine needs less than that.
    """
    windowed = facts.num_window_layers if facts.window else 0
    if facts.stages is None:
        whole = facts.num_layers - facts.num_kv_shared_layers - windowed
        return [Share(Fraction(1, stages), Fraction(whole, stages), Fraction(windowed, stages))] * stages
    sizes = _sizes(facts, stages, given)
    ends = [0, *itertools.accumulate(sizes)]
    return [_share(facts, facts.stages, range(start, stop)) for start, stop in itertools.pairwise(ends)]


def device_shares(stages: Sequence[Share], tensor: int, num_devices: int) -> list[Share]:
    """Return each device's part: they have the ranks in their order between them, `tensor` of each stage."""
    each = Fraction(len(stages) * tensor, num_devices)
    return [_together(stages, tensor, device * each, (device + 1) * each) for device in range(num_devices)]


def _sizes(facts: ModelFacts, stages: int, given: str) -> list[int]:
    words = given.split(",")
    sizes = [int(word) for word in words] if all(word.strip().isdecimal() for word in words) else []
    # The engine refuses what does not add up, in better words.
    fits = len(sizes) == stages and sum(sizes) == facts.num_layers
    return sizes if fits else stage_sizes(facts.num_layers, stages, latest_stage(facts))


def _share(facts: ModelFacts, stages: StageFacts, layers: range) -> Share:
    is_first, is_last = layers.start == 0, layers.stop == facts.num_layers
    own = sum(stages.layers[layers.start : layers.stop])
    own += is_first * stages.first + is_last * stages.last + (is_first or is_last) * stages.both
    kept = stages.windows[: facts.num_layers - facts.num_kv_shared_layers][layers.start : layers.stop]
    windowed = sum(window > 0 for window in kept)
    weights = Fraction(own, max(1, facts.weights_bytes - facts.expert_bytes))
    return Share(weights, Fraction(len(kept) - windowed), Fraction(windowed))


def _together(stages: Sequence[Share], tensor: int, start: Fraction, stop: Fraction) -> Share:
    """Of the ranks from `start` to `stop`; a part of one counts as that part of what it has."""
    weights = whole = windowed = Fraction(0)
    for number, stage in enumerate(stages):
        first, last = Fraction(number * tensor), Fraction((number + 1) * tensor)
        ranks = max(Fraction(0), min(stop, last) - max(start, first))
        weights += stage.weights * ranks / tensor
        whole += stage.whole * ranks
        windowed += stage.windowed * ranks
    return Share(weights, whole, windowed)
