"""NF4 and LLM.int8 through bitsandbytes: products against the unpacked weights, bytes, paths, whole models, and doing without it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from saved_models import save_tiny
from torch import Tensor

from engine.engine import Engine
from engine.model.load import sensitive_scheme
from engine.ops.cpu import CpuOps, bitsandbytes_products
from engine.ops.cpu.dense_dtype import dense_dtype
from engine.options import Capabilities, Options, unavailable
from engine.params import SamplingParams
from engine.quality import fixed_tokens, full_precision, quality, read, reference_rows

pytest.importorskip("bitsandbytes")
SCHEMES = bitsandbytes_products.SCHEMES


def _random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _distance(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(deadline=None, max_examples=15)
@given(
    num_rows=st.integers(1, 40),
    out_features=st.integers(1, 70),
    in_features=st.integers(1, 200),
    has_bias=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_nf4_products_are_those_of_the_unpacked_weights(
    dtype: torch.dtype, num_rows: int, out_features: int, in_features: int, has_bias: bool, seed: int
) -> None:
    weight, x = _random(seed, out_features, in_features), _random(seed + 1, num_rows, in_features)
    bias = _random(seed + 2, out_features) if has_bias else None
    packed = bitsandbytes_products.pack(weight, bias, "nf4", dtype)
    got = bitsandbytes_products.linear(x, packed)
    unpacked = bitsandbytes_products.unpack(packed)
    wanted = torch.nn.functional.linear(x, unpacked, bias)
    size = torch.nn.functional.linear(x.abs(), unpacked.abs()) + 1
    assert got.dtype == torch.float32
    assert float(((got - wanted).abs() / size).max()) < (1e-5 if dtype == torch.float32 else 2e-2)


@settings(deadline=None, max_examples=20)
@given(num_rows=st.integers(1, 40), out_features=st.integers(8, 70), seed=st.integers(0, 1000))
def test_int8_products_keep_outliers_in_full(num_rows: int, out_features: int, seed: int) -> None:
    """One input of 60,000 would leave nothing of the others in 8 bits; fp16 would not even hold ten of it."""
    x = _random(seed, num_rows, 128)
    x[:, 7] = 6e5
    packed = bitsandbytes_products.pack(_random(seed + 1, out_features, 128) / 10, None, "llm_int8", torch.float32)
    unpacked = bitsandbytes_products.unpack(packed)
    got = bitsandbytes_products.linear(x, packed)
    outlier = x[:, 7:8] @ unpacked[:, 7:8].T
    x[:, 7] = 0
    others = x @ unpacked.T
    assert float((got - outlier - others).abs().max()) < 0.05 * float(others.abs().max()) + 1e-6 * float(
        outlier.abs().max()
    )


@pytest.mark.parametrize(("scheme", "largest", "bytes_per_weight"), [("nf4", 0.12, 0.5625), ("llm_int8", 0.01, 1.02)])
def test_packed_weights_stand_for_the_original_in_few_bytes(
    scheme: str, largest: float, bytes_per_weight: float
) -> None:
    weight = _random(0, 100, 256)
    packed = CpuOps(use_native=False).pack(weight, None, scheme)
    assert _distance(CpuOps().unpack(packed), weight) < largest
    assert packed.num_bytes / weight.numel() <= bytes_per_weight
    assert packed.num_bytes == sum(tensor.nbytes for tensor in packed.data)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("in_features", [128, 70])
def test_rows_come_back_as_unpack_has_them(scheme: str, in_features: int) -> None:
    ops = CpuOps(use_native=False)
    packed = ops.pack(_random(0, 45, in_features), None, scheme)
    ids = torch.tensor([44, 0, 17, 17])
    assert torch.equal(ops.embed(packed, ids, 1.0, torch.float32), ops.unpack(packed)[ids])


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_damaged_weights_are_refused(scheme: str, bad: float) -> None:
    weight = _random(0, 20, 64)
    weight[13, 40] = bad
    with pytest.raises(ValueError, match="NaN or infinite"):
        CpuOps(use_native=False).pack(weight, None, scheme)


def test_head_and_embedding_are_read_as_int8() -> None:
    assert [sensitive_scheme("nf4", sensitive) for sensitive in ("on", "off")] == ["int8", "nf4"]
    assert [sensitive_scheme("llm_int8", sensitive) for sensitive in ("on", "off")] == ["int8", "int8"]
    assert sensitive_scheme("llm_int8", "more", 0, 3) == "llm_int8"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = save_tiny("llama", tmp_path_factory.mktemp("tiny"))
    engine = Engine.load(str(folder), full_precision(), kv_bytes=1 << 20)
    yield engine
    engine.close()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_model_runs_on_them_and_says_so(engine: Engine, scheme: str) -> None:
    engine.apply(full_precision())
    tokens = fixed_tokens(engine, 100)
    reference, full_bytes = reference_rows(engine, tokens), engine.info.weight_bytes
    engine.apply({"weights": scheme, "fused_ops": "on", "sensitive_layers": "on"})
    assert 0 < quality(reference, read(engine, tokens), tokens).mean_kl < 0.1
    paths = engine.info.active_paths
    assert f"{scheme}: bitsandbytes" in paths["weights"]
    assert paths["products"].startswith(f"{scheme}: bitsandbytes")
    assert paths["head"].startswith("int8: torch")
    assert engine.info.weight_bytes < full_bytes / 2
    assert engine.info.dtype == ("int8" if scheme == "llm_int8" else {torch.float32: "fp32"}.get(dense_dtype(), "bf16"))


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_starter_answers_with_them(starter_path: Path, scheme: str) -> None:
    engine = Engine.load(str(starter_path), {"weights": scheme}, kv_bytes=64 << 20)
    params = SamplingParams(temperature=0.0, max_tokens=8)
    (completion,) = engine.generate([[{"role": "user", "content": "What is the capital of France?"}]], params)
    engine.close()
    assert "Paris" in completion.text


def test_without_the_package_the_choices_are_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Capabilities(has_bitsandbytes=False)
    assert set(unavailable(here)["weights"]) == set(SCHEMES)
    with pytest.raises(ValueError, match="not installed"):
        Options({"weights": "nf4"}, here)
    bitsandbytes_products._library.cache_clear()
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ValueError, match=r"cannot be loaded here .* choose weights=int4"):
        bitsandbytes_products.pack(_random(0, 4, 64), None, "nf4", torch.float32)


def test_the_package_is_imported_only_when_it_is_asked_for() -> None:
    ask = "import sys, engine.engine, engine.ops.cpu.ops; print('bitsandbytes' in sys.modules)"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", ask], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
