"""``ridgeline chat``: one answer on stdout, or a conversation in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

from app.chat.conversation import left_out_words
from app.commands import Subparsers
from app.commands.session import (
    INTERRUPTED,
    Progress,
    Reply,
    add_draft,
    add_switches,
    chosen_settings,
    figures,
    interrupt_flag,
    log_to_file,
    open_engine,
    run_reply,
)
from app.library import catalog
from engine.commands import Message, Overflow, Prompt
from engine.events import FinishReason
from engine.options import OPTIONS, parse_settings
from engine.params import SamplingParams

if TYPE_CHECKING:
    from engine.engine import Engine

DEMO_QUESTION = "What is the capital of France?"
DEFAULT_TEMPERATURE = 0.7
DEFAULT_OVERFLOW: Overflow = "drop_oldest"  # a conversation goes on; what is left out is said
_DEMO_TOKENS = 48
_HELP = """\
/new            forget this conversation
/set KEY=VALUE  flip a switch, e.g. /set weights=int8
/draft MODEL    load a model that guesses with /set speculation=draft; without MODEL let it go
/options        the switches and their values
/quit           leave (Ctrl+D too); Ctrl+C stops a reply"""


def add_to(commands: Subparsers) -> argparse.ArgumentParser:
    parser = commands.add_parser("chat", help="answer one prompt, or chat in the terminal")
    parser.add_argument(
        "-m", "--model", default="starter", metavar="MODEL", help="starter, a path, or a name of 'models'"
    )
    parser.add_argument("-p", "--prompt", metavar="TEXT", help="answer this and exit; '-' or a pipe reads stdin")
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    add_switches(parser)
    add_draft(parser)
    parser.add_argument("--temperature", type=float, default=DEFAULT_TEMPERATURE, help="0 is greedy (default: 0.7)")
    parser.add_argument("--top-p", type=float, default=1.0, help="keep the likeliest tokens up to this probability")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="longest reply, in tokens")
    parser.add_argument("--seed", type=int, metavar="S", help="the same seed gives the same text")
    parser.add_argument(
        "--when-full",
        choices=get_args(Overflow),
        default=DEFAULT_OVERFLOW,
        help="a conversation longer than the window: refuse the next message, or leave out the oldest (default: drop_oldest)",
    )
    parser.set_defaults(run=run)
    return parser


def run(arguments: argparse.Namespace) -> int:
    settings = chosen_settings(arguments)
    params = SamplingParams(
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        max_tokens=arguments.max_tokens,
        seed=arguments.seed,
    )
    prompt = arguments.prompt
    if prompt == "-" or (prompt is None and not sys.stdin.isatty()):
        prompt = sys.stdin.read().strip()
    if prompt == "":
        raise ValueError("The prompt is empty. Pass one with -p TEXT, or run in a terminal to chat.")
    with log_to_file(), closing(open_engine(arguments.model, settings, arguments.draft)) as engine:
        conversation = _Conversation(engine, arguments.system, [], arguments.when_full)
        return _converse(conversation, params) if prompt is None else _answer(conversation, params, prompt)


def run_in_terminal(model: str) -> int:
    """The chat that stands in for the window: a conversation, one piped prompt, or one demonstration."""
    params = SamplingParams(temperature=DEFAULT_TEMPERATURE)
    has_terminal = sys.stdin is not None and sys.stdin.isatty()
    prompt = "" if has_terminal or sys.stdin is None else sys.stdin.read().strip()
    if not prompt and not has_terminal:
        prompt, params = DEMO_QUESTION, SamplingParams(temperature=0, max_tokens=_DEMO_TOKENS)
        print(f'No terminal either, so here is one answer. Ask your own: ridgeline chat -p "{prompt}"', file=sys.stderr)
    with log_to_file(), closing(open_engine(model, {})) as engine:
        conversation = _Conversation(engine, None, [])
        return _converse(conversation, params) if has_terminal else _answer(conversation, params, prompt)


def _answer(conversation: _Conversation, params: SamplingParams, question: str) -> int:
    with interrupt_flag() as stopped:
        reply = run_reply(conversation.engine, conversation.prompt_for(question), params, _write, stopped)
    if reply.reason is FinishReason.ERROR:
        raise ValueError(reply.message)
    print()
    print(_note(reply), file=sys.stderr)
    return INTERRUPTED if reply.reason is FinishReason.ABORT else 0


def _converse(conversation: _Conversation, params: SamplingParams) -> int:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (gives input() history and editing; Windows has its own)

    info = conversation.engine.info
    print(f"{info.name}, {info.stored_format}. /help lists commands.", file=sys.stderr)
    while True:
        try:
            line = input("\n> ").strip()
        except EOFError:
            print()
            return 0
        except KeyboardInterrupt:
            print("\nCtrl+D leaves.", file=sys.stderr)
            continue
        if line == "/quit":
            return 0
        if line.startswith("/"):
            _command(line, conversation)
        elif line:
            _turn(conversation, params, line)


def _turn(conversation: _Conversation, params: SamplingParams, line: str) -> None:
    with interrupt_flag() as stopped:
        try:
            reply = run_reply(
                conversation.engine, conversation.prompt_for(line), params, _write, stopped, conversation.overflow
            )
        except ValueError as error:
            print(error, file=sys.stderr)
            return
    print()
    if reply.reason is FinishReason.ERROR:
        print(reply.message, file=sys.stderr)
        return
    conversation.add(line, reply.text)
    print(_note(reply), file=sys.stderr)


def _command(line: str, conversation: _Conversation) -> None:
    word, _, rest = line.partition(" ")
    if word == "/new":
        conversation.forget()
        print("A new conversation.", file=sys.stderr)
    elif word == "/options":
        print(_options_text(conversation.engine.options), file=sys.stderr)
    elif word == "/set":
        try:
            conversation.engine.apply(parse_settings(rest.split()))
        except ValueError as error:
            print(error, file=sys.stderr)
            return
        print(_options_text(conversation.engine.options), file=sys.stderr)
    elif word == "/draft":
        _set_draft(rest.strip(), conversation.engine)
    else:
        print(_HELP, file=sys.stderr)


def _set_draft(model: str, engine: Engine) -> None:
    try:
        draft = engine.set_draft(model, Progress(), find=catalog.resolve).draft
    except ValueError as error:
        print(error, file=sys.stderr)
        return
    words = f"{draft.name} guesses with /set speculation=draft. {draft.note}" if draft else "No draft model."
    print(words.strip(), file=sys.stderr)


@dataclass(slots=True)
class _Conversation:
    """The turns so far, and the prompt that continues them."""

    engine: Engine
    system: str | None
    turns: list[Message]
    overflow: Overflow = DEFAULT_OVERFLOW

    def prompt_for(self, question: str) -> Prompt:
        """The conversation with ``question`` added; plain text for a model without a chat template."""
        if not self.engine.info.has_chat_template:
            return "\n".join([*(turn.content for turn in self.turns), question])
        start = [Message("system", self.system)] if self.system else []
        return (*start, *self.turns, Message("user", question))

    def add(self, question: str, answer: str) -> None:
        self.turns += [Message("user", question), Message("assistant", answer)]

    def forget(self) -> None:
        self.turns.clear()


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _note(reply: Reply) -> str:
    ends = {
        FinishReason.LENGTH: "stopped at --max-tokens; ",
        FinishReason.CONTEXT: "stopped because the model's window is full; /new starts afresh; ",
        FinishReason.ABORT: "stopped; ",
    }
    dropped = reply.usage.dropped_messages
    left_out = f"{left_out_words(dropped)}; " if dropped else ""
    return f"[{ends.get(reply.reason, '')}{left_out}{figures(reply)}]"


def _options_text(options: Mapping[str, str]) -> str:
    return "  ".join(f"{option.key}={options[option.key]}" for option in OPTIONS)
