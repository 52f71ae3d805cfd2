"""Grammars by llguidance: an Earley parser over lexemes whose automata grow while they are used.

Nothing is computed ahead over the vocabulary, and what was compiled is its text, which is read again where it is
loaded: milliseconds, but seconds for some forms of several hundred kB. Every table that grows has a limit, and a
matcher that reaches one fails alone.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from pagefleet_protocol.structured_outputs import StructuredOutputsParams

from pagefleet_engine.errors import GrammarFailed
from pagefleet_engine.grammars.guidance_text import guidance_text
from pagefleet_engine.grammars.library_matcher import LibraryMatcher
from pagefleet_engine.grammars.port import Mask
from pagefleet_engine.grammars.vocabulary import Vocabulary

_STRING = r'[^"\\\x00-\x1F\x7F]'
_TEXT = r'[^"\\\x00-\x1F\x7F<>\[\]{}|`]'
_SLICES = (r"[\x20\x0A\x0D\x09]+", f"{_STRING}{{1,10}}", f"{_STRING}{{1,30}}", f"{_TEXT}+", f"{_STRING}+")
"""Classes of tokens of which a mask takes all at once, where it can: whitespace, what strings of JSON may hold, and
text without what calls of tools begin with."""
_MAX_ITEMS_IN_ROW = 10_000
"""Of 2,500 properties that may be left out. More take a large part of MAX_ACCEPT_S for a token."""
_MAX_TRIED = 32
"""Tokens of an answer that is tried when a form is compiled: what breaks at once is refused before it is asked for."""
_BASE_BYTES = 64 * 1024
_BYTES_PER_CHAR = 32
"""Measured over schemas of 1 to 100 kB."""


class GuidanceBackend:
    """llguidance over one vocabulary. May be used from several threads.

    Args:
        vocabulary: with an ending token at least.
        num_threads: that fill masks; default: as many as this process may use, 32 at most.
        clock: of the processor's time that the thread has used.
    """

    def __init__(
        self, vocabulary: Vocabulary, num_threads: int | None = None, clock: Callable[[], float] = time.thread_time
    ) -> None:
        assert vocabulary.ending_ids, "checked before"
        self._vocabulary = vocabulary
        self.clock = clock
        tokens = TokenizerWrapper(_Tokens(vocabulary))
        # In two calls: each keeps the interpreter's lock, a third of a second for a large vocabulary
        self._tokenizer = LLTokenizer(tokens, eos_token=list(vocabulary.ending_ids), slices=[]).with_slices(
            list(_SLICES)
        )
        self.ending_ids = frozenset(vocabulary.ending_ids)
        self.ending_row = vocabulary.row_of(vocabulary.ending_ids)
        blank = [id_ for id_, token in enumerate(vocabulary.tokens) if token.isspace()]
        self._tried = ~vocabulary.row_of([*vocabulary.ending_ids, *blank])
        self._limits = LLParserLimits(  # work and memory of one matcher: some 40 ms a step and 100 MB at most
            initial_lexer_fuel=2_000_000,
            step_lexer_fuel=500_000,
            step_max_items=25_000,
            max_items_in_row=_MAX_ITEMS_IN_ROW,
            max_lexer_states=50_000,
            verbose_errors=False,
        )
        self._executor = LLExecutor(num_threads or min(len(os.sched_getaffinity(0)), 32))

    def compile(self, params: StructuredOutputsParams) -> bytes:
        """Write a form in llguidance's language and try it.

        Raises:
            InvalidRequest: it cannot be held.
        """
        return guidance_text(params, self._vocabulary, self._fault).encode()

    def _fault(self, text: str) -> str | None:
        """Return why a grammar cannot be; None if it can."""
        matcher = self._matcher(text)
        row = np.zeros_like(self.ending_row)
        for _ in range(_MAX_TRIED):
            if matcher.is_error() or matcher.is_stopped():
                break
            matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            allowed = np.flatnonzero(np.unpackbits((row & self._tried).view(np.uint8), bitorder="little"))
            if matcher.is_error() or not len(allowed):
                break
            matcher.try_consume_tokens([int(allowed[0])])
        return matcher.get_error() if matcher.is_error() else None

    def load(self, compiled: bytes) -> GuidanceGrammar:
        """Return what `compile` made.

        Raises:
            ValueError: it is not.
        """
        matcher = self._matcher(compiled.decode())
        if matcher.is_error():
            raise ValueError(f"a grammar cannot be read back: {_first_line(matcher.get_error())}")
        return GuidanceGrammar(matcher, self, _BASE_BYTES + _BYTES_PER_CHAR * len(compiled))

    def _matcher(self, text: str) -> LLMatcher:
        return LLMatcher(self._tokenizer, text, log_level=0, limits=self._limits)

    def fill(self, matchers: Sequence[tuple[GuidanceMatcher, int]], masks: Mask) -> None:
        """Fill rows of `masks` in parallel; a matcher that fails leaves its row undefined, and `failure` says why."""
        rows = [(matcher.inner, row) for matcher, row in matchers if not matcher.has_ended]
        if rows:
            self._executor.unsafe_compute_mask_ptr(rows, masks.ctypes.data, masks.shape[1] * 4, masks.shape[0])
        for matcher, row in matchers:
            if matcher.has_ended:
                matcher.fill(masks[row])


class GuidanceGrammar:
    """One form; a matcher is a copy of its first one."""

    def __init__(self, first: LLMatcher, backend: GuidanceBackend, num_bytes: int) -> None:
        self._first = first
        self._backend = backend
        self._num_bytes = num_bytes

    @property
    def num_bytes(self) -> int:
        """Memory, about."""
        return self._num_bytes

    def matcher(self) -> GuidanceMatcher:
        """Return a new one."""
        return GuidanceMatcher(self._first.deep_copy(), self._backend)


class GuidanceMatcher(LibraryMatcher[GuidanceBackend]):
    """Follows one output. The library would not roll an ending token back."""

    def __init__(self, inner: LLMatcher, backend: GuidanceBackend) -> None:
        super().__init__(backend)
        self.inner = inner

    @property
    def failure(self) -> GrammarFailed | None:
        """Why it cannot go on, if so."""
        if not self.inner.is_error():
            return super().failure
        return GrammarFailed(f"The form has become too complex: {_first_line(self.inner.get_error())}")

    @property
    def is_finished(self) -> bool:
        """Whether nothing may follow."""
        return self.has_ended or (self.inner.is_stopped() and self.inner.is_accepting())

    def _fill(self, row: Mask) -> None:
        self.inner.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)

    def _accept(self, token_id: int) -> bool:
        return self.inner.try_consume_tokens([token_id]) == 1

    def _rollback(self, num_tokens: int) -> None:
        if not self.inner.rollback(num_tokens):
            raise GrammarFailed("The form cannot be followed back to an earlier token.")

    def _is_complete(self) -> bool:
        return self.inner.is_accepting()


class _Tokens:
    """What llguidance's tokenizer is made of. It encodes nothing: no grammar here forces tokens, only text."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = vocabulary.tokens
        self.special_token_ids = vocabulary.special_ids
        self.eos_token_id = vocabulary.ending_ids[0]
        self.bos_token_id = None

    def __call__(self, text: str | bytes) -> list[int]:
        return []


def _first_line(message: str) -> str:
    return message.strip().split("\n", 1)[0][:200]
