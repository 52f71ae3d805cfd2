from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from pagefleet_engine.errors import ConfigError
from pagefleet_engine.kv_transfer.blob_store.manifest import MANIFEST, claim_folder

from tests.fakes.byte_pages import SHAPE


def test_new_folder_is_made_and_claimed_again(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    claim_folder(folder, SHAPE, alone=True).release()
    written = json.loads((folder / MANIFEST).read_text())
    assert written["shape"]["block_size"] == SHAPE.block_size
    claim_folder(folder, SHAPE, alone=True).release()
    assert [path.name for path in folder.iterdir()] == [MANIFEST]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"block_size": 8}, "block_size 4 here, 8 there"),
        ({"model": "ab" * 32}, "model "),
        ({"cache_dtype": "fp8"}, "cache_dtype float32 here, fp8 there"),
    ],
)
def test_folder_of_another_shape_is_refused_in_one_line(
    tmp_path: Path, change: dict[str, str | int], said: str
) -> None:
    claim_folder(tmp_path, msgspec.structs.replace(SHAPE, **change), alone=True).release()
    with pytest.raises(ConfigError, match=said) as caught:
        claim_folder(tmp_path, SHAPE, alone=True)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_folder_of_another_version_is_refused_whatever_else_it_says(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text('{"pagefleet_kv_folder": 7, "shapes": ["of another kind"]}')
    with pytest.raises(ConfigError, match="is of version 7, this engine's is 1"):
        claim_folder(tmp_path, SHAPE, alone=False)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"pagefleet_kv_folder": 1}', b"\xff" * 100_000])
def test_damaged_manifest_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / MANIFEST).write_bytes(content)
    with pytest.raises(ConfigError, match="is damaged"):
        claim_folder(tmp_path, SHAPE, alone=False)


def test_folder_with_somebodys_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("chapter 1")
    with pytest.raises(ConfigError, match=r"holds other files \(thesis.tex\)"):
        claim_folder(tmp_path, SHAPE, alone=True)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_folder_whose_manifest_was_being_written_is_no_strangers(tmp_path: Path) -> None:
    (tmp_path / f"{MANIFEST}.0011223344556677").write_text("{")
    claim_folder(tmp_path, SHAPE, alone=True).release()
    assert (tmp_path / MANIFEST).exists()


def test_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        claim_folder(tmp_path / "file", SHAPE, alone=True)


def test_one_engine_at_a_time_has_a_folder_alone(tmp_path: Path) -> None:
    first = claim_folder(tmp_path, SHAPE, alone=True)
    with pytest.raises(ConfigError, match="is used by another engine"):
        claim_folder(tmp_path, SHAPE, alone=True)
    first.release()
    first.release()
    claim_folder(tmp_path, SHAPE, alone=True).release()


def test_engines_may_share_a_folder(tmp_path: Path) -> None:
    claims = [claim_folder(tmp_path, SHAPE, alone=False) for _ in range(2)]
    assert {claim.folder for claim in claims} == {tmp_path}
    with pytest.raises(ConfigError, match="is used by another engine or connector"):
        claim_folder(tmp_path, SHAPE, alone=True)
    for claim in claims:
        claim.release()
