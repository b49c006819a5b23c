"""Speculation in the engine, on tiny random models in fp32: whatever guesses, the text is the one without guesses."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_load_model import save
from tiny_engine import load, save_model
from tiny_models import make_model

from engine.commands import Message
from engine.engine import PAGE_SIZE, Engine
from engine.events import Completion, Event, Finished, FinishReason, Phase, StepRecord, TokenDelta
from engine.model.load import LoadCancelled
from engine.params import SamplingParams
from engine.sampling import Row
from engine.speculation.candidates import AS_LARGE, ITSELF, judged, why_not
from engine.speculation.draft import DraftProposer, _Run
from engine.speculation.layer_skip import kept_layers
from engine.speculation.make import NO_DRAFT
from engine.speculation.verify import Proposal

GREEDY = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
PROMPTS = ("abcabcabc", "The rain falls. The rain falls. The", "xyz", "one two three one two " * 6)
MIXED = (
    GREEDY,
    replace(GREEDY, presence_penalty=0.6, frequency_penalty=0.3),
    replace(GREEDY, repetition_penalty=1.2, logit_bias={40: 1.5}),
    SamplingParams(temperature=0.8, top_p=0.9, seed=5, max_tokens=40, ignore_eos=True),
)
KINDS = ("ngram", "draft", "layer_skip")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and, as its draft, the same model with every weight a little off: right now and then."""
    target, draft = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("draft")
    model = make_model("llama", seed=4)
    save(model, target)
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    try:
        generator = torch.Generator().manual_seed(1)
        for value in model.state_dict().values():
            value.add_(torch.randn(value.shape, generator=generator) * value.std() * 0.12)
        save(model, draft)
    finally:
        model.load_state_dict(kept)
    return target, draft


def open_engine(folders: tuple[Path, Path], num_pages: int = 200, draft: int = 1) -> Engine:
    kv_bytes = num_pages * PAGE_SIZE * 2 * 4 * 32 * 4
    return Engine.load(str(folders[0]), {"weights": "none"}, kv_bytes=kv_bytes, draft=str(folders[draft]))


@pytest.fixture(scope="module")
def loaded(folders: tuple[Path, Path]) -> Iterator[Engine]:
    engine = open_engine(folders)
    yield engine
    engine.close()


@pytest.fixture
def engine(loaded: Engine) -> Iterator[Engine]:
    before = dict(loaded.options)
    yield loaded
    check(loaded)
    loaded.apply(before)


def check(engine: Engine) -> None:
    assert not engine.has_work
    engine.check_integrity()
    proposer = engine._speculator.proposer if engine._speculator else None
    if isinstance(proposer, DraftProposer):
        proposer.check_integrity()
        assert proposer._pool.num_held == 0, "an ended request left pages in the draft's cache"


def speculate(engine: Engine, kind: str, length: str = "4") -> None:
    """Guess in every step, whether it pays or not."""
    engine.apply({"speculation": kind, "draft_length": length})
    assert engine._speculator is not None
    engine._speculator.controller.automatic_off = False


def texts(completions: list[Completion]) -> list[tuple[tuple[int, ...], str, FinishReason]]:
    return [(each.token_ids, each.text, each.finish_reason) for each in completions]


def accepted(completions: list[Completion]) -> tuple[int, int]:
    usages = [each.usage for each in completions]
    return sum(usage.num_drafted for usage in usages), sum(usage.num_accepted for usage in usages)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", ["1", "8"])
def test_a_mixed_batch_writes_what_it_writes_without_guesses(engine: Engine, kind: str, length: str) -> None:
    plain = engine.generate(PROMPTS, MIXED)
    speculate(engine, kind, length)
    guessed = engine.generate(PROMPTS, MIXED)
    num_drafted, num_accepted = accepted(guessed)
    assert 0 < num_accepted < num_drafted
    assert texts(guessed[:3]) == texts(plain[:3])
    if kind == "ngram":  # made without chance: a seed's text stays too
        assert texts(guessed) == texts(plain)
    assert guessed[3].usage.new_tokens == 40


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "changes",
    [
        {"token_budget": "32"},
        {"chunked_prefill": "off"},
        {"paging": "off"},
        {"prefix": "off", "fused_ops": "off"},
        {"batching": "fixed", "max_batch": "2"},
        {"kv_cache": "off"},
    ],
)
def test_other_switches_and_guesses_do_not_mind_each_other(engine: Engine, kind: str, changes: dict[str, str]) -> None:
    prompts, params = PROMPTS[:3], [replace(each, max_tokens=24) for each in MIXED[:3]]
    plain = engine.generate(prompts, params)
    engine.apply(changes)
    speculate(engine, kind)
    guessed = engine.generate(prompts, params)
    assert texts(guessed) == texts(plain)
    assert (accepted(guessed)[0] > 0) == (changes.get("kv_cache") != "off")
    engine.submit(prompts[0], params[0])
    (record,) = [event for event in engine.step() if isinstance(event, StepRecord)]
    assert record.active_paths["speculation"].startswith("rests") == (changes.get("kv_cache") == "off")
    while engine.has_work:
        engine.step()


@pytest.mark.parametrize("kind", KINDS)
def test_requests_that_are_preempted_for_want_of_pages_keep_their_texts(
    folders: tuple[Path, Path], engine: Engine, kind: str
) -> None:
    longer = [replace(GREEDY, max_tokens=90)] * 4
    plain = engine.generate(PROMPTS, longer)
    small = open_engine(folders, num_pages=9)
    try:
        speculate(small, kind)
        guessed = small.generate(PROMPTS, longer)
        assert texts(guessed) == texts(plain)
        assert sum(each.usage.recomputed_tokens for each in guessed) > 0
        assert accepted(guessed)[1] > 0
        check(small)
    finally:
        small.close()


def test_kinds_are_flipped_in_the_middle_of_replies(engine: Engine) -> None:
    plain = engine.generate(PROMPTS, (*MIXED[:3], GREEDY))
    numbers = [engine.submit(prompt, its) for prompt, its in zip(PROMPTS, (*MIXED[:3], GREEDY), strict=True)]
    events: list[Event] = []
    for kind in ("ngram", "off", "draft", "layer_skip", "ngram", "draft", "off"):
        speculate(engine, kind) if kind != "off" else engine.apply({"speculation": "off"})
        for _ in range(4):
            events += engine.step()
    while engine.has_work:
        events += engine.step()
    for number, wanted in zip(numbers, plain, strict=True):
        deltas = [event for event in events if isinstance(event, TokenDelta) and event.request_id == number]
        assert tuple(token for delta in deltas for token in delta.token_ids) == wanted.token_ids
        assert "".join(delta.text for delta in deltas) == wanted.text


@pytest.mark.parametrize("kind", KINDS)
def test_replies_end_inside_accepted_guesses_as_they_end_without(engine: Engine, kind: str) -> None:
    """At each length, and at stop strings that begin anywhere: same text, same tokens, same count."""
    (whole,) = engine.generate([PROMPTS[0]], [GREEDY])
    cases = [replace(GREEDY, max_tokens=most) for most in range(1, 14)]
    cases += [replace(GREEDY, stop=(whole.text[start : start + 3],)) for start in range(2, 30, 3)]
    plain = engine.generate([PROMPTS[0]] * len(cases), cases)
    speculate(engine, kind, "8")
    guessed = engine.generate([PROMPTS[0]] * len(cases), cases)
    assert texts(guessed) == texts(plain)
    assert [each.usage.new_tokens for each in guessed] == [each.usage.new_tokens for each in plain]
    assert accepted(guessed)[1] > 0


def test_the_window_fills_to_its_last_token(engine: Engine) -> None:
    prompt = tuple([7, 8, 9] * ((engine.context_length - 20) // 3))
    to_the_end = SamplingParams(temperature=0, ignore_eos=True)
    (plain,) = engine.generate([prompt], to_the_end)
    for kind in KINDS:
        speculate(engine, kind, "8")
        (guessed,) = engine.generate([prompt], to_the_end)
        assert guessed.finish_reason is FinishReason.CONTEXT
        assert texts([guessed]) == texts([plain])


@pytest.mark.parametrize("params", [replace(GREEDY, max_tokens=200), replace(MIXED[3], max_tokens=200)])
def test_a_draft_that_is_the_target_is_right_every_time(folders: tuple[Path, Path], params: SamplingParams) -> None:
    """200 tokens: after each step in which all was accepted the draft must close the hole in its cache."""
    engine = open_engine(folders, draft=0)
    try:
        speculate(engine, "draft", "3")
        (answer,) = engine.generate([PROMPTS[1]], params)
        assert answer.usage.new_tokens == 200
        assert answer.usage.num_drafted == answer.usage.num_accepted
        assert answer.usage.num_accepted >= 149  # three of every four tokens
        assert answer.usage.acceptance == 1.0
        check(engine)
    finally:
        engine.close()


@pytest.mark.parametrize("right", [0, 1, 2, 3])
def test_forced_patterns_around_page_edges(engine: Engine, monkeypatch: pytest.MonkeyPatch, right: int) -> None:
    """Two chats, three guesses, the first ``right`` of them right, at each position around a page's edge."""
    prompts = [tuple(range(50, 50 + length)) for length in range(PAGE_SIZE - 5, PAGE_SIZE + 3)]
    few = replace(GREEDY, max_tokens=12)
    plain = engine.generate(prompts, few)
    truth = {prompt: each.token_ids for prompt, each in zip(prompts, plain, strict=True)}
    speculate(engine, "ngram", "3")
    assert engine._speculator is not None

    def oracle(wanted):  # type: ignore[no-untyped-def]
        found = {}
        for request, _, most in wanted:
            prompt = tuple(request.tokens[: request.num_prompt])
            ahead = truth[prompt][request.num_generated :][:most]
            found[request.request_id] = Proposal(
                tuple(token if place < right else (token + 1) % 200 for place, token in enumerate(ahead))
            )
        return found

    monkeypatch.setattr(engine._speculator.proposer, "propose", oracle)
    guessed = engine.generate(prompts, few)
    assert texts(guessed) == texts(plain)
    num_drafted, num_accepted = accepted(guessed)
    assert (num_accepted > 0) == (right > 0)
    assert (num_accepted == num_drafted) == (right == 3)


@pytest.mark.parametrize("right", [0, 1, 2, 3])
def test_forced_patterns_around_edges_of_the_drafts_own_pages(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, right: int
) -> None:
    """The same through a draft model that is the target: after ten forced tokens it guesses freely, and is right each time
    only if its own cache followed every acceptance and every rejection over the edge."""
    prompts = [tuple(range(40 + length, 40 + 2 * length)) for length in range(PAGE_SIZE - 8, PAGE_SIZE + 2)]
    few, free = replace(GREEDY, max_tokens=16), []
    engine = open_engine(folders, draft=0)
    try:
        plain = engine.generate(prompts, few)
        truth = {prompt: each.token_ids for prompt, each in zip(prompts, plain, strict=True)}
        draw = _Run.draw

        def forced(run: _Run, row: Row) -> bool:
            tokens = run.follower.tokens
            (prompt,) = [prompt for prompt in prompts if tuple(tokens[: len(prompt)]) == prompt]
            place, at = len(run.token_ids), len(tokens) - len(prompt)
            if at - place >= 10:
                goes_on = draw(run, row)
                free.append(run.token_ids[-1] == truth[prompt][at])
                return goes_on
            run.token_ids.append(truth[prompt][at] if place < right else (truth[prompt][at] + 1) % 200)
            run.state.commit(run.token_ids[-1])
            tokens.append(run.token_ids[-1])
            return len(run.token_ids) < run.most

        monkeypatch.setattr(_Run, "draw", forced)
        speculate(engine, "draft", "3")
        assert texts(engine.generate(prompts, few)) == texts(plain)
        assert len(free) >= len(prompts)
        assert all(free)
        check(engine)
    finally:
        engine.close()


def test_records_count_compared_guesses_and_name_what_guessed(engine: Engine) -> None:
    speculate(engine, "ngram", "6")
    number = engine.submit(PROMPTS[3], GREEDY)
    events: list[Event] = []
    while engine.has_work:
        events += engine.step()
    records = [event for event in events if isinstance(event, StepRecord)]
    (ending,) = [event for event in events if isinstance(event, Finished) and event.request_id == number]
    assert sum(record.num_new_tokens for record in records) == ending.usage.new_tokens == 60
    assert sum(record.num_drafted for record in records) == ending.usage.num_drafted
    assert sum(record.num_accepted for record in records) == ending.usage.num_accepted
    for record in records[1:]:
        assert record.num_drafted - record.num_accepted in (0, 1)  # nothing behind a rejected guess was compared
        assert record.num_new_tokens == record.num_accepted + 1 or record is records[-1]
        assert record.active_paths["speculation"].startswith("n-gram")


@pytest.mark.parametrize("kind", KINDS)
def test_what_guessing_reads_and_computes_is_counted(engine: Engine, kind: str) -> None:
    """Three guesses by a model as large as the target read its weights three times more; copied ones cost nothing."""
    wanted = {"ngram": 1.0, "draft": 4.0, "layer_skip": 1.0 + 3 * len(kept_layers(4)) / 4}[kind]

    def decode_records() -> list[StepRecord]:
        engine.submit(PROMPTS[3], replace(GREEDY, max_tokens=30))
        events: list[Event] = []
        while engine.has_work:
            events += engine.step()
        records = [event for event in events if isinstance(event, StepRecord)]
        return [record for record in records if record.phase is Phase.DECODE]

    plain = decode_records()[5].cost.weight_bytes
    speculate(engine, kind, "3")
    costs = [record.cost.weight_bytes for record in decode_records()[1:-2] if record.num_drafted]
    assert statistics.median(costs) == pytest.approx(wanted * plain, rel=0.02 if kind != "layer_skip" else 0.2)


def test_guesses_that_do_not_pay_end_and_the_records_say_so(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.apply({"speculation": "ngram"})
    assert engine._speculator is not None

    def slow_and_wrong(wanted):  # type: ignore[no-untyped-def]
        time.sleep(0.02)
        return {each.request.request_id: Proposal((199,) * each.most) for each in wanted}

    monkeypatch.setattr(engine._speculator.proposer, "propose", slow_and_wrong)
    engine.submit(PROMPTS[0], replace(GREEDY, max_tokens=30))
    records: list[StepRecord] = []
    while engine.has_work:
        records += [event for event in engine.step() if isinstance(event, StepRecord)]
    assert any(record.num_drafted for record in records)
    assert not any(record.num_drafted for record in records[-10:])
    assert any("off by itself" in record.active_paths["speculation"] for record in records)


def test_guessing_that_fails_ends_and_the_chat_goes_on(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    (plain,) = engine.generate([PROMPTS[0]], GREEDY)
    speculate(engine, "draft")
    assert engine._speculator is not None

    def broken(*_: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(engine._speculator.proposer, "propose", broken)
    (answer,) = engine.generate([PROMPTS[0]], GREEDY)
    assert texts([answer]) == texts([plain])
    assert "no memory" in engine._speculator.describe()


def test_a_draft_with_another_vocabulary_is_refused_and_candidates_say_why(
    folders: tuple[Path, Path], engine: Engine, starter_path: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"cannot guess for this model\. Its vocabulary has"):
        Engine.load(str(folders[0]), {"weights": "none"}, draft=str(starter_path))
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    found = engine.draft_candidates([*folders, starter_path, tmp_path / "broken.gguf"])
    assert [candidate.path for candidate in found] == [*folders, starter_path, tmp_path / "broken.gguf"]
    assert (found[0].reason, found[0].note) == ("", ITSELF)
    assert (found[1].reason, found[1].note) == ("", AS_LARGE)
    assert "vocabulary" in found[2].reason
    assert found[3].reason


def test_a_larger_model_cannot_guess_and_a_smaller_one_may(folders: tuple[Path, Path], tmp_path: Path) -> None:
    larger = load(save_model(tmp_path))
    try:
        target = larger._as_target(larger._loaded)
        assert judged(target._replace(path=folders[0]), tmp_path) == (
            "",
            AS_LARGE,
        )
        size = target.num_parameters
        smaller_target = target._replace(path=folders[0], num_parameters=size - 1)
        assert f"larger than this model: {size:,} weights" in judged(smaller_target, tmp_path).reason
        assert judged(target._replace(path=folders[0], num_parameters=size + 1), tmp_path) == ("", "")
    finally:
        larger.close()


def test_only_padding_may_differ() -> None:
    ours = ["a", "b", "<s>", "[PAD3]", "[PAD4]", None]
    assert why_not(ours, ["a", "b", "<s>"]) == ""
    assert why_not(ours, ["a", "b", "<s>", "<unused0>", "<|reserved_special_token_5|>"]) == ""
    assert why_not(ours, ["a", "b", "<s>", "c"]) == "Its vocabulary has 4 tokens, this model's has 3."
    assert why_not(ours, ["a", "c", "<s>"]) == "Token 1 is 'c' there and 'b' in this model."


def test_rows_that_are_padding_in_the_draft_alone_are_never_guessed(folders: tuple[Path, Path]) -> None:
    """The draft's head has 40 rows more than there are tokens, and they are its likeliest."""
    engine = open_engine(folders)
    try:
        speculate(engine, "draft")
        proposer = engine._speculator.proposer if engine._speculator else None
        assert isinstance(proposer, DraftProposer)
        forward = proposer._model.forward

        class Padded:
            kv_dtype = proposer._model.kv_dtype

            def forward(self, batch, cache):  # type: ignore[no-untyped-def]
                logits = forward(batch, cache)
                return torch.cat((logits, logits.new_full((logits.shape[0], 40), 100.0)), dim=1)

        proposer._model = Padded()  # type: ignore[assignment]
        guessed = engine.generate(PROMPTS[:2], [GREEDY, MIXED[3]])
        assert guessed[0].usage.num_accepted > 0
        assert guessed[1].usage.num_accepted > 0
        check(engine)
    finally:
        engine.close()


def test_without_a_draft_model_the_switch_says_so(folders: tuple[Path, Path]) -> None:
    stages: list[str] = []
    with pytest.raises(ValueError, match="No draft model is loaded"):  # before anything is read
        Engine.load(
            str(folders[0]), {"weights": "none", "speculation": "draft"}, lambda stage, share: stages.append(stage)
        )
    assert stages == []
    engine = Engine.load(str(folders[0]), {"weights": "none"}, kv_bytes=2**22)
    try:
        with pytest.raises(ValueError, match="No draft model is loaded"):
            engine.apply({"speculation": "draft"})
        assert "draft" in engine.loaded_event().unavailable["speculation"]
    finally:
        engine.close()


def test_a_draft_model_comes_and_goes_while_a_reply_runs(folders: tuple[Path, Path], starter_path: Path) -> None:
    """It can be chosen, replaced and let go between two steps; the text stays, and the switch follows."""
    engine = Engine.load(str(folders[0]), {"weights": "none"}, kv_bytes=200 * PAGE_SIZE * 2 * 4 * 32 * 4)
    try:
        (plain,) = engine.generate([PROMPTS[1]], GREEDY)
        engine.submit(PROMPTS[1], GREEDY, 1)
        events = [event for _ in range(4) for event in engine.step()]
        stages: list[str] = []
        changed = engine.set_draft(str(folders[1]), lambda stage, share: stages.append(stage))
        assert changed.draft is not None and changed.draft.source == str(folders[1])
        assert changed.draft.weight_bytes > 0
        assert changed.info is not None and changed.info.memory.draft_bytes >= changed.draft.weight_bytes
        assert "speculation" not in changed.unavailable
        assert stages and all(stage.startswith("Draft model: ") for stage in stages)
        speculate(engine, "draft")
        events += [event for _ in range(4) for event in engine.step()]
        with pytest.raises(ValueError, match="Its vocabulary has"):
            engine.set_draft(str(starter_path))
        assert engine.draft == changed.draft
        with pytest.raises(LoadCancelled):
            engine.set_draft(str(folders[0]), cancelled=lambda: True)
        assert engine.draft == changed.draft
        assert engine.set_draft(str(folders[0])).draft.note == ITSELF  # type: ignore[union-attr]
        events += [event for _ in range(4) for event in engine.step()]
        let_go = engine.set_draft("")
        assert (let_go.draft, let_go.options["speculation"]) == (None, "off")
        assert let_go.unavailable["speculation"]["draft"] == NO_DRAFT
        while engine.has_work:
            events += engine.step()
        tokens = [token for event in events if isinstance(event, TokenDelta) for token in event.token_ids]
        assert tuple(tokens) == plain.token_ids
        check(engine)
    finally:
        engine.close()


def test_a_draft_that_does_not_fit_need_not_cost_the_load(folders: tuple[Path, Path], starter_path: Path) -> None:
    settings, refused = {"weights": "none", "speculation": "draft"}, []
    engine = Engine.load(
        str(folders[0]), settings, kv_bytes=2**22, draft=str(starter_path), on_draft_refused=refused.append
    )
    try:
        assert engine.options["speculation"] == "off"
        assert engine.draft is None
        (message,) = refused
        assert "Its vocabulary has" in message
    finally:
        engine.close()


def test_the_starter_as_its_own_draft_writes_the_same_text(starter_path: Path) -> None:
    """On packed weights: every guess is accepted, so a step gains all of them."""
    prompt = (Message("user", "Name three colours."),)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    engine = Engine.load("starter", kv_bytes=1 << 25, find=lambda name: starter_path, draft="starter")
    try:
        assert engine.draft is not None and engine.draft.note == ITSELF
        (plain,) = engine.generate([prompt], params)
        assert plain.usage.num_drafted == 0
        speculate(engine, "draft", "3")
        (guessed,) = engine.generate([prompt], params)
        assert guessed.token_ids == plain.token_ids
        assert guessed.usage.num_accepted == guessed.usage.num_drafted >= 27  # three of every four tokens
        check(engine)
    finally:
        engine.close()
