"""Keys and values in fewer bits: sizes, rounding, outliers, quality, and every neighbour they must work with (FIELD 14, 44; 12
is test_kv_pairs.py)."""

from __future__ import annotations

import pydoc_data.topics
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from paged_batches import Text, make_batch, scattered_pages
from tiny_engine import drain, greedy, load, reply, save_model, text
from tiny_models import FAMILIES, StateDictSource, make_model
from torch import Tensor

from engine.events import StepRecord, TokenDelta
from engine.kv.cache import KvCache
from engine.kv.codec import ChannelScales, FewBits, Int8, codec_for, rotate
from engine.kv.layout import KvLayout
from engine.model.decoder import Decoder
from engine.model.load import LoadedModel, build_decoder, load_model
from engine.ops.cpu import CpuOps, native
from engine.ops.interface import AttentionParams, Span
from engine.ops.reference import ReferenceOps
from engine.options import entry
from engine.quality import fixed_text
from engine.weights.source import open_source

OPS = {True: CpuOps(fused=True), False: ReferenceOps()}
CODED = [value for value in entry("kv_dtype").values if value != "native"]
PAGE = 8


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# -- codes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [16, 24, 64, 96])
def test_rounding_stays_within_half_a_step(head_dim: int) -> None:
    x = randn(50, 3, head_dim)
    for codec, steps in ((Int8(head_dim), 127), (FewBits(head_dim, 4), 15), (FewBits(head_dim, 6), 63)):
        parts = codec.encode(x)
        assert [part.shape[-1] for part in parts] == [size for size, _ in codec.parts]
        assert [part.dtype for part in parts] == [kind for _, kind in codec.parts]
        error = (codec.decode(parts, torch.float32) - x).abs()
        spread = x.abs().amax(-1) if steps == 127 else x.amax(-1) - x.amin(-1)
        assert (error.amax(-1) <= 0.51 * spread / steps + 1e-2 * spread / steps + 2e-3).all()


@pytest.mark.parametrize("codec", [Int8(16), FewBits(16, 4), FewBits(16, 6)])
def test_zeros_and_constants_come_back_and_never_written_slots_are_zero(codec: Int8 | FewBits) -> None:
    for value in (0.0, 3.0, -2.5):
        x = torch.full((2, 1, 16), value)
        torch.testing.assert_close(codec.decode(codec.encode(x), torch.float32), x, atol=1e-3, rtol=1e-2)
    empty = tuple(torch.zeros(2, 1, size, dtype=kind) for size, kind in codec.parts)
    assert (codec.decode(empty, torch.float32) == 0).all()


@pytest.mark.parametrize("bits", [4, 6])
def test_each_code_lies_where_the_layout_says(bits: int) -> None:
    codec = FewBits(16, bits)
    codes = torch.randint(0, 2**bits, (16,), generator=torch.Generator().manual_seed(3))
    codes[:2] = torch.tensor([0, 2**bits - 1])  # the whole range, so that the scale is 1
    packed, numbers = codec.encode(codes[None].float())
    assert numbers.tolist() == [[1.0, 0.0]]
    for channel, code in enumerate(codes.tolist()):
        stored = int(packed[0, channel % 8]) >> 4 * (channel // 8) & 15
        if bits == 6:
            stored += (int(packed[0, 8 + channel % 4]) >> 2 * (channel // 4) & 3) << 4
        assert stored == code


@pytest.mark.parametrize("head_dim", [2, 16, 24, 64, 80, 96])
def test_rotating_twice_gives_back_what_was_and_products_stay(head_dim: int) -> None:
    q, k = randn(5, head_dim), randn(5, head_dim, seed=1)
    torch.testing.assert_close(rotate(rotate(q)), q)
    torch.testing.assert_close((rotate(q) * rotate(k)).sum(-1), (q * k).sum(-1))


def test_an_unknown_type_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="Choose native, int8"):
        codec_for("int3", 16, torch.float32)
    with pytest.raises(ValueError, match="multiple of 4"):
        codec_for("int4", 18, torch.float32)


# -- sizes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_dtype", ["native", "int8", "int4"])
@pytest.mark.parametrize("gqa", ["on", "off"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_estimate_is_what_the_tensors_take(kv_dtype: str, gqa: str, dtype: torch.dtype) -> None:
    for family in ("llama", "gemma3", "qwen3"):
        spec = FAMILIES[family].spec
        layout = KvLayout.of(spec, {"kv_dtype": kv_dtype, "gqa": gqa}, dtype.itemsize)
        cache = KvCache(spec, 7, PAGE, dtype, layout=layout)
        held = sum(part.nbytes for i in range(4) for part in cache.layer(i).keys + cache.layer(i).values)
        assert held == cache.num_bytes == 7 * PAGE * layout.token_bytes
    assert KvLayout.of(spec, {}, dtype.itemsize).token_bytes == spec.kv_bytes_per_token(dtype.itemsize)


# -- attention ----------------------------------------------------------------------------------


def attention(layout: KvLayout, scales: ChannelScales | None, k: Tensor, v: Tensor, q: Tensor, fused: bool) -> Tensor:
    """One text of len(k) tokens in scattered pages, its last len(q) rows attending, by one layer of a cache."""
    spec = replace(FAMILIES["llama"].spec, layers=FAMILIES["llama"].spec.layers[:1])
    cache = KvCache(spec, 12, PAGE, torch.float32, layout=layout, scales=None if scales is None else [scales])
    (pages,) = scattered_pages(1, len(k), PAGE)
    slots = torch.tensor([pages[p // PAGE] * PAGE + p % PAGE for p in range(len(k))])
    layer = cache.layer(0)
    keys, values, targets = layer.write_target(slots)
    keys.flatten(0, 1).index_copy_(0, targets, k)
    values.flatten(0, 1).index_copy_(0, targets, v)
    layer.written(slots)
    return layer.attend(OPS[fused], q, (Span(0, len(q), len(k), pages),), AttentionParams(k.shape[-1] ** -0.5))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
@pytest.mark.parametrize("gqa", ["on", "off"])
def test_a_channel_fifty_times_the_rest_does_no_harm(kv_dtype: str, gqa: str, fused: bool) -> None:
    """The channel is large because its weights are, and queries answer with a small one: attention is what it was."""
    layout = KvLayout.of(FAMILIES["llama"].spec, {"kv_dtype": kv_dtype, "gqa": gqa}, 4)
    k, v, q = randn(70, 2, 16), randn(70, 2, 16, seed=1), randn(9, 6, 16, seed=2)
    plain, ones = (
        KvLayout.of(FAMILIES["llama"].spec, {"gqa": gqa}, 4),
        ChannelScales(torch.ones(2, 16), torch.ones(2, 16)),
    )
    usual = attention(layout, ones, k, v, q, fused) - attention(plain, None, k, v, q, fused)
    big = torch.ones(16)
    big[3] = 50.0
    sizes = ChannelScales(big.expand(2, 16), big.expand(2, 16))
    wanted = attention(plain, None, k * big, v * big, q / big, fused)
    with_outlier = (attention(layout, sizes, k * big, v * big, q / big, fused) - wanted).view(9, 6, 16) / big
    assert with_outlier.square().mean() < 1.5 * usual.square().mean()
    assert usual.abs().max() < (0.05 if kv_dtype == "int8" else 0.6)


def test_the_sizes_of_channels_are_read_off_the_weights() -> None:
    """A key channel pair and a value channel made 50 times larger show up as such, whatever packs the weights."""
    spec = FAMILIES["llama"].spec
    state = {name: tensor.clone() for name, tensor in make_model("llama").state_dict().items()}
    state["model.layers.1.self_attn.k_proj.weight"][[16 + 3, 16 + 11]] *= 50  # head 1, channels 3 and 3 + 8
    state["model.layers.1.self_attn.v_proj.weight"][5] *= 50
    for scheme in ("none", "int8"):
        before, after = (
            build_decoder(StateDictSource(spec, weights), OPS, scheme).kv_scales()
            for weights in (make_model("llama").state_dict(), state)
        )
        ratio = after[1].keys[1] / after[1].keys[1][0] / (before[1].keys[1] / before[1].keys[1][0])
        torch.testing.assert_close(ratio[[3, 11]], torch.full((2,), 50.0), atol=1, rtol=0.02)
        torch.testing.assert_close(ratio[[4, 12]], torch.ones(2), atol=0.05, rtol=0)
        ratio = after[1].values[0] / after[1].values[0][0] / (before[1].values[0] / before[1].values[0][0])
        size = (
            50.0 if scheme == "none" else 50.0 / 8
        )  # before weights are rounded, outliers are evened out (balance.py)
        torch.testing.assert_close(ratio[5], torch.tensor(size), atol=0.2, rtol=0.02)
        torch.testing.assert_close(after[0].keys, before[0].keys)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3", "qwen3", "phi3", "smollm3"])
@pytest.mark.parametrize("kv_dtype", CODED)
def test_logits_stay_close_in_every_family(family: str, kv_dtype: str) -> None:
    """Windows, score caps, norms on keys, partial rotation and odd groups go through the codes unharmed."""
    decoder = build_decoder(StateDictSource(FAMILIES[family].spec, make_model(family).state_dict()), OPS, "none")
    tokens = torch.randint(3, 300, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    native, coded = (logits_of(decoder, tokens, kind) for kind in ("native", kv_dtype))
    assert mean_kl(native, coded) < (0.003 if kv_dtype == "int8" else 0.3)
    plain = build_decoder(StateDictSource(FAMILIES[family].spec, make_model(family).state_dict()), OPS, "none", False)
    torch.testing.assert_close(logits_of(plain, tokens, kv_dtype), coded, atol=0.1, rtol=0.05)


def logits_of(decoder: Decoder, tokens: list[int], kv_dtype: str) -> Tensor:
    """Logits [len, vocab], computed in chunks of 250 against pages in ``kv_dtype``."""
    layout = KvLayout.of(decoder.spec, {"kv_dtype": kv_dtype}, decoder.activation_dtype.itemsize)
    (pages,) = scattered_pages(1, len(tokens), 32)
    cache = KvCache(
        decoder.spec, len(pages) + 1, 32, decoder.activation_dtype, layout=layout, scales=decoder.kv_scales()
    )
    one, parts = Text(tokens, pages), []
    while one.num_computed < len(tokens):
        count = min(250, len(tokens) - one.num_computed)
        parts.append(decoder.forward(make_batch([(one, count)], 32), cache))
        one.num_computed += count
    return torch.cat(parts)


def mean_kl(truth: Tensor, other: Tensor) -> float:
    p, q = truth.log_softmax(-1), other.log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


# -- quality on a real model --------------------------------------------------------------------

BOUND = {"int8": 0.001, "int4": 0.02}  # mean KL to native keys and values, nats


@pytest.fixture(scope="module")
def starter(starter_path: Path) -> LoadedModel:
    return load_model(starter_path, "none", True, lambda _text, _share: None)


def starter_kl(starter: LoadedModel, num_tokens: int, kv_dtype: str) -> float:
    topics = pydoc_data.topics.topics
    tokens = starter.text.encode("".join(topics[key] for key in sorted(topics)[:12]))[:num_tokens]
    assert len(tokens) == num_tokens
    model = starter.model
    assert isinstance(model, Decoder)
    texts = [tokens[start : start + 1000] for start in range(0, num_tokens, 1000)]
    return (
        sum(mean_kl(logits_of(model, one, "native"), logits_of(model, one, kv_dtype)) * len(one) for one in texts)
        / num_tokens
    )


@pytest.mark.parametrize("kv_dtype", CODED)
def test_quality_on_a_short_text(starter: LoadedModel, kv_dtype: str) -> None:
    assert (
        1e-6 < starter_kl(starter, 300, kv_dtype) <= 1.5 * BOUND[kv_dtype]
    )  # the first tokens of a text are the hardest


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", CODED)
def test_quality_over_4000_tokens(starter: LoadedModel, kv_dtype: str) -> None:
    assert starter_kl(starter, 4000, kv_dtype) <= BOUND[kv_dtype]


class WithOutliers:
    """The starter with channels of keys and values 50 times the rest, and what reads them a 50th: the same model."""

    def __init__(self, path: Path) -> None:
        self._source = open_source(path)
        self.spec, self.stored_format = self._source.spec, self._source.stored_format
        self.not_stored_packed = "The blocks of the file are not those of this model."
        self.tokenizer_files, self.eos_token_ids = self._source.tokenizer_files, self._source.eos_token_ids

    def names(self) -> frozenset[str]:
        return self._source.names()

    def read_stored(self, name: str, types: frozenset[int]) -> None:
        """What is changed is no longer as it was stored."""

    def stores_numbers(self, name: str) -> bool:
        return False

    def read(self, name: str) -> Tensor:
        weight, spec = self._source.read(name), self.spec
        if name.endswith(".qkv"):
            q, k, v = weight.split((spec.q_size, spec.kv_size, spec.kv_size))
            for channel in (5, 5 + spec.head_dim // 2):  # a pair that turns together
                q.unflatten(0, (-1, spec.head_dim))[:, channel] /= 50
                k.unflatten(0, (-1, spec.head_dim))[:, channel] *= 50
            v.unflatten(0, (-1, spec.head_dim))[:, 9] *= 50
            weight = torch.cat((q, k, v))
        if name.endswith(".attn_out"):
            weight.unflatten(1, (-1, spec.head_dim))[:, :, 9] /= 50
        return weight


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", CODED)
def test_outlier_channels_of_the_starter_change_the_price_by_less_than_twice(
    starter: LoadedModel, starter_path: Path, kv_dtype: str
) -> None:
    model = starter.model
    assert isinstance(model, Decoder)
    tokens = starter.text.encode(fixed_text()[:6000])[:1000]
    other = build_decoder(WithOutliers(starter_path), OPS, "none", max_context=model.max_context)
    native = logits_of(model, tokens, "native")
    assert mean_kl(native, logits_of(other, tokens, "native")) < 1e-6
    usual, harmed = (mean_kl(native, logits_of(one, tokens, kv_dtype)) for one in (model, other))
    assert harmed < 2 * usual


# -- the matrix: {type} x {window} x {regenerate, edit early, share a prefix} --------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("window", ["model", "512"])
@pytest.mark.parametrize("kv_dtype", ["native", *CODED])
@pytest.mark.parametrize("weights", ["none", "int8"])
def test_every_type_and_window_shares_regenerates_and_edits_like_a_fresh_run(
    folder: Path, kv_dtype: str, window: str, weights: str
) -> None:
    """With packed weights the C kernels write and read the codes, where there are any."""
    prompt = text(640)
    edited = (prompt[0], 77, *prompt[2:])
    branch = (*prompt[:600], *text(60, seed=9))
    fresh = []
    for one in (prompt, edited, branch):
        alone = load(folder, {"weights": weights, "kv_dtype": kv_dtype, "window": window, "prefix": "off"})
        fresh.append(reply(alone, one))
        alone.close()
    engine = load(folder, {"weights": weights, "kv_dtype": kv_dtype, "window": window})
    assert reply(engine, prompt) == fresh[0]
    (again,) = engine.generate([prompt], greedy(12))  # regenerate
    assert tuple(again.token_ids) == fresh[0]
    assert again.usage.cached_tokens >= 600
    (other,) = engine.generate([edited], greedy(12))  # nothing to share after an early edit
    assert (tuple(other.token_ids), other.usage.cached_tokens) == (fresh[1], 0)
    (shared,) = engine.generate([branch], greedy(12))
    assert tuple(shared.token_ids) == fresh[2]
    assert shared.usage.cached_tokens >= 576
    engine.check_integrity()
    engine.close()


@pytest.mark.parametrize("kv_dtype", CODED)
@pytest.mark.parametrize("weights", ["none", "int8"])
def test_preempted_chats_end_as_with_plenty_of_memory(folder: Path, kv_dtype: str, weights: str) -> None:
    prompts = [text(60, seed) for seed in range(4)]
    roomy = load(folder, {"weights": weights, "kv_dtype": kv_dtype})
    wanted = [reply(roomy, prompt, 40) for prompt in prompts]
    page_bytes = 32 * roomy.info.kv_bytes_per_token
    roomy.close()
    tight = load(folder, {"weights": weights, "kv_dtype": kv_dtype}, kv_bytes=9 * page_bytes)
    completions = tight.generate(prompts, greedy(40))
    assert [tuple(completion.token_ids) for completion in completions] == wanted
    assert sum(completion.usage.recomputed_tokens for completion in completions) > 0
    tight.check_integrity()
    tight.close()


@pytest.mark.parametrize("kv_dtype", CODED)
def test_the_type_changes_while_chats_run_and_the_path_is_named(folder: Path, kv_dtype: str) -> None:
    engine = load(folder)
    native_bytes, native_pages = engine.info.kv_bytes_per_token, engine._scheduler.pool.num_pages - 1
    number = engine.submit(text(80), greedy(20))
    events = [event for _ in range(6) for event in engine.step()]
    applied = engine.apply({"kv_dtype": kv_dtype})
    assert applied.preempted == 1
    assert applied.info is not None
    assert applied.info.kv_bytes_per_token < native_bytes / 3
    assert engine._scheduler.pool.num_pages - 1 > 3 * native_pages
    events += drain(engine)
    assert sum(len(e.token_ids) for e in events if isinstance(e, TokenDelta) and e.request_id == number) == 20
    last = [event for event in events if isinstance(event, StepRecord)][-1]
    if native.is_available():
        assert f"{kv_dtype} codes read as they are" in last.active_paths["attention"]
    else:
        assert f"{kv_dtype} pages decoded before attention" in last.active_paths["kv"]
    assert last.cost.kv_read_bytes == 99 * applied.info.kv_bytes_per_token
    assert last.pool.page_bytes == 32 * applied.info.kv_bytes_per_token
    engine.apply({"kv_dtype": "native"})
    engine.submit(text(10), greedy(2))
    paths = [event for event in drain(engine) if isinstance(event, StepRecord)][-1].active_paths
    assert "kv" not in paths
    assert "codes" not in paths["attention"]
    engine.close()


def test_cached_pages_of_another_type_are_never_hit(folder: Path) -> None:
    engine = load(folder)
    prompt = text(100)
    reply(engine, prompt)
    engine.apply({"kv_dtype": "int8"})
    (completion,) = engine.generate([prompt], greedy(3))
    assert completion.usage.cached_tokens == 0
    engine.close()
