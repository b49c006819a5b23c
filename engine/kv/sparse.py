"""Which pages a decoding token reads: those whose keys could matter most (Quest, Tang 2024).

Of every page the least and the largest value of each key channel are kept. For a query q no key of the page can score more
than  sum over channels of max(q * least, q * largest), so pages are ranked by that bound, for each KV head by the query
head of its group that wants it most. The first page (attention sinks) and the last one (what was just said) are always read.
"""

from __future__ import annotations

import torch
from torch import Tensor


class PageBounds:
    """One layer's bounds, ``least`` and ``largest``: fp32 [num_pages, heads, D] each."""

    def __init__(self, num_pages: int, num_heads: int, head_dim: int) -> None:
        self.least = torch.zeros(num_pages, num_heads, head_dim)
        self.largest = torch.zeros(num_pages, num_heads, head_dim)

    def read_pages(self, pages: Tensor, keys: Tensor) -> None:
        """Bounds of pages that were written before: pages int64 [n], keys [n, P, heads, D]."""
        self.least[pages] = keys.float().amin(1)
        self.largest[pages] = keys.float().amax(1)

    def add(self, slots: Tensor, keys: Tensor, page_size: int) -> None:
        """Keys [N, heads, D] were written at ``slots``; a page begins anew when its first slot is written."""
        pages, keys = slots // page_size, keys.float()
        begun = pages[slots % page_size == 0]
        self.least[begun], self.largest[begun] = torch.inf, -torch.inf
        index = pages[:, None, None].expand_as(keys)
        self.least.scatter_reduce_(0, index, keys, "amin")
        self.largest.scatter_reduce_(0, index, keys, "amax")

    def choose(self, q: Tensor, pages: Tensor, count: int) -> Tensor:
        """For each KV head ``count`` of ``pages`` [n], as indices into them, ascending: int64 [heads, count].

        q: [H, D], the query heads of a KV head next to each other.
        """
        least, largest = self.least[pages].permute(1, 2, 0), self.largest[pages].permute(1, 2, 0)  # [heads, D, n]
        grouped = q.float().view(least.shape[0], -1, q.shape[-1])
        bounds = (grouped.clamp_min(0) @ largest + grouped.clamp_max(0) @ least).amax(1)
        bounds[:, [0, -1]] = torch.inf
        return bounds.topk(count, dim=1).indices.sort(dim=1).values
