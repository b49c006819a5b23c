"""Markdown to flat blocks, each the content of one row of the chat view. Knows no Qt.

Lists and quotes are flattened: a leaf (paragraph, heading, code, table, rule) carries its depth and its list marker,
so that a list of a thousand items is a thousand small rows. HTML in the source stays literal text; images become
links, so nothing is ever fetched to show a message. Streaming: `BlockStream.feed` parses again only from the last
top-level block (or list item), everything before it is finished and never changes.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from urllib.parse import urlsplit

from markdown_it import MarkdownIt
from markdown_it.token import Token

LINK_SCHEMES = frozenset({"http", "https", "mailto"})
CODE_CHUNK_LINES = 120  # a longer code block becomes several rows, so that no row is slow to lay out
TEXT_CHUNK_CHARS = 6000

_MARKERS = ("•", "◦", "▪")


class BlockKind(StrEnum):
    PARAGRAPH = "paragraph"
    HEADING = "heading"
    CODE = "code"
    TABLE = "table"
    RULE = "rule"
    PLAIN = "plain"  # shown as written: what the user typed


@dataclass(frozen=True, slots=True)
class Block:
    """One row's content.

    html: rich text of paragraphs, headings and tables, made here and fully escaped.
    text: the code, the plain text, or a table's Markdown, as written (no final newline).
    level: 1 to 6 for headings. indent: list depth, quote: quote depth. marker: "•" or "3." on an item's first leaf.
    is_open: a code fence that has not been closed yet. continues, continued: a part of a longer block, cut for speed.
    """

    kind: BlockKind
    html: str = ""
    text: str = ""
    language: str = ""
    level: int = 0
    indent: int = 0
    quote: int = 0
    marker: str = ""
    is_open: bool = False
    continues: bool = False
    continued: bool = False


def is_safe_link(href: str) -> bool:
    """Whether a link may be offered at all: http, https and mailto."""
    try:
        return urlsplit(href).scheme.lower() in LINK_SCHEMES
    except ValueError:
        return False


def _parser() -> MarkdownIt:
    return MarkdownIt("commonmark", {"html": False, "breaks": True}).enable(["table", "strikethrough"])


_MARKDOWN = _parser()


def parse(text: str) -> list[Block]:
    """All blocks of a finished message."""
    stream = BlockStream()
    stream.feed(text)
    stream.close()
    return stream.blocks


def plain_blocks(text: str) -> list[Block]:
    """Text shown as written, cut at line ends (or anywhere in a very long line) into rows of bounded size."""
    pieces: list[str] = []
    lines: list[str] = []
    size = 0
    for line in text.rstrip("\n").split("\n"):
        while len(line) > TEXT_CHUNK_CHARS:
            pieces.extend(["\n".join(lines)] if lines else [])
            lines, size = [], 0
            pieces.append(line[:TEXT_CHUNK_CHARS])
            line = line[TEXT_CHUNK_CHARS:]
        if lines and size + len(line) > TEXT_CHUNK_CHARS:
            pieces.append("\n".join(lines))
            lines, size = [], 0
        lines.append(line)
        size += len(line) + 1
    pieces.append("\n".join(lines))
    return _chained([Block(BlockKind.PLAIN, text=piece) for piece in pieces])


class BlockStream:
    """Blocks of a message that is still growing.

    Attributes:
        blocks: all blocks so far; those before the index that `feed` returned are unchanged objects.
    """

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._tail = ""  # source from the start of the last top-level block or item
        self._tail_index = 0  # its first block
        self._tail_number: int | None = None  # its place in an ordered list
        self._is_closed = False

    def feed(self, added: str) -> int:
        """Append text; returns the index of the first block that changed (len(blocks) when none did)."""
        assert not self._is_closed
        self._tail += added
        return self._parse_tail()

    def close(self) -> int:
        """The message is finished: an open fence counts as closed. Returns as `feed`."""
        self._is_closed = True
        return self._parse_tail()

    def _parse_tail(self) -> int:
        source = self._tail
        units = _units(source, self._tail_number)
        start = self._tail_index
        fresh = [block for unit in units for block in unit.blocks]
        if self._is_closed:
            fresh = [replace(block, is_open=False) if block.is_open else block for block in fresh]
        old = self.blocks[start:]
        same = 0
        while same < min(len(old), len(fresh)) and old[same] == fresh[same]:
            same += 1
        self.blocks[start + same :] = fresh[same:]
        if units:
            self._tail = source[_line_offset(source, units[-1].line) :]
            self._tail_index = start + len(fresh) - len(units[-1].blocks)
            self._tail_number = units[-1].number
        return start + same


@dataclass(slots=True)
class _Unit:
    """A top-level block, or one item of a top-level list: what is parsed again as a whole."""

    line: int
    number: int | None
    blocks: list[Block]


def _line_offset(source: str, line: int) -> int:
    offset = 0
    for _ in range(line):
        offset = source.index("\n", offset) + 1
    return offset


def _units(source: str, first_number: int | None) -> list[_Unit]:
    walk = _Walk(source.split("\n"), first_number)
    for token in _MARKDOWN.parse(source):
        walk.take(token)
    return walk.units


@dataclass(slots=True)
class _List:
    """An open list: number of the next item (ordered) or None, and the marker the next leaf will carry."""

    number: int | None
    marker: str = ""


class _Walk:
    """Turns markdown-it's flat token list into units of leaves."""

    def __init__(self, lines: Sequence[str], first_number: int | None) -> None:
        self.units: list[_Unit] = []
        self._lines = lines
        self._first_number = first_number
        self._lists: list[_List] = []
        self._quotes = 0
        self._heading = 0
        self._table: list[str] | None = None
        self._table_source = ""

    def take(self, token: Token) -> None:
        if self._begins_unit(token):
            assert token.map is not None
            number = self._lists[0].number if token.type == "list_item_open" else None
            self.units.append(_Unit(token.map[0], number, []))
        if self._table is not None or token.type == "table_open":
            self._take_table(token)
        else:
            self._take_block(token)

    def _begins_unit(self, token: Token) -> bool:
        if token.nesting < 0:
            return False
        if token.level == 0:
            return token.type not in ("bullet_list_open", "ordered_list_open")
        return token.type == "list_item_open" and token.level == 1 and len(self._lists) == 1 and not self._quotes

    def _take_block(self, token: Token) -> None:
        kind = token.type
        if kind in ("bullet_list_open", "ordered_list_open"):
            self._open_list(token)
        elif kind in ("bullet_list_close", "ordered_list_close"):
            self._lists.pop()
        elif kind == "list_item_open":
            self._open_item()
        elif kind == "list_item_close":
            self._close_item()
        elif kind == "blockquote_open":
            self._quotes += 1
        elif kind == "blockquote_close":
            self._quotes -= 1
        elif kind == "heading_open":
            self._heading = int(token.tag[1])
        elif kind == "heading_close":
            self._heading = 0
        elif kind == "inline":
            self._add_text(token)
        elif kind in ("fence", "code_block"):
            self._add_code(token)
        elif kind == "hr":
            self._add([Block(BlockKind.RULE)])

    def _open_list(self, token: Token) -> None:
        number: int | None = None
        if token.type == "ordered_list_open":
            number = int(token.attrs.get("start", 1))
            if not self.units and not self._lists and self._first_number is not None:
                number = self._first_number
        self._lists.append(_List(number))

    def _open_item(self) -> None:
        innermost = self._lists[-1]
        if innermost.number is None:
            innermost.marker = _MARKERS[min(len(self._lists), len(_MARKERS)) - 1]
            return
        innermost.marker = f"{innermost.number}."
        innermost.number += 1

    def _close_item(self) -> None:
        if self._lists[-1].marker:  # an item without content still shows
            self._add([Block(BlockKind.PARAGRAPH)])

    def _add(self, blocks: list[Block]) -> None:
        marker = ""
        if self._lists:
            marker, self._lists[-1].marker = self._lists[-1].marker, ""
        placed = [replace(block, indent=len(self._lists), quote=self._quotes) for block in blocks]
        placed[0] = replace(placed[0], marker=marker)
        self.units[-1].blocks.extend(placed)

    def _add_text(self, token: Token) -> None:
        kind = BlockKind.HEADING if self._heading else BlockKind.PARAGRAPH
        pieces = _inline_pieces(token.children or [])
        self._add(_chained([Block(kind, html=piece, level=self._heading) for piece in pieces]))

    def _add_code(self, token: Token) -> None:
        lines = token.content.removesuffix("\n").split("\n")
        language = token.info.strip().split(" ")[0] if token.info.strip() else ""
        is_open = token.type == "fence" and not self._is_fence_closed(token)
        chunks = [lines[i : i + CODE_CHUNK_LINES] for i in range(0, len(lines), CODE_CHUNK_LINES)]
        code = BlockKind.CODE
        self._add(_chained([Block(code, text="\n".join(c), language=language, is_open=is_open) for c in chunks]))

    def _is_fence_closed(self, token: Token) -> bool:
        assert token.map is not None
        first, end = token.map
        last = self._lines[min(end, len(self._lines)) - 1].strip(" \t>")
        return end - first >= 2 and len(last) >= len(token.markup) and set(last) == {token.markup[0]}

    def _take_table(self, token: Token) -> None:
        if token.type == "table_open":
            assert token.map is not None
            self._table = []
            self._table_source = "\n".join(line.strip() for line in self._lines[token.map[0] : token.map[1]])
        assert self._table is not None
        self._table.append(_table_html(token))
        if token.type == "table_close":
            markup, self._table = "".join(self._table), None
            self._add([Block(BlockKind.TABLE, html=markup, text=self._table_source)])


def _chained(blocks: list[Block]) -> list[Block]:
    """Mark the parts of one long block as belonging together."""
    last = len(blocks) - 1
    return [replace(b, continues=i > 0, continued=i < last) for i, b in enumerate(blocks)] if last else blocks


def _table_html(token: Token) -> str:
    if token.type == "inline":
        return "".join(_inline_pieces(token.children or []))
    if token.type == "table_open":
        return '<table cellspacing="0" cellpadding="6" border="1" style="border-collapse:collapse">'
    if token.type in ("thead_open", "thead_close", "tbody_open", "tbody_close"):
        return ""
    if token.nesting < 0:
        return f"</{token.tag}>"
    style = str(token.attrGet("style") or "")
    align = style.removeprefix("text-align:")
    return f'<{token.tag} align="{align if align in ("left", "right", "center") else "left"}">'


_INLINE_TAGS = {"strong_open": "<b>", "strong_close": "</b>", "em_open": "<i>", "em_close": "</i>"}
_INLINE_TAGS |= {"s_open": "<s>", "s_close": "</s>"}


def _inline_pieces(children: Sequence[Token]) -> list[str]:
    """Escaped rich text of inline tokens; more than one piece only where a very long paragraph is cut."""
    pieces: list[str] = []
    parts: list[str] = []
    size = depth = 0
    links: list[bool] = []
    for child in children:
        depth += child.nesting
        is_break = child.type in ("softbreak", "hardbreak")
        if size > TEXT_CHUNK_CHARS and depth == 0 and is_break:
            pieces.append("".join(parts))
            parts, size = [], 0
            continue
        if child.type == "text" and depth == 0 and len(child.content) > 2 * TEXT_CHUNK_CHARS:
            *whole, rest = _cut_at_spaces(child.content)
            for piece in whole:
                pieces.append("".join([*parts, html.escape(piece)]))
                parts = []
            parts, size = [html.escape(rest)], len(rest)
            continue
        parts.append(_inline_html(child, links))
        size += len(child.content)
    return [*pieces, "".join(parts)]


def _cut_at_spaces(text: str) -> list[str]:
    pieces = []
    while len(text) > TEXT_CHUNK_CHARS:
        at = text.rfind(" ", 1, TEXT_CHUNK_CHARS)
        at = at if at > 0 else TEXT_CHUNK_CHARS
        pieces.append(text[:at])
        text = text[at:].removeprefix(" ")
    return [*pieces, text]


def _inline_html(token: Token, links: list[bool]) -> str:
    kind = token.type
    if kind in _INLINE_TAGS:
        return _INLINE_TAGS[kind]
    if kind in ("softbreak", "hardbreak"):
        return "<br/>"
    if kind == "code_inline":
        return f"<code>{_keep_spaces(token.content)}</code>"
    if kind == "link_open":
        href = str(token.attrGet("href") or "")
        links.append(is_safe_link(href))
        return f'<a href="{html.escape(href)}">' if links[-1] else ""
    if kind == "link_close":
        return "</a>" if links.pop() else ""
    if kind == "image":
        return _image_html(token, bool(links))
    return html.escape(token.content)


def _image_html(token: Token, is_in_link: bool) -> str:
    source, label = str(token.attrGet("src") or ""), html.escape(f"[image: {token.content or 'no description'}]")
    if is_in_link or not is_safe_link(source):
        return label
    return f'<a href="{html.escape(source)}">{label}</a>'


def _keep_spaces(text: str) -> str:
    return html.escape(text).replace("  ", "&nbsp; ")
