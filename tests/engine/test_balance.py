"""Outlier channels are evened out before weights are rounded: the same function, and rounding that hardly notices them."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from four_bits import as_stored_in_4_bits
from outliers import OUTLIERS, Change, Changed, large_activation, large_mlp, large_value, large_weight
from paged_batches import run_in_chunks
from tiny_models import FAMILIES, StateDictSource, make_model
from torch import Tensor

from engine.model.load import build_decoder
from engine.model.spec import ModelSpec
from engine.ops.cpu import CpuOps
from engine.weights.balance import Half, balance_attention, balance_mlp
from engine.weights.quantize import dequantize_int4, quantize_int4
from engine.weights.source import WeightSource

OPS = {True: CpuOps(True), False: CpuOps(False)}
TOKENS = torch.randint(3, 300, (60,), generator=torch.Generator().manual_seed(1)).tolist()
FAMILY = "llama"
SPEC = FAMILIES[FAMILY].spec
NAMES = ("attn_norm", "qkv", "attn_out", "mlp_norm", "gate_up", "mlp_out")
IDS = [change.__name__ for change in OUTLIERS]


def source(change: Change | None = None, family: str = FAMILY) -> WeightSource:
    plain = StateDictSource(FAMILIES[family].spec, make_model(family).state_dict())
    return plain if change is None else Changed(plain, change)


def logits(scheme: str, change: Change | None, family: str = FAMILY) -> Tensor:
    return run_in_chunks(build_decoder(source(change, family), OPS, scheme), TOKENS, 60)


def mean_kl(truth: Tensor, other: Tensor) -> float:
    p, q = truth.log_softmax(-1), other.log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def halves(change: Change | None) -> tuple[Half, Half]:
    its = source(change)
    norm, qkv, out, mlp_norm, gate_up, mlp_out = (its.read(f"layers.1.{name}").float() for name in NAMES)
    return Half(norm, qkv, None, out), Half(mlp_norm, gate_up, None, mlp_out)


def halves_of_4_bits(kind: Literal["q4_1", "q4_0"], *changes: Change) -> tuple[Half, Half]:
    """The same from a file of 4-bit weights."""
    tensors = []
    for name in NAMES:
        tensor = source().read(f"layers.1.{name}").float()
        tensor = tensor.clone() if name.endswith("norm") else as_stored_in_4_bits(tensor, kind)
        for change in changes:
            tensor = change(SPEC, name, tensor)
        tensors.append(tensor)
    norm, qkv, out, mlp_norm, gate_up, mlp_out = tensors
    return Half(norm, qkv, None, out), Half(mlp_norm, gate_up, None, mlp_out)


def on_grid(weight: Tensor) -> Tensor:
    return dequantize_int4(quantize_int4(weight), weight.shape[1])


@pytest.mark.parametrize("change", OUTLIERS, ids=IDS)
def test_the_changed_model_is_the_same_function(change: Change) -> None:
    torch.testing.assert_close(logits("none", change), logits("none", None), atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("scheme", ["int8", "int4", "int4_g64"])
@pytest.mark.parametrize("change", OUTLIERS, ids=IDS)
def test_an_outlier_costs_no_more_than_twice_the_rounding_without_it(change: Change, scheme: str) -> None:
    truth = logits("none", None)
    usual = mean_kl(truth, logits(scheme, None))
    assert mean_kl(truth, logits(scheme, change)) < 2 * usual
    assert usual > 1e-6


@pytest.mark.parametrize("change", [None, large_activation, large_weight, large_value, large_mlp])
def test_balancing_keeps_the_function_and_evens_sizes_out(change: Change | None) -> None:
    attention, mlp = halves(change)
    for half, balanced in (
        (attention, balance_attention(SPEC, "int8", attention)),
        (mlp, balance_mlp(SPEC, "int8", mlp)),
    ):
        if change is None:
            assert balanced is half
            continue
        torch.testing.assert_close(_gram(balanced), _gram(half), atol=1e-4, rtol=1e-4)
        for weight in (balanced.first, balanced.second):
            sizes = weight.square().mean(0).sqrt()
            assert sizes.max() < 4 * sizes.median()
            assert sizes.min() > sizes.median() / 4


def _gram(half: Half) -> Tensor:
    """What the last rows of ``first`` and the columns of ``second`` that read them make together; heads 0 read KV head 0."""
    count = SPEC.head_dim if half.second.shape[1] == SPEC.q_size else SPEC.intermediate_size
    rows = half.first[-SPEC.kv_size :][:count] if count == SPEC.head_dim else half.first[-count:]
    return half.second[:, :count] @ (rows * half.norm)


def test_an_outlier_whose_weights_lie_on_the_files_own_grid_is_left_alone() -> None:
    """Packing keeps such weights exactly; moved by a factor they would be rounded again, with all that share their scale."""
    attention, _ = halves(large_activation)
    half = Half(attention.norm, on_grid(attention.first), None, on_grid(attention.second))
    assert balance_attention(SPEC, "int4", half) is half
    assert balance_attention(SPEC, "int4_g64", half) is not half
    assert balance_attention(SPEC, "int8", half) is not half


def beside_it(spec: ModelSpec, name: str, tensor: Tensor) -> Tensor:
    """The next channel of both norms puts out 30 times as much: two columns of a group are off its grid."""
    channel = spec.hidden_size // 5 + 1
    if name.endswith("norm"):
        tensor[channel] *= 30
    if name in ("qkv", "gate_up"):
        tensor[:, channel] /= 30
    return tensor


@pytest.mark.parametrize("kind", ["q4_1", "q4_0"])
@pytest.mark.parametrize(
    "changes",
    [(large_activation,), (large_weight,), (large_value,), (large_mlp,), (large_activation, beside_it)],
    ids=lambda changes: " and ".join(change.__name__ for change in changes),
)
def test_an_outlier_costs_weights_of_a_4_bit_file_nothing(
    kind: Literal["q4_1", "q4_0"], changes: tuple[Change, ...]
) -> None:
    """The factor that undoes it is found, so that packing sees the weights, and with them the grid, that the file had."""
    balances = balance_attention, balance_mlp
    for balance, half, wanted in zip(balances, halves_of_4_bits(kind, *changes), halves_of_4_bits(kind), strict=True):
        found = balance(SPEC, "int4", half)
        torch.testing.assert_close(found.norm, wanted.norm, rtol=1e-6, atol=0)
        for its, own in ((found.first, wanted.first), (found.second, wanted.second)):
            packed = quantize_int4(its)
            assert torch.equal(packed.values, quantize_int4(own).values)
            torch.testing.assert_close(dequantize_int4(packed, own.shape[1]), own, rtol=1e-6, atol=1e-6)


def test_weights_on_no_grid_are_moved_by_powers_of_two() -> None:
    """They round nothing, and the grid of 32 columns is of no use to groups of 64."""
    for scheme, half in (
        ("int4", halves(large_activation)[0]),
        ("int4_g64", halves_of_4_bits("q4_1", large_activation)[0]),
    ):
        factors = half.norm / balance_attention(SPEC, scheme, half).norm
        assert factors.max() == 64
        assert torch.equal(factors.frexp().mantissa, torch.full_like(factors, 0.5))


def test_silent_channels_are_no_reason_to_divide_by_zero() -> None:
    attention, _ = halves(large_activation)
    attention.norm[3] = 0
    attention.first[:, 5] = 0
    balanced = balance_attention(SPEC, "int8", attention)
    assert all(tensor is None or tensor.isfinite().all() for tensor in balanced)
    assert balanced.norm[3] == 0
