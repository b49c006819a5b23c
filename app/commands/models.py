"""``ridgeline models``: what is on disk, fetch the models that ship as packages, look inside one, delete one."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from app.commands import Subparsers
from app.library import catalog
from app.library.catalog import LibraryModel
from app.library.packaged import fetch, packaged_models
from app.library.starter import STARTER, fetch_starter, models_folder

_KV_ELEMENT_BYTES = 2  # keys and values in 16 bits


def add_to(commands: Subparsers) -> argparse.ArgumentParser:
    parser = commands.add_parser("models", help="list, get, inspect or remove models")
    actions = parser.add_subparsers(metavar="list|get|inspect|drafts|remove")
    listing = actions.add_parser("list", help="models on this machine")
    listing.set_defaults(run=run_list)
    get = actions.add_parser("get", help=f"fetch a model: {', '.join(packaged_models())}")
    get.add_argument("model")
    get.set_defaults(run=run_get)
    inspect = actions.add_parser("inspect", help="the facts of one model file or folder")
    inspect.add_argument("model")
    inspect.set_defaults(run=run_inspect)
    drafts = actions.add_parser("drafts", help="which models can guess for one, and why the others cannot")
    drafts.add_argument("model", nargs="?", default=STARTER)
    drafts.set_defaults(run=run_drafts)
    remove = actions.add_parser("remove", help="delete a model of the models folder from disk")
    remove.add_argument("model")
    remove.set_defaults(run=run_remove)
    for action in (parser, listing, inspect, drafts):
        action.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print JSON")
    parser.set_defaults(run=run_list)
    return parser


def run_list(arguments: argparse.Namespace) -> int:
    found = catalog.models()
    if getattr(arguments, "json", False):
        print(json.dumps([_facts(model) for model in found], indent=2))
        return 0
    if not found:
        print("No models here yet. Fetch the starter with: ridgeline models get starter")
    for model in found:
        size = f"{model.num_bytes / 1e6:,.0f} MB"
        print(f"{model.name:<28} {model.format:<18} {size:>10}  {model.problem or model.title}")
    print(f"\nModels folder: {models_folder()}", file=sys.stderr)
    return 0


def run_get(arguments: argparse.Namespace) -> int:
    table = packaged_models()
    if arguments.model not in table:
        raise ValueError(
            f"{arguments.model!r} cannot be fetched. Fetchable: {', '.join(table)}. For any other model, put its GGUF file "
            f"or safetensors folder into {models_folder()}."
        )
    print(f"{table[arguments.model].title}, licence: {table[arguments.model].licence}", file=sys.stderr)
    models_folder().mkdir(parents=True, exist_ok=True)
    if arguments.model == STARTER:
        path = fetch_starter(progress=_show_progress)
    else:
        path = fetch(table[arguments.model], models_folder(), _show_progress)
    print(path)
    return 0


def run_inspect(arguments: argparse.Namespace) -> int:
    model = catalog.describe(catalog.resolve(arguments.model))
    if model.problem:
        raise ValueError(model.problem)
    facts = {**_facts(model), **_shape(model.path)}
    if getattr(arguments, "json", False):
        print(json.dumps(facts, indent=2))
        return 0
    for key, value in facts.items():
        if value not in ("", None):
            print(f"{key.replace('_', ' '):<16} {value}")
    return 0


def run_drafts(arguments: argparse.Namespace) -> int:
    """Judged by headers and tokenizers alone: nothing is loaded."""
    from engine.speculation.candidates import Target, judged

    target = Target.at(catalog.resolve(arguments.model))
    found = [
        (model.name, model.problem, "") if model.problem else (model.name, *judged(target, model.path))
        for model in catalog.models()
    ]
    if getattr(arguments, "json", False):
        print(json.dumps([{"name": name, "reason": reason, "note": note} for name, reason, note in found], indent=2))
        return 0
    for name, reason, note in found:
        print(f"{name:<28} {'no' if reason else 'yes':<5} {reason or note}".rstrip())
    print("\nUse one with: ridgeline chat --draft NAME --set speculation=draft", file=sys.stderr)
    return 0


def run_remove(arguments: argparse.Namespace) -> int:
    gone = catalog.remove(arguments.model)
    print(f"Removed {gone.name} ({gone.num_bytes / 1e6:,.0f} MB).")
    return 0


def _facts(model: LibraryModel) -> dict[str, object]:
    return {**asdict(model), "path": str(model.path)}


def _shape(path: Path) -> dict[str, object]:
    """What the decoder makes of the model's headers; a note instead for a kind that only transformers runs."""
    from engine.memory import expected
    from engine.options import Options
    from engine.weights.source import UnsupportedArchitecture, open_source

    try:
        spec = open_source(path).spec
    except UnsupportedArchitecture as error:
        return {"decoder": f"through transformers, slower ({error})"}
    return {
        "decoder": "Ridgeline's own",
        "family": spec.family,
        "parameters": spec.num_parameters,
        "layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "query_heads": spec.num_heads,
        "kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "vocabulary": spec.vocab_size,
        "kv_bytes_per_token": spec.kv_bytes_per_token(_KV_ELEMENT_BYTES),
        "memory_bytes": expected(spec, Options()).total_bytes,
    }


def _show_progress(stage: str, fraction: float) -> None:
    print(f"{stage} ({fraction:.0%})", file=sys.stderr)
