"""FIELD 4: after any sequence of sending, editing, regenerating, stopping, deleting, undoing and restarting, each
message that was ever stored can be reached by choosing branches, with the text it had."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from app.chat.conversation import Conversation, figure_text, stats_words, title_from
from app.store import MessageRecord, MessageStats
from engine.commands import Message
from tests.app.desk import Desk

TEXTS = st.sampled_from(["alpha", "beta gamma", "δ", "e\nf"])
PICK = st.integers(min_value=0, max_value=10_000)


class Chats(RuleBasedStateMachine):
    """Two chats at most, driven as a user would; ``known`` is all that ever was stored: id -> (chat, text of a user)."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.desk = Desk(Path(self.folder.name))
        self.count = 0
        self.desk.script.replies = self.reply
        self.desk.store._connection.execute("PRAGMA synchronous = OFF")
        self.desk.load()
        self.open_chats: list[str] = []
        self.deleted: list[str] = []
        self.known: dict[str, tuple[str, str]] = {}

    def reply(self, _prompt: object) -> str:
        self.count += 1
        return f"reply number {self.count}"

    def pick(self, among: list[str], number: int) -> str:
        return among[number % len(among)]

    def note(self, chat: str) -> None:
        for view in self.desk.controller.messages(chat):
            if view.role == "user":
                self.known.setdefault(view.message_id, (chat, view.text))
            else:
                self.known.setdefault(view.message_id, (chat, ""))

    @rule(text=TEXTS, number=PICK, fresh=st.booleans())
    def send(self, text: str, number: int, fresh: bool) -> None:
        if not self.open_chats or (fresh and len(self.open_chats) < 2):
            self.open_chats.append(self.desk.controller.new_chat())
            number = -1  # the new one: without a message it would not be listed
        chat = self.pick(self.open_chats, number)
        self.desk.controller.send(chat, text)
        self.note(chat)

    @precondition(lambda self: self.open_chats)
    @rule(number=PICK, at=PICK)
    def regenerate(self, number: int, at: int) -> None:
        chat = self.pick(self.open_chats, number)
        self.desk.controller.regenerate(chat, self.pick(self.shown(chat), at))
        self.note(chat)

    @precondition(lambda self: self.open_chats)
    @rule(number=PICK, at=PICK, text=TEXTS)
    def edit(self, number: int, at: int, text: str) -> None:
        chat = self.pick(self.open_chats, number)
        self.desk.controller.edit(chat, self.pick(self.shown(chat), at), text)
        self.note(chat)

    @precondition(lambda self: self.open_chats)
    @rule(number=PICK, at=PICK, index=st.integers(min_value=0, max_value=4))
    def choose(self, number: int, at: int, index: int) -> None:
        chat = self.pick(self.open_chats, number)
        self.desk.controller.choose_branch(chat, self.pick(self.shown(chat), at), index)

    @precondition(lambda self: self.open_chats)
    @rule(number=PICK)
    def stop(self, number: int) -> None:
        self.desk.controller.stop(self.pick(self.open_chats, number))

    @rule(steps=st.integers(min_value=1, max_value=4))
    def let_it_run(self, steps: int) -> None:
        self.desk.step(steps)

    @precondition(lambda self: self.open_chats)
    @rule(number=PICK)
    def delete(self, number: int) -> None:
        chat = self.pick(self.open_chats, number)
        self.desk.controller.delete(chat)
        self.open_chats.remove(chat)
        self.deleted.append(chat)

    @precondition(lambda self: self.deleted)
    @rule()
    def undo(self) -> None:
        chat = self.deleted.pop()
        assert self.desk.controller.undo_delete(chat) == chat
        self.open_chats.append(chat)

    @rule()
    def restart(self) -> None:
        before = {chat: self.shown(chat) for chat in self.open_chats}
        self.desk.restart()
        self.desk.store._connection.execute("PRAGMA synchronous = OFF")
        assert {chat: self.shown(chat) for chat in self.open_chats} == before

    def shown(self, chat: str) -> list[str]:
        return [view.message_id for view in self.desk.controller.messages(chat)]

    @invariant()
    def the_list_is_right(self) -> None:
        assert {row.chat_id for row in self.desk.controller.chats()} == set(self.open_chats)

    @invariant()
    def roles_take_turns_in_what_is_shown(self) -> None:
        for chat in self.open_chats:
            roles = [view.role for view in self.desk.controller.messages(chat)]
            assert roles == ["user", "assistant"] * (len(roles) // 2)

    def teardown(self) -> None:
        for chat in [*self.deleted]:
            self.desk.controller.undo_delete(chat)
        for restart in (False, True):
            if restart:
                self.desk.restart()
            for message_id, (chat, text) in self.known.items():
                self.desk.controller.reveal(chat, message_id)
                view = next(view for view in self.desk.controller.messages(chat) if view.message_id == message_id)
                assert not text or view.text == text
                assert 0 <= view.branch_index < view.branch_count
        self.desk.close()
        self.folder.cleanup()


Chats.TestCase.settings = settings(
    max_examples=15, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.usefixtures("qapp")
class TestChats(Chats.TestCase):  # type: ignore[name-defined,misc]
    """Every stored message stays reachable."""


# ---- the tree by itself


def record(
    message_id: str, parent_id: str | None, role: str = "user", text: str = "t", active: str | None = None
) -> MessageRecord:
    return MessageRecord(message_id, parent_id, role, text, "done", 1.0, active_child=active)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "records",
    [
        [record("a", "missing"), record("b", "a")],
        [record("a", "b"), record("b", "a")],
        [record("a", "a")],
        [record("a", None, active="nonsense"), record("b", "a"), record("c", "a", active="a")],
    ],
)
def test_a_tree_with_bad_links_keeps_every_message_reachable(records: list[MessageRecord]) -> None:
    tree = Conversation(records, active_root="nowhere")
    for entry in records:
        tree.choose(entry.message_id)
        assert entry.message_id in list(tree.branch())


def test_remembered_branches_are_shown_again() -> None:
    tree = Conversation(
        [
            record("a", None, active="b"),
            record("b", "a", active="d"),
            record("c", "a"),
            record("d", "b"),
            record("e", "b"),
        ],
        active_root="a",
    )
    assert list(tree.branch()) == ["a", "b", "d"]
    assert tree.choose("c") == [("a", "c")]
    assert tree.choose("e") == [("a", "b"), ("b", "e")]


def test_a_long_reply_grows_in_time_that_does_not_depend_on_its_length() -> None:
    tree = Conversation([record("q", None)])
    tree.add(MessageRecord("a", "q", "assistant", "", "streaming", 1.0))
    for number in range(1000):
        tree.grow("a", f"{number} ")
        if number % 100 == 0:
            assert tree["a"].text.endswith(f"{number} ")
    assert tree.view("a").text == "".join(f"{number} " for number in range(1000))


def test_the_prompt_ends_at_the_message_asked_for() -> None:
    tree = Conversation(
        [
            record("q", None, text="Q"),
            record("a", "q", "assistant", "A"),
            record("r", "a", text="R"),
            record("b", "r", "assistant", ""),
        ]
    )
    assert tree.prompt("q") == (Message("user", "Q"),)
    assert tree.prompt("b", "S", "D") == (
        Message("system", "S"), Message("user", "Q"), Message("assistant", "A"), Message("user", "R\n\nD"),
    )  # fmt: skip
    assert tree.prompt(None) == ()


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0.00"), (0.2149, "0.21"), (8.4249, "8.42"), (9.996, "10.0"), (39.06, "39.1"), (99.96, "100"), (118.4, "118"),
     (12345.6, "12,300"), (1.2e9, "1,200,000,000"), (1e-9, "0.00")],
)  # fmt: skip
def test_figures_have_no_exponent(value: float, shown: str) -> None:
    assert figure_text(value) == shown


def test_unknown_figures_are_left_out() -> None:
    assert stats_words(MessageStats(0)) == ("0 tokens",)
    assert stats_words(MessageStats(1, first_token_seconds=0.2)) == ("first token 0.20 s", "1 token")
    assert stats_words(MessageStats(2, num_drafted=18, num_accepted=11)) == ("2 tokens", "drafts accepted 61 %")
    assert stats_words(MessageStats(1420, 30, 16, 118.2, 0.21)) == (
        "118 tokens/s", "first token 0.21 s", "1,420 tokens", "16 of 30 prompt tokens reused",
    )  # fmt: skip
    assert stats_words(MessageStats(5, 30, 16, dropped_messages=4)) == (
        "5 tokens", "4 oldest messages left out", "16 of 30 prompt tokens reused",
    )  # fmt: skip
    assert stats_words(MessageStats(5, dropped_messages=1))[-1] == "oldest message left out"


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("", "New chat"),
        ("\n \n", "New chat"),
        ("x" * 100, "x" * 60 + "…"),
        ("## Heading\nrest", "Heading"),
        ("a  b", "a b"),
    ],
)
def test_titles_from_text(text: str, title: str) -> None:
    assert title_from(text) == title
