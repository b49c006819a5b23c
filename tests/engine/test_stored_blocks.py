"""GGUF's blocks kept as they are: the same numbers as the gguf package's, products on every instruction set, whole files and refusals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf_files import write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st
from native_kernels import needs_kernels
from saved_models import save_tiny
from tiny_models import make_model
from torch import Tensor

from engine.engine import Engine
from engine.model.load import load_model, read_weights
from engine.ops.cpu import CpuOps, native
from engine.ops.cpu.native import linear as native_linear
from engine.ops.cpu.native import stored as native_stored
from engine.ops.cpu.native.linear import NativePacked
from engine.options import Capabilities, Options, unavailable
from engine.quality import fixed_tokens, full_precision, quality, read, reference_rows
from engine.weights.ggml_types import block_of, dequantize_rows
from engine.weights.source import WeightSource, open_source
from engine.weights.stored import KEPT_TYPES, TYPES_OF_SCHEME, StoredRows

pytestmark = needs_kernels
Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K = sorted(KEPT_TYPES)
_HALVES = {Q4_1: (0, 2), Q5_1: (0, 2), Q4_K: (0, 2), Q5_K: (0, 2), Q6_K: (208,)}  # where a block's fp16 numbers lie
NO_PROGRESS = lambda text, share: None  # noqa: E731


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = native.isa()
    yield
    native.set_isa(before)
    native.set_threads(1)


def stored_rows(ggml_type: int, num_rows: int, in_features: int, seed: int, scale: float = 0.05) -> StoredRows:
    """Random values in every field; scales of both signs about as large as ``scale``."""
    block = block_of(ggml_type)
    assert block is not None
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (num_rows * in_features // block.elements, block.bytes), dtype=np.uint8)
    for at in _HALVES.get(ggml_type, (0,)):
        halves = (generator.standard_normal(len(blocks)) * scale).astype(np.float16)
        blocks[:, at : at + 2] = halves.view(np.uint8).reshape(-1, 2)
    return StoredRows(ggml_type, block.name, in_features, torch.from_numpy(blocks.reshape(num_rows, -1)))


def numbers(stored: Sequence[StoredRows]) -> Tensor:
    """What the gguf package makes of the rows."""
    return torch.cat([torch.from_numpy(dequantize_rows(rows.blocks.numpy(), rows.ggml_type)) for rows in stored])


def quantized(x: Tensor) -> Tensor:
    """x [N, in] as the kernels see it: int8 with a scale per 32."""
    grouped = x.view(x.shape[0], -1, 32)
    scales = grouped.abs().amax(dim=2, keepdim=True) / 127
    return ((grouped * (1 / scales)).round() * scales).flatten(1)


@pytest.mark.parametrize("ggml_type", sorted(KEPT_TYPES))
@pytest.mark.parametrize("scale", [0.05, 2e-6])  # the second one lies among fp16's subnormal numbers
def test_repacked_blocks_hold_the_bits_of_the_gguf_package(ggml_type: int, scale: float) -> None:
    stored = [stored_rows(ggml_type, num_rows, 512, seed=num_rows, scale=scale) for num_rows in (1, 16, 37)]
    packed = native_stored.pack(stored, None, "as_stored")
    assert packed.parts == ()
    assert torch.equal(native_linear.unpack(packed), numbers(stored))
    ids = torch.tensor([53, 0, 17, 17])
    assert torch.equal(native_linear.rows(packed, ids), numbers(stored)[ids])


@pytest.mark.parametrize("isa", native.ISAS[1:])
@pytest.mark.parametrize("types", [*((kept,) for kept in sorted(KEPT_TYPES)), (Q4_K, Q6_K), (Q5_0, Q4_1, Q8_0, Q5_K)])
@settings(deadline=None, max_examples=8)
@given(
    num_rows=st.integers(1, 40),
    sizes=st.lists(st.integers(1, 50), min_size=4, max_size=4),
    num_blocks=st.integers(1, 2),
    has_terms=st.booleans(),
    num_threads=st.integers(1, 2),
    seed=st.integers(0, 1000),
)
def test_products_match_their_twin_and_no_row_sees_another(
    isa: str,
    types: tuple[int, ...],
    num_rows: int,
    sizes: list[int],
    num_blocks: int,
    has_terms: bool,
    num_threads: int,
    seed: int,
) -> None:
    if not native.set_isa(isa):
        pytest.skip(f"this CPU lacks {isa}")
    native.set_threads(num_threads)
    generator = torch.Generator().manual_seed(seed)
    width = 256 * num_blocks
    stored = [stored_rows(kind, size, width, seed) for kind, size in zip(types, sizes, strict=False)]
    weight = numbers(stored).double()
    x = torch.randn(num_rows, width, generator=generator)
    bias = torch.randn(len(weight), generator=generator) if has_terms else None
    residual = torch.randn(num_rows, len(weight), generator=generator) if has_terms else None
    packed = native_stored.pack(stored, bias, "as_stored")
    got = native_linear.linear(x, packed, residual)

    wanted = quantized(x).double() @ weight.T + (0 if bias is None else bias) + (0 if residual is None else residual)
    # A minimum and its values may cancel: the error is that of what is added up, about as large as the largest weight.
    size = quantized(x).abs().double() @ (weight.abs() + weight.abs().max()).T + 1
    assert float(((got - wanted).abs() / size).max()) < 1e-5
    for row in {0, num_rows // 2, num_rows - 1}:
        its_residual = None if residual is None else residual[row : row + 1]
        assert torch.equal(native_linear.linear(x[row : row + 1], packed, its_residual)[0], got[row])


@pytest.mark.parametrize("ggml_type", sorted(KEPT_TYPES))
def test_instruction_sets_and_threads_agree_to_the_last_bit(ggml_type: int) -> None:
    packed = native_stored.pack([stored_rows(ggml_type, 333, 512, 1)], None, "as_stored")
    x = torch.randn(21, 512, generator=torch.Generator().manual_seed(0))
    results = []
    for isa in native.ISAS[1:]:
        for num_threads in (1, 3):
            if native.set_isa(isa):
                native.set_threads(num_threads)
                results.append(native_linear.linear(x, packed))
    assert all(torch.equal(result, results[0]) for result in results)


def test_sensitive_products_of_stored_blocks_keep_16_bits() -> None:
    stored = [stored_rows(Q4_K, 20, 256, 1), stored_rows(Q6_K, 30, 256, 2)]
    x = torch.randn(9, 256, generator=torch.Generator().manual_seed(0))
    wanted = x.double() @ numbers(stored).double().T
    errors = []
    for sensitive in (False, True):
        packed = native_stored.pack(stored, None, "as_stored", sensitive)
        errors.append(float((native_linear.linear(x, packed) - wanted).norm() / wanted.norm()))
        assert packed.num_passes == 1 + sensitive
        assert (
            packed.path == f"as_stored Q4_K + Q6_K: C kernel ({native.isa()}), int{16 if sensitive else 8} activations"
        )
    assert errors[1] < min(1e-4, errors[0] / 20)


@pytest.mark.parametrize(
    ("ggml_type", "bytes_per_weight"),
    [(Q4_0, 0.625), (Q4_1, 0.625), (Q5_0, 0.75), (Q5_1, 0.75), (Q8_0, 1.0625), (Q4_K, 0.579), (Q5_K, 0.704), (Q6_K, 0.829)],
)  # fmt: skip
def test_they_take_about_the_bytes_of_the_file(ggml_type: int, bytes_per_weight: float) -> None:
    stored = stored_rows(ggml_type, 64, 1024, 0)
    packed = native_stored.pack([stored], None, "as_stored")
    assert packed.num_bytes == packed.data[0].nbytes <= bytes_per_weight * 64 * 1024
    assert packed.num_bytes < 1.12 * stored.blocks.nbytes


@pytest.mark.parametrize("ggml_type", sorted(KEPT_TYPES))
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_damaged_scales_are_refused(ggml_type: int, bad: float) -> None:
    stored = stored_rows(ggml_type, 20, 256, 0)
    at = _HALVES.get(ggml_type, (0,))[-1]
    stored.blocks.numpy()[13, at : at + 2] = np.array([bad], np.float16).view(np.uint8)
    with pytest.raises(ValueError, match="NaN or infinite"):
        native_stored.pack([stored], None, "as_stored")


# -- whole files ------------------------------------------------------------------------------------------------------


def _tiny(folder: Path, type_name: str, mixed: bool = False) -> WeightSource:
    """A Llama file (its q and k rows are interleaved); ``mixed``: v of the first layer is stored as Q8_0."""
    model = make_model("llama")
    replace = {}
    if mixed:
        from gguf import GGMLQuantizationType
        from gguf.quants import quantize

        v = model.state_dict()["model.layers.0.self_attn.v_proj.weight"].numpy()
        replace["blk.0.attn_v.weight"] = (quantize(v, GGMLQuantizationType.Q8_0), GGMLQuantizationType.Q8_0)
    return open_source(write_gguf(folder / "tiny.gguf", model, type_name, replace=replace))


def _matrices(source: WeightSource) -> list[str]:
    return [name for name in sorted(source.names()) if source.read(name).ndim == 2]


@pytest.mark.parametrize(("type_name", "mixed"), [("Q4_0", False), ("Q5_1", False), ("Q8_0", False), ("Q4_1", True)])
def test_every_matrix_of_a_file_is_what_dequantizing_gives(tmp_path: Path, type_name: str, mixed: bool) -> None:
    source, ops = _tiny(tmp_path, type_name, mixed), CpuOps()
    for name in _matrices(source):
        stored = source.read_stored(name, KEPT_TYPES)
        assert stored is not None
        packed = ops.pack_stored(stored, None, "as_stored")
        assert isinstance(packed, NativePacked)
        assert torch.equal(ops.unpack(packed), source.read(name))
        assert len(packed.parts) == (2 if mixed and name == "layers.0.qkv" else 0)


@pytest.mark.parametrize(("type_name", "scheme"), [("Q4_0", "int4"), ("Q4_1", "int4"), ("Q8_0", "int8")])
def test_other_choices_take_blocks_that_are_already_theirs(tmp_path: Path, type_name: str, scheme: str) -> None:
    source, ops = _tiny(tmp_path, type_name), CpuOps()
    weights = read_weights(source, ops, scheme, NO_PROGRESS, sensitive="off")
    for name, packed in weights.matrices():
        if packed is not weights.embed:
            assert torch.equal(ops.unpack(packed), source.read(name))
        assert packed.scheme == scheme
        assert packed.path.startswith(f"{scheme}: C kernel")


def test_int4_takes_the_blocks_of_gemmas_q4_k_matrices(gemma_path: Path) -> None:
    source = open_source(gemma_path)
    stored = source.read_stored("layers.0.attn_out", TYPES_OF_SCHEME["int4"])
    assert stored is not None
    assert stored[0].type_name == "Q4_K"
    packed = native_stored.pack(stored, None, "int4")
    assert packed.path.startswith("int4: C kernel")
    assert torch.equal(native_linear.unpack(packed), source.read("layers.0.attn_out"))
    assert packed.num_bytes < 0.58 * packed.out_features * packed.in_features
    assert source.read_stored("layers.0.qkv", TYPES_OF_SCHEME["int4"]) is None


@pytest.mark.parametrize("type_name", ["F16", "F32"])
def test_a_file_of_plain_numbers_is_refused_with_the_reason(tmp_path: Path, type_name: str) -> None:
    source = _tiny(tmp_path, type_name)
    assert "Q4_0, Q4_1" in source.not_stored_packed
    assert source.read_stored("layers.0.qkv", KEPT_TYPES) is None
    assert source.stores_numbers("layers.0.qkv")


def test_plain_numbers_beside_blocks_stay_what_they_are(tmp_path: Path) -> None:
    from gguf import GGMLQuantizationType

    model = make_model("llama")
    half = model.state_dict()["model.layers.0.mlp.down_proj.weight"].numpy().astype(np.float16)
    replace = {"blk.0.ffn_down.weight": (half.view(np.uint8), GGMLQuantizationType.F16)}
    source = open_source(write_gguf(tmp_path / "tiny.gguf", model, "Q8_0", replace=replace))
    weights = read_weights(source, CpuOps(), "as_stored", NO_PROGRESS)
    packed = weights.layers[0].mlp_out
    assert packed.path.startswith("none: ")
    assert torch.equal(CpuOps().unpack(packed), torch.from_numpy(half).float())
    assert weights.layers[0].qkv.path.startswith("as_stored Q8_0: C kernel")


def test_folders_and_machines_without_kernels_are_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_tiny("llama", tmp_path)
    with pytest.raises(ValueError, match=r"safetensors folder.* such as weights=int4"):
        load_model(folder, "as_stored", True, NO_PROGRESS)
    engine = Engine.load(str(folder), {}, kv_bytes=1 << 20)
    reason = unavailable(engine.capabilities)["weights"]["as_stored"]
    assert "Only GGUF files" in reason
    with pytest.raises(ValueError, match="Only GGUF files"):
        engine.apply({"weights": "as_stored"})
    engine.close()
    with pytest.raises(ValueError, match="C kernels are not built"):
        Options({"weights": "as_stored"}, Capabilities(has_native_kernels=False))


def _mean_kl(path: Path, weights: str, num_tokens: int) -> tuple[float, Engine]:
    """Of ``weights`` to full precision of the same file."""
    engine = Engine.load(str(path), full_precision(), kv_bytes=64 << 20)
    tokens = fixed_tokens(engine, num_tokens)
    reference = reference_rows(engine, tokens)
    engine.apply({"weights": weights, "fused_ops": "on"})
    return quality(reference, read(engine, tokens), tokens).mean_kl, engine


def test_the_starter_as_stored_loses_next_to_nothing(starter_path: Path) -> None:
    mean_kl, engine = _mean_kl(starter_path, "as_stored", 60)
    assert mean_kl < 3e-4
    assert engine.info.weight_bytes < 1.1 * starter_path.stat().st_size
    assert "as_stored Q4_1: C kernel" in engine.info.active_paths["weights"]
    assert engine.info.active_paths["head"].startswith("as_stored Q8_0: C kernel")
    engine.close()


@pytest.mark.slow
def test_gemma_as_stored_loses_less_than_rounding_it_again(gemma_path: Path) -> None:
    """Its Q4_K_M file has five types, and matrices whose parts differ."""
    (kept, engine), (rounded, other) = (_mean_kl(gemma_path, weights, 100) for weights in ("as_stored", "int4"))
    assert kept < 1e-3 < rounded
    assert "as_stored Q5_0 + Q8_0: C kernel" in engine.info.active_paths["weights"]
    engine.close()
    other.close()
