"""Pages of the KV cache: who holds which, and which can be used again.

KV memory is cut into pages of ``page_size`` tokens (PagedAttention, Kwon 2023). A request holds a list of
pages, its *block table*: page i of the table keeps the keys and values of its tokens [i * page_size, (i + 1) * page_size).
Each page is in exactly one of three states:

    held     some request's table names it (``refs > 0``; several tables may share one page)
    cached   no table names it, but the prefix index remembers its text: a later prompt may hold it again
    free     nothing is known of it

    allocate:  free -> held   (when none is free: the least recently used cached page -> held)
    acquire:   cached or held -> held
    release:   held -> cached if it is indexed (and finished texts are kept), else free

A full page is *registered* in the index after its keys and values were written. Its key is the page before it and
its own tokens, compared in full: a colliding hash costs time, never correctness. Page 0 belongs to nobody; padding
reads and writes go there.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_ROOT = 0  # the "page before" of a prompt's first page


@dataclass(frozen=True, slots=True)
class PageKey:
    """What a full page holds: its tokens, after the text that ``parent`` stands for.

    ``parent`` is the serial number of the registered text before it, so equal keys mean equal text from the
    first token on, and equal text means equal keys and values (same model, same KV dtype: a pool serves one of each).
    """

    parent: int
    tokens: tuple[int, ...]


class PagePool:
    """Bookkeeping for pages 1 .. num_pages - 1. Knows no tensors and no requests."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 2:
            raise ValueError(
                f"A pool of {num_pages} pages holds nothing: page 0 is reserved. Give the KV cache more memory."
            )
        self.num_pages = num_pages
        self.page_size = page_size
        self._refs = [0] * num_pages
        self._free = set(range(1, num_pages))
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._index: dict[PageKey, int] = {}
        self._key_of: dict[int, PageKey] = {}  # indexed pages only
        self._serial_of: dict[int, int] = {}  # page -> serial number of the text up to its end
        self._next_serial = _ROOT + 1
        self._num_shared = 0

    # -- taking and giving back ---------------------------------------------------------------

    @property
    def num_available(self) -> int:
        """Pages that ``allocate`` could hand out now."""
        return len(self._free) + len(self._cached)

    @property
    def capacity_tokens(self) -> int:
        return (self.num_pages - 1) * self.page_size

    def allocate(self, count: int, after: int | None = None) -> list[int] | None:
        """``count`` fresh pages, each held once, or None when they do not exist.

        Pages that follow ``after`` are preferred: attention reads neighbouring pages as one piece, without a copy.
        """
        if count > self.num_available:
            return None
        pages: list[int] = []
        for _ in range(count):
            page = self._pick(after, count)
            self._refs[page] = 1
            pages.append(page)
            after = page
        return pages

    def allocate_run(self, count: int) -> list[int] | None:
        """``count`` consecutive pages (a contiguous reservation), or None when there is no such run."""
        start = self._find_run(count)
        if start is None:
            return None
        pages = list(range(start, start + count))
        for page in pages:
            self._take(page)
            self._refs[page] = 1
        return pages

    def acquire(self, pages: Iterable[int]) -> None:
        """Hold pages that a prefix match named once more."""
        for page in pages:
            assert self._refs[page] or page in self._cached, f"page {page} is free and cannot be shared"
            self._cached.pop(page, None)
            self._refs[page] += 1
            self._num_shared += self._refs[page] == 2

    def release(self, pages: Sequence[int], keep: bool = True) -> None:
        """Give back one hold on each page. Tail first, so that the end of a text is reused before its beginning.

        keep: False frees a page that nobody holds any more at once, its text forgotten.
        """
        for page in reversed(pages):
            assert self._refs[page] > 0, f"page {page} is not held"
            self._refs[page] -= 1
            self._num_shared -= self._refs[page] == 1
            if self._refs[page]:
                continue
            if keep and page in self._key_of:
                self._cached[page] = None
            else:
                self._forget(page)
                self._free.add(page)

    # -- the prefix index ---------------------------------------------------------------------

    def match(self, tokens: Sequence[int]) -> list[int]:
        """Pages that already hold the longest prefix of ``tokens``. Never covers the last token: its logits are needed."""
        found: list[int] = []
        parent = _ROOT
        size = self.page_size
        for start in range(0, (len(tokens) - 1) // size * size, size):
            page = self._index.get(PageKey(parent, tuple(tokens[start : start + size])))
            if page is None:
                break
            found.append(page)
            parent = self._serial_of[page]
        return found

    def register(self, page: int, previous: int | None, tokens: Sequence[int]) -> None:
        """Remember that held ``page`` is full of ``tokens``, whose keys and values were written, after page ``previous``.

        A page whose text is already indexed elsewhere stays unindexed, but its successors chain to the same text.
        """
        assert self._refs[page] > 0, f"page {page} is not held"
        assert len(tokens) == self.page_size
        if page in self._serial_of:
            return
        parent = _ROOT if previous is None else self._serial_of.get(previous)
        if parent is None:  # the page before was forgotten (index cleared meanwhile): this text has no known beginning
            return
        key = PageKey(parent, tuple(tokens))
        twin = self._index.get(key)
        if twin is not None:
            self._serial_of[page] = self._serial_of[twin]
            return
        self._index[key] = page
        self._key_of[page] = key
        self._serial_of[page] = self._next_serial
        self._next_serial += 1

    def free_cached(self) -> None:
        """Forget the texts that nobody holds; those of held pages stay findable."""
        for page in self._cached:
            self._forget(page)
        self._free.update(self._cached)
        self._cached.clear()

    def clear_index(self) -> None:
        """Forget every remembered text; cached pages become free, held pages stay held."""
        self._index.clear()
        self._key_of.clear()
        self._serial_of.clear()
        self._free.update(self._cached)
        self._cached.clear()

    # -- looking in ---------------------------------------------------------------------------

    @property
    def num_held(self) -> int:
        return self.num_pages - 1 - len(self._free) - len(self._cached)

    @property
    def num_shared(self) -> int:
        return self._num_shared

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def refs(self, page: int) -> int:
        return self._refs[page]

    def held_pages(self) -> list[int]:
        return [page for page, count in enumerate(self._refs) if count]

    def is_cached(self, page: int) -> bool:
        return page in self._cached

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError, with both sides, unless every page is accounted for by exactly ``tables``."""
        holds = Counter(page for table in tables for page in table)
        refs = {page: count for page, count in enumerate(self._refs) if count}
        assert holds == refs, f"tables hold {dict(holds)}, the pool counts {refs}"
        assert 0 not in refs.keys() | self._free | self._cached.keys(), "page 0 was handed out"
        parts = (len(self._free), len(refs), len(self._cached))
        assert sum(parts) == self.num_pages - 1, f"free, held, cached {parts} != {self.num_pages - 1}"
        assert len(self._free | refs.keys() | self._cached.keys()) == sum(parts), "a page is in two states"
        assert self._num_shared == sum(count > 1 for count in refs.values()), "shared pages miscounted"
        assert set(self._index.values()) == set(self._key_of), "index and its inverse differ"
        assert all(page in self._key_of for page in self._cached), "a cached page is not indexed"

    # -- choosing a page ----------------------------------------------------------------------

    def _pick(self, after: int | None, count: int) -> int:
        if after is not None and after + 1 in self._free:
            self._free.remove(after + 1)
            return after + 1
        page = self._start_of_room(count) if self._free else next(iter(self._cached))
        self._take(page)
        return page

    def _take(self, page: int) -> None:
        """Make a free or cached page nobody's, forgetting its text."""
        if page in self._cached:
            del self._cached[page]
            self._forget(page)
        else:
            self._free.remove(page)

    def _forget(self, page: int) -> None:
        """Drop what the index knows of a page that nobody holds."""
        key = self._key_of.pop(page, None)
        if key is not None:
            del self._index[key]
        self._serial_of.pop(page, None)

    def _start_of_room(self, count: int) -> int:
        """Where a new stretch should begin: inside the longest free run, leaving its owner's neighbour room to grow."""
        start, length = self._longest_free_run()
        borders_a_text = start > 1 and self._refs[start - 1] > 0
        return start + length // 2 if borders_a_text and length > 2 * count else start

    def _longest_free_run(self) -> tuple[int, int]:
        best_start, best_length, length = 0, 0, 0
        for page in range(1, self.num_pages + 1):
            if page in self._free:
                length += 1
                continue
            if length > best_length:
                best_start, best_length = page - length, length
            length = 0
        return best_start, best_length

    def _find_run(self, count: int) -> int | None:
        """First run of ``count`` pages that are free or, failing that, free or cached."""
        for usable in (lambda p: p in self._free, lambda p: p in self._free or p in self._cached):
            length = 0
            for page in range(1, self.num_pages):
                length = length + 1 if usable(page) else 0
                if length == count:
                    return page - count + 1
        return None
