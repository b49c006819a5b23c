"""What is left out of a conversation that outgrows the window, and that its kept beginning seldom changes (FIELD 8, 9)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.commands import Message, Submit
from engine.context import MOST_REPLY_TOKENS, fit, reply_room
from engine.engine import PAGE_SIZE, Engine
from engine.events import Event, Finished, FinishReason
from engine.params import SamplingParams
from engine.service import EngineService
from engine.weights.source import open_source

FRAME = 3  # tokens around each message


def count(messages: Sequence[Message]) -> int:
    """A template's way to count: a frame for each message, one for the reply that follows, a token per word."""
    return 2 + sum(FRAME + len(message.content.split()) for message in messages)


def said(role: str, num_words: int, first: str = "w") -> Message:
    return Message(role, " ".join([first] + ["w"] * (num_words - 1)))  # type: ignore[arg-type]


def of_length(num_tokens: int) -> Message:
    return said("user", num_tokens - FRAME - 2)


SYSTEM = Message("system", "Be brief and kind.")


def test_what_fits_is_sent_whole() -> None:
    chat = (SYSTEM, said("user", 10), said("assistant", 10), said("user", 10))
    assert fit(chat, count, 1000) == (chat, 0)


@pytest.mark.parametrize(("beyond", "is_sent"), [(-1, True), (0, False), (1, False)])
def test_one_message_around_the_windows_edge(beyond: int, is_sent: bool) -> None:
    chat = (of_length(100 + beyond),)
    assert count(chat) == 100 + beyond
    if is_sent:
        assert fit(chat, count, 100) == (chat, 0)
    else:
        with pytest.raises(ValueError, match=rf"Your last message has {100 + beyond} tokens.*100.*Shorten the message"):
            fit(chat, count, 100)


@pytest.mark.parametrize("beyond", [-1, 0, 1])
def test_a_chat_around_the_edge_of_what_leaves_room_for_a_reply(beyond: int) -> None:
    older = (said("user", 10), said("assistant", 10))
    room = 200 - reply_room(200)
    chat = (*older, of_length(room + beyond - count(older) + 2))
    assert count(chat) == room + beyond
    assert fit(chat, count, 200).num_dropped == (2 if beyond > 0 else 0)


def test_the_system_message_counts_and_is_named_when_nothing_helps() -> None:
    chat = (said("system", 70), said("user", 5), said("assistant", 5), said("user", 30))
    with pytest.raises(ValueError, match="The system message and your last message have 108 tokens"):
        fit(chat, count, 100)


def test_a_turn_goes_with_its_reply_and_never_without() -> None:
    turns = [(said("user", 5, f"q{i}"), said("assistant", 8, f"a{i}")) for i in range(12)]
    chat = (SYSTEM, *(message for turn in turns for message in turn), said("user", 4, "now"))
    kept, num_dropped = fit(chat, count, 160)
    assert num_dropped > 0
    assert kept[0] is SYSTEM
    assert kept[1].role == "user"
    assert kept == (SYSTEM, *chat[1 + num_dropped :])


def test_room_for_a_reply_follows_the_window_and_the_longest_reply() -> None:
    assert reply_room(100) == 25
    assert reply_room(100_000) == MOST_REPLY_TOKENS
    assert reply_room(100_000, 40) == 40
    assert reply_room(100, 0) == 0


@given(
    sizes=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=60),
    limit=st.integers(90, 800),
    has_system=st.booleans(),
)
def test_a_chat_that_outgrows_the_window_over_many_turns(
    sizes: list[tuple[int, int]], limit: int, has_system: bool
) -> None:
    system = (SYSTEM,) if has_system else ()
    past: list[Message] = []
    beginnings: list[Message] = []
    written = 0
    for at, (asked, answered) in enumerate(sizes):
        question = said("user", asked, f"q{at}")
        chat = (*system, *past, question)
        kept, num_dropped = fit(chat, count, limit)
        assert fit(chat, count, limit) == (kept, num_dropped)
        assert kept == (*system, *chat[len(system) + num_dropped :])  # the system message and an unbroken end
        assert kept[-1] is question
        assert count(kept) < limit
        assert count(kept) <= limit - reply_room(limit) or kept == (*system, question)
        assert num_dropped == 0 or count(chat) > limit - reply_room(limit)
        beginnings.append(kept[len(system)])
        past += [question, said("assistant", answered, f"a{at}")]
        written += asked + answered + 2 * FRAME + 2
    is_usual = max(max(size) for size in sizes) * 2 + 2 * FRAME < limit // 4
    if is_usual:
        num_changes = sum(before is not after for before, after in pairwise(beginnings))
        assert num_changes <= 1 + written // (limit // 4)


# ---- in the engine


@pytest.fixture(scope="module")
def small(starter_path: Path) -> Iterator[Engine]:
    bytes_per_token = open_source(starter_path).spec.kv_bytes_per_token(4)
    engine = Engine.load(str(starter_path), {"weights": "none"}, kv_bytes=6 * PAGE_SIZE * bytes_per_token)
    yield engine
    engine.close()


def finished(engine: Engine, number: int) -> Finished:
    events: list[Event] = []
    while engine.has_work:
        events += engine.step()
    (ending,) = [event for event in events if isinstance(event, Finished) and event.request_id == number]
    return ending


def test_the_engine_leaves_out_the_oldest_turns_and_reuses_the_kept_beginning(small: Engine) -> None:
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    past: list[Message] = [Message("system", "You answer in one word.")]
    endings: list[Finished] = []
    for at in range(14):
        past.append(Message("user", f"Say the number {at} please"))
        endings.append(finished(small, small.submit(tuple(past), params, overflow="drop_oldest")))
        past.append(Message("assistant", f"The number is {at}"))
    assert all(ending.reason is FinishReason.LENGTH for ending in endings)
    assert all(ending.usage.prompt_tokens < small.context_length for ending in endings)
    dropped = [ending.usage.dropped_messages for ending in endings]
    assert dropped[0] == 0
    assert dropped[-1] > 10
    assert len(set(dropped)) <= 1 + small.count_tokens(past) // (small.context_length // 4)
    same_start = [i for i in range(1, 14) if dropped[i] == dropped[i - 1] > 0]
    assert same_start
    assert all(endings[i].usage.cached_tokens > 0 for i in same_start)
    with pytest.raises(ValueError, match="Shorten the prompt, or start a new chat"):
        small.submit(tuple(past), params)
    small.check_integrity()


@pytest.mark.parametrize("overflow", ["stop", "drop_oldest"])
def test_the_service_hands_the_policy_on(overflow: str) -> None:
    service, got = EngineService(), []
    service._engine = SimpleNamespace(submit=lambda *arguments: got.append(arguments))  # type: ignore[assignment]
    params = SamplingParams(max_tokens=3)
    service._handle(Submit(7, (SYSTEM,), params, overflow))  # type: ignore[arg-type]
    assert got == [((SYSTEM,), params, 7, overflow)]


@pytest.mark.parametrize("overflow", ["stop", "drop_oldest"])
def test_the_engine_refuses_one_message_longer_than_the_window(small: Engine, overflow: str) -> None:
    chat = (Message("user", "word " * small.context_length),)
    submit: Callable[..., int] = small.submit
    with pytest.raises(ValueError, match="Shorten"):
        submit(chat, SamplingParams(), overflow=overflow)
    assert not small.has_work
