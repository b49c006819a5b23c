"""The one set of tensor names and shapes that the decoder knows, whatever the file calls them. Imports no torch.

"embed" [vocab, hidden]; "head" [vocab, hidden] (absent when tied to embed); "final_norm" [hidden]; and per layer i,
"layers.{i}." + one of the names of ``layer_shapes``. Matrices are [out, in]; q, k, v and gate, up are stacked in
that order. Norm weights are the final multipliers (Gemma's +1 applied); rows of q and k are in the "rotate half"
order, where dimension d turns with d + rotary_dim / 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from engine.model.spec import ModelSpec

Shape = tuple[int, ...]


def layer_shapes(spec: ModelSpec) -> dict[str, tuple[Shape, ...]]:
    """Name within a layer -> the shapes of its stacked pieces: (q, k, v), (gate, up), or a single one."""
    q, kv, hidden, inner = spec.q_size, spec.kv_size, spec.hidden_size, spec.intermediate_size
    shapes: dict[str, tuple[Shape, ...]] = {
        "attn_norm": ((hidden,),),
        "qkv": ((q, hidden), (kv, hidden), (kv, hidden)),
        "attn_out": ((hidden, q),),
        "mlp_norm": ((hidden,),),
        "gate_up": ((inner, hidden), (inner, hidden)),
        "mlp_out": ((hidden, inner),),
    }
    if spec.qkv_bias:
        shapes["qkv_bias"] = ((q,), (kv,), (kv,))
    if spec.output_bias:
        shapes["attn_out_bias"] = ((hidden,),)
    if spec.mlp_bias:
        shapes |= {"gate_up_bias": ((inner,), (inner,)), "mlp_out_bias": ((hidden,),)}
    if spec.qk_norm:
        shapes |= {"q_norm": ((spec.head_dim,),), "k_norm": ((spec.head_dim,),)}
    if spec.sandwich_norms:
        shapes |= {"post_attn_norm": ((hidden,),), "post_mlp_norm": ((hidden,),)}
    return shapes


@dataclass(frozen=True, slots=True)
class Piece:
    """One stored tensor of ``shape`` that makes (a stretch of rows of) a canonical tensor."""

    stored: str
    shape: Shape


@dataclass(frozen=True, slots=True)
class Naming:
    """How one file format spells the canonical names.

    top: "embed", "head", "final_norm" -> stored name.
    layer: name within a layer -> spellings to try; each is one stored name for the stacked tensor or one per piece,
    with "{i}" for the layer.
    """

    top: Mapping[str, str]
    layer: Mapping[str, tuple[tuple[str, ...], ...]]


def stacked(shapes: Iterable[Shape]) -> Shape:
    """The shape of pieces stacked along their rows."""
    first, *rest = shapes
    return (first[0] + sum(shape[0] for shape in rest), *first[1:])


def layout(spec: ModelSpec, naming: Naming, stored: Mapping[str, Shape], where: str) -> dict[str, tuple[Piece, ...]]:
    """Canonical name -> the stored pieces that make it.

    ``stored``: what the file has, name -> shape; ``where`` names the file in messages.
    ValueError for a tensor that is missing or has another shape than ``spec`` says.
    """
    found: dict[str, tuple[Piece, ...]] = {}
    tops: dict[str, Shape] = {"embed": (spec.vocab_size, spec.hidden_size), "final_norm": (spec.hidden_size,)}
    if not spec.tied_head:
        tops["head"] = (spec.vocab_size, spec.hidden_size)
    for name, shape in tops.items():
        found[name] = _pieces([[naming.top[name]]], (shape,), stored, where)
    for index in range(spec.num_layers):
        for name, shapes in layer_shapes(spec).items():
            spellings = [[text.replace("{i}", str(index)) for text in spelling] for spelling in naming.layer[name]]
            found[f"layers.{index}.{name}"] = _pieces(spellings, shapes, stored, where)
    return found


def _pieces(
    spellings: Sequence[Sequence[str]], shapes: tuple[Shape, ...], stored: Mapping[str, Shape], where: str
) -> tuple[Piece, ...]:
    """The first of ``spellings`` the file has, its shapes checked."""
    for names in spellings:
        if names[0] in stored:
            wanted = shapes if len(names) == len(shapes) else (stacked(shapes),)
            return tuple(_checked(name, shape, stored, where) for name, shape in zip(names, wanted, strict=True))
    raise ValueError(
        f"{where} has no tensor {spellings[0][0]}. The file is incomplete or of another model than its configuration "
        "says; download it again."
    )


def _checked(name: str, shape: Shape, stored: Mapping[str, Shape], where: str) -> Piece:
    if name not in stored:
        raise ValueError(f"{where} has no tensor {name}. The file is incomplete; download it again.")
    if stored[name] != shape:
        raise ValueError(
            f"{where}: tensor {name} has the shape {list(stored[name])}, but its configuration asks for {list(shape)}. "
            "The weights and the configuration belong to different models; download both again."
        )
    return Piece(name, shape)
