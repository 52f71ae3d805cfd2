"""The blocks of the KV pool: who holds them, which are free, and which free ones still hold a known prefix.

A block is its number. It is held (reference count over zero) or free; a free block keeps its hash and can be taken
again by content, until it is handed out for something else. Nothing here knows requests.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence

from pagefleet_protocol.block_hash import BlockHash

from pagefleet_engine.core.cache_events import CacheEvents


class IntegrityError(AssertionError):
    """The accounts of blocks or requests do not add up: a bug of the engine, never a user's mistake."""


class FreeList:
    """The free blocks in the order in which they will be reused, as a doubly linked list inside two integer arrays.

    Order: the front is reused first. Blocks with nothing worth keeping enter at the front; blocks that hold a cached
    prefix enter at the back, so that the least recently used prefix is lost first. The links are intrusive because a
    prefix hit takes a block out of the middle: that is O(1) here, without allocating anything.

    Link `num_blocks` is a sentinel before the front and after the back, so no operation has an empty case.
    """

    __slots__ = ("_end", "_next", "_prev", "_size")

    def __init__(self, num_blocks: int) -> None:
        """All blocks are free, in ascending order."""
        self._end = num_blocks
        self._next: list[int] = [*range(1, num_blocks + 1), 0]
        self._prev: list[int] = [num_blocks, *range(num_blocks)]
        self._size = num_blocks

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[int]:
        block = self._next[self._end]
        while block != self._end:
            yield block
            block = self._next[block]

    def take(self, count: int) -> list[int]:
        """Remove and return the `count` blocks to be reused first; the list must hold as many."""
        blocks: list[int] = []
        block = self._next[self._end]
        for _ in range(count):
            blocks.append(block)
            block = self._next[block]
        self._next[self._end] = block
        self._prev[block] = self._end
        self._size -= count
        return blocks

    def push_front(self, block: int) -> None:
        """Add a block that is reused before all others."""
        self._insert(block, self._end, self._next[self._end])

    def push_back(self, block: int) -> None:
        """Add a block that is reused after all others."""
        self._insert(block, self._prev[self._end], self._end)

    def remove(self, block: int) -> None:
        """Take a block out, wherever it stands; it must be in the list."""
        before, after = self._prev[block], self._next[block]
        self._next[before] = after
        self._prev[after] = before
        self._size -= 1

    def check_integrity(self) -> None:
        """Walk the list both ways in bounded time.

        Raises:
            IntegrityError: the links or the count are wrong.
        """
        block = self._end
        for _ in range(self._size + 1):
            if self._prev[self._next[block]] != block:
                raise IntegrityError(f"free list: the links around block {block} disagree")
            block = self._next[block]
        if block != self._end:
            raise IntegrityError(f"free list: {self._size} blocks are counted but more are linked")

    def _insert(self, block: int, before: int, after: int) -> None:
        self._prev[block] = before
        self._next[block] = after
        self._next[before] = block
        self._prev[after] = block
        self._size += 1


class BlockPool:
    """Reference counts, the free list and the prefix index over `num_blocks` blocks.

    Two requests that compute the same prefix at once fill two blocks with the same content. The index names only the
    first that was published; the other stays a private block without a hash. So each hash has one block and each
    published block one hash, and losing one can never leave the index pointing at another block's old content.

    `events`, if any, are told all that enters the index and all that leaves it.
    """

    __slots__ = (
        "_block_of_hash",
        "_events",
        "_free",
        "_hash_of_block",
        "_kept",
        "_num_uses",
        "_refs",
        "_replaced",
        "in_windows",
        "num_blocks",
        "num_promised",
    )

    def __init__(self, num_blocks: int, events: CacheEvents | None = None) -> None:
        self.num_blocks = num_blocks
        self._events = events
        self.num_promised = 0
        """Free blocks that are kept for those who were promised them; counted by them."""
        self._free = FreeList(num_blocks)
        self._refs = [0] * num_blocks
        self._kept = [0] * num_blocks
        """Of these references, those that are transfers'."""
        self.in_windows: set[int] = set()
        """Blocks in requests' tables of groups with a window, each there for a promise to its request: what leaves the
        window is free for the next."""
        self._replaced: set[int] = set()
        """Of these, those that a transfer keeps, so that they will not be free: others are promised in their place."""
        self._num_uses = [0] * num_blocks
        self._hash_of_block: list[BlockHash | None] = [None] * num_blocks
        self._block_of_hash: dict[BlockHash, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, cached or not."""
        return len(self._free)

    @property
    def num_available(self) -> int:
        """Free blocks that are promised to nobody."""
        return len(self._free) - self.num_promised

    @property
    def num_kept(self) -> int:
        """Blocks that transfers hold, alone or with requests."""
        return sum(1 for count in self._kept if count)

    @property
    def num_cached(self) -> int:
        """Blocks that the prefix index names, held or free."""
        return len(self._block_of_hash)

    def find_prefix(self, hashes: Sequence[BlockHash], limit: int) -> list[int]:
        """Return the blocks of the longest cached run from the start of `hashes`, at most `limit`; holds nothing."""
        found: list[int] = []
        for index in range(limit):
            block = self._block_of_hash.get(hashes[index])
            if block is None:
                break
            found.append(block)
        return found

    def find(self, content: BlockHash) -> int | None:
        """Return the block that holds this content; holds nothing."""
        return self._block_of_hash.get(content)

    def count_free(self, blocks: Sequence[int]) -> int:
        """Return how many of `blocks` are free now."""
        refs = self._refs
        return sum(1 for block in blocks if refs[block] == 0)

    def count_single(self, blocks: Sequence[int]) -> int:
        """Return how many of `blocks` have one holder."""
        return sum(1 for block in blocks if self._refs[block] == 1)

    def num_uses(self, block: int) -> int:
        """Return how often the block was handed out; while that stays the same, so does what it holds."""
        return self._num_uses[block]

    def count_leading(self, blocks: Sequence[int], num_holders: int) -> int:
        """Return how many of the first of `blocks` have exactly so many holders."""
        for index, block in enumerate(blocks):
            if self._refs[block] != num_holders:
                return index
        return len(blocks)

    def hold(self, blocks: Sequence[int]) -> None:
        """Add one reference to each, taking free ones out of the free list."""
        for block in blocks:
            if self._refs[block] == 0:
                self._free.remove(block)
            self._refs[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` blocks with one reference each; what they cached is forgotten. `num_free` must suffice."""
        if count > len(self._free):
            raise IntegrityError(f"{count} blocks were asked for and {len(self._free)} are free")
        blocks = self._free.take(count)
        for block in blocks:
            self._refs[block] = 1
            self._num_uses[block] += 1
        self.unpublish(blocks)
        return blocks

    def publish(self, blocks: Sequence[int], contents: Sequence[BlockHash]) -> None:
        """Make blocks findable; their K/V must be complete. A hash that has a block already keeps that one.

        They are held, or were last and have not been handed out since.
        """
        stored = []
        for block, content in zip(blocks, contents, strict=True):
            if content not in self._block_of_hash and self._hash_of_block[block] is None:
                self._block_of_hash[content] = block
                self._hash_of_block[block] = content
                stored.append(content)
        if stored and self._events is not None:
            self._events.stored(stored)

    def release(self, blocks: Sequence[int], to_be_published: bool = False) -> None:
        """Drop one reference from each block of a request's table.

        The last block goes first: a prefix is found from its start, so its tail must be evicted before its head.
        Blocks that are `to_be_published` are kept as long as those that are findable already.
        """
        for block in reversed(blocks):
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if self._hash_of_block[block] is None and not to_be_published:
                    self._free.push_front(block)
                else:
                    self._free.push_back(block)

    def enter_windows(self, blocks: Sequence[int]) -> None:
        """As `hold`, for a request's window, to which as many are promised."""
        for block in blocks:
            if not self._refs[block]:
                self.num_promised -= 1
            elif self._kept[block] and block not in self.in_windows:
                self._replaced.add(block)
        self.in_windows.update(blocks)
        self.hold(blocks)

    def leave_windows(self, blocks: Sequence[int], to_be_published: bool = False) -> None:
        """As `release`, of what is in a request's window, for each of which another is promised to it again."""
        self.release(blocks, to_be_published)
        for block in blocks:
            if self._refs[block] != self._kept[block]:
                continue  # it is in others
            self.in_windows.remove(block)
            if block in self._replaced:
                self._replaced.remove(block)
            else:
                self.num_promised += 1

    def keep(self, blocks: Sequence[int], staying: Container[int] = ()) -> None:
        """As `hold`, for a transfer. For those in windows others are promised, but for those that are `staying`."""
        for block in blocks:
            if block in self.in_windows and block not in self._replaced and block not in staying:
                self._replaced.add(block)
                self.num_promised += 1
            self._kept[block] += 1
        self.hold(blocks)

    def let_go(self, blocks: Sequence[int]) -> None:
        """As `release`, of what a transfer keeps."""
        for block in blocks:
            self._kept[block] -= 1
            if not self._kept[block] and block in self._replaced:
                self._replaced.remove(block)
                self.num_promised -= 1
        self.release(blocks)

    def count_promised(self, blocks: Iterable[int]) -> int:
        """Return how many of `blocks` are in windows, and no other is promised in their place."""
        return sum(1 for block in blocks if block in self.in_windows and block not in self._replaced)

    def unpublish(self, blocks: Sequence[int]) -> None:
        """Forget what blocks hold, so that no later request finds it."""
        removed = self._unname(blocks)
        if removed and self._events is not None:
            self._events.removed(removed)

    def forget(self, contents: Iterable[BlockHash]) -> None:
        """As `unpublish`, for whichever blocks hold these contents."""
        found = (self._block_of_hash.get(content) for content in contents)
        self.unpublish([block for block in found if block is not None])

    def reset_prefix_cache(self) -> int:
        """Forget the content of every free block; returns how many were cached."""
        removed = self._unname(list(self._free))
        if removed and self._events is not None:
            if self._block_of_hash:
                self._events.removed(removed)
            else:
                self._events.cleared()
        return len(removed)

    def check_integrity(self, held: Sequence[int]) -> None:
        """Compare the accounts with `held`: how many tables name each block.

        Raises:
            IntegrityError: a block is lost, counted wrongly, or indexed wrongly.
        """
        self._free.check_integrity()
        free = set(self._free)
        for block in range(self.num_blocks):
            if self._refs[block] != held[block]:
                raise IntegrityError(f"block {block} has {self._refs[block]} references and {held[block]} holders")
            if (self._refs[block] == 0) != (block in free):
                raise IntegrityError(f"block {block} with {self._refs[block]} references is on the wrong list")
        published = {content: block for block, content in enumerate(self._hash_of_block) if content is not None}
        if published != self._block_of_hash:
            raise IntegrityError("the prefix index and the blocks' hashes disagree")

    def _unname(self, blocks: Sequence[int]) -> list[BlockHash]:
        """Take blocks out of the index; returns what it called them."""
        names = self._hash_of_block
        removed = []
        for block in blocks:
            content = names[block]
            if content is not None:
                del self._block_of_hash[content]
                names[block] = None
                removed.append(content)
        return removed
