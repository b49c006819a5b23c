"""The engine with the real starter model, fp32 and greedy unless a test says otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from engine.engine import PAGE_SIZE, Engine
from engine.events import Event, Finished, FinishReason, Phase, StepRecord, TokenDelta
from engine.options import OPTIONS, Capabilities
from engine.params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
QUESTIONS = (
    "What is the capital of France?",
    "Write one sentence about rain.",
    "Name three colours.",
    "Why is the sky blue? Explain it to a child who has never seen the sea, with an example from a kitchen.",
    "2 + 2 =",
    "Say hello in Spanish.",
    "What do bees make?",
    "List two planets.",
)


def ask(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


@pytest.fixture(scope="module")
def loaded(starter_path: Path) -> Iterator[Engine]:
    engine = Engine.load(str(starter_path), {"weights": "none"})
    yield engine
    engine.close()


@pytest.fixture
def engine(loaded: Engine) -> Iterator[Engine]:
    before = dict(loaded.options)
    yield loaded
    assert not loaded.has_work
    loaded.check_integrity()
    loaded.apply(before)


@pytest.fixture(scope="module")
def alone(loaded: Engine) -> list[str]:
    return [loaded.generate([ask(question)], GREEDY)[0].text for question in QUESTIONS]


@pytest.fixture
def small(starter_path: Path, loaded: Engine) -> Iterator[Callable[[int], Engine]]:
    """Engines whose pool has few pages."""
    made: list[Engine] = []

    def make(num_pages: int) -> Engine:
        kv_bytes = num_pages * PAGE_SIZE * loaded.info.kv_bytes_per_token
        made.append(Engine.load(str(starter_path), {"weights": "none"}, kv_bytes=kv_bytes))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def drain(engine: Engine) -> list[Event]:
    events: list[Event] = []
    while engine.has_work:
        events += engine.step()
    return events


def text_of(events: list[Event], number: int) -> str:
    return "".join(event.text for event in events if isinstance(event, TokenDelta) and event.request_id == number)


def ending(events: list[Event], number: int) -> Finished:
    (finished,) = [event for event in events if isinstance(event, Finished) and event.request_id == number]
    return finished


def test_the_capital_of_france_is_paris(engine: Engine) -> None:
    (answer,) = engine.generate([ask(QUESTIONS[0])], SamplingParams(temperature=0, max_tokens=40))
    assert "Paris" in answer.text
    assert answer.finish_reason is FinishReason.STOP


def test_eight_chats_at_once_each_get_their_text_alone(engine: Engine, alone: list[str]) -> None:
    together = engine.generate([ask(question) for question in QUESTIONS], GREEDY)
    assert [completion.text for completion in together] == alone


LOSSLESS = [
    (option.key, value)
    for option in OPTIONS
    if option.lossless and option.kind != "weights"
    for value in option.values
    if value != option.default and option.reason(value, Capabilities()) is None  # a CPU has no graphs to capture
    if (option.key, value) != ("speculation", "draft")  # test_speculation_engine.py has it
]


@pytest.mark.parametrize(("key", "value"), LOSSLESS)
def test_a_lossless_switch_flipped_in_the_middle_of_a_reply_changes_nothing(
    engine: Engine, alone: list[str], key: str, value: str
) -> None:
    numbers = [engine.submit(ask(QUESTIONS[i]), GREEDY) for i in (0, 3)]
    events: list[Event] = []
    for _ in range(8):
        events += engine.step()
    applied = engine.apply({key: value})
    assert applied.changed == (key,)
    events += drain(engine)
    assert [text_of(events, number) for number in numbers] == [alone[0], alone[3]]


def test_weights_can_change_in_the_middle_of_a_reply(engine: Engine, alone: list[str]) -> None:
    number = engine.submit(ask(QUESTIONS[1]), GREEDY)
    events: list[Event] = []
    for _ in range(6):
        events += engine.step()
    before = text_of(events, number)
    stages: list[float] = []
    full = engine.info.weight_bytes
    for weights in ("int8", "int4"):
        applied = engine.apply({"weights": weights}, lambda stage, fraction: stages.append(fraction))
        assert applied.preempted == 1
        assert applied.info is not None
        assert applied.info.weight_bytes < full / 3
        assert weights in " ".join(engine.info.active_paths.values())
        events += engine.step()
    assert stages[-1] == 1.0
    events += drain(engine)
    assert ending(events, number).usage.new_tokens == 24
    assert text_of(events, number).startswith(before)
    assert before == alone[1][: len(before)]


def test_a_second_turn_finds_its_beginning_in_the_prefix_index(engine: Engine) -> None:
    first = ask(QUESTIONS[3])
    (answer,) = engine.generate([first], GREEDY)
    turn = [*first, {"role": "assistant", "content": answer.text}, {"role": "user", "content": "Go on."}]
    (again,) = engine.generate([turn], GREEDY)
    assert again.usage.cached_tokens >= PAGE_SIZE
    engine.apply({"prefix": "off"})
    (plain,) = engine.generate([turn], GREEDY)
    assert plain.usage.cached_tokens == 0
    assert plain.text == again.text


def test_chats_that_exceed_memory_wait_or_are_recomputed_and_all_finish(
    small: Callable[[int], Engine], alone: list[str]
) -> None:
    engine = small(6)
    longer = replace(GREEDY, max_tokens=40)
    completions = engine.generate([ask(question) for question in QUESTIONS[:4]], longer)
    for completion, text in zip(completions, alone, strict=False):
        assert completion.text.startswith(text)
    assert sum(completion.usage.recomputed_tokens for completion in completions) > 0
    engine.check_integrity()


def test_prompts_around_the_windows_edge(small: Callable[[int], Engine]) -> None:
    engine = small(2)
    window = engine.context_length
    assert window == 2 * PAGE_SIZE
    (last,) = engine.generate([tuple([5] * (window - 1))], SamplingParams(temperature=0, ignore_eos=True))
    assert (last.finish_reason, last.usage.new_tokens) == (FinishReason.CONTEXT, 1)
    (grown,) = engine.generate([tuple([5] * 10)], SamplingParams(temperature=0, ignore_eos=True))
    assert (grown.finish_reason, grown.usage.new_tokens) == (FinishReason.CONTEXT, window - 10)
    for length in (window, window + 1):
        with pytest.raises(ValueError, match=rf"{length} tokens.*Shorten the prompt"):
            engine.submit(tuple([5] * length), GREEDY)
    assert not engine.has_work


@pytest.mark.parametrize("stop_at", [0, 1, 2, 5])
def test_stopping_at_any_step_frees_the_pages_and_spares_the_other(
    engine: Engine, alone: list[str], stop_at: int
) -> None:
    gone, kept = engine.submit(ask(QUESTIONS[0]), GREEDY), engine.submit(ask(QUESTIONS[3]), GREEDY)
    events: list[Event] = []
    for _ in range(stop_at):
        events += engine.step()
    engine.abort(gone)
    engine.abort(gone)
    engine.abort(123456)
    events += drain(engine)
    assert ending(events, gone).reason is FinishReason.ABORT
    assert text_of(events, kept) == alone[3]


def test_a_failing_step_fails_its_requests_and_the_next_one_works(
    engine: Engine, alone: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a kernel failed")

    number = engine.submit(ask(QUESTIONS[0]), GREEDY)
    events = engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine._loaded.model, "forward", broken)
        events += engine.step()
    assert ending(events, number).reason is FinishReason.ERROR
    assert "a kernel failed" in ending(events, number).message
    assert engine.generate([ask(QUESTIONS[0])], GREEDY)[0].text == alone[0]


def test_running_out_of_memory_says_what_fits(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def hungry(*_: object) -> None:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory")

    number = engine.submit(ask(QUESTIONS[0]), GREEDY)
    with monkeypatch.context() as patch:
        patch.setattr(engine._loaded.model, "forward", hungry)
        events = engine.step()
    assert "tokens of context" in ending(events, number).message
    assert "Lower the batch limit" in ending(events, number).message


@pytest.mark.parametrize("changes", [{}, {"token_budget": "32"}, {"chunked_prefill": "off"}, {"kv_cache": "off"}])
def test_a_seed_gives_one_text_whatever_the_schedule(engine: Engine, changes: dict[str, str]) -> None:
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=12, ignore_eos=True)
    prompt = ask(" ".join(QUESTIONS))
    (wanted,) = engine.generate([prompt], params)
    engine.apply(changes)
    others = [ask(question) for question in QUESTIONS[:3]]
    got = engine.generate([*others, prompt], params)[-1]
    assert got.text == wanted.text
    (other,) = engine.generate([prompt], SamplingParams(temperature=1.0, seed=12, max_tokens=12, ignore_eos=True))
    assert other.text != wanted.text


def test_a_stop_string_ends_the_reply_and_is_not_part_of_it(engine: Engine, alone: list[str]) -> None:
    stop = alone[0][8:20]
    (answer,) = engine.generate([ask(QUESTIONS[0])], SamplingParams(temperature=0, max_tokens=24, stop=(stop,)))
    assert answer.text == alone[0][: alone[0].index(stop)]
    assert answer.finish_reason is FinishReason.STOP


def test_records_and_usage_count_the_same_tokens(engine: Engine) -> None:
    numbers = [engine.submit(ask(question), GREEDY) for question in QUESTIONS[:3]]
    events = drain(engine)
    records = [event for event in events if isinstance(event, StepRecord)]
    usages = [ending(events, number).usage for number in numbers]
    assert sum(record.num_new_tokens for record in records) == sum(usage.new_tokens for usage in usages) == 3 * 24
    computed = sum(record.num_prefill_tokens for record in records)
    assert computed == sum(usage.prompt_tokens - usage.cached_tokens for usage in usages)
    assert {record.phase for record in records} == {Phase.PREFILL, Phase.DECODE}
    assert all(
        record.step_seconds > 0 and record.memory_seconds > 0 and record.compute_seconds > 0 for record in records
    )
    for usage in usages:
        assert usage.first_token_seconds is not None
        assert usage.tokens_per_second is not None
    decode = [record for record in records if record.phase is Phase.DECODE]
    assert decode[-1].cost.weight_bytes == engine.info.weight_bytes


def test_steps_that_find_their_bytes_in_a_cache_do_not_raise_the_measured_bandwidth(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = replace(engine.info.machine, read_bytes_per_second=1000.0)
    monkeypatch.setattr(engine._accountant, "figures", slow)
    engine.submit(ask(QUESTIONS[0]), GREEDY)
    for record in (event for event in drain(engine) if isinstance(event, StepRecord)):
        assert record.memory_seconds == pytest.approx(record.cost.total_bytes / 1000.0)
        assert record.overhead_seconds == 0.0
    assert engine.info.machine == slow


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_no_token_or_one_token_never_divides_by_zero(engine: Engine, max_tokens: int) -> None:
    (answer,) = engine.generate([ask(QUESTIONS[0])], SamplingParams(temperature=0, max_tokens=max_tokens))
    assert answer.finish_reason is FinishReason.LENGTH
    assert answer.usage.new_tokens == max_tokens
    assert answer.usage.tokens_per_second is None
    assert (answer.usage.first_token_seconds is None) == (max_tokens == 0)


def test_streamed_text_is_the_generated_text(engine: Engine, alone: list[str]) -> None:
    assert "".join(delta.text for delta in engine.stream(ask(QUESTIONS[3]), GREEDY)) == alone[3]


def test_text_held_back_for_a_stop_string_is_not_lost_when_the_user_stops(engine: Engine, alone: list[str]) -> None:
    number = engine.submit(ask(QUESTIONS[0]), replace(GREEDY, stop=(alone[0] + "and more",)))
    events = [event for _ in range(6) for event in engine.step()]
    assert text_of(events, number) == ""
    engine.abort(number)
    events += drain(engine)
    assert len(text_of(events, number)) > 10
    assert alone[0].startswith(text_of(events, number))


def test_leaving_a_stream_early_stops_the_request(engine: Engine) -> None:
    for _ in engine.stream(ask(QUESTIONS[3]), GREEDY):
        break
    drain(engine)


def test_paging_off_strands_pages_and_says_so(engine: Engine) -> None:
    engine.apply({"paging": "off"})
    number = engine.submit(ask(QUESTIONS[0]), GREEDY)
    record = next(event for event in engine.step() if isinstance(event, StepRecord))
    assert record.pool.stranded > 0
    assert record.pool.used == -(-engine.context_length // PAGE_SIZE)
    engine.abort(number)
    drain(engine)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"wieghts": "int8"}, "There is no option 'wieghts'. Options are: weights"),
        ({"weights": "int3"}, "cannot be 'int3'. Choose one of: none, int8, int4"),
    ],
)
def test_unknown_switches_are_refused_and_change_nothing(engine: Engine, changes: dict[str, str], message: str) -> None:
    before = dict(engine.options)
    with pytest.raises(ValueError, match=message):
        engine.apply(changes)
    assert dict(engine.options) == before
