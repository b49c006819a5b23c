"""Chat templates: a conversation becomes the text a model was trained to continue.

Templates run in a helper process (template_worker.py) that is killed when it exceeds its time, so a hostile or broken one
costs an error message, never the engine thread. The process starts when the template is opened and compiles it once, at
the first conversation.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.commands import Message

_log = logging.getLogger(__name__)
_WORKER = Path(__file__).with_name("template_worker.py")
_START_SECONDS = 30.0  # a busy machine may take its time to start a process
_MAX_TIMEOUTS = 2  # after that the template is not tried again


class TemplateRefusedError(ValueError):
    """The template itself rejected the conversation (raise_exception), e.g. a role it does not know."""


class ChatTemplate:
    """One compiled chat template.

    render_seconds: wall time a rendering may take. base_chars: characters it may write beyond eight times the input.
    """

    def __init__(self, source: str, render_seconds: float = 5.0, base_chars: int = 1 << 20) -> None:
        self.source = source
        self._render_seconds = render_seconds
        self._base_chars = base_chars
        self._timeouts = 0
        self._worker: _Worker | None = None
        try:
            self._worker = _Worker(source)
        except OSError as error:  # the model is still of use for plain text; a conversation will say what is wrong
            _log.warning("the chat template helper did not start: %s", error)

    def render(self, messages: Sequence[Message], variables: Mapping[str, Any], add_generation_prompt: bool) -> str:
        """The text for ``messages``. Raises ValueError in plain words; TemplateRefusedError if the template said no."""
        context = {
            "messages": [{"role": message.role, "content": message.content} for message in messages],
            "add_generation_prompt": add_generation_prompt,
            "tools": None,
            "documents": None,
            **variables,
        }
        num_chars = sum(len(message.content) for message in messages)
        answer = self._ask({"context": context, "max_chars": self._base_chars + 8 * num_chars})
        if "refused" in answer:
            raise TemplateRefusedError(f"The model's chat template refuses this conversation: {answer['refused']}")
        if "error" in answer:
            raise ValueError(f"The model's chat template failed: {answer['error']}. {_REMEDY}")
        return str(answer["text"])

    def close(self) -> None:
        """End the helper process. A later render starts a new one."""
        if self._worker is not None:
            self._worker.stop()
            self._worker = None

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._timeouts >= _MAX_TIMEOUTS:
            raise ValueError(f"The model's chat template ran into its time limit repeatedly. {_REMEDY}")
        try:
            if self._worker is None:
                self._worker = _Worker(self.source)
            answer = self._worker.ask(request, self._render_seconds)
        except TimeoutError:
            self._timeouts += 1
            self.close()
            raise ValueError(
                f"The model's chat template did not finish within {self._render_seconds:g} seconds. {_REMEDY}"
            ) from None
        except OSError as error:
            return {"error": f"its helper process could not be started ({error})"}
        except _WorkerEndedError as ended:
            self.close()
            return {"error": str(ended)}
        self._timeouts = 0
        return answer


_REMEDY = "Choose another file of this model, or send plain text instead of a conversation."


class _WorkerEndedError(Exception):
    """The helper process is gone, or never came up."""


class _Worker:
    """The helper process and its line protocol. Owned by one ChatTemplate; not for several threads at once."""

    def __init__(self, source: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-X", "utf8", str(_WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
            start_new_session=True,  # Ctrl+C in a terminal stops a reply; it must not reach the helper
        )
        self._source = source
        self._is_ready = False
        # Also runs when the interpreter ends, so that no process outlives the app.
        self._finalizer = weakref.finalize(self, _end, self._process)

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Send one request and wait for its answer. Raises TimeoutError or _WorkerEndedError."""
        if not self._is_ready:
            self._exchange(b"", _START_SECONDS)  # "started"
            compiled = self._exchange(_line({"template": self._source}), seconds)
            if "error" in compiled:
                raise _WorkerEndedError(compiled["error"])
            self._is_ready = True
        return self._exchange(_line(request), seconds)

    def stop(self) -> None:
        self._finalizer()

    def _exchange(self, line: bytes, seconds: float) -> dict[str, Any]:
        # A thread, because a pipe cannot be read with a time limit on Windows. It lives as long as the exchange.
        answers: list[bytes] = []
        thread = threading.Thread(target=_exchange_line, args=(self._process, line, answers), name="chat template")
        thread.start()
        thread.join(seconds)
        if thread.is_alive():
            self._process.kill()  # closes the pipe under the thread, which then ends
            thread.join()
            raise TimeoutError
        if not answers or not answers[0].endswith(b"\n"):
            raise _WorkerEndedError("its helper process ended (too much memory, or a fault in the template)")
        answer: dict[str, Any] = json.loads(answers[0])
        return answer


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value).encode() + b"\n"


def _exchange_line(process: subprocess.Popen[bytes], line: bytes, answers: list[bytes]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(line)
        process.stdin.flush()
        answers.append(process.stdout.readline())
    except OSError as error:  # the process is gone; the caller sees that no answer came
        _log.info("chat template helper: %s", error)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            _close(pipe)


def _close(pipe: Any) -> None:
    try:
        pipe.close()
    except OSError as error:  # an unfinished write to a process that is gone
        _log.info("chat template helper: %s", error)


def plain_conversation(messages: Sequence[Message], add_generation_prompt: bool) -> str:
    """The format for models without a template: names before turns, in plain text."""
    names = {"system": "", "user": "User: ", "assistant": "Assistant: "}
    turns = [names[message.role] + message.content.strip() for message in messages]
    return "\n\n".join(turns) + ("\n\nAssistant:" if add_generation_prompt else "")


def fold_system(messages: Sequence[Message]) -> tuple[Message, ...] | None:
    """The same conversation with the system message at the head of the first user turn, for templates that know no
    system role (Gemma's); None when there is nothing to fold."""
    if len(messages) < 2 or messages[0].role != "system" or messages[1].role != "user":
        return None
    first = Message("user", f"{messages[0].content}\n\n{messages[1].content}")
    return (first, *messages[2:])
