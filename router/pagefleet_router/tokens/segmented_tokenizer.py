"""A tokenizer that cuts prompts where cutting changes nothing, and remembers the ids of the parts.

Where it cuts: before an occurrence of a token that the chat template writes, such as `<|im_start|>`. The tokenizers
library first finds the added tokens that are not to be normalized, leftmost and longest, and treats the text between
them piece by piece; no normalizer, pre-tokenizer or model sees over them. So `ids(a + b) = ids(a) + ids(b)` where b
begins with such a token, provided that

- it overlaps in no way with another added token, nor with itself: then every occurrence of its spelling is a match;
- it takes no space beside it along (`lstrip`, `rstrip`), nor begins or ends with space;
- no added token looks at its neighbours (`single_word`), and the model has no dropout.

Tokens that do not fulfil this are not cut at; a tokenizer that has none is used as it is.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import tokenizers
from pagefleet_protocol.handoff import pack_tokens, unpack_tokens
from pagefleet_text.tokenizer import Tokenizer, without_surrogates

MAX_CUTS = 16


class SegmentedTokenizer(Tokenizer):
    """Gives the ids that `Tokenizer` gives.

    Args:
        backend: the library's object.
        settings: tokenizer_config.json.
        eos_token_ids: of the model.
        template: the chat template, which says where to cut.
        cache: may be shared with other tokenizers of other names.
        name: of this tokenizer, for the cache.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, settings: Mapping[str, Any], eos_token_ids: Iterable[int] = (), *,
        template: str, cache: SegmentCache, name: str,
    ) -> None:  # fmt: skip
        super().__init__(backend, settings, eos_token_ids)
        self._cuts = cut_tokens(backend, template)
        self._cache = cache
        self._name = name
        self._min_chars = cache.min_chars
        self._working_for = threading.local()

    @contextlib.contextmanager
    def working_for(self, salt: str | None) -> Iterator[None]:
        """Use what was remembered for the same tenant's salt, in this thread and block."""
        self._working_for.salt = salt
        try:
            yield
        finally:
            self._working_for.salt = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """See Tokenizer."""
        if add_special_tokens or not self._cuts or len(text) < self._min_chars:
            return super().encode(text, add_special_tokens)
        owner = f"{self._name} {getattr(self._working_for, 'salt', None)}".encode("utf-8", "surrogatepass")
        ids: list[int] = []
        for segment in split(without_surrogates(text), self._cuts, self._min_chars):
            if len(segment) < self._min_chars:
                ids += super().encode(segment, add_special_tokens=False)
                continue
            key = self._cache.key(owner, segment)
            packed = self._cache.get(key)
            if packed is None:
                new = super().encode(segment, add_special_tokens=False)
                self._cache.put(key, pack_tokens(new))
                ids += new
            else:
                ids += unpack_tokens(packed)
        return ids


def split(text: str, cuts: Sequence[str], min_chars: int) -> Iterator[str]:
    """Yield the parts of a text, of `min_chars` at least but for the last, each cut before one of `cuts`.

    A text that begins as another one is split as that one, but for the last part.
    """
    positions = []
    for cut in cuts:
        # Plain searches: a regular expression would keep the interpreter's lock ten times as long.
        found = text.find(cut, min_chars)
        while found >= 0:
            positions.append(found)
            found = text.find(cut, found + len(cut))
    start = 0
    for position in sorted(positions):
        if position - start >= min_chars:
            yield text[start:position]
            start = position
    yield text[start:]


def cut_tokens(backend: tokenizers.Tokenizer, template: str) -> tuple[str, ...]:
    """Return the spellings that a text may be cut before; see the head of this file."""
    added = list(backend.get_added_tokens_decoder().values())
    if getattr(backend.model, "dropout", None) or any(token.single_word for token in added):
        return ()
    found_first = [token.content for token in added if not token.normalized]
    candidates = dict.fromkeys(
        token.content
        for token in added
        if not (token.normalized or token.lstrip or token.rstrip) and token.content in template and token.content
    )
    cuts = [
        spelling
        for spelling in candidates
        if spelling == spelling.strip() and not any(_overlap(spelling, other) for other in found_first)
    ]
    return tuple(cuts[:MAX_CUTS])


def _overlap(one: str, other: str) -> bool:
    """Whether two spellings (or two occurrences of the same one) can share characters of a text."""
    if one != other and (one in other or other in one):
        return True
    lengths = range(1, min(len(one), len(other)))
    return any(one.endswith(other[:n]) or other.endswith(one[:n]) for n in lengths)


MIN_CHARS = 1024
_KEY_BYTES = 24
_OVERHEAD_BYTES = 200
"""Of an entry, beside its ids."""


class SegmentCache:
    """Packed token ids by what they were made of, forgotten least recently used first. For several threads.

    Args:
        max_bytes: of memory.
        min_chars: of the texts worth an entry.
    """

    def __init__(self, max_bytes: int, min_chars: int = MIN_CHARS) -> None:
        self.min_chars = min_chars
        self.num_hits = 0
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._entries: OrderedDict[bytes, bytes] = OrderedDict()
        self._lock = threading.Lock()

    @staticmethod
    def key(owner: bytes, text: str) -> bytes:
        """Return the name of a text of an owner: other owners can neither use it nor learn that it is there."""
        return hashlib.blake2b(text.encode(), digest_size=_KEY_BYTES, key=hashlib.sha256(owner).digest()).digest()

    def get(self, key: bytes) -> bytes | None:
        """Return packed ids, None where there are none."""
        with self._lock:
            found = self._entries.get(key)
            if found is not None:
                self.num_hits += 1
                self._entries.move_to_end(key)
            return found

    def put(self, key: bytes, packed: bytes) -> None:
        """Remember packed ids, unless they would take more than a quarter of all room."""
        size = len(packed) + _OVERHEAD_BYTES
        if size > self._max_bytes // 4:
            return
        with self._lock:
            if key in self._entries:
                return
            self._entries[key] = packed
            self.num_bytes += size
            while self.num_bytes > self._max_bytes:
                _, old = self._entries.popitem(last=False)
                self.num_bytes -= len(old) + _OVERHEAD_BYTES
