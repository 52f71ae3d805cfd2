"""The binding of NCCL against a library in C that checks what it is given; and the real one, where there is one."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
from pagefleet_kv.cuda_memory import CudaError, CudaSharedMemory, find_cudart
from pagefleet_kv.p2p.planes.nccl.library import (
    OLDEST,
    Config,
    NcclError,
    NcclFunctions,
    State,
    UniqueId,
    find_nccl,
    version_text,
)

COMPILER = shutil.which("cc")
ADDRESS, STREAM, LONG = 0x700000001000, 0x600000002000, 5 << 32


class Stub:
    """The compiled library, and what it noted."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.library = ctypes.CDLL(self.path)

    def set(self, name: str, value: int) -> None:
        """Let it answer so."""
        ctypes.c_int.in_dll(self.library, f"stub_{name}").value = value

    def complaint(self) -> str:
        """What was wrong first."""
        return (ctypes.c_char * 64).in_dll(self.library, "stub_complaint").value.decode()

    def calls(self) -> list[int]:
        """How often each function was called."""
        return list((ctypes.c_int * 8).in_dll(self.library, "stub_calls"))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if COMPILER is None:
        pytest.skip("there is no C compiler")
    target = tmp_path_factory.mktemp("nccl") / "libnccl_stub.so"
    source = Path(__file__).with_name("nccl_stub.c")
    subprocess.run([COMPILER, "-Wall", "-Werror", "-shared", "-fPIC", "-o", target, source], check=True)
    return target


@pytest.fixture
def stub(compiled: Path, tmp_path: Path) -> Stub:
    own = tmp_path / "libnccl.so.2"  # of another path: the loader gives each test its own
    own.write_bytes(compiled.read_bytes())
    return Stub(own)


def test_every_function_is_given_what_nccl_declares(stub: Stub) -> None:
    nccl = NcclFunctions(stub.path)
    assert nccl.version == 22907
    unique_id = nccl.unique_id()
    assert unique_id == bytes(range(128))
    communicator = nccl.begin(unique_id, 1, "kv to d", 2)
    assert nccl.state(communicator) is State.IN_PROGRESS
    stub.set("state", 0)
    assert nccl.state(communicator) is State.READY
    nccl.send(communicator, ADDRESS, LONG, STREAM)
    nccl.recv(communicator, ADDRESS, LONG, STREAM)
    nccl.abort(communicator)
    assert stub.complaint() == ""
    assert stub.calls() == [1, 1, 2, 1, 1, 1, 0, 0]


def test_the_name_of_a_communicator_lives_as_long_as_it_does(stub: Stub) -> None:
    nccl = NcclFunctions(stub.path)
    communicator = nccl.begin(nccl.unique_id(), 1, "kv to d", 2)
    others = [b"%07d" % number for number in range(1000)]  # take the memory of what was let go
    assert ctypes.c_char_p.in_dll(stub.library, "stub_name").value == b"kv to d"
    del others
    nccl.abort(communicator)


def test_errors_say_what_nccl_says(stub: Stub) -> None:
    nccl = NcclFunctions(stub.path)
    stub.set("state", 6)
    with pytest.raises(NcclError, match=r"the communicator: some error \(Duplicate GPU detected\)"):
        nccl.state(nccl.begin(nccl.unique_id(), 1, "kv to d", 2))
    stub.set("result", 5)
    with pytest.raises(NcclError, match="ncclCommInitRankConfig: invalid usage"):
        nccl.begin(bytes(range(128)), 1, "kv to d", 2)
    assert stub.calls()[5] == 1  # what had been begun was ended


def test_a_library_that_is_too_old_is_refused(stub: Stub) -> None:
    stub.set("version", OLDEST - 1)
    with pytest.raises(NcclError, match=r"NCCL 2\.26\.99 is too old: 2\.27\.0 or newer"):
        NcclFunctions(stub.path)


def test_a_library_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "libnccl.so.2").write_bytes(b"\x7fELF?")
    for path in (tmp_path / "libnccl.so.2", tmp_path / "nowhere.so"):
        with pytest.raises(NcclError, match="cannot be loaded"):
            NcclFunctions(str(path))
        with pytest.raises(CudaError, match="cannot be loaded"):
            CudaSharedMemory(str(path))


def test_a_library_of_something_else_is_refused() -> None:
    with pytest.raises(NcclError, match="cannot be loaded"):
        NcclFunctions("libc.so.6")


def test_what_is_passed_has_the_size_that_nccl_expects() -> None:
    assert (ctypes.sizeof(UniqueId), ctypes.sizeof(Config)) == (128, 56)
    assert (Config.net_name.offset, Config.comm_name.offset) == (32, 48)


@pytest.mark.parametrize(("version", "text"), [(22907, "2.29.7"), (23000, "2.30.0"), (22809, "2.28.9")])
def test_versions_are_written_as_people_do(version: int, text: str) -> None:
    assert version_text(version) == text


def test_the_real_library_draws_ids_where_there_is_one() -> None:
    try:
        nccl = NcclFunctions(find_nccl())
    except NcclError:
        pytest.skip("there is no NCCL here")
    assert len(nccl.unique_id()) == 128
    assert nccl.unique_id() != nccl.unique_id()


def test_the_runtime_is_looked_for_by_its_major_version() -> None:
    assert find_cudart("13.0").endswith("libcudart.so.13")
    assert find_cudart("12.8").endswith("libcudart.so.12")
