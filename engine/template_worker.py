"""The helper process that renders chat templates. Run as a script; imports nothing but jinja2 and the standard library.

A chat template is a program that came with a model file. Jinja's sandbox keeps it away from Python's internals, but not
from endless loops or gigabyte strings, and a thread that is stuck in them can neither be stopped nor freed. A process can.

Protocol, one JSON object per line on stdin and stdout: the process says {"started": true}; then comes {"template": source},
answered by {"ready": true} or {"error": message}; then {"context": variables, "max_chars": n}, each answered by {"text": ...}, {"refused": message} when
the template itself called raise_exception, or {"error": message}.
"""

from __future__ import annotations

import json
import sys
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_MEMORY_BYTES = 1 << 30


class _GenerationTag(Extension):
    """``{% generation %} ... {% endgeneration %}`` marks the assistant's words for training; here its body is just text."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's own protocol)

    def parse(self, parser: Parser) -> Node | list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _RefusedError(Exception):
    """The template rejected the conversation with raise_exception."""


def _refuse(message: object) -> NoReturn:
    raise _RefusedError(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models were trained on it: jinja2's own filter escapes it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def compile_template(source: str) -> jinja2.Template:
    """Compile in the sandbox with the settings that chat templates are written for. Raises jinja2.TemplateError."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source)


def render(template: jinja2.Template, context: dict[str, Any], max_chars: int) -> dict[str, str]:
    """One answer of the protocol. Whatever the template raises becomes a message."""
    pieces, length = [], 0
    try:
        for piece in template.generate(context):
            length += len(piece)
            if length > max_chars:
                return {"error": f"it wrote more than {max_chars} characters"}
            pieces.append(piece)
    except _RefusedError as refusal:
        return {"refused": str(refusal)}
    except MemoryError:
        return {"error": "it asked for too much memory"}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"text": "".join(pieces)}


def _limit_memory() -> None:
    """Where the system can: make a template that asks for gigabytes fail instead of starving the machine."""
    if sys.platform == "linux":  # Windows has no such call, macOS refuses it; there the time limit alone holds
        import resource

        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = _MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(_MEMORY_BYTES, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def _answer(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def main() -> None:
    _limit_memory()
    _answer({"started": True})
    try:
        template = compile_template(json.loads(sys.stdin.readline())["template"])
    except Exception as error:
        _answer({"error": str(error) or type(error).__name__})
        return
    _answer({"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        _answer(render(template, request["context"], request["max_chars"]))


if __name__ == "__main__":
    main()
