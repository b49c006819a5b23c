"""One estimate of memory, before loading and after, and what the process really takes: within 5 % for each setting."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_engine import drain, greedy, load, reply, save_model, text

from engine.events import Finished, FinishReason
from engine.kv.layout import KvLayout
from engine.kv.pool import PagePool
from engine.kv.room import PAGE_SIZE, make_cache, num_pages
from engine.memory import expected
from engine.options import Capabilities, Options, entry
from engine.scheduler import Policy, Request, Scheduler
from engine.weights.source import open_source

KV_BYTES = 160 << 20
TOLERANCE = 0.05
PROBE = Path(__file__).with_name("memory_probe.py")
ROOT = PROBE.parents[2]
on_linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's account of memory")

SETTINGS = [
    *(f"weights={value}" for value in entry("weights").values),
    "activations=int8",
    *(f"kv_dtype={value}" for value in entry("kv_dtype").values if value != "native"),
    "gqa=off",
    "window=512",
    "sparse=8",
    "paging=off",
    "speculation=ngram",
    "speculation=layer_skip",
    "speculation=draft",
    "sensitive_layers=off",
    "sensitive_layers=more",
    "kv_cache=off",
]
QUICK = {"weights=int4"}


def probe(model: Path, *pairs: str, native: str = "") -> dict[str, object]:
    draft = str(model) if "speculation=draft" in pairs else "-"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RIDGELINE_NATIVE": native}
    if not native:
        del environment["RIDGELINE_NATIVE"]
    done = subprocess.run(
        [sys.executable, str(PROBE), str(model), str(KV_BYTES), draft, *pairs],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    print(pairs, found)
    return found


def off_by(found: dict[str, object], name: str) -> float:
    measured, told = found["measured"], found[name]
    assert isinstance(measured, int) and isinstance(told, int)
    return abs(measured / told - 1)


@on_linux
@pytest.mark.parametrize(
    "setting", [pytest.param(one, marks=[] if one in QUICK else pytest.mark.slow) for one in SETTINGS]
)
def test_the_process_takes_what_was_estimated(starter_path: Path, setting: str) -> None:
    key, _, value = setting.partition("=")
    reason = entry(key).reason(value, Capabilities(no_draft=""))
    if reason:
        pytest.skip(reason)
    found = probe(starter_path, setting)
    assert off_by(found, "in_use") < TOLERANCE
    if setting != "speculation=draft":  # whose weights nobody knows before they are read
        assert off_by(found, "expected") < TOLERANCE


@on_linux
@pytest.mark.slow
def test_copies_that_batches_make_without_the_c_kernels_are_counted(starter_path: Path) -> None:
    found = probe(starter_path, "weights=int4", native="off")
    parts = found["parts"]
    assert isinstance(parts, dict)
    if not torch.cpu._is_amx_tile_supported() and not torch.cpu._is_avx512_bf16_supported():
        assert parts["copy_bytes"] == 0
    assert off_by(found, "in_use") < TOLERANCE
    assert off_by(found, "expected") < TOLERANCE


@on_linux
@pytest.mark.slow
def test_a_model_of_another_family_and_vocabulary(gemma_path: Path) -> None:
    found = probe(gemma_path, "weights=int4")
    assert off_by(found, "in_use") < TOLERANCE
    assert off_by(found, "expected") < TOLERANCE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("kv_dtype", entry("kv_dtype").values)
@pytest.mark.parametrize("gqa", ["on", "off"])
@pytest.mark.parametrize("weights", ["none", "int4"])
def test_the_pool_is_as_large_as_estimated_to_the_byte(folder: Path, kv_dtype: str, gqa: str, weights: str) -> None:
    settings = {"kv_dtype": kv_dtype, "gqa": gqa, "weights": weights}
    engine = load(folder, settings)
    foretold = expected(open_source(folder).spec, Options(settings), 4 * 2**20)
    layers = [engine._cache.layer(index) for index in range(engine.info.num_layers)]
    held = sum(part.nbytes for layer in layers for part in layer.keys + layer.values)
    assert held == engine.pool_bytes == engine.info.memory.kv_bytes == foretold.kv_bytes
    assert 4 * 2**20 <= held < 4 * 2**20 + PAGE_SIZE * engine.info.kv_bytes_per_token + 1  # and one page of padding
    engine.close()


def test_what_sparse_attention_keeps_is_part_of_the_estimate(folder: Path) -> None:
    engine = load(folder)
    before = engine.info.memory.kv_bytes
    engine.apply({"sparse": "8"})
    bounds = sum(bound.nbytes for layer in engine._cache._layers for bound in layer.bounds or ())
    assert engine.info.memory.kv_bytes - before == bounds > 0
    engine.close()
    engine = load(folder, {"sparse": "8"})
    assert expected(open_source(folder).spec, engine.options, 4 * 2**20).kv_bytes == engine.info.memory.kv_bytes
    engine.close()


@pytest.mark.parametrize("num_windows", [1, 2, 4])
def test_at_least_four_times_as_many_chats_fit_with_paging(num_windows: int) -> None:
    """Chats of 500 tokens in a pool of whole windows of 4,096."""
    reserved, paged = (chats_that_run(paging, 4096, 500, num_windows) for paging in ("off", "on"))
    assert reserved == num_windows
    assert paged >= 4 * reserved


def chats_that_run(paging: str, window: int, num_tokens: int, num_windows: int) -> int:
    """How many chats run at the same time, at ``num_tokens`` tokens each, of more than can."""
    options = Options({"paging": paging, "max_batch": "32", "token_budget": "1024"})
    scheduler = Scheduler(PagePool(1 + num_windows * window // PAGE_SIZE, PAGE_SIZE), Policy.of(options), window)
    for number in range(1, 33):
        scheduler.add(Request(number, [number] * (num_tokens - 20), num_tokens - 20, max_tokens=1000))
    while max(request.num_tokens for request in (*scheduler.running, *scheduler.waiting)) < num_tokens:
        plan = scheduler.plan()
        scheduler.commit(plan, {item.request.request_id: [7] for item in plan.items if item.wants_logits})
        scheduler.check_integrity()
    return sum(request.num_generated > 0 for request in scheduler.running)


@pytest.mark.parametrize("kv_dtype", entry("kv_dtype").values)
def test_sharing_heads_fits_exactly_heads_over_kv_heads_times_the_tokens(folder: Path, kv_dtype: str) -> None:
    spec = open_source(folder).spec
    pages = {}
    for gqa in ("on", "off"):
        layout = KvLayout.of(spec, {"kv_dtype": kv_dtype, "gqa": gqa}, 4)
        unshared = KvLayout.of(spec, {"kv_dtype": kv_dtype, "gqa": "off"}, 4)
        pages[gqa] = (
            num_pages(layout, Options({}), 50 * PAGE_SIZE * unshared.token_bytes) - 1
        )  # without the page for padding
    assert pages["on"] * spec.num_kv_heads == pages["off"] * spec.num_heads == 50 * spec.num_heads


def test_a_cache_that_cannot_be_had_is_made_smaller_and_the_chats_go_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in the middle of a reply, when another layout is asked for: the old cache has gone by then."""
    engine = load(folder)
    usual, before = engine.context_length, reply(engine, text(40))
    long, short = engine.submit(text(600), greedy(8)), engine.submit(text(40), greedy(12))
    events = engine.step()
    zeros, most = torch.zeros, 1 << 19

    def scarce(*shape: int, **options: object) -> torch.Tensor:
        size = torch.empty(shape, dtype=options.get("dtype"), device="meta").nbytes  # type: ignore[call-overload]
        if size > most // 2:  # keys and values are a tensor each
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory")
        return zeros(*shape, **options)  # type: ignore[no-any-return, call-overload]

    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", scarce)
        engine.apply({"gqa": "off"})
        assert PAGE_SIZE <= engine.context_length < usual
        assert engine.pool_bytes <= most
        events += drain(engine)
    endings = {event.request_id: event for event in events if isinstance(event, Finished)}
    assert endings[long].reason is FinishReason.ERROR
    assert f"{engine.context_length:,} fit" in endings[long].message
    assert endings[short].reason is FinishReason.LENGTH
    engine.apply({"gqa": "on"})
    assert engine.context_length == usual
    assert reply(engine, text(40)) == before
    engine.close()


def test_without_memory_for_one_page_it_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    engine = load(folder)
    monkeypatch.setattr(torch, "zeros", none)
    with pytest.raises(MemoryError, match="Close other programs"):
        make_cache(engine._loaded, engine.options, 1 << 20)
    engine.close()
