"""Patches of pod templates: what is merged, replaced and deleted, as kubectl would do it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagefleet_operator.render.strategic_merge import strategic_merge

BASE: dict[str, Any] = {
    "metadata": {"labels": {"a": "1"}},
    "spec": {
        "containers": [
            {"name": "engine", "image": "engine:1", "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]},
            {"name": "side", "image": "side:1"},
        ],
        "volumes": [{"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}}, {"name": "model", "emptyDir": {}}],
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "nodeSelector": {"gpu": "h100"},
    },
}


def container(merged: dict[str, Any], name: str = "engine") -> dict[str, Any]:
    found = [one for one in merged["spec"]["containers"] if one["name"] == name]
    assert len(found) == 1
    return dict(found[0])


def merge_spec(**spec: Any) -> dict[str, Any]:
    return strategic_merge(BASE, {"spec": spec})


def test_mappings_are_merged_and_null_deletes() -> None:
    merged = strategic_merge(BASE, {"metadata": {"labels": {"b": "2"}}, "spec": {"nodeSelector": None}})
    assert merged["metadata"]["labels"] == {"a": "1", "b": "2"}
    assert "nodeSelector" not in merged["spec"]
    assert merged["spec"]["containers"] == BASE["spec"]["containers"]


def test_items_with_a_key_are_merged_in_place_and_new_ones_come_last() -> None:
    env = [{"name": "B", "value": "3"}, {"name": "C", "value": "4"}]
    merged = merge_spec(containers=[{"name": "new", "image": "new:1"}, {"name": "engine", "env": env}])
    assert [one["name"] for one in merged["spec"]["containers"]] == ["engine", "side", "new"]
    assert container(merged)["image"] == "engine:1"
    assert [(one["name"], one["value"]) for one in container(merged)["env"]] == [("A", "1"), ("B", "3"), ("C", "4")]


def test_lists_without_a_key_are_replaced() -> None:
    merged = merge_spec(tolerations=[{"key": "spot"}], containers=[{"name": "engine", "args": ["x"]}])
    assert merged["spec"]["tolerations"] == [{"key": "spot"}]
    assert container(merged)["args"] == ["x"]


def test_an_item_is_deleted_by_its_key() -> None:
    merged = merge_spec(containers=[{"name": "side", "$patch": "delete"}, {"name": "nobody", "$patch": "delete"}])
    assert [one["name"] for one in merged["spec"]["containers"]] == ["engine"]


def test_an_item_a_list_or_a_mapping_is_replaced() -> None:
    item = merge_spec(containers=[{"name": "side", "$patch": "replace", "command": ["x"]}])
    assert container(item, "side") == {"name": "side", "command": ["x"]}
    whole = merge_spec(containers=[{"$patch": "replace"}, {"name": "only", "image": "only:1"}])
    assert whole["spec"]["containers"] == [{"name": "only", "image": "only:1"}]
    mapping = merge_spec(nodeSelector={"$patch": "replace", "zone": "b"})
    assert mapping["spec"]["nodeSelector"] == {"zone": "b"}


def test_a_mapping_is_deleted() -> None:
    assert "nodeSelector" not in merge_spec(nodeSelector={"$patch": "delete"})["spec"]


def test_a_volume_gets_another_source_in_place_of_its_own() -> None:
    claim = {"persistentVolumeClaim": {"claimName": "scratch"}}
    merged = merge_spec(volumes=[{"name": "tmp", **claim}])
    assert merged["spec"]["volumes"][0] == {"name": "tmp", **claim}
    resized = merge_spec(volumes=[{"name": "tmp", "emptyDir": {"sizeLimit": "2Gi"}}])
    assert resized["spec"]["volumes"][0] == {"name": "tmp", "emptyDir": {"sizeLimit": "2Gi"}}


@pytest.mark.parametrize("nothing", [None, {"$patch": "delete"}])
def test_taking_a_source_away_that_a_volume_has_not_leaves_the_one_that_it_has(nothing: Any) -> None:
    volume = {"name": "tmp", "emptyDir": {}}
    patch = {"volumes": [{"name": "tmp", "hostPath": nothing}]}
    assert strategic_merge({"volumes": [volume]}, patch) == {"volumes": [volume]}


@pytest.mark.parametrize("patch", [{"metadata": "text"}, {"spec": {"containers": "text"}}, {"spec": ["a"]}])
def test_another_type_takes_the_place(patch: dict[str, Any]) -> None:
    name, value = next(iter(patch.items()))
    merged = strategic_merge(BASE, patch)[name]
    assert merged == value or merged["containers"] == "text"


SCALARS = st.one_of(st.text(max_size=3), st.integers(), st.booleans())
NAMES = st.sampled_from(["a", "b", "c"])


def documents(values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Mappings with scalars, keyed and plain lists, and mappings below."""

    def wider(below: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        item = st.builds(lambda name, more: {**more, "name": name}, NAMES, st.dictionaries(NAMES, below, max_size=2))
        keyed = st.lists(item, max_size=3, unique_by=lambda one: one["name"])
        fields = {"containers": keyed, "volumes": keyed, "env": keyed, "tolerations": st.lists(SCALARS, max_size=2)}
        return st.fixed_dictionaries({}, optional=fields | {"a": below, "b": below})

    return st.recursive(values, wider, max_leaves=12).filter(lambda one: isinstance(one, dict))


DOCUMENTS = documents(SCALARS)
PATCHES = documents(st.one_of(SCALARS, st.none(), st.sampled_from([{"$patch": "delete"}, {"$patch": "replace"}])))


@given(DOCUMENTS)
def test_an_empty_patch_changes_nothing(base: dict[str, Any]) -> None:
    assert strategic_merge(base, {}) == base


@given(DOCUMENTS, PATCHES)
def test_the_same_patch_again_changes_nothing_and_neither_side_is_touched(
    base: dict[str, Any], patch: dict[str, Any]
) -> None:
    before = copy.deepcopy((base, patch))
    once = strategic_merge(base, patch)
    assert strategic_merge(once, patch) == once
    assert (base, patch) == before


@given(DOCUMENTS)
def test_what_is_merged_into_nothing_is_itself(base: dict[str, Any]) -> None:
    assert strategic_merge({}, base) == base
