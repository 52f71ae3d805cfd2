"""Layers in groups: every layer has one place, little of a block is padding, and there are few groups."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pagefleet_engine.core.kv_groups import MAX_GROUPS, KVGroup, group_layers

from tests.example_counts import examples

GEMMA3_27B = [None if layer % 6 == 5 else 1024 for layer in range(62)]
GEMMA3_4B = [None if layer % 6 == 5 else 1024 for layer in range(34)]
GEMMA2_9B = [None if layer % 2 else 4096 for layer in range(42)]


def test_layers_that_see_everything_are_one_group() -> None:
    groups = group_layers([None] * 36)
    assert groups.groups == (KVGroup(tuple(range(36)), None),)
    assert groups.layers_per_block == 36
    assert groups.padding_share == 0.0


def test_layers_with_the_same_window_are_one_group() -> None:
    groups = group_layers([4096] * 32)
    assert groups.groups == (KVGroup(tuple(range(32)), 4096),)


@pytest.mark.parametrize(
    ("windows", "num_full", "num_windowed", "layers_per_block", "padding"),
    [
        (GEMMA3_27B, 1, 6, 10, 8 / 70),
        (GEMMA3_4B, 1, 6, 5, 1 / 35),
        ([None if layer % 6 == 5 else 1024 for layer in range(48)], 1, 5, 8, 0.0),
        ([None if layer % 6 == 5 else 512 for layer in range(26)], 1, 6, 4, 2 / 28),
        (GEMMA2_9B, 1, 1, 21, 0.0),
        ([None, 4, 4, 4], 1, 3, 1, 0.0),
    ],
)
def test_known_models(
    windows: list[int | None], num_full: int, num_windowed: int, layers_per_block: int, padding: float
) -> None:
    groups = group_layers(windows)
    assert [group.window is None for group in groups.groups] == [True] * num_full + [False] * num_windowed
    assert groups.layers_per_block == layers_per_block
    assert groups.padding_share == pytest.approx(padding)


def test_several_windows_stand_in_falling_order() -> None:
    groups = group_layers([512, 512, None, 4096, 512, 512, None, 4096])
    assert [group.window for group in groups.groups] == [None, 4096, 512, 512]
    assert groups.groups[2].layers == (0, 1)


def test_too_many_windows_are_held_as_the_next_larger() -> None:
    windows = list(range(1, MAX_GROUPS + 4))
    groups = group_layers(windows)
    assert len(groups) == MAX_GROUPS
    for layer, window in enumerate(windows):
        held = groups.groups[groups.place(layer)[0]].window
        assert held is not None
        assert held >= window


def test_a_layer_that_is_not_there_is_named() -> None:
    with pytest.raises(IndexError, match="layer 2 is in no group"):
        group_layers([None, None]).place(2)


@pytest.mark.parametrize("windows", [[], [None, 0], [-1]])
def test_windows_that_make_no_sense_are_refused(windows: list[int | None]) -> None:
    with pytest.raises(ValueError, match="at least one"):
        group_layers(windows)


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.one_of(st.none(), st.integers(1, 12), st.sampled_from([512, 1024])), min_size=1, max_size=70))
def test_every_layer_has_a_place_of_its_own_that_holds_its_window(windows: list[int | None]) -> None:
    groups = group_layers(windows)
    places = [groups.place(layer) for layer in range(len(windows))]
    assert len(set(places)) == len(windows)
    assert sum(len(group.layers) for group in groups.groups) == len(windows)
    assert len(groups) <= MAX_GROUPS
    for window, (group, index) in zip(windows, places, strict=True):
        held = groups.groups[group].window
        assert index < groups.layers_per_block
        assert held is None if window is None else held is not None and held >= window
