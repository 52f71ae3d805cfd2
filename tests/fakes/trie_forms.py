"""Forms without a library: a choice of texts, each a list of token ids ("5 6 7"), held in a trie."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from pagefleet_engine.errors import GrammarFailed, InvalidRequest, QueueFull
from pagefleet_engine.grammars.port import GrammarBackend, Mask, Matcher
from pagefleet_engine.grammars.vocabulary import Vocabulary
from pagefleet_protocol.structured_outputs import StructuredOutputsParams

EOS = 7


@dataclass(slots=True)
class Node:
    """What may follow some tokens."""

    children: dict[int, Node] = field(default_factory=dict)
    is_end: bool = False

    @property
    def allowed(self) -> list[int]:
        """Tokens that may come; the ending token where the form is complete."""
        return sorted([*self.children, EOS] if self.is_end else self.children)

    @property
    def is_finished(self) -> bool:
        return self.is_end and not self.children


def choice(*texts: Iterable[int]) -> StructuredOutputsParams:
    """The form of an output that is one of these."""
    return StructuredOutputsParams(choice=tuple(" ".join(map(str, text)) for text in texts))


def trie_of(params: StructuredOutputsParams) -> Node:
    root = Node()
    for text in params.choice or ():
        node = root
        for word in text.split():
            node = node.children.setdefault(int(word), Node())
        node.is_end = True
    return root


class TrieMatcher:
    """Implements `Matcher`; used by two threads at once it fails the test."""

    failure = None

    def __init__(self, root: Node, source: TrieSource) -> None:
        self._path: list[Node | None] = [root]
        self._source = source
        self._lock = threading.Lock()
        self._num_fills = 0
        self._is_broken = False

    @property
    def backend(self) -> GrammarBackend:
        raise AssertionError("the source fills")

    @property
    def node(self) -> Node | None:
        """None after the ending token."""
        return self._path[-1]

    def fill(self, row: Mask) -> bool:
        with self._alone():
            self._num_fills += 1
            if self._source.breaks or self._num_fills > self._source.fills_each:
                self._is_broken = True
                raise self._source.error
            row[:] = 0
            words = row.view(np.uint32)
            for token in self.node.allowed if self.node else ():
                words[token // 32] |= np.uint32(1 << (token % 32))
            return True

    def accept(self, token_id: int) -> bool:
        with self._alone():
            if self.node is None or token_id not in self.node.allowed:
                return False
            self._path.append(self.node.children.get(token_id))
            return True

    def rollback(self, num_tokens: int) -> None:
        with self._alone():
            if num_tokens and self._is_broken:
                raise self._source.error
            if num_tokens:
                del self._path[-num_tokens:]
            assert self._path

    @property
    def is_complete(self) -> bool:
        return self.node is None or self.node.is_end

    @property
    def is_finished(self) -> bool:
        return self.node is None or self.node.is_finished

    def _alone(self) -> threading.Lock:
        assert not self._lock.locked(), "two threads use one matcher"
        return self._lock


@dataclass(frozen=True, slots=True)
class Trie:
    """Implements `Grammar`."""

    root: Node
    source: TrieSource
    num_bytes: int = 1

    def matcher(self) -> TrieMatcher:
        return TrieMatcher(self.root, self.source)


@dataclass(slots=True)
class TrieTicket:
    """Implements `Ticket`."""

    params: StructuredOutputsParams
    source: TrieSource
    turns: int

    def done(self) -> bool:
        return self.source.now >= self.turns

    def result(self) -> Trie:
        assert self.done()
        if self.source.refuses:
            raise InvalidRequest("That form cannot be held.", "structured_outputs.choice", "invalid_value")
        if self.source.fails:
            raise GrammarFailed("not compiled")
        return Trie(trie_of(self.params), self.source)


@dataclass(frozen=True, slots=True)
class KnownVocabulary:
    """Implements `Ticket`."""

    vocabulary: Vocabulary

    def done(self) -> bool:
        return True

    def result(self) -> Vocabulary:
        return self.vocabulary


class TrieSource:
    """Implements `GrammarSource`. A form is compiled after `turns` calls of `turn`."""

    def __init__(self, turns: int = 0) -> None:
        self.turns = turns
        self.spelling = [f"<{token}>".encode() for token in range(300)]
        """Bytes of each token."""
        self.now = 0
        self.refuses = self.fails = self.breaks = False
        self.fills_each = float("inf")
        """After which a matcher breaks, and cannot go back."""
        self.error: Exception = GrammarFailed("too complex")
        """Of what breaks."""
        self.may_fill = threading.Event()
        """While it is not set, no mask gets ready."""
        self.may_fill.set()
        self.num_fills = 0
        self.tenants: list[str] = []
        """Of the forms that were submitted."""
        self.max_forms = float("inf")
        self._pipe: tuple[int, int] | None = None

    def turn(self) -> None:
        self.now += 1

    @property
    def bell(self) -> int:
        if self._pipe is None:  # a trace of steps needs none, and there are thousands
            self._pipe = os.pipe()
        return self._pipe[0]

    def silence(self) -> None:
        """It never rings by itself."""

    def submit(self, params: StructuredOutputsParams, tenant: str = "") -> TrieTicket:
        if len(self.tenants) >= self.max_forms:
            raise QueueFull("too many forms", 5.0)
        self.tenants.append(tenant)
        return TrieTicket(params, self, self.now + self.turns)

    def spell(self) -> KnownVocabulary:
        return KnownVocabulary(Vocabulary(self.spelling, [EOS], [EOS]))

    def fill(self, rows: Sequence[tuple[Matcher, int]], masks: Mask) -> dict[int, Exception]:
        assert len({id(matcher) for matcher, _ in rows}) == len(rows) == len({row for _, row in rows})
        assert self.may_fill.wait(120)
        self.num_fills += len(rows)
        failures: dict[int, Exception] = {}
        for matcher, row in rows:
            try:
                if not matcher.fill(masks[row]):
                    masks[row] = -1
            except GrammarFailed as error:
                failures[row] = error
        return failures

    def stats(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        for end in self._pipe or ():
            os.close(end)


class AnyMatcher(TrieMatcher):
    """Takes whatever comes; its masks allow everything, and now and then one token after another."""

    def __init__(self, source: TrieSource) -> None:
        super().__init__(Node(), source)
        self._num_taken = 0

    def fill(self, row: Mask) -> bool:
        row[:] = -1
        if self._num_taken % 5 in (2, 3):
            row[:] = 0
            row[0] = 1 << 9
        return self._num_taken % 5 != 1

    def accept(self, token_id: int) -> bool:
        self._num_taken += 1
        return True

    def rollback(self, num_tokens: int) -> None:
        self._num_taken -= num_tokens

    @property
    def is_finished(self) -> bool:
        return False


class AnyForm(TrieTicket):
    """Implements `Ticket` and `Grammar`."""

    num_bytes = 1

    def result(self) -> AnyForm:  # type: ignore[override]
        return self

    def matcher(self) -> AnyMatcher:
        return AnyMatcher(self.source)


class AnySource(TrieSource):
    """For devices whose tokens mean nothing."""

    def submit(self, params: StructuredOutputsParams, tenant: str = "") -> TrieTicket:
        return AnyForm(params, self, 0)
