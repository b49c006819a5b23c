"""ModelSpec: everything the decoder, the ledger and the planner must know of a model. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """One rotary table (RoFormer, Su 2021) and its context extension.

    kind: "plain"; "linear" (positions divided by ``factor``); "llama3" (per-frequency smoothing);
    "yarn" (Peng 2023, with ``attention_factor``); "longrope" (Phi-3: per-frequency ``short_factors``/``long_factors``);
    "factors" (GGUF ``rope_freqs``: per-frequency divisors in ``short_factors``).
    rotary_dim: how many of the head's dimensions rotate.
    """

    theta: float
    rotary_dim: int
    kind: Literal["plain", "linear", "llama3", "yarn", "longrope", "factors"] = "plain"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True  # yarn: round the correction range to whole dimensions
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What differs between the layers of one model.

    window: tokens a query may see, itself included; None sees all.
    rope: index into ModelSpec.ropes, or None for a layer without rotation (SmolLM3).
    sinks: the text's first tokens, seen whatever the window (a user's window has them; no model here has).
    """

    window: int | None = None
    rope: int | None = 0
    sinks: int = 0


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The shape of a decoder-only transformer; one parametric decoder serves all of them."""

    family: (
        str  # "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "smollm3" or transformers' model_type
    )
    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerSpec, ...]
    ropes: tuple[RopeSpec, ...]
    max_position: int  # the model's own window, tokens
    norm_eps: float
    activation: Literal["silu", "gelu_tanh", "gelu"] = "silu"
    tied_head: bool = False
    qkv_bias: bool = False
    output_bias: bool = False  # bias on the attention output projection
    mlp_bias: bool = False
    qk_norm: bool = False  # RMS norm on each head of q and k before rotation (Qwen3, Gemma 3)
    sandwich_norms: bool = False  # norms after attention and after the MLP too (Gemma 2 and 3)
    embedding_scale: float = 1.0
    attention_scale: float = 0.0  # 0 means head_dim ** -0.5
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    def __post_init__(self) -> None:
        assert self.num_heads % self.num_kv_heads == 0, (self.num_heads, self.num_kv_heads)
        assert all(layer.rope is None or layer.rope < len(self.ropes) for layer in self.layers)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def gqa_group(self) -> int:
        """Query heads that share one KV head: query head q reads KV head q // gqa_group."""
        return self.num_heads // self.num_kv_heads

    @property
    def query_scale(self) -> float:
        return self.attention_scale or self.head_dim**-0.5

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Elements of K (or of V) per token and layer."""
        return self.num_kv_heads * self.head_dim

    @property
    def layer_linear_weights(self) -> int:
        """Weights of one layer's matrices."""
        attention = self.hidden_size * (self.q_size + 2 * self.kv_size) + self.q_size * self.hidden_size
        return attention + 3 * self.hidden_size * self.intermediate_size

    @property
    def num_parameters(self) -> int:
        """Matrix weights, embedding and head (norms and biases are left out; they are under 0.1 %)."""
        tables = self.vocab_size * self.hidden_size * (1 if self.tied_head else 2)
        return self.num_layers * self.layer_linear_weights + tables

    def with_window(self, window: int, sinks: int) -> ModelSpec:
        """This model with a user's ``window`` on every layer whose own is wider."""
        narrowed = tuple(
            layer if layer.window is not None and layer.window <= window else replace(layer, window=window, sinks=sinks)
            for layer in self.layers
        )
        return replace(self, layers=narrowed)

    @property
    def widest_window(self) -> int | None:
        """Tokens back that some layer still sees; None when one sees all."""
        windows = [layer.window for layer in self.layers]
        return None if None in windows else max(window for window in windows if window is not None)

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        return 2 * self.num_layers * self.kv_size * element_bytes
