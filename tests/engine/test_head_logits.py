"""Logits of torch's packed heads are fp32 where it matters: bf16 would tie tokens that are an eighth apart."""

from __future__ import annotations

import pytest
import torch

from engine.ops.cpu import CpuOps

OPS = CpuOps(use_native=False)


@pytest.mark.parametrize("vocab", [12, 400])
@pytest.mark.parametrize("num_rows", [1, 3, 40])
@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_the_largest_logits_are_those_of_the_packed_weights_in_fp32(scheme: str, num_rows: int, vocab: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    packed = OPS.pack(3 * torch.randn(vocab, 64, generator=generator), torch.randn(vocab, generator=generator), scheme)
    x = torch.randn(num_rows, 64, generator=generator).bfloat16()
    logits = OPS.head(x, packed, None)
    assert logits.dtype == torch.float32
    exact = x.float() @ OPS.unpack(packed).T + packed.bias.float()
    top = exact.topk(8, dim=1).indices
    torch.testing.assert_close(logits.gather(1, top), exact.gather(1, top), atol=1e-3, rtol=1e-5)
    assert torch.equal(logits.argmax(1), exact.argmax(1))
    torch.testing.assert_close(logits, exact, atol=0.8, rtol=0.02)  # the rest, as bf16 rounds it


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_ties_in_bf16_go_to_the_token_that_is_ahead(scheme: str) -> None:
    """Logits near 200, where bf16 has steps of one: the product alone takes the first of those that tie."""
    generator = torch.Generator().manual_seed(1)
    packed = OPS.pack(3 + 0.05 * torch.randn(16, 64, generator=generator), None, scheme)
    x = (1 + 0.1 * torch.randn(20, 64, generator=generator)).bfloat16()
    exact = x.float() @ OPS.unpack(packed).T
    assert not torch.equal(exact.bfloat16().float().argmax(1), exact.argmax(1))
    assert torch.equal(OPS.head(x, packed, None).argmax(1), exact.argmax(1))


def test_a_soft_cap_comes_after_the_fine_logits() -> None:
    packed = OPS.pack(torch.randn(64, 32, generator=torch.Generator().manual_seed(2)), None, "int8")
    x = torch.randn(2, 32, generator=torch.Generator().manual_seed(3)).bfloat16()
    plain = OPS.head(x, packed, None)
    torch.testing.assert_close(OPS.head(x, packed, 5.0), 5.0 * torch.tanh(plain / 5.0))
