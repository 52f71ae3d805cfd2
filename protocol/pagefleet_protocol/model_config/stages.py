"""Which layers each stage of a pipeline has: engines build by it, and plans reckon with it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence


def latest_start(kinds: Sequence[Hashable], num_reading: int) -> int:
    """Return the last layer that a stage may begin with.

    Args:
        kinds: of all layers.
        num_reading: of the last layers, that read what the last one before them of their kind keeps: in one stage.
    """
    keeping = len(kinds) - num_reading
    if not num_reading:
        return keeping - 1
    last = {kind: layer for layer, kind in enumerate(kinds[:keeping])}
    return min(last[kind] for kind in kinds[keeping:])


def stage_sizes(num_layers: int, stages: int, latest: int) -> list[int]:
    """Return how many layers each of at most `latest + 1` stages has, none of which begins behind layer `latest`.

    In equal parts. Layers that are over go to the stages between the first and the last, which have an embedding and a
    head besides; then to the first, whose embedding takes memory but no time.
    """
    last = max(num_layers // stages, num_layers - latest)
    each, over = divmod(num_layers - last, max(1, stages - 1))
    favoured = [*range(1, stages - 1), 0][:over]
    return [*(each + (stage in favoured) for stage in range(stages - 1)), last]
