"""Key bounds and the choice of pages in C, against plain torch."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from ctypes import c_int64, c_void_p
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_kernels import ISAS, needs_kernels, running_on
from torch import Tensor

from engine.kv.sparse import PageBounds
from engine.ops.cpu import native
from engine.ops.cpu.native.kernels import KvArgs, SpanTable
from engine.ops.interface import Span

pytestmark = needs_kernels

_POINTERS = {"least", "largest", "kv", "keys", "slots", "q", "spans", "pages", "chosen"}


def _structure(name: str, names: str) -> type[ctypes.Structure]:
    fields = [(field, c_void_p if field in _POINTERS else c_int64) for field in names.split()]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


Noted = _structure("Noted", "least largest kv keys slots rows num_kv_heads copies head_dim page_size")
Choice = _structure(
    "Choice",
    "least largest q spans pages chosen num_spans num_pages num_heads num_kv_heads head_dim page_size count",
)


def call(name: str, args: ctypes.Structure) -> int:
    return int(native.function(name, c_void_p)(ctypes.addressof(args)))


class Texts:
    """Texts of ``contexts`` tokens with their pages in any order, the sizes of their heads, and random numbers for them.

    heads: as they are stored, each KV head ``copies`` times.
    """

    def __init__(
        self, contexts: list[int], page_size: int, num_kv_heads: int, copies: int, head_dim: int, seed: int
    ) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.contexts, self.page_size = contexts, page_size
        self.num_kv_heads, self.copies, self.head_dim = num_kv_heads, copies, head_dim
        self.heads = num_kv_heads * copies
        self.needed = [-(-context // page_size) for context in contexts]
        self.num_pages = 1 + sum(self.needed)
        order = [int(page) + 1 for page in torch.randperm(sum(self.needed), generator=self.generator)]
        self.tables = [[order.pop() for _ in range(number)] for number in self.needed]

    def slots(self) -> Tensor:
        """Where each token's key lies."""
        size = self.page_size
        pairs = zip(self.tables, self.contexts, strict=True)
        return torch.tensor([table[p // size] * size + p % size for table, n in pairs for p in range(n)])

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)


@dataclass(frozen=True)
class Bounds:
    """The least and largest keys of pages in two accounts: the tensors that C writes, and its plain twin."""

    least: Tensor
    largest: Tensor
    twin: PageBounds


def noted_in_c_and_plainly(texts: Texts, is_coded: bool) -> Bounds:
    """Every key noted by ``rl_note_keys`` and by the twin. is_coded: C reads the keys as they were computed."""
    slots, heads, size = texts.slots(), texts.heads, texts.page_size
    computed = texts.randn(len(slots), texts.num_kv_heads, texts.head_dim)
    stored = computed.repeat_interleave(texts.copies, dim=1)
    plain = torch.full((texts.num_pages * size, heads, texts.head_dim), torch.nan)
    plain[slots] = stored
    twin = PageBounds(texts.num_pages, heads, texts.head_dim)
    twin.add(slots, stored, size)
    least, largest = torch.full(
        (2, texts.num_pages, heads, texts.head_dim), 7.0
    )  # what a page held before is forgotten
    least[0], largest[0] = 0.0, 0.0
    cache = plain.view(texts.num_pages, size, heads, texts.head_dim)
    kv = KvArgs.of((cache,), (cache,))
    if is_coded:
        kv.type = 3  # the keys are then read as they were computed
    noted = Noted(
        least.data_ptr(),
        largest.data_ptr(),
        ctypes.addressof(kv),
        computed.data_ptr(),
        slots.data_ptr(),
        len(slots),
        heads,
        texts.copies,
        texts.head_dim,
        size,
    )
    assert call("rl_note_keys", noted) == 0
    return Bounds(least, largest, twin)


class Chosen:
    """What ``rl_choose_pages`` chose: spans for the kernel, and the pages that they point into."""

    def __init__(self, bounds: Bounds, texts: Texts, q: Tensor, spans: tuple[Span, ...], count: int) -> None:
        table = SpanTable(spans, texts.page_size)
        heads = texts.heads
        self.pages = torch.zeros(table.num_pages + len(spans) * heads * count, dtype=torch.int64)
        self.pages[: table.num_pages] = torch.tensor([page for each in texts.tables for page in each])
        chosen = torch.zeros(len(spans) * heads, 6, dtype=torch.int64)
        choice = Choice(
            bounds.least.data_ptr(),
            bounds.largest.data_ptr(),
            q.data_ptr(),
            table.rows,
            self.pages.data_ptr(),
            chosen.data_ptr(),
            len(spans),
            table.num_pages,
            q.shape[1],
            heads,
            texts.head_dim,
            texts.page_size,
            count,
        )
        total = call("rl_choose_pages", choice)
        self.rows: list[list[int]] = chosen[:total].tolist()


def check_whole(span: Span, chosen: Chosen, rows: Iterator[list[int]]) -> None:
    """A prompt, or a reply with few pages: one row for all heads, with every page."""
    row, num_rows, context, first, head, _ = next(rows)
    assert (row, num_rows, context, head) == (span.start, 1, span.context, -1)
    assert chosen.pages[first : first + len(span.pages)].tolist() == list(span.pages)


def check_picked(
    span: Span, chosen: Chosen, rows: Iterator[list[int]], wanted: list[list[int]], page_size: int
) -> None:
    """A reply with many pages: a row for each head, with the ``wanted`` ones (their indices) in their order."""
    count = len(wanted[0])
    for head, indices in enumerate(wanted):
        row, num_rows, context, first, its_head, _ = next(rows)
        assert (row, num_rows, its_head) == (span.start, 1, head)
        assert context == span.context - (len(span.pages) - count) * page_size
        assert chosen.pages[first : first + count].tolist() == [span.pages[index] for index in indices]


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=40, deadline=None)
@given(
    contexts=st.lists(st.integers(1, 300), min_size=1, max_size=3),
    decodes=st.lists(st.booleans(), min_size=3, max_size=3),
    num_kv_heads=st.integers(1, 3),
    copies=st.sampled_from([1, 2]),
    group=st.sampled_from([1, 3]),
    head_dim=st.sampled_from([8, 20, 64, 80]),
    page_size=st.sampled_from([4, 16, 32]),
    count=st.sampled_from([2, 3, 8]),
    is_coded=st.booleans(),
    num_threads=st.sampled_from([1, 2]),
    seed=st.integers(0, 1000),
)
def test_bounds_and_choices_are_those_of_plain_torch(
    isa: str,
    contexts: list[int],
    decodes: list[bool],
    num_kv_heads: int,
    copies: int,
    group: int,
    head_dim: int,
    page_size: int,
    count: int,
    is_coded: bool,
    num_threads: int,
    seed: int,
) -> None:
    texts = Texts(contexts, page_size, num_kv_heads, copies, head_dim, seed)
    rows_of = zip(contexts, texts.tables, decodes, strict=False)
    spans = tuple(Span(row, 1, n, table, decode) for row, (n, table, decode) in enumerate(rows_of))
    with running_on(isa, num_threads):
        bounds = noted_in_c_and_plainly(texts, is_coded)
        assert torch.equal(bounds.least, bounds.twin.least)
        assert torch.equal(bounds.largest, bounds.twin.largest)
        q = texts.randn(len(contexts), texts.heads * group, head_dim)
        chosen = Chosen(bounds, texts, q, spans, count)
    rows = iter(chosen.rows)
    for span, number in zip(spans, texts.needed, strict=True):
        if not span.is_decode or number <= count:
            check_whole(span, chosen, rows)
            continue
        wanted = bounds.twin.choose(q[span.start], torch.tensor(span.pages), count).tolist()
        assert [len(each) for each in wanted] == [count] * texts.heads
        check_picked(span, chosen, rows, wanted, page_size)
    assert next(rows, None) is None
