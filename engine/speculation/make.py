"""From switches to a Speculator, and from a path to a draft model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from engine.events import DraftInfo
from engine.model.decoder import Decoder
from engine.model.load import LoadedModel
from engine.options import Options
from engine.speculation.candidates import Target, judged
from engine.speculation.controller import Controller
from engine.speculation.draft import DraftProposer
from engine.speculation.layer_skip import skipping
from engine.speculation.ngram import NgramProposer
from engine.speculation.proposer import Proposer
from engine.speculation.speculator import Speculator

NO_DRAFT = (
    "No draft model is loaded. Choose one: below this switch in the window, with --draft MODEL on the command line."
)


class Draft(NamedTuple):
    """A model that guesses for another. source: what it was asked for as; note: why it cannot pay, if so."""

    source: str
    path: Path
    loaded: LoadedModel
    note: str

    @property
    def info(self) -> DraftInfo:
        loaded = self.loaded
        return DraftInfo(self.source, loaded.name, loaded.spec.num_parameters, loaded.model.weight_bytes, self.note)


def load_draft(source: str, path: Path, target: Target, load: Callable[[Path], LoadedModel]) -> Draft:
    """The model at ``path``, loaded by ``load``. Raises ValueError when it cannot be, or cannot guess for ``target``."""
    reason, note = judged(target, path)
    if reason:
        raise ValueError(f"{path.name} cannot guess for this model. {reason} Choose a draft model of the same family.")
    return Draft(source, path, load(path), note)


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
    of_ops = Options({key: options[key] for key in ("fused_ops", "attention")})  # it has no window, nor chosen pages
    match options["speculation"]:
        case "ngram":
            return NgramProposer()
        case "draft" if draft:
            model, spec = draft.loaded.model, draft.loaded.spec
            model.set_fused(options.on("fused_ops"), options["attention"] == "fused")
            return DraftProposer(f"draft {draft.loaded.name}", model, spec, vocab_size, num_pages, page_size, of_ops)
        case "layer_skip" if isinstance(target.model, Decoder):
            part = skipping(target.model)
            name = f"{part.spec.num_layers} of {target.spec.num_layers} layers (experiment)"
            return DraftProposer(name, part, part.spec, vocab_size, num_pages, page_size, of_ops)
    return None
