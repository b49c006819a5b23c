"""ChatController: the view-model between store, engine bridge and widgets. Owns the chats; widgets only show them."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from PySide6.QtCore import QObject, Signal

from app.chat.catalogue import NUM_COLOURS, UNTITLED, ChatCatalogue
from app.chat.context_counter import ContextCounter
from app.chat.conversation import ChatSummary, Conversation, MessageView, title_from
from app.chat.generation import Generation
from app.chat.saving import EndedReply, ReplySaver
from app.settings import Settings, SettingsStore
from app.store import ChatStore, MessageRecord, MessageState, MessageStats, SearchHit, StoreError
from engine.commands import Message, Overflow
from engine.events import Finished, FinishReason, StepRecord, TokenDelta

if TYPE_CHECKING:
    from app.bridge import EngineBridge

logger = logging.getLogger(__name__)

_STATS_SECONDS = 0.25
_NO_REASON = "The engine gave no reason. Regenerate to ask again."
# Why a reply ended with the window, after Settings.context_policy.
_WINDOW_FULL = {
    "stop": (
        "The reply ends here because the model's window is full. Start a new chat, edit an earlier message to branch "
        "off, or let the oldest messages be left out (Preferences, Context)."
    ),
    "drop_oldest": (
        "The reply ends here because the model's window is full. Ask it to go on: the oldest messages are then left "
        "out to make room. A new chat begins with an empty window."
    ),
}


@dataclass(frozen=True, slots=True)
class _Unsent:
    """A message that could not be saved and therefore was not sent. It lives in memory until it is retried."""

    message_id: str
    text: str
    error: str

    def view(self) -> MessageView:
        return MessageView(self.message_id, "user", self.text, "failed", self.error)


class ChatController(QObject):
    """Chats, their messages and what is being generated. Everything runs on the GUI thread.

    Signals: see the comments beside them. ``trouble`` holds plain words about the chats file (damaged, newer,
    unwritable), empty when all is well; ``repair`` mends a damaged one.
    """

    chats_changed = Signal()  # the list, a title, or a generating flag
    message_appended = Signal(str, object)  # chat_id, MessageView
    message_text_grew = Signal(str, str, str)  # chat_id, message_id, added text
    message_changed = Signal(str, object)  # chat_id, MessageView (finished, stopped, failed, final figures)
    stats_changed = Signal(str, str, object)  # chat_id, message_id, MessageStats so far; a few times a second
    chat_reset = Signal(str)  # another branch is shown: read messages(chat_id) again
    context_counted = Signal(str, int)  # chat_id, tokens of the rendered template
    storage_failed = Signal(str, str)  # chat_id (or ""), what could not be saved and what to do

    def __init__(
        self, store: ChatStore, bridge: EngineBridge, settings: SettingsStore, parent: QObject | None = None
    ) -> None:
        super().__init__(parent)
        self._store = store
        self._bridge = bridge
        self._settings = settings
        self._chats = ChatCatalogue(store)
        self._conversations: dict[str, Conversation] = {}
        self._unsent: dict[str, list[_Unsent]] = {}
        self._generations: dict[int, Generation] = {}
        self._owners: dict[int, str] = {}
        self._stats_shown_at: dict[int, float] = {}
        self._saver = ReplySaver(store)
        self._saver.setParent(self)
        self._saver.failed.connect(self.storage_failed)
        self._saver.saved_later.connect(self._on_saved_later)
        self._counter = ContextCounter(bridge, self._prompt_with)
        self._counter.setParent(self)
        self._counter.counted.connect(self.context_counted)
        bridge.tokens_arrived.connect(self._on_tokens_arrived)
        bridge.generation_finished.connect(self._on_generation_finished)
        bridge.steps_recorded.connect(self._on_steps_recorded)

    @property
    def settings(self) -> Settings:
        """What replies are asked for with."""
        return self._settings.settings

    # ---- the list of chats

    @property
    def trouble(self) -> str:
        return self._store.trouble

    @property
    def can_repair(self) -> bool:
        """``repair`` would help with the trouble."""
        return self._store.can_repair

    def chats(self) -> list[ChatSummary]:
        """Chats with at least one message, the most recently used first."""
        return self._chats.summaries({entry.chat_id for entry in self._generations.values() if not entry.is_stopped})

    def new_chat(self) -> str:
        """The id of an empty chat. It is listed and on disk from its first message on; until then it is given out again."""
        for chat_id in self._chats.new_ones():
            if not self._unsent.get(chat_id):
                return chat_id
        chat_id = self._chats.add_new()
        self._conversations[chat_id] = Conversation()
        return chat_id

    def title(self, chat_id: str) -> str:
        return self._chats[chat_id].title or UNTITLED

    def colour_index(self, chat_id: str) -> int:
        """Into Theme.chats."""
        return self._chats[chat_id].colour_index % NUM_COLOURS

    def is_generating(self, chat_id: str) -> bool:
        return any(True for _ in self._running(chat_id))

    def rename(self, chat_id: str, title: str) -> None:
        """Set the title; an empty one leaves it as it was."""
        title = " ".join(title.split())
        if title and self._saved(chat_id, lambda: self._chats.rename(chat_id, title)):
            self.chats_changed.emit()

    def delete(self, chat_id: str) -> None:
        """Take the chat off the list; what it was generating is stopped. ``undo_delete`` brings it back."""
        self.stop(chat_id)
        if self._saved(chat_id, lambda: self._chats.delete(chat_id)):
            self.chats_changed.emit()

    def undo_delete(self, chat_id: str | None = None) -> str | None:
        """Bring back ``chat_id``, or the chat deleted last. Returns its id; None when there is nothing to undo."""
        try:
            found = self._chats.undelete(chat_id)
        except StoreError as error:
            self.storage_failed.emit(chat_id or "", str(error))
            return None
        if found is not None:
            self.chats_changed.emit()
        return found

    def search(self, text: str) -> list[SearchHit]:
        """Chats and messages that hold ``text``; empty when there is nothing to search for."""
        try:
            return [hit for hit in self._store.search(text) if self._chats.is_listed(hit.chat_id)]
        except StoreError as error:
            self.storage_failed.emit("", str(error))
            return []

    def repair(self) -> str:
        """Start a new chats file with what was saved of a damaged one. Returns what happened, in plain words."""
        try:
            kept = self._store.repair()
        except StoreError as error:
            return str(error)
        self.chats_changed.emit()
        return f"Repaired. The damaged file is kept as {kept}."

    # ---- messages of a chat

    def messages(self, chat_id: str) -> list[MessageView]:
        """The branch that is shown, then what could not be sent."""
        unsent = [message.view() for message in self._unsent.get(chat_id, ())]
        return self._conversation(chat_id).views() + unsent

    def owner_of(self, request_id: int) -> str | None:
        """The chat a request belongs to, also after it has finished; None for a request of somebody else."""
        return self._owners.get(request_id)

    def send(self, chat_id: str, text: str) -> str:
        """Commit the message and an empty reply to disk, then ask the engine. Returns the message's id.

        What cannot be saved is not sent: it stands in the chat as failed with the remedy, and ``regenerate`` on it
        tries again. A reply that still streams in this chat is stopped first. Blank text does nothing.
        """
        if not text.strip():
            return ""
        self.stop(chat_id)
        return self._ask(chat_id, self._conversation(chat_id).leaf(), text)

    def stop(self, chat_id: str) -> None:
        """Stop what the chat is generating. It shows at once; the engine's last word only adds the figures."""
        for generation in list(self._running(chat_id)):
            generation.is_stopped = True
            self._bridge.abort(generation.request_id)
            self._settle(generation, "stopped", "", generation.stats() if generation.new_tokens else None)

    def regenerate(self, chat_id: str, message_id: str) -> None:
        """A new reply beside ``message_id`` (or below it, when that is the user's), as another branch."""
        unsent = self._take_unsent(chat_id, message_id)
        if unsent is not None:
            self.send(chat_id, unsent.text)
            return
        self.stop(chat_id)
        conversation = self._conversation(chat_id)
        record = conversation[message_id]
        question_id = message_id if record.role == "user" else record.parent_id
        changed = conversation.choose(question_id) if question_id is not None else []
        reply = self._reply_to(question_id)
        chat = replace(self._chats[chat_id], updated_at=time.time())
        if not self._saved(chat_id, lambda: self._store.begin_reply(chat, None, reply), shown=message_id):
            return
        self._keep_choices(chat_id, changed)
        self._chats.put(chat)
        conversation.add(reply)
        self.chat_reset.emit(chat_id)
        self._start(chat_id, reply.message_id)

    def edit(self, chat_id: str, message_id: str, text: str) -> str:
        """The user's message in other words, as another branch, answered anew. An edited reply is a branch without asking.

        Returns the id of the new message.
        """
        unsent = self._take_unsent(chat_id, message_id)
        if unsent is not None:
            return self.send(chat_id, text)
        if not text.strip():
            return ""
        self.stop(chat_id)
        record = self._conversation(chat_id)[message_id]
        if record.role == "user":
            return self._ask(chat_id, record.parent_id, text)
        return self._add_edited_reply(chat_id, record, text)

    def choose_branch(self, chat_id: str, message_id: str, index: int) -> None:
        """Show sibling ``index`` (from 0) of ``message_id``."""
        siblings = self._conversation(chat_id).siblings(message_id)
        if 0 <= index < len(siblings):
            self.reveal(chat_id, siblings[index])

    def reveal(self, chat_id: str, message_id: str) -> None:
        """Show the branch that holds ``message_id`` (a search hit, for example).

        A message that another window wrote after this one had read the chat is not known here; nothing happens.
        """
        conversation = self._conversation(chat_id)
        changed = conversation.choose(message_id) if message_id in conversation else []
        if not changed:
            return
        self._keep_choices(chat_id, changed)
        self.chat_reset.emit(chat_id)

    # ---- sampling and context

    def set_sampling(self, **changes: Any) -> None:
        """Change sampling settings (names as in SamplingSettings) from the next reply on. ValueError for a bad value."""
        current = self._settings.settings.sampling
        self._settings.update(sampling={**current.model_dump(), **changes})

    def set_system_prompt(self, text: str) -> None:
        self._settings.update(system_prompt=text)

    def count_context(self, chat_id: str, draft_text: str) -> None:
        """Count the tokens of the chat with the draft as its next message; ``context_counted`` answers shortly.

        While the chat generates its steps count it, so nothing is asked.
        """
        self._counter.want(chat_id, draft_text)

    def close(self) -> None:
        """Before the program ends: what still streams is kept as interrupted, and the file is closed."""
        self._counter.close()
        self._saver.close()
        self._generations.clear()
        self._store.close()

    # ---- asking the engine

    def _ask(self, chat_id: str, parent_id: str | None, text: str) -> str:
        conversation = self._conversation(chat_id)
        is_appended = parent_id == conversation.leaf() and not self._unsent.get(chat_id)
        now = time.time()
        question = MessageRecord(uuid.uuid4().hex, parent_id, "user", text, "done", now)
        reply = self._reply_to(question.message_id)
        before = self._chats[chat_id]
        chat = replace(before, title=before.title or title_from(text), updated_at=now)
        try:
            self._store.begin_reply(chat, question, reply)
        except StoreError as error:
            return self._keep_unsent(chat_id, text, str(error))
        self._chats.put(chat)
        conversation.add(question)
        conversation.add(reply)
        if is_appended:
            self.message_appended.emit(chat_id, conversation.view(question.message_id))
            self.message_appended.emit(chat_id, conversation.view(reply.message_id))
        else:
            self.chat_reset.emit(chat_id)
        self._start(chat_id, reply.message_id)
        return question.message_id

    def _reply_to(self, question_id: str | None) -> MessageRecord:
        return MessageRecord(uuid.uuid4().hex, question_id, "assistant", "", "streaming", time.time())

    def _start(self, chat_id: str, reply_id: str) -> None:
        conversation = self._conversation(chat_id)
        settings = self._settings.settings
        prompt = conversation.prompt(conversation[reply_id].parent_id, settings.system_prompt)
        request_id = self._bridge.submit(prompt, settings.sampling.to_params(), settings.context_policy)
        self._owners[request_id] = chat_id
        generation = Generation(request_id, chat_id, reply_id, time.perf_counter())
        self._generations[request_id] = generation
        self._saver.watch(generation)
        self.chats_changed.emit()

    def _add_edited_reply(self, chat_id: str, record: MessageRecord, text: str) -> str:
        edited = MessageRecord(uuid.uuid4().hex, record.parent_id, "assistant", text, "done", time.time())
        chat = replace(self._chats[chat_id], updated_at=edited.created_at)
        if not self._saved(chat_id, lambda: self._store.add_message(chat, edited), shown=record.message_id):
            return ""
        self._chats.put(chat)
        self._conversation(chat_id).add(edited)
        self.chat_reset.emit(chat_id)
        self.chats_changed.emit()
        return edited.message_id

    # ---- what the engine says

    def _on_tokens_arrived(self, deltas: list[TokenDelta]) -> None:
        added: dict[int, list[str]] = {}
        for delta in deltas:
            if delta.text:
                added.setdefault(delta.request_id, []).append(delta.text)
        for request_id, texts in added.items():
            generation = self._generations.get(request_id)
            if generation is None or generation.is_stopped:
                continue
            text = "".join(texts)
            generation.grow(text)
            self._conversation(generation.chat_id).grow(generation.message_id, text)
            self.message_text_grew.emit(generation.chat_id, generation.message_id, text)

    def _on_generation_finished(self, finished: Finished) -> None:
        generation = self._generations.pop(finished.request_id, None)
        self._stats_shown_at.pop(finished.request_id, None)
        if generation is None:
            return
        stats = MessageStats.of(finished.usage)
        if generation.is_stopped:
            self._add_stats(generation, stats)
            return
        self._settle(generation, *_outcome(finished, self._settings.settings.context_policy), stats)

    def _on_steps_recorded(self, records: list[StepRecord]) -> None:
        touched: dict[int, Generation] = {}
        for record in records:
            for progress in record.requests:
                generation = self._generations.get(progress.request_id)
                if generation is not None and not generation.is_stopped:
                    generation.record(progress, record.ended_at)
                    touched[progress.request_id] = generation
        now = time.perf_counter()
        for request_id, generation in touched.items():
            self.context_counted.emit(generation.chat_id, generation.context_tokens)
            if now - self._stats_shown_at.get(request_id, 0.0) >= _STATS_SECONDS:
                self._stats_shown_at[request_id] = now
                self.stats_changed.emit(generation.chat_id, generation.message_id, generation.stats())

    # ---- saving

    def _settle(self, generation: Generation, state: MessageState, error: str, stats: MessageStats | None) -> None:
        """End a reply in the tree, on disk and on screen."""
        chat_id, message_id = generation.chat_id, generation.message_id
        conversation = self._conversation(chat_id)
        conversation.settle(message_id, state, error, stats)
        reply = EndedReply(chat_id, message_id, conversation[message_id].text, state, error, stats)
        problem = self._saver.end(generation, reply)
        if problem:
            conversation.settle(message_id, state, f"{error}\n{problem}".strip(), stats)
        self.message_changed.emit(chat_id, conversation.view(message_id))
        self._chats.touch(chat_id)
        self.chats_changed.emit()

    def _on_saved_later(self, reply: EndedReply) -> None:
        conversation = self._conversation(reply.chat_id)
        stats = conversation[reply.message_id].stats
        conversation.settle(reply.message_id, reply.state, reply.error, stats)
        self.message_changed.emit(reply.chat_id, conversation.view(reply.message_id))

    def _add_stats(self, generation: Generation, stats: MessageStats) -> None:
        """The engine's own figures of a reply that the user had stopped."""
        conversation = self._conversation(generation.chat_id)
        record = conversation[generation.message_id]
        conversation.settle(record.message_id, record.state, record.error, stats)
        self._saved(generation.chat_id, lambda: self._store.set_stats(record.message_id, stats))
        self.message_changed.emit(generation.chat_id, conversation.view(record.message_id))

    def _keep_unsent(self, chat_id: str, text: str, error: str) -> str:
        unsent = _Unsent(uuid.uuid4().hex, text, error)
        self._unsent.setdefault(chat_id, []).append(unsent)
        self.message_appended.emit(chat_id, unsent.view())
        self.storage_failed.emit(chat_id, error)
        return unsent.message_id

    def _take_unsent(self, chat_id: str, message_id: str) -> _Unsent | None:
        """Take a message that was not sent out of the chat, to try it again."""
        for unsent in self._unsent.get(chat_id, ()):
            if unsent.message_id == message_id:
                self._unsent[chat_id].remove(unsent)
                self.chat_reset.emit(chat_id)
                return unsent
        return None

    def _keep_choices(self, chat_id: str, changed: list[tuple[str | None, str]]) -> None:
        if changed:
            self._saved(chat_id, lambda: self._store.choose_branch(chat_id, changed))

    def _saved(self, chat_id: str, save: Callable[[], None], shown: str = "") -> bool:
        """Whether ``save`` worked; if not, the reason is announced and shown under message ``shown``."""
        try:
            save()
        except StoreError as error:
            self.storage_failed.emit(chat_id, str(error))
            if shown:
                view = self._conversation(chat_id).view(shown)
                self.message_changed.emit(chat_id, replace(view, error=str(error)))
            return False
        return True

    # ---- what is known

    def _running(self, chat_id: str) -> Iterator[Generation]:
        return (entry for entry in self._generations.values() if entry.chat_id == chat_id and not entry.is_stopped)

    def _conversation(self, chat_id: str) -> Conversation:
        if chat_id not in self._conversations:
            record, was_well = self._chats[chat_id], not self.trouble
            try:
                messages = self._store.messages(chat_id)
            except StoreError as error:
                self.storage_failed.emit(chat_id, str(error))
                messages = []
            self._conversations[chat_id] = Conversation(messages, record.active_root)
            if was_well and self.trouble:
                self.storage_failed.emit("", self.trouble)
        return self._conversations[chat_id]

    def _prompt_with(self, chat_id: str, draft: str) -> tuple[Message, ...] | None:
        if self.is_generating(chat_id) or chat_id not in self._chats:
            return None
        conversation = self._conversation(chat_id)
        return conversation.prompt(conversation.leaf(), self._settings.settings.system_prompt, draft)


def _outcome(finished: Finished, policy: Overflow) -> tuple[MessageState, str]:
    """The state a finished reply gets, and what is shown under it."""
    if finished.reason is FinishReason.ERROR:
        return "failed", finished.message or _NO_REASON
    if finished.reason is FinishReason.ABORT:
        return "stopped", finished.message
    if finished.reason is FinishReason.CONTEXT:
        return "done", finished.message or _WINDOW_FULL[policy]
    return "done", ""
