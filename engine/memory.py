"""How much memory a model takes, part by part: the one estimate that everything shows and decides by.

``expected`` knows it before anything is loaded, from the model's headers and the switches; ``in_use`` counts the tensors
of a loaded one. They share what neither can count: tokenizers live in another library's memory, and scratch is what the
largest step will have touched. Both agree with what the operating system says of the process within 5 % (tests).
"""

from __future__ import annotations

from functools import cache

import torch

from engine.events import MemoryUse
from engine.kv.cache import KvCache
from engine.kv.layout import KvLayout
from engine.kv.room import PAGE_SIZE, budget_for, num_pages
from engine.model.decoder import Decoder
from engine.model.load import LoadedModel, backends, sensitive_scheme
from engine.model.spec import ModelSpec
from engine.ops.cpu.dense_dtype import dense_dtype
from engine.ops.cpu.packing import CpuPacked
from engine.options import Options
from engine.speculation.draft import DraftProposer
from engine.speculation.layer_skip import kept_layers
from engine.speculation.make import Draft
from engine.speculation.speculator import Speculator

TOKENIZER_ENTRY_BYTES = 400  # of vocabulary, merges included, measured with 49 k and 262 k entries
_SCRATCH_RESERVE = 1.5  # the buffer of a step's rows is made larger than asked for, so that it need not grow often
_LLM_INT8_SCRATCH = 4.0  # bitsandbytes makes several tensors of each product's rows; measured
_LIBRARY_BYTES = {"nf4": 123 << 20, "llm_int8": 123 << 20}  # bitsandbytes itself and what it imports, measured
_PROBE = (512, 1024)  # rows and input features of the matrix that shows what a scheme's weights take


def expected(spec: ModelSpec, options: Options, kv_budget: int | None = None, stored_bytes: int = 0) -> MemoryUse:
    """What loading a model of this shape under ``options`` will take, a draft model aside.

    kv_budget: bytes for the KV cache, by default what a load would give it now. stored_bytes: of the file, for weights that
    stay as they are stored.
    """
    scheme = options["weights"]
    element_bytes = backends(scheme)[True].kv_dtype(scheme).itemsize
    kv_budget = budget_for(spec, element_bytes) if kv_budget is None else kv_budget
    layout = KvLayout.of(spec, options, element_bytes)
    pages = num_pages(layout, options, kv_budget)
    draft_bytes = scratch_bytes = 0
    if options["speculation"] == "layer_skip":
        plain = KvLayout.of(spec, {}, element_bytes)
        draft_bytes = pages * PAGE_SIZE * plain.layer_token_bytes * len(kept_layers(spec.num_layers))
        scratch_bytes = _scratch_bytes(spec, options)
    weight_bytes, copy_bytes = _weight_and_copy_bytes(spec, options, stored_bytes)
    scratch_bytes += _copying_bytes(spec, copy_bytes)
    return MemoryUse(
        weight_bytes=weight_bytes,
        copy_bytes=copy_bytes,
        kv_bytes=pages * layout.page_bytes(PAGE_SIZE, with_bounds=options["sparse"] != "off"),
        draft_bytes=draft_bytes,
        table_bytes=_table_bytes(spec, options),
        scratch_bytes=scratch_bytes + _scratch_bytes(spec, options),
    )


def in_use(
    loaded: LoadedModel, kv: KvCache, options: Options, draft: Draft | None, speculator: Speculator | None
) -> MemoryUse:
    """What a loaded model takes now, once its pages and scratch have been touched."""
    model, spec = loaded.model, loaded.spec
    draft_bytes, scratch_bytes = 0, _scratch_bytes(spec, options)
    table_bytes = _table_bytes(spec, options)
    if draft is not None:
        draft_bytes += draft.loaded.model.weight_bytes
        table_bytes += TOKENIZER_ENTRY_BYTES * draft.loaded.spec.vocab_size
    if speculator is not None and isinstance(speculator.proposer, DraftProposer):
        draft_bytes += speculator.proposer.cache_bytes
        scratch_bytes += _scratch_bytes(speculator.proposer.spec, options)
    copy_bytes = model.copy_bytes if isinstance(model, Decoder) else 0
    scratch_bytes += _copying_bytes(spec, copy_bytes)
    return MemoryUse(
        weight_bytes=model.weight_bytes,
        copy_bytes=copy_bytes,
        kv_bytes=kv.num_bytes,
        draft_bytes=draft_bytes,
        table_bytes=table_bytes + (model.table_bytes if isinstance(model, Decoder) else 0),
        scratch_bytes=scratch_bytes,
    )


def _weight_and_copy_bytes(spec: ModelSpec, options: Options, stored_bytes: int) -> tuple[int, int]:
    """Of the weights as packed, and of the copies that batches will make of them."""
    model, sensitive = options["weights"], options["sensitive_layers"]
    if model == "as_stored":
        return stored_bytes, 0
    hidden = spec.hidden_size
    of_layer = (2 * spec.q_size + 2 * spec.kv_size + 3 * spec.intermediate_size) * hidden
    matrices = [
        (of_layer, sensitive_scheme(model, sensitive, index, spec.num_layers)) for index in range(spec.num_layers)
    ]
    of_table = spec.vocab_size * hidden
    matrices += [(of_table, sensitive_scheme(model, sensitive))] * (1 if spec.tied_head else 2)
    packed, copied = (
        sum(count * _bytes_per_weight(model, scheme)[part] for count, scheme in matrices) for part in (0, 1)
    )
    norm_bytes = 4 * (2 * spec.num_layers + 1) * hidden
    return int(packed) + norm_bytes, int(copied)


@cache
def _bytes_per_weight(model: str, scheme: str) -> tuple[float, float]:
    """As packed, and of an unpacked copy that batches will make, in a model of the scheme ``model``: found by packing one small
    matrix, so true of whatever ops run here."""
    packed = backends(model)[True].pack(torch.zeros(_PROBE), None, scheme)
    makes_copies = isinstance(packed, CpuPacked) and scheme != "none" and dense_dtype() == torch.bfloat16
    return packed.num_bytes / (_PROBE[0] * _PROBE[1]), dense_dtype().itemsize if makes_copies else 0


def _copying_bytes(spec: ModelSpec, copy_bytes: int) -> int:
    """Where batches read copies: the largest one once more, laid out anew for a batch of another size."""
    return dense_dtype().itemsize * spec.vocab_size * spec.hidden_size if copy_bytes else 0


def _table_bytes(spec: ModelSpec, options: Options) -> int:
    return TOKENIZER_ENTRY_BYTES * spec.vocab_size + _LIBRARY_BYTES.get(options["weights"], 0)


def _scratch_bytes(spec: ModelSpec, options: Options) -> int:
    """Rows of what lies between a step's operations (and of what enters products, rounded), and the logits of one row per
    chat, fp32."""
    rows = min(options.number("token_budget"), spec.max_position)
    row = 5 * spec.hidden_size + 3 * spec.intermediate_size + 3 * spec.q_size + 2 * spec.kv_size
    logits = options.number("max_batch") * spec.vocab_size
    copies = _LLM_INT8_SCRATCH if options["weights"] == "llm_int8" else _SCRATCH_RESERVE
    return int(4 * (copies * rows * row + logits))
