from pathlib import Path

import pytest
from pagefleet_engine.engine_core.model_folder import resolve_model_folder, served_names
from pagefleet_engine.errors import ConfigError, ModelLoadError


def test_a_folder_with_a_config_is_taken(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model_folder(str(tmp_path)) == tmp_path
    assert resolve_model_folder(f"file://{tmp_path}") == tmp_path


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("/no/such/folder", "no such folder; give a folder"),
        ("some-org/some-model", "no such folder; give a folder"),
    ],
)
def test_what_is_no_folder_gets_a_remedy(model: str, says: str) -> None:
    with pytest.raises(ModelLoadError, match=says) as caught:
        resolve_model_folder(model)
    assert str(caught.value).startswith(model)
    assert "\n" not in str(caught.value)


def test_empty_folders_and_files_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="the folder is empty"):
        resolve_model_folder(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelLoadError, match=r"no config\.json"):
        resolve_model_folder(str(tmp_path))
    with pytest.raises(ModelLoadError, match="is a file"):
        resolve_model_folder(str(tmp_path / "model.safetensors"))


@pytest.mark.parametrize(
    ("model", "given", "names"),
    [
        ("/models/qwen/", None, ("qwen",)),
        ("/models/a,b", None, ("a,b",)),
        ("builtin://tiny", None, ("tiny",)),
        ("/models/qwen", "mine", ("mine",)),
        ("/models/qwen", "org/mine:8b, gpt-4o,gpt-4o", ("org/mine:8b", "gpt-4o")),
    ],
)
def test_the_names_for_clients(model: str, given: str | None, names: tuple[str, ...]) -> None:
    assert served_names(model, given) == names


@pytest.mark.parametrize("given", [",", "a,", ",a", "a,,b", "a, ,b"])
def test_an_empty_name_is_a_mistake(given: str) -> None:
    with pytest.raises(ConfigError, match="served_model_name"):
        served_names("/m", given)
