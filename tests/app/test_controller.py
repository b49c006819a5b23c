"""ChatController over a real store on disk, the real bridge and a scripted engine."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.chat.conversation import stats_words
from app.store import ChatStore, MessageRecord, MessageStats
from app.store.records import INTERRUPTED
from engine.commands import Abort, LoadModel, MeasureContext, Message, Submit
from engine.events import Finished, FinishReason, RequestUsage, TokenDelta
from tests.app.desk import Desk
from tests.app.scripted_service import count_tokens

REPLY = "one two three four five"


@pytest.fixture
def desk(tmp_path: Path, qapp: object) -> Iterator[Desk]:
    desk = Desk(tmp_path)
    desk.load()
    yield desk
    desk.close()


def ids(desk: Desk, chat: str) -> list[str]:
    return [view.message_id for view in desk.controller.messages(chat)]


def asked(desk: Desk, text: str = "Hello there") -> str:
    """A chat with one answered question."""
    chat = desk.controller.new_chat()
    desk.controller.send(chat, text)
    desk.run()
    return chat


def prompts(desk: Desk) -> list[tuple[Message, ...]]:
    return [command.prompt for command in desk.service.posted if isinstance(command, Submit)]


def test_a_message_is_answered_and_survives_a_restart(desk: Desk) -> None:
    chat = asked(desk)
    wanted = [("user", "Hello there", "done"), ("assistant", REPLY, "done")]
    assert desk.texts(chat) == wanted
    assert "".join(args[2] for args in desk.of("message_text_grew")) == REPLY
    desk.restart()
    assert desk.texts(chat) == wanted
    assert [row.title for row in desk.controller.chats()] == ["Hello there"]


def test_the_message_is_on_disk_before_the_engine_hears_of_it(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    on_disk: list[list[tuple[str, str]]] = []
    post = desk.service.post

    def watched(command: object) -> None:
        if isinstance(command, Submit):
            other = sqlite3.connect(f"{desk.store.path.as_uri()}?mode=ro", uri=True)
            on_disk.append(other.execute("SELECT text, state FROM message ORDER BY seq").fetchall())
            other.close()
        post(command)  # type: ignore[arg-type]

    monkeypatch.setattr(desk.service, "post", watched)
    chat = desk.controller.new_chat()
    desk.controller.send(chat, "First")
    assert on_disk == [[("First", "done"), ("", "streaming")]]
    desk.run()
    desk.controller.regenerate(chat, ids(desk, chat)[1])
    assert on_disk[1][-1] == ("", "streaming")
    desk.run()
    desk.controller.edit(chat, ids(desk, chat)[0], "Other words")
    assert on_disk[2][-2:] == [("Other words", "done"), ("", "streaming")]


def test_signals_say_what_a_view_needs_in_order(desk: Desk) -> None:
    chat = desk.controller.new_chat()
    question = desk.controller.send(chat, "Hi")
    desk.step(2)
    desk.run()
    told = [(name, args[1]) for name, args in desk.signals if name in ("message_appended", "message_changed")]
    assert [(name, view.role, view.state) for name, view in told] == [
        ("message_appended", "user", "done"),
        ("message_appended", "assistant", "streaming"),
        ("message_changed", "assistant", "done"),
    ]
    assert told[0][1].message_id == question
    assert {args[1] for args in desk.of("message_text_grew")} == {told[1][1].message_id}
    names = [name for name, _ in desk.signals]
    assert names.index("message_appended") < names.index("message_text_grew") < names.index("message_changed")


def test_history_is_the_branch_shown_with_the_system_prompt(desk: Desk) -> None:
    chat = asked(desk, "First")
    desk.controller.set_system_prompt("Be brief.")
    desk.controller.send(chat, "Second")
    desk.run()
    assert prompts(desk)[-1] == (
        Message("system", "Be brief."),
        Message("user", "First"),
        Message("assistant", REPLY),
        Message("user", "Second"),
    )
    desk.controller.edit(chat, ids(desk, chat)[0], "Another first")
    assert prompts(desk)[-1] == (Message("system", "Be brief."), Message("user", "Another first"))


def test_empty_replies_are_left_out_of_the_history(desk: Desk) -> None:
    chat = desk.controller.new_chat()
    desk.controller.send(chat, "First")
    desk.controller.stop(chat)
    desk.run()
    desk.controller.send(chat, "Second")
    assert prompts(desk)[-1] == (Message("user", "First\n\nSecond"),)


def test_regenerate_adds_a_branch_and_keeps_the_old_reply(desk: Desk) -> None:
    desk.script.replies = ("first answer", "second answer", "third answer")
    chat = asked(desk)
    reply = ids(desk, chat)[1]
    desk.controller.regenerate(chat, reply)
    desk.run()
    shown = desk.controller.messages(chat)[1]
    assert (shown.text, shown.branch_index, shown.branch_count) == ("second answer", 1, 2)
    desk.controller.choose_branch(chat, shown.message_id, 0)
    assert desk.controller.messages(chat)[1].text == "first answer"
    assert desk.of("chat_reset")[-1] == (chat,)
    desk.restart()
    assert desk.controller.messages(chat)[1].text == "first answer"
    desk.controller.regenerate(chat, reply)
    desk.run()
    assert [desk.controller.messages(chat)[1].branch_count, desk.texts(chat)[1][2]] == [3, "done"]


def test_edit_branches_off_and_the_later_messages_stay_below_the_old_one(desk: Desk) -> None:
    chat = asked(desk, "First")
    desk.controller.send(chat, "Second")
    desk.run()
    first = ids(desk, chat)[0]
    edited = desk.controller.edit(chat, first, "First, better")
    desk.run()
    assert [text for _, text, _ in desk.texts(chat)] == ["First, better", REPLY]
    desk.controller.choose_branch(chat, edited, 0)
    assert [text for _, text, _ in desk.texts(chat)] == ["First", REPLY, "Second", REPLY]


def test_an_edited_reply_is_a_branch_without_asking(desk: Desk) -> None:
    chat = asked(desk)
    num_asked = len(prompts(desk))
    desk.controller.edit(chat, ids(desk, chat)[1], "What I wanted to hear")
    assert desk.texts(chat)[1] == ("assistant", "What I wanted to hear", "done")
    assert len(prompts(desk)) == num_asked
    desk.restart()
    assert desk.controller.messages(chat)[1].branch_count == 2


def test_several_chats_generate_at_once_and_keep_apart(desk: Desk) -> None:
    desk.script.replies = lambda prompt: f"answer to {prompt[-1].content}"  # type: ignore[index,union-attr]
    chats = []
    for name in ("A", "B", "C"):
        chats.append(desk.controller.new_chat())
        desk.controller.send(chats[-1], name)
    desk.step(2)
    assert {row.chat_id for row in desk.controller.chats() if row.is_generating} == set(chats)
    assert len({row.colour_index for row in desk.controller.chats()}) == 3
    desk.run()
    assert [desk.texts(chat)[1][1] for chat in chats] == ["answer to A", "answer to B", "answer to C"]
    assert not any(row.is_generating for row in desk.controller.chats())


def test_figures_belong_to_their_chat(desk: Desk) -> None:
    """FIELD 19."""
    long, short = desk.controller.new_chat(), ""
    desk.script.replies = ("w " * 40, "x y")
    desk.controller.send(long, "A long question of many words indeed")
    short = desk.controller.new_chat()
    desk.controller.send(short, "Short")
    desk.run()
    first, second = desk.controller.messages(long)[1].stats, desk.controller.messages(short)[1].stats
    assert first is not None
    assert second is not None
    assert (first.new_tokens, second.new_tokens) == (41, 2)
    assert first.prompt_tokens != second.prompt_tokens
    for chat_id, message_id, _ in desk.of("stats_changed"):
        assert message_id in ids(desk, chat_id)


def test_rates_come_from_the_engines_tokens_not_from_pieces_of_text(desk: Desk) -> None:
    """FIELD 18: one delta may carry many tokens or none of the text."""
    chat = desk.controller.new_chat()
    desk.controller.send(chat, "Hi")
    desk.service.advance()
    request = max(command.request_id for command in desk.service.posted if isinstance(command, Submit))
    desk.service._active.clear()
    desk.service.take_events()
    usage = RequestUsage(prompt_tokens=7, cached_tokens=4, new_tokens=11, first_token_seconds=0.5, decode_seconds=2.0)
    desk.service.emit(
        TokenDelta(request, "all of it at once", tuple(range(11))), Finished(request, FinishReason.STOP, usage)
    )
    desk.drain()
    stats = desk.controller.messages(chat)[1].stats
    assert stats is not None
    assert (stats.tokens_per_second, stats.first_token_seconds, stats.cached_tokens) == (5.0, 0.5, 4)


@pytest.mark.parametrize("new_tokens", [0, 1])
def test_a_reply_too_short_for_a_rate_has_none(desk: Desk, new_tokens: int) -> None:
    desk.controller.set_sampling(max_tokens=1)
    desk.script.replies = ("one",)
    chat = desk.controller.new_chat()
    desk.controller.send(chat, "Hi")
    if new_tokens == 0:
        desk.service.post(Abort(1))
    desk.run()
    stats = desk.controller.messages(chat)[1].stats
    assert stats is not None
    assert (stats.new_tokens, stats.tokens_per_second) == (new_tokens, None)


def test_stop_shows_at_once_and_the_engines_last_word_adds_the_figures(desk: Desk) -> None:
    chat = desk.controller.new_chat()
    desk.controller.send(chat, "Hi")
    desk.step(2)
    desk.service.advance()  # one more token is on its way
    desk.controller.stop(chat)
    assert desk.texts(chat)[1] == ("assistant", "one two", "stopped")
    assert not desk.controller.chats()[0].is_generating
    assert isinstance(desk.service.posted[-1], Abort)
    desk.run()
    assert desk.texts(chat)[1] == ("assistant", "one two", "stopped")
    stats = desk.controller.messages(chat)[1].stats
    assert stats is not None
    assert stats.new_tokens == 3
    desk.restart()
    assert desk.texts(chat)[1] == ("assistant", "one two", "stopped")
    assert desk.controller.messages(chat)[1].stats == stats


def test_stop_just_after_sending(desk: Desk) -> None:
    """FIELD 46."""
    chat = desk.controller.new_chat()
    desk.controller.send(chat, "Hi")
    desk.controller.stop(chat)
    assert desk.texts(chat)[1] == ("assistant", "", "stopped")
    desk.run()
    assert desk.texts(chat)[1] == ("assistant", "", "stopped")
    assert not desk.service.has_work


def test_stop_while_a_model_loads(tmp_path: Path, qapp: object) -> None:
    """FIELD 46: the load has not been taken up yet, so nothing can answer; stop shows all the same."""
    desk = Desk(tmp_path)
    desk.bridge.load_model("starter")
    chat = desk.controller.new_chat()
    desk.controller.send(chat, "Hi")
    desk.controller.stop(chat)
    assert desk.texts(chat)[1] == ("assistant", "", "stopped")
    assert [type(command) for command in desk.service.posted] == [LoadModel, Submit, Abort]
    desk.controller.send(chat, "Again")
    desk.run()
    assert desk.texts(chat)[-1] == ("assistant", REPLY, "done")
    desk.close()


def test_sending_while_a_reply_streams_stops_it_first(desk: Desk) -> None:
    chat = desk.controller.new_chat()
    desk.controller.send(chat, "First")
    desk.step(2)
    desk.controller.send(chat, "Second")
    desk.run()
    assert [(text, state) for _, text, state in desk.texts(chat)] == [
        ("First", "done"), ("one two", "stopped"), ("Second", "done"), (REPLY, "done"),
    ]  # fmt: skip


def test_a_failed_reply_says_why_and_can_be_regenerated(desk: Desk) -> None:
    desk.script.fail_reply = "Out of memory. The largest context that fits is 512 tokens."
    chat = asked(desk)
    failed = desk.controller.messages(chat)[1]
    assert (failed.state, failed.text, failed.error) == ("failed", "one two", desk.script.fail_reply)
    desk.restart()
    assert desk.controller.messages(chat)[1].error == desk.script.fail_reply
    desk.script.fail_reply = None
    desk.controller.regenerate(chat, failed.message_id)
    desk.run()
    assert desk.texts(chat)[1] == ("assistant", REPLY, "done")


def test_without_a_model_the_chat_says_so(tmp_path: Path, qapp: object) -> None:
    desk = Desk(tmp_path)
    chat = asked(desk)
    failed = desk.controller.messages(chat)[1]
    assert (failed.state, failed.error) == ("failed", "No model is loaded. Choose one first.")
    desk.close()


def test_a_dead_engine_fails_the_reply_and_the_next_question_works(desk: Desk) -> None:
    chat = desk.controller.new_chat()
    desk.controller.send(chat, "Hi")
    desk.step(2)
    desk.service.die()
    desk.drain()
    assert desk.texts(chat)[1][1:] == ("one two", "failed")
    assert desk.controller.messages(chat)[1].error
    desk.load()
    desk.controller.regenerate(chat, ids(desk, chat)[1])
    desk.run()
    assert desk.texts(chat)[1] == ("assistant", REPLY, "done")


def test_a_full_window_is_told_below_the_reply(desk: Desk) -> None:
    chat = desk.controller.new_chat()
    desk.controller.send(chat, "Hi")
    desk.service.advance()
    desk.service._active.clear()
    desk.service.emit(Finished(1, FinishReason.CONTEXT, RequestUsage(5, new_tokens=1)))
    desk.drain()
    view = desk.controller.messages(chat)[1]
    assert view.state == "done"
    assert "window is full" in view.error


def test_closing_while_a_reply_streams_keeps_it_as_interrupted(desk: Desk) -> None:
    chat = desk.controller.new_chat()
    desk.controller.send(chat, "Hi")
    desk.step(3)
    desk.restart()
    view = desk.controller.messages(chat)[1]
    assert (view.text, view.state, view.error) == ("one two three", "interrupted", INTERRUPTED)
    desk.controller.regenerate(chat, view.message_id)
    desk.run()
    assert desk.texts(chat)[1] == ("assistant", REPLY, "done")


def test_a_full_disk_sends_nothing_and_says_so_in_the_chat(desk: Desk) -> None:
    chat = asked(desk)
    num_asked = len(prompts(desk))
    desk.fill_disk()
    long = "word " * 20_000
    message_id = desk.controller.send(chat, long)
    view = desk.controller.messages(chat)[-1]
    assert (view.message_id, view.text, view.state) == (message_id, long, "failed")
    assert "not sent" in view.error
    assert "Free some space" in view.error
    assert desk.of("message_appended")[-1] == (chat, view)
    assert len(prompts(desk)) == num_asked
    desk.free_disk()
    desk.controller.regenerate(chat, message_id)
    desk.run()
    assert [text for _, text, _ in desk.texts(chat)] == ["Hello there", REPLY, long, REPLY]
    assert prompts(desk)[-1][-1] == Message("user", long.rstrip(" ") + " ")


def test_a_message_that_was_not_sent_can_be_edited(desk: Desk) -> None:
    chat = asked(desk)
    desk.fill_disk()
    message_id = desk.controller.send(chat, "word " * 20_000)
    desk.free_disk()
    desk.controller.edit(chat, message_id, "shorter")
    desk.run()
    assert [text for _, text, _ in desk.texts(chat)] == ["Hello there", REPLY, "shorter", REPLY]


def test_a_reply_that_cannot_be_saved_stays_in_memory_and_is_saved_later(desk: Desk) -> None:
    desk.script.replies = ("word " * 20_000,)
    chat = desk.controller.new_chat()
    desk.controller.send(chat, "Hi")
    desk.fill_disk()
    desk.service.run(30_000)
    desk.drain()
    view = desk.controller.messages(chat)[1]
    assert view.state == "done"
    assert "Free some space" in view.error
    assert len(view.text) == 100_000
    assert desk.of("storage_failed")[-1][0] == chat
    desk.free_disk()
    desk.controller._saver.retry()
    assert desk.controller.messages(chat)[1].error == ""
    assert desk.of("message_changed")[-1][1].error == ""
    desk.restart()
    assert len(desk.controller.messages(chat)[1].text) == 100_000


def test_a_damaged_file_refuses_to_send_and_can_be_repaired(desk: Desk) -> None:
    chat = asked(desk)
    desk.close()
    content = desk.store.path.read_bytes()
    desk.store.path.write_bytes(content[: len(content) // 4096 * 4096 - 4096])
    desk.open()
    desk.load()
    assert "damaged" in desk.controller.trouble
    desk.controller.send(chat if desk.controller.chats() else desk.controller.new_chat(), "Hi")
    assert len(prompts(desk)) == 0
    assert "Repaired" in desk.controller.repair()
    assert desk.controller.trouble == ""
    fresh = desk.controller.new_chat()
    desk.controller.send(fresh, "Now")
    desk.run()
    assert desk.texts(fresh)[-1][1:] == (REPLY, "done")


def test_delete_and_undo(desk: Desk) -> None:
    first, second = asked(desk, "First chat"), asked(desk, "Second chat")
    desk.controller.delete(first)
    assert [row.chat_id for row in desk.controller.chats()] == [second]
    assert desk.controller.search("First") == []
    assert desk.controller.undo_delete() == first
    assert {row.chat_id for row in desk.controller.chats()} == {first, second}
    desk.controller.delete(first)
    desk.controller.delete(second)
    desk.restart()
    assert desk.controller.chats() == []
    assert [desk.controller.undo_delete(), desk.controller.undo_delete(), desk.controller.undo_delete()] == [
        second, first, None,
    ]  # fmt: skip
    assert desk.texts(first)[0][1] == "First chat"


def test_deleting_a_chat_stops_what_it_generates(desk: Desk) -> None:
    chat = desk.controller.new_chat()
    desk.controller.send(chat, "Hi")
    desk.step()
    desk.controller.delete(chat)
    assert isinstance(desk.service.posted[-1], Abort)
    desk.run()
    desk.controller.undo_delete(chat)
    assert desk.texts(chat)[1] == ("assistant", "one", "stopped")


def test_an_empty_chat_is_given_out_again_and_never_listed(desk: Desk) -> None:
    chat = desk.controller.new_chat()
    assert desk.controller.new_chat() == chat
    assert desk.controller.chats() == []
    assert desk.controller.messages(chat) == []
    desk.controller.send(chat, "   \n")
    assert desk.controller.chats() == []
    desk.restart()
    assert desk.controller.chats() == []


def test_titles(desk: Desk) -> None:
    chat = asked(
        desk, "\n\n  # Why   does ice float, and how would I go about checking that with numbers at home?\nMore"
    )
    assert desk.controller.title(chat) == "Why does ice float, and how would I go about checking that…"
    desk.controller.rename(chat, "  Ice \n ")
    desk.controller.rename(chat, " ")
    desk.controller.send(chat, "Next")
    desk.restart()
    assert desk.controller.title(chat) == "Ice"


def test_a_search_hit_on_a_hidden_branch_can_be_shown(desk: Desk) -> None:
    chat = asked(desk, "The old needle")
    desk.controller.edit(chat, ids(desk, chat)[0], "Something else")
    desk.run()
    [hit] = [hit for hit in desk.controller.search("needle") if hit.message_id]
    desk.controller.reveal(chat, hit.message_id or "")
    assert desk.texts(chat)[0][1] == "The old needle"


def test_a_hit_that_another_window_wrote_is_harmless(desk: Desk) -> None:
    chat = asked(desk)
    other = ChatStore(desk.store.path)
    record = MessageRecord("elsewhere", ids(desk, chat)[1], "user", "needle", "done", 1.0)
    other.add_message(other.conversations()[0], record)
    other.close()
    before = desk.texts(chat)
    [hit] = desk.controller.search("needle")
    desk.controller.reveal(chat, hit.message_id or "")
    assert desk.texts(chat) == before
    desk.restart()
    assert desk.texts(chat) == [*before, ("user", "needle", "done")]


def test_the_context_is_counted_by_the_engine_before_sending(desk: Desk) -> None:
    """FIELD 10: what is measured is exactly what would be sent."""
    chat = asked(desk)
    desk.controller.count_context(chat, "not this")
    desk.controller.count_context(chat, "a draft of five words")
    desk.controller._counter._ask()
    desk.step()
    measured = [command for command in desk.service.posted if isinstance(command, MeasureContext)]
    assert len(measured) == 1
    assert desk.of("context_counted")[-1] == (chat, count_tokens(measured[0].messages))
    desk.controller._counter.close()
    desk.controller.send(chat, "a draft of five words")
    assert prompts(desk)[-1] == measured[0].messages


def test_typing_is_counted_once_it_pauses(desk: Desk, qtbot) -> None:  # type: ignore[no-untyped-def]
    chat = asked(desk)
    for draft in ("a", "a b", "a b c"):
        desk.controller.count_context(chat, draft)
    qtbot.waitUntil(lambda: any(isinstance(command, MeasureContext) for command in desk.service.posted))
    asked_for = [command.messages for command in desk.service.posted if isinstance(command, MeasureContext)]
    assert [messages[-1].content for messages in asked_for] == ["a b c"]


def test_an_empty_chat_counts_zero_and_an_old_answer_is_ignored(desk: Desk) -> None:
    chat = asked(desk)
    fresh = desk.controller.new_chat()
    desk.controller.count_context(chat, "draft")
    desk.controller._counter._ask()
    desk.controller.count_context(fresh, "")
    desk.controller._counter._ask()
    desk.step()
    assert desk.of("context_counted")[-1] == (fresh, 0)
    desk.controller._counter.close()


def test_while_streaming_the_steps_count_the_context(desk: Desk) -> None:
    chat = desk.controller.new_chat()
    desk.controller.send(chat, "Hi")
    prompt = count_tokens(prompts(desk)[-1])
    desk.step()
    desk.step()
    assert [args for args in desk.of("context_counted") if args[0] == chat] == [(chat, prompt + 1), (chat, prompt + 2)]


def test_sampling_is_used_kept_and_checked(desk: Desk) -> None:
    desk.controller.set_sampling(temperature=0, seed=3)
    with pytest.raises(ValueError, match="top_p"):
        desk.controller.set_sampling(top_p=2)
    asked(desk)
    desk.restart()
    asked(desk)
    params = [command.params for command in desk.service.posted if isinstance(command, Submit)][-1]
    assert (params.temperature, params.seed, params.top_p) == (0, 3, 1.0)


def test_requests_keep_their_owner(desk: Desk) -> None:
    chat = asked(desk)
    request = next(command.request_id for command in desk.service.posted if isinstance(command, Submit))
    assert desk.controller.owner_of(request) == chat
    assert desk.controller.owner_of(request + 1000) is None


def test_events_of_unknown_requests_are_ignored(desk: Desk) -> None:
    chat = asked(desk)
    before = desk.texts(chat)
    desk.service.emit(TokenDelta(999, "x", (1,)), Finished(999, FinishReason.STOP, RequestUsage(1)))
    desk.drain()
    assert desk.texts(chat) == before


# ---- a chat that outgrows the window (FIELD 8)


@pytest.fixture
def small_desk(desk: Desk) -> Desk:
    """A window of 60 tokens; the scripted engine counts words, and four for each message's frame."""
    desk.script.window = 60
    desk.load()
    return desk


def test_a_chat_goes_on_beyond_the_window_and_says_what_was_left_out(small_desk: Desk) -> None:
    desk = small_desk
    desk.controller.set_system_prompt("Be brief.")
    chat = desk.controller.new_chat()
    for at in range(6):
        desk.controller.send(chat, f"Question {at} in five words")
        desk.run()
    assert {command.overflow for command in desk.service.posted if isinstance(command, Submit)} == {"drop_oldest"}
    replies = [view for view in desk.controller.messages(chat) if view.role == "assistant"]
    assert [view.state for view in replies] == ["done"] * 6
    dropped = [view.stats.dropped_messages for view in replies if view.stats]
    assert dropped[0] == 0
    assert dropped[-1] > 0
    assert stats_words(replies[-1].stats or MessageStats(0))[3] == f"{dropped[-1]} oldest messages left out"
    assert len(prompts(desk)[-1]) == 12  # the whole chat is offered; the engine decides what fits
    desk.restart(load=False)
    kept = desk.controller.messages(chat)[-1].stats
    assert kept is not None
    assert kept.dropped_messages == dropped[-1]


def test_with_stop_a_chat_beyond_the_window_is_refused_and_nothing_is_cut(small_desk: Desk) -> None:
    desk = small_desk
    desk.settings.update(context_policy="stop")
    chat = desk.controller.new_chat()
    for at in range(4):
        desk.controller.send(chat, f"Question {at} in five words")
        desk.run()
    last = desk.controller.messages(chat)[-1]
    assert last.state == "failed"
    assert "Shorten" in last.error
    assert all(not view.stats or not view.stats.dropped_messages for view in desk.controller.messages(chat))


@pytest.mark.parametrize(("policy", "remedy"), [("stop", "Preferences"), ("drop_oldest", "go on")])
def test_a_reply_that_fills_the_window_says_what_to_do(small_desk: Desk, policy: str, remedy: str) -> None:
    desk = small_desk
    desk.settings.update(context_policy=policy)
    desk.script.reply_tokens = 200
    chat = desk.controller.new_chat()
    desk.controller.send(chat, "Hello")
    desk.run()
    view = desk.controller.messages(chat)[1]
    assert view.state == "done"
    assert "window is full" in view.error
    assert remedy in view.error
