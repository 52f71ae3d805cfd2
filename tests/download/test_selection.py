"""Which of a repository's files are wanted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagefleet_download.errors import BadModel
from pagefleet_download.selection import check_config, choose_weights, companions, is_weights, top_names

from tests.fakes.model_files import WANTED, sharded


def test_no_code_and_no_pickles() -> None:
    names = top_names([*sharded(), "tokenizer.model", "setup.py", "a.pkl", "b.pt", "run.sh", "x.so", "LICENSE"])
    weights = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}
    assert set(companions(names)) == (WANTED - weights) | {"tokenizer.model"}


@given(st.text(max_size=30))
def test_a_name_is_refused_or_stays_in_the_folder(name: str) -> None:
    try:
        kept = top_names([name])
    except BadModel:
        return
    assert kept in ([], [name])
    for one in kept:
        assert "/" not in one
        assert "\\" not in one
        assert not one.startswith(".")


def test_a_name_is_there_once() -> None:
    with pytest.raises(BadModel, match=r"lists 'tokenizer[.]json' twice"):
        top_names(["tokenizer.json", "config.json", "tokenizer.json"])


def test_our_own_names_are_nobody_elses() -> None:
    assert top_names([".pagefleet.json", ".incoming/x.json", ".pagefleet.lock", "a.json"]) == ["a.json"]


def test_the_index_decides_then_the_single_file_then_all() -> None:
    index = {"weight_map": {"x": "b.safetensors", "y": "a.safetensors", "z": "b.safetensors"}}
    there = ["a.safetensors", "b.safetensors", "c.safetensors", "model.safetensors"]
    assert choose_weights(there, index) == ["a.safetensors", "b.safetensors"]
    assert choose_weights(there, None) == ["model.safetensors"]
    assert choose_weights(there[:3], None) == there[:3]


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["model-00001-of-00002.safetensors"], "index.json is missing"),
        (["a.bin", "b.pt"], "only as a.bin, b.pt, and loading pickled"),
        ([], "has no *.safetensors file"),
    ],
)
def test_what_has_no_weights_that_are_read(names: list[str], words: str) -> None:
    with pytest.raises(BadModel) as refused:
        choose_weights(names, None)
    assert words in str(refused.value)


def test_a_model_without_configuration() -> None:
    with pytest.raises(BadModel, match=r"no config\.json"):
        check_config(["m.safetensors"])
    check_config(["config.json"])


@pytest.mark.parametrize("places", [[], {}, {"a": 1}, None, "x"])
def test_an_index_without_places(places: object) -> None:
    with pytest.raises(BadModel, match="no weight_map"):
        choose_weights(["a.safetensors"], {"weight_map": places})


@pytest.mark.parametrize("name", ["/a.safetensors", "x/a.safetensors", "../a.safetensors", "evil.py", ""])
def test_an_index_of_other_places(name: str) -> None:
    with pytest.raises(BadModel, match="lie beside it"):
        choose_weights([name], {"weight_map": {"a": name}})


def test_bounds() -> None:
    with pytest.raises(BadModel, match="5000 files"):
        companions([f"{number}.json" for number in range(5000)])
    with pytest.raises(BadModel, match="over 200 bytes"):
        companions(["é" * 100 + ".json"])


def test_what_an_engine_would_load_by_itself() -> None:
    loaded = [name for name in sharded() if is_weights(name)]
    assert "consolidated.safetensors" in loaded
    assert "model.safetensors.index.json" in loaded
    assert "config.json" not in loaded
