"""A part is continued, hashed and verified, and never written after it is closed."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagefleet_download.errors import BadSettings
from pagefleet_download.source import Algorithm, Digest, RemoteFile
from pagefleet_download.transfer import PartFile

DATA = bytes(range(256)) * 40


def digest_of(data: bytes, algorithm: Algorithm) -> Digest:
    hasher = Digest(algorithm, "").hasher(len(data))
    hasher.update(data)
    return Digest(algorithm, hasher.hexdigest())


def file_of(data: bytes = DATA, algorithm: Algorithm | None = "sha256", tag: str = "t") -> RemoteFile:
    return RemoteFile("a.json", len(data), tag, digest_of(data, algorithm) if algorithm else None)


@given(
    cuts=st.lists(st.integers(0, len(DATA)), max_size=6), algorithm=st.sampled_from(["sha256", "md5", "git-sha1", None])
)
def test_however_it_is_cut_the_bytes_are_verified(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int], algorithm: Algorithm | None
) -> None:
    path = tmp_path_factory.mktemp("part") / "a.part"
    ends = [*sorted(cuts), len(DATA)]
    for end in ends:
        part = PartFile(path, file_of(algorithm=algorithm))
        part.open()
        part.write(DATA[part.size : end])
        assert part.size == end
        installed = part.verified()
        part.close()
        assert (installed is not None) == (end == len(DATA))
    assert installed is not None
    assert (installed.sha256, installed.size) == (hashlib.sha256(DATA).hexdigest(), len(DATA))
    assert path.read_bytes() == DATA


@pytest.mark.parametrize("algorithm", ["sha256", "md5", "git-sha1"])
def test_one_wrong_bit_is_found_and_a_reset_begins_again(tmp_path: Path, algorithm: Algorithm) -> None:
    part = PartFile(tmp_path / "a.part", file_of(algorithm=algorithm))
    part.open()
    part.write(DATA[:-1] + b"?")
    assert part.verified() is None
    part.reset()
    assert (part.size, (tmp_path / "a.part").stat().st_size) == (0, 0)
    part.write(DATA)
    assert part.verified() is not None
    part.close()


def test_git_names_a_blob_by_its_length_and_content() -> None:
    # git hash-object of a file that holds "hello\n"
    assert digest_of(b"hello\n", "git-sha1").hexdigest == "ce013625030ba8dba906f756967f9e9ca394464a"


@pytest.mark.parametrize(("there", "tag"), [(DATA + b"more", "t"), (DATA[:100], "")])
def test_what_cannot_be_the_beginning_is_thrown_away(tmp_path: Path, there: bytes, tag: str) -> None:
    (tmp_path / "a.part").write_bytes(there)
    part = PartFile(tmp_path / "a.part", file_of(tag=tag))
    part.open()
    assert part.size == 0
    part.write(DATA)
    assert part.verified() is not None
    part.close()
    assert (tmp_path / "a.part").read_bytes() == DATA


def test_nothing_is_written_after_the_end(tmp_path: Path) -> None:
    part = PartFile(tmp_path / "a.part", file_of())
    part.open()
    part.write(DATA[:10])
    part.close()
    part.write(DATA[10:])
    part.reset()
    assert (part.size, part.verified()) == (10, None)
    assert (tmp_path / "a.part").read_bytes() == DATA[:10]
    part.open()
    part.write(DATA)
    part.close()
    assert (tmp_path / "a.part").read_bytes() == DATA[:10]


def test_a_link_is_not_followed_and_a_pipe_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "victim").write_bytes(b"precious")
    (tmp_path / "a.part").symlink_to("victim")
    part = PartFile(tmp_path / "a.part", file_of())
    with pytest.raises(OSError, match="symbolic links"):
        part.open()
    part.close()
    assert (tmp_path / "victim").read_bytes() == b"precious"
    os.mkfifo(tmp_path / "b.part")
    pipe = PartFile(tmp_path / "b.part", file_of())
    with pytest.raises(BadSettings, match="is not a file"):
        pipe.open()
    pipe.close()
