"""ReferenceOps against brute force: attention over pages (FIELD 32, 33, 38), rotation, norms, products."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from engine.ops.interface import AttentionParams, Span
from engine.ops.reference import ReferenceOps

OPS = ReferenceOps()
PAGE = 8
HEAD_DIM = 16


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def brute_force(q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
    """One text, loops in Python: q [n, H, D] are the last n positions of k, v [S, K, D]."""
    out = torch.zeros_like(q)
    group = q.shape[1] // k.shape[1]
    first = k.shape[0] - q.shape[0]
    for row in range(q.shape[0]):
        position = first + row
        begin = 0 if params.window is None else max(0, position - params.window + 1)
        for head in range(q.shape[1]):
            scores = k[begin : position + 1, head // group] @ q[row, head] * params.scale
            if params.softcap is not None:
                scores = params.softcap * torch.tanh(scores / params.softcap)
            out[row, head] = scores.softmax(0) @ v[begin : position + 1, head // group]
    return out.flatten(1)


class PagedTexts:
    """Several texts in one pair of page tensors whose every other slot holds NaN (page 0: zeros)."""

    def __init__(self, contexts: list[int], kv_heads: int) -> None:
        pages_each = [-(-context // PAGE) for context in contexts]
        num_pages = sum(pages_each) + 3
        order = (torch.randperm(num_pages - 1, generator=torch.Generator().manual_seed(5)) + 1).tolist()
        self.keys = torch.full((num_pages, PAGE, kv_heads, HEAD_DIM), math.nan)
        self.values = torch.full_like(self.keys, math.nan)
        self.keys[0] = self.values[0] = 0.0
        self.pages, self.k, self.v = [], [], []
        for index, context in enumerate(contexts):
            pages = [order.pop() for _ in range(pages_each[index])]
            k = randn(context, kv_heads, HEAD_DIM, seed=index)
            v = randn(context, kv_heads, HEAD_DIM, seed=100 + index)
            for position in range(context):
                self.keys[pages[position // PAGE], position % PAGE] = k[position]
                self.values[pages[position // PAGE], position % PAGE] = v[position]
            self.pages.append(pages)
            self.k.append(k)
            self.v.append(v)


PARAMS = [
    AttentionParams(0.3),
    AttentionParams(0.25, window=5),
    AttentionParams(0.3, softcap=1.5),
    AttentionParams(0.3, window=9, softcap=2.0),
]


@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 1), (6, 2), (5, 1), (14, 2)])
def test_attention_equals_brute_force_for_mixed_spans(heads: int, kv_heads: int, params: AttentionParams) -> None:
    contexts, counts = [1, 9, 20, 33, 16], [1, 1, 20, 7, 3]  # a first token, decode, whole prompt, chunk, verification
    texts = PagedTexts(contexts, kv_heads)
    spans, queries, start = [], [], 0
    for index, (context, count) in enumerate(zip(contexts, counts, strict=True)):
        spans.append(Span(start, count, context, texts.pages[index]))
        queries.append(randn(count, heads, HEAD_DIM, seed=50 + index))
        start += count
    actual = OPS.paged_attention(torch.cat(queries), texts.keys, texts.values, spans, params)
    wanted = [brute_force(q, k, v, params) for q, k, v in zip(queries, texts.k, texts.v, strict=True)]
    torch.testing.assert_close(actual, torch.cat(wanted), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("context", [11, 12, 13, 20, 25])
@pytest.mark.parametrize("window", [7, 8, 9, 11, 12, 13])
@pytest.mark.parametrize("count", [1, 6, 11])
def test_a_window_counts_the_query_itself(window: int, context: int, count: int) -> None:
    texts = PagedTexts([context], 1)
    q = randn(count, 2, HEAD_DIM, seed=7)
    params = AttentionParams(0.5, window=window)
    actual = OPS.paged_attention(q, texts.keys, texts.values, [Span(0, count, context, texts.pages[0])], params)
    torch.testing.assert_close(actual, brute_force(q, texts.k[0], texts.v[0], params), atol=1e-5, rtol=1e-5)


def test_the_window_ends_exactly_where_it_should() -> None:
    """Values one-hot by position: the output shows which positions were seen at all."""
    context, window = 12, 5
    texts = PagedTexts([context], 1)
    for position in range(context):
        page, offset = texts.pages[0][position // PAGE], position % PAGE
        texts.values[page, offset, 0] = torch.nn.functional.one_hot(torch.tensor(position), HEAD_DIM).float()
    q = randn(1, 1, HEAD_DIM)
    span = Span(0, 1, context, texts.pages[0])
    out = OPS.paged_attention(q, texts.keys, texts.values, [span], AttentionParams(1.0, window=window))
    assert out[0].nonzero().flatten().tolist() == [7, 8, 9, 10, 11]


def test_pages_before_the_window_are_never_read() -> None:
    """A page that slid out of the window may be given away: it can hold anything."""
    context, window = 40, 6
    texts = PagedTexts([context], 1)
    q = randn(2, 1, HEAD_DIM)
    params = AttentionParams(0.5, window=window)
    wanted = brute_force(q, texts.k[0], texts.v[0], params)
    first_needed = (context - 2 - window + 1) // PAGE
    for page in texts.pages[0][:first_needed]:
        texts.keys[page] = texts.values[page] = math.nan
    actual = OPS.paged_attention(q, texts.keys, texts.values, [Span(0, 2, context, texts.pages[0])], params)
    torch.testing.assert_close(actual, wanted, atol=1e-5, rtol=1e-5)


def test_rope_and_write_kv_splits_norms_rotates_and_writes_only_its_slots() -> None:
    heads, kv_heads, rows, half = 6, 2, 3, 5  # rotary_dim 10 of 16
    qkv = randn(rows, (heads + 2 * kv_heads) * HEAD_DIM)
    angles = randn(rows, half, seed=1)
    q_norm, k_norm = 1 + randn(HEAD_DIM, seed=2), 1 + randn(HEAD_DIM, seed=3)
    keys = torch.full((4, PAGE, kv_heads, HEAD_DIM), 7.0)
    values = torch.full_like(keys, 7.0)
    slots = torch.tensor([3 * PAGE + 7, 1 * PAGE, 2 * PAGE + 4])
    q = OPS.rope_and_write_kv(qkv, angles.cos(), angles.sin(), q_norm, k_norm, 1e-6, keys, values, slots)

    def by_hand(row: int, head: int, norm: Tensor) -> Tensor:
        x = qkv[row, head * HEAD_DIM : (head + 1) * HEAD_DIM].double()
        x = x / (x.square().mean() + 1e-6).sqrt() * norm
        turned = x.clone()
        for i in range(half):
            c, s = angles[row, i].double().cos(), angles[row, i].double().sin()
            turned[i] = x[i] * c - x[i + half] * s
            turned[i + half] = x[i] * s + x[i + half] * c
        return turned.float()

    for row in range(rows):
        for head in range(heads):
            torch.testing.assert_close(q[row, head], by_hand(row, head, q_norm), atol=1e-5, rtol=1e-5)
        for head in range(kv_heads):
            written = keys.flatten(0, 1)[slots[row], head]
            torch.testing.assert_close(written, by_hand(row, heads + head, k_norm), atol=1e-5, rtol=1e-5)
            first = (heads + kv_heads + head) * HEAD_DIM
            assert torch.equal(values.flatten(0, 1)[slots[row], head], qkv[row, first : first + HEAD_DIM])
    untouched = torch.ones(4 * PAGE, dtype=torch.bool)
    untouched[slots] = False
    assert (keys.flatten(0, 1)[untouched] == 7.0).all()
    assert (values.flatten(0, 1)[untouched] == 7.0).all()


def test_without_tables_nothing_rotates() -> None:
    qkv = randn(2, 4 * HEAD_DIM)
    keys = torch.zeros(2, PAGE, 1, HEAD_DIM)
    q = OPS.rope_and_write_kv(qkv, None, None, None, None, 1e-6, keys, torch.zeros_like(keys), torch.tensor([8, 9]))
    assert torch.equal(q.flatten(1), qkv[:, : 2 * HEAD_DIM])
    assert torch.equal(keys[1, :2, 0], qkv[:, 2 * HEAD_DIM : 3 * HEAD_DIM])


@pytest.mark.parametrize("scheme", ["none", "int8", "int4"])
def test_linear_head_and_embed_use_the_weights_that_unpack_gives(scheme: str) -> None:
    weight, bias, x, residual = randn(12, 64), randn(12, seed=1), randn(5, 64, seed=2), randn(5, 12, seed=3)
    packed = OPS.pack(weight, bias, scheme)
    unpacked = OPS.unpack(packed)
    worst = {"none": 0.0, "int8": 0.02, "int4": 0.3}[scheme]
    assert (unpacked - weight).abs().max() <= worst
    wanted = x @ unpacked.T + bias
    torch.testing.assert_close(OPS.linear(x, packed), wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(OPS.linear(x, packed, residual), wanted + residual, atol=1e-5, rtol=1e-5)
    capped = 2.0 * torch.tanh(wanted / 2.0)
    torch.testing.assert_close(OPS.head(x, packed, 2.0), capped, atol=1e-5, rtol=1e-5)
    rows = OPS.embed(packed, torch.tensor([7, 0, 7]), 3.0, torch.float32)
    torch.testing.assert_close(rows, 3.0 * unpacked[[7, 0, 7]])
    assert packed.scheme == scheme
    assert (packed.out_features, packed.in_features) == (12, 64)
    assert packed.num_bytes == sum(t.nbytes for t in packed.data) + bias.nbytes


def test_an_unknown_scheme_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="int3"):
        OPS.pack(randn(4, 32), None, "int3")


def test_the_embedding_scale_is_rounded_to_the_activations_dtype() -> None:
    """transformers multiplies by sqrt(hidden) in the model's dtype: in bf16 sqrt(640) is 25.25, not 25.298."""
    packed = OPS.pack(torch.ones(2, 4), None, "none")
    rows = OPS.embed(packed, torch.tensor([0]), 640**0.5, torch.bfloat16)
    assert rows.dtype == torch.bfloat16
    assert rows[0, 0].item() == 25.25


@pytest.mark.parametrize(
    ("activation", "module"),
    [
        ("silu", torch.nn.SiLU()),
        ("gelu_tanh", torch.nn.GELU(approximate="tanh")),
        ("gelu", torch.nn.GELU()),
    ],
)
def test_gated_activation(activation: str, module: torch.nn.Module) -> None:
    gate_up = randn(3, 20)
    wanted = module(gate_up[:, :10]) * gate_up[:, 10:]
    torch.testing.assert_close(OPS.gated_mlp_activation(gate_up, activation), wanted)
    with pytest.raises(ValueError, match="swish9"):
        OPS.gated_mlp_activation(gate_up, "swish9")


def test_rms_norm_takes_its_statistic_in_fp32() -> None:
    x = torch.full((1, 64), 300.0, dtype=torch.float16)  # the square overflows fp16
    out = OPS.rms_norm(x, torch.full((64,), 2.0), 1e-6)
    assert out.dtype == torch.float16
    torch.testing.assert_close(out, torch.full_like(out, 2.0))
