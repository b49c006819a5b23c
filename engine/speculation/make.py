"""From switches to a Speculator, and from a path to a draft model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from engine.model.decoder import Decoder
from engine.model.load import LoadedModel, load_model
from engine.options import Options
from engine.speculation.candidates import judged
from engine.speculation.controller import Controller
from engine.speculation.draft import DraftProposer
from engine.speculation.layer_skip import skipping
from engine.speculation.ngram import NgramProposer
from engine.speculation.proposer import Proposer
from engine.speculation.speculator import Speculator

NO_DRAFT = "No draft model was loaded with this one. Start with --draft MODEL to have one."


class Draft(NamedTuple):
    """A model that guesses for another."""

    path: Path
    loaded: LoadedModel


def load_draft(
    path: Path,
    target: LoadedModel,
    options: Options,
    progress: Callable[[str, float], None],
    cancelled: Callable[[], bool],
) -> Draft:
    """Raises ValueError when the model cannot be loaded or its vocabulary is another one."""
    reason = judged(target.text, path)
    if reason:
        raise ValueError(f"{path.name} cannot guess for this model. {reason} Choose a draft model of the same family.")
    return Draft(path, load_model(path, options["weights"], options.on("fused_ops"), progress, cancelled))


def make_speculator(
    options: Options, target: LoadedModel, draft: Draft | None, num_pages: int, page_size: int
) -> Speculator | None:
    """None when speculation is off. num_pages: of the target's cache; a draft's has as many, which cost nothing until used."""
    proposer = _make_proposer(options, target, draft, num_pages, page_size)
    return Speculator(proposer, Controller(options["draft_length"])) if proposer else None


def _make_proposer(
    options: Options, target: LoadedModel, draft: Draft | None, num_pages: int, page_size: int
) -> Proposer | None:
    vocab_size = target.text.vocab_size
    match options["speculation"]:
        case "ngram":
            return NgramProposer()
        case "draft" if draft:
            model, spec = draft.loaded.model, draft.loaded.spec
            model.set_fused(options.on("fused_ops"))
            return DraftProposer(f"draft {draft.loaded.name}", model, spec, vocab_size, num_pages, page_size)
        case "layer_skip" if isinstance(target.model, Decoder):
            part = skipping(target.model)
            name = f"{part.spec.num_layers} of {target.spec.num_layers} layers (experiment)"
            return DraftProposer(name, part, part.spec, vocab_size, num_pages, page_size)
    return None
