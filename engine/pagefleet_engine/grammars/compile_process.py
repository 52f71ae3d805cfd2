"""The process that compiles grammars: what explodes there is killed with it, and nothing else is.

Frames of a length (4 bytes, big endian) and msgpack on its standard input and output; one answer per question.
"""

from __future__ import annotations

import os
import resource
import select
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

import msgspec
from pagefleet_protocol.structured_outputs import StructuredOutputsParams

from pagefleet_engine.errors import GrammarFailed, InvalidRequest, ModelLoadError
from pagefleet_engine.grammars.backends import make_backend
from pagefleet_engine.grammars.port import GrammarBackend
from pagefleet_engine.grammars.vocabulary import Vocabulary, VocabularyFiles

START_S = 120.0
"""For the interpreter, the libraries and the tokenizer."""
_LENGTH = struct.Struct(">I")


class Open(msgspec.Struct, tag=True, frozen=True):
    """The first question: read the vocabulary."""

    files: VocabularyFiles


class Prepare(msgspec.Struct, tag=True, frozen=True):
    """Make a backend, which takes its time."""

    backend: str
    memory: int
    """Bytes that compiling may take beyond what the process has then."""


class Compile(msgspec.Struct, tag=True, frozen=True):
    """Compile a form, by a backend that was made."""

    backend: str
    params: StructuredOutputsParams


class Compiled(msgspec.Struct, tag=True, frozen=True):
    """What came of it: nothing, where a backend was made."""

    data: bytes


class Refused(msgspec.Struct, tag=True, frozen=True):
    """The form cannot be held."""

    message: str
    param: str | None
    code: str | None


class Failed(msgspec.Struct, tag=True, frozen=True):
    """Something else went wrong."""

    message: str


class OutOfMemory(msgspec.Struct, tag=True, frozen=True):
    """Compiling took more than it may."""


_Question = Open | Prepare | Compile


class _Opened(msgspec.Struct, tag=True, frozen=True):
    vocabulary: Vocabulary


_questions = msgspec.msgpack.Decoder(_Question)
_answers = msgspec.msgpack.Decoder(_Opened | Compiled | Refused | OutOfMemory | Failed)


class TooCostly(InvalidRequest):
    """A form that took too much here and now."""


class CompileProcess:
    """The other side of it: starts the process when it is first needed, and again after it was killed.

    Args:
        files: of the vocabulary.
        seconds: that one form may take.
        memory: bytes that compiling may take beyond the process's own.
    """

    def __init__(self, files: VocabularyFiles, seconds: float, memory: int) -> None:
        self._files = files
        self._seconds = seconds
        self._memory = memory
        self._process: subprocess.Popen[bytes] | None = None
        self._vocabulary: Vocabulary | None = None
        self._prepared: set[str] = set()

    def vocabulary(self) -> Vocabulary:
        """Return the vocabulary.

        Raises:
            GrammarFailed: it cannot be read.
        """
        self._started()
        assert self._vocabulary is not None, "the process has told it"
        return self._vocabulary

    def compile(self, backend: str, params: StructuredOutputsParams) -> bytes:
        """Compile a form.

        Raises:
            InvalidRequest: it cannot be held.
            TooCostly: it takes too much.
            GrammarFailed: the process cannot work.
        """
        process = self._started()
        if backend not in self._prepared:
            self._answer(process, Prepare(backend, self._memory), START_S)
            self._prepared.add(backend)
        answer = self._ask(process, Compile(backend, params), self._seconds)
        if isinstance(answer, Compiled):
            return answer.data
        if isinstance(answer, Refused):
            raise InvalidRequest(answer.message, answer.param, answer.code)
        if isinstance(answer, Failed):
            raise GrammarFailed(answer.message)
        if not isinstance(answer, OutOfMemory):
            self.kill()
        what = f"more than {self._seconds:g} seconds" if answer is None else "too much memory"
        path = f"structured_outputs.{params.form}"
        raise TooCostly(f"Invalid '{path}': to compile it takes {what}. Make it simpler.", path, "invalid_value")

    def kill(self) -> None:
        """End the process; the next question starts another."""
        process, self._process = self._process, None
        self._prepared.clear()
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.kill()
        command = [sys.executable, "-m", "pagefleet_engine.grammars.compile_process"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        # A session of its own: Ctrl-C is the engine's to answer. It ends when its input does, however the engine ends.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
        )
        answer = self._answer(self._process, Open(self._files), START_S)
        assert isinstance(answer, _Opened), "it is what the process says to that"
        self._vocabulary = answer.vocabulary
        return self._process

    def _answer(
        self, process: subprocess.Popen[bytes], question: _Question, seconds: float
    ) -> _Opened | Compiled | Refused:
        """Ask what must be answered.

        Raises:
            GrammarFailed: it is not.
        """
        answer = self._ask(process, question, seconds)
        if answer is None or isinstance(answer, bool | OutOfMemory | Failed):
            self.kill()
            why = answer.message if isinstance(answer, Failed) else "the process that compiles does not start"
            raise GrammarFailed(f"Forms of answers are not available: {why}.")
        return answer

    def _ask(
        self, process: subprocess.Popen[bytes], question: _Question, seconds: float
    ) -> _Opened | Compiled | Refused | OutOfMemory | Failed | bool | None:
        """Return the answer; None where it takes too long, False where the process has ended."""
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            _write(process.stdin, question)
            data = _read_within(process.stdout.fileno(), time.monotonic() + seconds)
        except TimeoutError:
            return None
        except (OSError, EOFError):
            return False
        answer: _Opened | Compiled | Refused | OutOfMemory | Failed = _answers.decode(data)
        return answer


def _write(stream: IO[bytes], message: object) -> None:
    data = msgspec.msgpack.encode(message)
    stream.write(_LENGTH.pack(len(data)) + data)
    stream.flush()


def _read_within(descriptor: int, deadline: float) -> bytes:
    (length,) = _LENGTH.unpack(_read_bytes(descriptor, _LENGTH.size, deadline))
    return _read_bytes(descriptor, length, deadline)


def _read_bytes(descriptor: int, size: int, deadline: float) -> bytes:
    data, there = bytearray(), select.poll()
    there.register(descriptor, select.POLLIN)
    while len(data) < size:
        if not there.poll(max(deadline - time.monotonic(), 0) * 1000):
            raise TimeoutError
        part = os.read(descriptor, size - len(data))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


class _Worker:
    """What the process does: one answer to each question."""

    def __init__(self) -> None:
        self._vocabulary: Vocabulary | None = None
        self._backends: dict[str, GrammarBackend] = {}

    def answer(self, question: _Question) -> _Opened | Compiled | Refused | OutOfMemory | Failed:
        """Do what is asked for."""
        try:
            if isinstance(question, Open):
                self._vocabulary = question.files.load()
                return _Opened(self._vocabulary)
            if isinstance(question, Prepare):
                assert self._vocabulary is not None, "it is opened first"
                _limit_memory(None)
                self._backends[question.backend] = make_backend(question.backend, self._vocabulary)
                _limit_memory(question.memory)
                return Compiled(b"")
            return Compiled(self._backends[question.backend].compile(question.params))
        except InvalidRequest as error:
            return Refused(error.message, error.param, error.code)
        except (ModelLoadError, GrammarFailed, OSError) as error:
            return Failed(str(error))
        except MemoryError:
            return OutOfMemory()


def _limit_memory(more: int | None) -> None:
    """Have allocations fail beyond what the process has by now and `more` bytes; None: no more."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    most = hard if more is None else pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))


def main() -> None:
    """Answer questions until there are no more."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    os.nice(5)  # the engine's own work comes first
    questions = sys.stdin.buffer
    worker = _Worker()
    while len(head := questions.read(_LENGTH.size)) == _LENGTH.size:
        _write(answers, worker.answer(_questions.decode(questions.read(_LENGTH.unpack(head)[0]))))


if __name__ == "__main__":
    main()
