"""What the core sees of grammars, and what a backend is.

A form becomes a `Grammar` once, in a `GrammarCompiler` that works apart from the step loop; each choice of a request
follows it with a `Matcher` of its own. Masks are bits, one per token id: bit `i % 32` of word `i // 32`, 1 where the
token may come next. Rows are int32 [ceil(vocab_size / 32)].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from pagefleet_protocol.structured_outputs import StructuredOutputsParams

Mask = NDArray[np.int32]
MAX_ACCEPT_S = 0.03
"""Of the processor's time for one token. The parsers' work grows with the text where a grammar is ambiguous throughout;
what takes longer would hold up the step loop, and fails instead."""
MAX_FILL_S = 0.06
"""Of the processor's time for one row's mask, for the same reason; what is found only once may take longer."""
TOO_AMBIGUOUS = "The form has become too complex: its grammar is too ambiguous for a text of this length."


Result_co = TypeVar("Result_co", covariant=True)


class Spelled(Protocol):
    """The bytes that each token id stands for."""

    @property
    def tokens(self) -> Sequence[bytes]:
        """One per row of the logits; empty where a row is padding."""
        ...

    @property
    def ending_ids(self) -> Sequence[int]:
        """Tokens that end an answer."""
        ...

    def row_of(self, token_ids: Sequence[int]) -> Mask:
        """Return the mask that allows these tokens."""
        ...


class Matcher(Protocol):
    """Follows one output through its grammar. Belongs to one thread at a time."""

    @property
    def backend(self) -> GrammarBackend:
        """Whose it is: several of the same backend are filled at once."""
        ...

    @property
    def failure(self) -> Exception | None:
        """The GrammarFailed that has ended it, if one has."""
        ...

    def fill(self, row: Mask) -> bool:
        """Write which tokens may come next into `row`, int32 [ceil(vocab_size / 32)].

        An ending token (of the tokenizer's) is allowed exactly where the form is complete. Another special token is
        allowed nowhere, but where a structural tag asks for it by name.

        Returns:
            False where every token may come: the row is not written, and no mask is needed.

        Raises:
            GrammarFailed: the grammar has become too complex here. The request cannot go on; others can.
        """
        ...

    def accept(self, token_id: int) -> bool:
        """Take the token that was sampled; False, and nothing changes, where the form does not allow it.

        Raises:
            GrammarFailed: as `fill` does.
        """
        ...

    def rollback(self, num_tokens: int) -> None:
        """Take back the last tokens that were accepted, an ending token too."""
        ...

    @property
    def is_complete(self) -> bool:
        """Whether what was accepted has the form, so that the answer may end here."""
        ...

    @property
    def is_finished(self) -> bool:
        """Whether it has the form and nothing may follow: the answer ends here, without an ending token of its own."""
        ...


class Grammar(Protocol):
    """A compiled form; shared by all choices and requests that ask for it, in any thread."""

    @property
    def num_bytes(self) -> int:
        """Memory that it takes, about."""
        ...

    def matcher(self) -> Matcher:
        """Return a new one, at the beginning."""
        ...


class Ticket(Protocol[Result_co]):
    """A form that is being compiled, or a vocabulary that is being read."""

    def done(self) -> bool:
        """Whether `result` returns or raises at once. May be asked in any thread."""
        ...

    def result(self) -> Result_co:
        """Return what came of it, once `done`.

        Raises:
            InvalidRequest: the form cannot be held; the client should know.
            GrammarFailed: it could not be compiled for a reason that is not the client's.
        """
        ...


class GrammarSource(Protocol):
    """Compiles forms apart from the thread that asks for them."""

    @property
    def bell(self) -> int:
        """A file descriptor that is readable while a ticket is done that `silence` has not been called for since."""
        ...

    def silence(self) -> None:
        """Stop the bell; call this before looking at tickets."""
        ...

    def submit(self, params: StructuredOutputsParams, tenant: str = "") -> Ticket[Grammar]:
        """Begin to compile a form, in the tenant's turn. A known one is done at once. Drop the ticket to let go of it.

        Raises:
            QueueFull: too many forms wait to be compiled, of this tenant or of all.
        """
        ...

    def spell(self) -> Ticket[Spelled]:
        """Begin to read what the tokens stand for; done at once where that is known."""
        ...

    def fill(self, rows: Sequence[tuple[Matcher, int]], masks: Mask) -> Mapping[int, Exception]:
        """Fill a row of `masks` for each matcher, in parallel and without the interpreter's lock.

        Args:
            rows: matchers of this source's grammars, none twice, and their places.
            masks: int32 [more than any place, ceil(vocab_size / 32)], contiguous. Where every token may come, all bits
                are set.

        Returns:
            By place what a matcher's own `fill` would raise. Such a row is undefined.
        """
        ...

    def stats(self) -> dict[str, float]:
        """Return counters and gauges, by the names of docs/metrics.md after `pagefleet_engine_`."""
        ...

    def close(self) -> None:
        """End what runs; nothing may be submitted any more."""
        ...


class GrammarBackend(Protocol):
    """One library that holds forms, over one vocabulary; the same in the compiling process and in the core."""

    def compile(self, params: StructuredOutputsParams) -> bytes:
        """Compile a form into bytes that `load` of another process takes. Slow, and run where it can be killed.

        Raises:
            InvalidRequest: the form cannot be held.
        """
        ...

    def load(self, compiled: bytes) -> Grammar:
        """Return what `compile` made: milliseconds, or seconds for a large form, without the interpreter's lock.

        Raises:
            ValueError: the bytes are of another version, or damaged.
        """
        ...

    def fill(self, matchers: Sequence[tuple[Any, int]], masks: Mask) -> None:
        """Fill a row of `masks` for each matcher of this backend's, in parallel; `failure` tells of those that fail."""
        ...
