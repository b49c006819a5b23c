"""An experiment: the target with some of its layers left out guesses for the whole of it (Zhang et al. 2023, Draft & Verify).

It costs no memory for weights, since the layers are the target's own. A model that was not trained to lose layers guesses
badly, so expect this to turn itself off; it shows what trained early exits (LayerSkip, Elhoushi et al. 2024) are for.
"""

from __future__ import annotations

from engine.model.decoder import Decoder

KEPT_AT_EACH_END = 0.2  # first and last layers change the text most


def kept_layers(num_layers: int) -> tuple[int, ...]:
    """The layers that guess: all at both ends, every other one between."""
    ends = max(1, round(num_layers * KEPT_AT_EACH_END))
    return tuple(
        index for index in range(num_layers) if index < ends or index >= num_layers - ends or (index - ends) % 2
    )


def skipping(target: Decoder) -> Decoder:
    """``target`` without some layers, on the same weights."""
    return target.with_layers(kept_layers(target.spec.num_layers))
