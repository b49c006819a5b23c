"""Markdown becomes flat, safe blocks, and streaming gives the same blocks as parsing at once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.chat.markdown import (
    CODE_CHUNK_LINES,
    TEXT_CHUNK_CHARS,
    Block,
    BlockKind,
    BlockStream,
    is_safe_link,
    parse,
    plain_blocks,
)

SAMPLE = """# Ice

Ice floats because *water* **expands**: see `density`.
Second line with a [link](https://example.org/a?b=1&c=2).

1. First item
2. Second item

   ```python
   def f(x):
       return x
   ```

   after the code
   - nested
3. Third

> A quote
> - with a list

| a | b |
|---|--:|
| 1 | 2 |

```
plain fence
```

***

Last paragraph.
"""


def kinds(blocks: list[Block]) -> list[str]:
    return [str(block.kind) for block in blocks]


def test_a_document_becomes_flat_blocks_with_depth_and_markers() -> None:
    blocks = parse(SAMPLE)
    described = [(str(b.kind), b.indent, b.quote, b.marker) for b in blocks]
    assert described == [
        ("heading", 0, 0, ""),
        ("paragraph", 0, 0, ""),
        ("paragraph", 1, 0, "1."),
        ("paragraph", 1, 0, "2."),
        ("code", 1, 0, ""),
        ("paragraph", 1, 0, ""),
        ("paragraph", 2, 0, "◦"),
        ("paragraph", 1, 0, "3."),
        ("paragraph", 0, 1, ""),
        ("paragraph", 1, 1, "•"),
        ("table", 0, 0, ""),
        ("code", 0, 0, ""),
        ("rule", 0, 0, ""),
        ("paragraph", 0, 0, ""),
    ]
    assert blocks[4].text == "def f(x):\n    return x"
    assert blocks[4].language == "python"


def test_html_stays_text_and_is_escaped() -> None:
    (block,) = parse("<script>alert(1)</script> & <img src=x>")
    assert block.html == "&lt;script&gt;alert(1)&lt;/script&gt; &amp; &lt;img src=x&gt;"
    assert "<b" not in parse("`<b>`")[0].html.replace("<br", "")


def test_images_are_links_and_never_image_tags() -> None:
    (block,) = parse("![a cat](https://example.org/cat.png)")
    assert "<img" not in block.html
    assert block.html == '<a href="https://example.org/cat.png">[image: a cat]</a>'
    (local,) = parse("![x](file:///etc/passwd)")
    assert "href" not in local.html


@pytest.mark.parametrize(
    ("href", "safe"),
    [
        ("https://example.org", True),
        ("HTTP://example.org", True),
        ("mailto:someone@example.org", True),
        ("javascript:alert(1)", False),
        ("file:///etc/passwd", False),
        ("data:text/html,x", False),
        ("relative/path", False),
        ("ridgeline:retry", False),
        ("http://[broken", False),
    ],
)
def test_only_web_and_mail_links_are_safe(href: str, safe: bool) -> None:
    assert is_safe_link(href) is safe


def test_unsafe_links_lose_their_target_but_keep_their_text() -> None:
    (block,) = parse("[click](ftp://example.org/x) and [run](ridgeline:retry)")
    assert block.html == "click and run"


def test_an_open_fence_is_open_until_it_closes() -> None:
    stream = BlockStream()
    stream.feed("```python\nx = 1\n")
    assert (stream.blocks[0].kind, stream.blocks[0].is_open) == (BlockKind.CODE, True)
    stream.feed("```\n")
    assert stream.blocks[0].is_open is False
    unfinished = BlockStream()
    unfinished.feed("```\nx")
    unfinished.close()
    assert unfinished.blocks == [Block(BlockKind.CODE, text="x")]


def test_feeding_changes_only_the_tail() -> None:
    stream = BlockStream()
    stream.feed("One.\n\nTwo.\n\n- a\n- b")
    before = list(stream.blocks)
    first_changed = stream.feed("c\n- d")
    assert first_changed == 3
    assert all(new is old for new, old in zip(stream.blocks[:3], before[:3], strict=True))
    assert stream.blocks[3].html == "bc"


def test_numbers_of_a_list_go_on_when_every_item_says_one() -> None:
    stream = BlockStream()
    for line in ("1. a\n", "1. b\n", "1. c\n", "1. d\n"):
        stream.feed(line)
    assert [block.marker for block in stream.blocks] == ["1.", "2.", "3.", "4."]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=30))
def test_streaming_gives_the_same_blocks_as_parsing_at_once(cuts: list[int]) -> None:
    stream = BlockStream()
    position = 0
    for cut in cuts:
        stream.feed(SAMPLE[position : position + cut])
        position += cut
    stream.feed(SAMPLE[position:])
    stream.close()
    assert stream.blocks == parse(SAMPLE)


@settings(max_examples=80, deadline=None)
@given(st.text(alphabet="ab \n`*_#>-1.|[]()<!&\\", max_size=120), st.integers(1, 5))
def test_any_text_streams_without_error_and_keeps_finished_blocks(text: str, size: int) -> None:
    stream = BlockStream()
    for start in range(0, len(text), size):
        before = list(stream.blocks)
        first = stream.feed(text[start : start + size])
        assert stream.blocks[:first] == before[:first]
    stream.close()
    assert "<script" not in "".join(block.html for block in stream.blocks)


def test_long_blocks_are_cut_into_bounded_rows() -> None:
    code = parse("```\n" + "\n".join(f"line {i}" for i in range(1000)) + "\n```")
    assert len(code) == -(-1000 // CODE_CHUNK_LINES)
    assert (code[0].continues, code[0].continued, code[-1].continued) == (False, True, False)
    assert "\n".join(block.text for block in code).count("\n") == 999
    paragraph = parse("word " * 20_000)
    assert max(len(block.html) for block in paragraph) <= 2 * TEXT_CHUNK_CHARS
    typed = plain_blocks("x" * 50_000 + "\n" + "short\n" * 5000)
    assert max(len(block.text) for block in typed) <= TEXT_CHUNK_CHARS
    assert kinds(plain_blocks("")) == ["plain"]
