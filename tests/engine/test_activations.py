"""The ``activations`` switch: what 16 bits keep and 8 bits lose, on the real starter model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.kv.cache import KvCache
from engine.model.load import LoadedModel, load_model
from engine.ops.cpu import native
from engine.ops.interface import Span, StepBatch
from engine.options import Capabilities, Options

TEXT = (
    "The tide comes in twice a day because the moon pulls at the sea, and the earth turns under both bulges of water. "
    * 2
)


def load(path: Path, weights: str, activations: str = "none", sensitive: str = "on") -> LoadedModel:
    return load_model(path, weights, True, lambda stage, share: None, activations=activations, sensitive=sensitive)


def log_probabilities(loaded: LoadedModel) -> Tensor:
    """[tokens, vocab], every row of one prefill."""
    ids = torch.tensor(loaded.text.encode(TEXT))
    cache = KvCache(loaded.spec, 8, 32, loaded.model.kv_dtype)
    n = len(ids)
    batch = StepBatch(ids, torch.arange(n), torch.arange(n) + 32, (Span(0, n, n, range(1, 8)),), torch.arange(n))
    loaded.text.close()
    return loaded.model.forward(batch, cache).log_softmax(-1)


@pytest.mark.skipif(not native.is_available(), reason="the C kernels are not built")
def test_16_bits_lose_next_to_nothing_of_the_files_own_weights_and_8_bits_a_little(starter_path: Path) -> None:
    truth = log_probabilities(load(starter_path, "none"))

    def divergence(activations: str, sensitive: str = "on") -> tuple[float, float, int]:
        """Mean KL to full precision, and the passes over a layer's weights and the head's that the ledger counts."""
        loaded = load(starter_path, "int4", activations, sensitive)
        got, sizes = log_probabilities(loaded), loaded.model.weight_sizes
        return float((truth.exp() * (truth - got)).sum(-1).mean()), sizes.block_passes, sizes.head_passes

    kept, *passes_kept = divergence("none")
    rounded, layer_passes, head_passes = divergence("int8")
    _, *fewest_passes = divergence("int8", "off")
    assert passes_kept == [2, 2]
    assert 1.19 < layer_passes < 1.23  # QKV is done twice, 16 % of the weights, and the first and the last of 30 layers
    assert 1.15 < fewest_passes[0] < 1.17
    assert head_passes == fewest_passes[1] == 1
    assert kept < 0.001
    assert kept * 3 < rounded < 0.002


def test_without_the_c_kernels_the_default_is_what_can_be_used() -> None:
    assert Options()["activations"] == "int8"
    assert Options(capabilities=Capabilities(has_native_kernels=False))["activations"] == "none"
    assert (
        Options(capabilities=Capabilities(is_fallback=True))["activations"] == "int8"
    )  # no choice acts on such a model


def test_without_the_c_kernels_8_bits_are_refused_with_the_reason() -> None:
    here = Capabilities(has_native_kernels=False)
    with pytest.raises(ValueError, match="C kernels are not built"):
        Options({"activations": "int8"}, here)
    assert Options({"activations": "none"}, here)["activations"] == "none"
