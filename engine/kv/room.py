"""How much memory the KV cache may take, and the cache that fits into it."""

from __future__ import annotations

import logging

import psutil
import torch

from engine.kv.cache import KvCache
from engine.kv.layout import KvLayout
from engine.kv.switches import sparse_pages, user_window
from engine.model.load import LoadedModel
from engine.model.spec import ModelSpec
from engine.options import Options

log = logging.getLogger(__name__)

PAGE_SIZE = 32  # tokens
KV_SHARE_OF_FREE_MEMORY = 0.3
KV_BYTES_WANTED = 512 * 2**20  # room for several chats, even when one window needs less


def kv_budget(loaded: LoadedModel) -> int:
    """Bytes for the cache: what the model's window needs, at least ``KV_BYTES_WANTED``, at most a share of the free memory."""
    return budget_for(loaded.spec, loaded.model.kv_dtype.itemsize)


def budget_for(spec: ModelSpec, element_bytes: int) -> int:
    """The same before loading: keys and values will be of ``element_bytes`` each."""
    window_bytes = spec.max_position * spec.kv_bytes_per_token(element_bytes)
    most = int(psutil.virtual_memory().available * KV_SHARE_OF_FREE_MEMORY)
    return min(max(window_bytes, KV_BYTES_WANTED), most)


def layout_for(loaded: LoadedModel, options: Options) -> KvLayout:
    return KvLayout.of(loaded.spec, options, loaded.model.kv_dtype.itemsize)


def num_pages(layout: KvLayout, options: Options, budget: int) -> int:
    """Pages of ``layout`` in ``budget`` bytes, the padding page included. ValueError when not even one page fits."""
    page_bytes = layout.page_bytes(PAGE_SIZE, with_bounds=sparse_pages(options) is not None)
    count = 1 + budget // page_bytes
    if count < 2:
        raise ValueError(
            f"One page of KV cache needs {page_bytes:,} bytes and {budget:,} are available. "
            "Close other programs, or choose a smaller model."
        )
    return count


def make_cache(loaded: LoadedModel, options: Options, budget: int) -> KvCache:
    """An empty cache in the layout that ``options`` ask for, as many pages as fit into ``budget`` bytes.

    Where the system has less than that, half as much is asked for, and half of that: a small cache keeps the engine going, a
    failure would leave it without any. ValueError when not even one page fits, MemoryError when it is not to be had.
    """
    layout = layout_for(loaded, options)
    scales = None if layout.kv_dtype == "native" else loaded.model.kv_scales()
    pages = num_pages(layout, options, budget)
    while True:
        try:
            kv = KvCache(loaded.spec, pages, PAGE_SIZE, loaded.model.kv_dtype, layout=layout, scales=scales)
            kv.window = user_window(options)
            kv.set_sparse(sparse_pages(options))
            return kv
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            if pages == 2:
                raise MemoryError("There is no memory for one page of KV cache. Close other programs.") from error
            pages = max(2, pages // 2)
            log.warning("no memory for the KV cache; trying %d pages", pages)


def is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error)
