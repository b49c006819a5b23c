"""Chat templates: what they may do, and that none can freeze or crash the engine (FIELD 42)."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator

import pytest

from engine.chat_template import ChatTemplate, TemplateRefusedError, fold_system, plain_conversation
from engine.commands import Message

CONVERSATION = (Message("system", "Be brief."), Message("user", "Hi  "), Message("assistant", "Hello"))


@pytest.fixture
def opened() -> Iterator[list[ChatTemplate]]:
    templates: list[ChatTemplate] = []
    yield templates
    for template in templates:
        template.close()


def render(opened: list[ChatTemplate], source: str, *, seconds: float = 5.0, **variables: object) -> str:
    opened.append(ChatTemplate(source, render_seconds=seconds, base_chars=10_000))
    return opened[-1].render(CONVERSATION, variables, add_generation_prompt=True)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (
            "{% for m in messages %}{{ m.role }}={{ m['content'] | trim }};{% endfor %}",
            "system=Be brief.;user=Hi;assistant=Hello;",
        ),
        ("  {% if add_generation_prompt %}\nA{% endif %}\n{{ bos_token }}", "A<s>"),  # blocks are trimmed and stripped
        ("{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.role }}{% endfor %}", "system"),
        ("{% generation %}x{{ 1 + 1 }}{% endgeneration %}y", "x2y"),
        ("{{ messages[1] | tojson }}", '{"role": "user", "content": "Hi  "}'),
        ("{{ '<é&>' | tojson }}", '"<é&>"'),
        ("{{ {'b': 1, 'a': [2]} | tojson(indent=1, sort_keys=true) }}", '{\n "a": [\n  2\n ],\n "b": 1\n}'),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "3"),
        ("{{ undefined_thing }}{% if tools is not none %}no{% endif %}", ""),
        ("{{ messages[1].content.split('i')[0] }}", "H"),
    ],
)
def test_what_templates_use(opened: list[ChatTemplate], source: str, text: str) -> None:
    assert render(opened, source, bos_token="<s>") == text


def test_strftime_now_is_today(opened: list[ChatTemplate]) -> None:
    assert render(opened, "{{ strftime_now('%Y') }}") in {str(time.localtime().tm_year), str(time.gmtime().tm_year)}


def test_a_template_may_refuse(opened: list[ChatTemplate]) -> None:
    with pytest.raises(TemplateRefusedError, match="System role not supported"):
        render(opened, "{{ raise_exception('System role not supported') }}")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for m in messages %}", "Unexpected end of template"),
        ("{{ messages | no_such_filter }}", "no_such_filter"),
        ("{{ undefined_thing.attribute }}", "undefined_thing"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{% for i in range(20000) %}xx{% endfor %}", "more than"),
    ],
)
def test_broken_templates_have_a_clear_error(opened: list[ChatTemplate], source: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        render(opened, source)
    assert "chat template" in str(caught.value)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 7 ** (7 ** 9) }}",  # one operation of C code: no thread could be stopped inside it
    ],
)
def test_endless_templates_are_stopped(opened: list[ChatTemplate], source: str) -> None:
    started = time.monotonic()
    with pytest.raises(ValueError, match="did not finish"):
        render(opened, source, seconds=0.5)
    assert time.monotonic() - started < 20


@pytest.mark.parametrize("source", ["{{ 'a' * 3000000000 }}", "{{ 'a' | center(3000000000) }}"])
def test_greedy_templates_fail_without_taking_the_memory(opened: list[ChatTemplate], source: str) -> None:
    with pytest.raises(ValueError, match="chat template"):
        render(opened, source)


def test_a_template_that_never_ends_is_given_up(opened: list[ChatTemplate]) -> None:
    opened.append(ChatTemplate("{{ 7 ** (7 ** 9) }}", render_seconds=0.2))
    for _ in range(2):
        with pytest.raises(ValueError, match="did not finish"):
            opened[0].render(CONVERSATION, {}, True)
    started = time.monotonic()
    with pytest.raises(ValueError, match="repeatedly"):
        opened[0].render(CONVERSATION, {}, True)
    assert time.monotonic() - started < 0.1


def test_a_template_is_used_again_after_a_failure_and_after_close(opened: list[ChatTemplate]) -> None:
    source = "{% if messages | length == 1 %}{{ 'a' * 3000000000 }}{% endif %}fine"
    opened.append(ChatTemplate(source))
    with pytest.raises(ValueError, match="chat template"):
        opened[0].render(CONVERSATION[:1], {}, True)
    assert opened[0].render(CONVERSATION, {}, True) == "fine"
    opened[0].close()
    assert opened[0].render(CONVERSATION, {}, True) == "fine"


def test_no_process_outlives_its_template() -> None:
    template = ChatTemplate("x")
    assert template._worker is not None
    process = template._worker._process
    assert process.poll() is None
    del template
    gc.collect()
    assert process.poll() is not None


def test_a_machine_that_starts_no_process_gets_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/nonexistent/python")
    template = ChatTemplate("x")
    with pytest.raises(ValueError, match="could not be started"):
        template.render(CONVERSATION, {}, True)
    monkeypatch.undo()
    assert template.render(CONVERSATION, {}, True) == "x"
    template.close()


def test_large_conversations_fit_through(opened: list[ChatTemplate]) -> None:
    opened.append(ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}"))
    long = (Message("user", "é🎉\n" * 400_000),)
    assert opened[0].render(long, {}, True) == long[0].content


def test_plain_conversation() -> None:
    assert plain_conversation(CONVERSATION[:2], True) == "Be brief.\n\nUser: Hi\n\nAssistant:"
    assert plain_conversation(CONVERSATION, False) == "Be brief.\n\nUser: Hi\n\nAssistant: Hello"


def test_fold_system() -> None:
    assert fold_system(CONVERSATION) == (Message("user", "Be brief.\n\nHi  "), Message("assistant", "Hello"))
    assert fold_system(CONVERSATION[1:]) is None
    assert fold_system(CONVERSATION[:1]) is None


@pytest.mark.skipif(os.name == "nt", reason="Windows gives the helper a console of its own")
def test_ctrl_c_in_the_terminal_does_not_reach_the_helper(opened: list[ChatTemplate]) -> None:
    render(opened, "x")
    worker = opened[-1]._worker
    assert worker is not None
    assert os.getsid(worker._process.pid) != os.getsid(0)
