"""QTextDocuments for rows: built once, kept in a bounded cache, laid out only when a row comes into sight."""

from __future__ import annotations

from collections import OrderedDict

from pygments.lexers import get_lexer_by_name
from pygments.token import Token as PygmentsToken
from pygments.util import ClassNotFound
from PySide6.QtGui import (
    QColor,
    QTextBlockFormat,
    QTextCharFormat,
    QTextCursor,
    QTextDocument,
    QTextOption,
)

from app import theme as look
from app.chat.blocks import Row, RowKind
from app.chat.markdown import BlockKind
from app.theme import Theme

CACHE_ROWS = 160  # several screens full at 2560x1440
HIGHLIGHT_LIMIT_CHARS = 20_000
HEADING_PIXELS = (20.0, 17.5, 15.5, 14.5, 13.5, 13.5)
ACTION_SCHEME = "action:"  # links of our own, in error rows; Markdown cannot make them


class DocumentCache:
    """Least recently used cache of documents by row.

    Attributes:
        layouts: how often a document was laid out, ever (tests count it).
    """

    def __init__(self, capacity: int = CACHE_ROWS) -> None:
        self.layouts = 0
        self._capacity = capacity
        self._documents: OrderedDict[int, tuple[Row, QTextDocument, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._documents)

    def get(self, row: Row, width: float) -> QTextDocument:
        """The row's document, laid out for ``width`` pixels."""
        key = id(row)
        held = self._documents.get(key)
        if held is not None and held[0] is row:
            self._documents.move_to_end(key)
            if held[2] == width:
                return held[1]
            document = held[1]
        else:
            document = build(row, look.current())
        self._lay_out(document, width)
        self._documents[key] = (row, document, width)
        if len(self._documents) > self._capacity:
            self._documents.popitem(last=False)
        return document

    def grow(self, old: Row, new: Row, width: float) -> None:
        """Take over the document of a growing code block by appending to it, instead of building it anew."""
        held = self._documents.pop(id(old), None)
        if held is None or held[0] is not old or not _only_appends(old, new):
            return
        assert old.block is not None and new.block is not None
        document = held[1]
        cursor = QTextCursor(document)
        cursor.movePosition(QTextCursor.MoveOperation.End)
        cursor.insertText(new.block.text[len(old.block.text) :])
        self.layouts += 1
        self._documents[id(new)] = (new, document, width)

    def forget(self, row: Row) -> None:
        self._documents.pop(id(row), None)

    def clear(self) -> None:
        self._documents.clear()

    def _lay_out(self, document: QTextDocument, width: float) -> None:
        document.setTextWidth(width)
        document.size()
        self.layouts += 1


def _only_appends(old: Row, new: Row) -> bool:
    a, b = old.block, new.block
    if a is None or b is None or a.kind is not BlockKind.CODE or b.kind is not BlockKind.CODE:
        return False
    return a.is_open and b.is_open and a.continued == b.continued and b.text.startswith(a.text)


def build(row: Row, theme: Theme) -> QTextDocument:
    """A document with the row's content, not laid out yet."""
    document = QTextDocument()
    document.setUndoRedoEnabled(False)
    document.setDocumentMargin(0)
    option = QTextOption()
    option.setWrapMode(QTextOption.WrapMode.WrapAtWordBoundaryOrAnywhere)
    document.setDefaultTextOption(option)
    document.setDefaultFont(look.font())
    if row.kind is RowKind.ERROR:
        _fill_error(document, row, theme)
    elif row.block is not None and row.block.kind is BlockKind.CODE:
        _fill_code(document, row, theme)
    elif row.block is not None and row.block.kind is BlockKind.PLAIN:
        document.setPlainText(row.block.text)
        _space_lines(document, 128)
    elif row.block is not None:
        _fill_rich(document, row, theme)
    return document


def plain_text(document: QTextDocument, start: int = 0, end: int | None = None) -> str:
    """Text between two positions as one would type it: ordinary spaces and line ends."""
    cursor = QTextCursor(document)
    last = document.characterCount() - 1
    cursor.setPosition(max(0, min(start, last)))
    stop = last if end is None else max(0, min(end, last))
    cursor.setPosition(stop, QTextCursor.MoveMode.KeepAnchor)
    return cursor.selectedText().translate({0x2029: "\n", 0x2028: "\n", 0xA0: " ", 0xFDD0: "", 0xFDD1: ""})


def _fill_rich(document: QTextDocument, row: Row, theme: Theme) -> None:
    block = row.block
    assert block is not None
    if block.kind is BlockKind.HEADING:
        size = HEADING_PIXELS[block.level - 1]
        document.setDefaultFont(look.font(size, look.QFont.Weight.DemiBold))
    mono = ", ".join(f"'{name}'" for name in look.MONOSPACE_FAMILIES)
    document.setDefaultStyleSheet(
        f"a {{ color: {theme.accent}; text-decoration: none; }}"
        f"code {{ font-family: {mono}; font-size: {look.points(12.5)}pt; background-color: {theme.hover}; }}"
        f"table {{ border-color: {theme.line}; border-style: solid; }} th {{ font-weight: 600; }}"
    )
    document.setHtml(block.html)
    _space_lines(document, 118 if block.kind is BlockKind.TABLE else 130)


def _space_lines(document: QTextDocument, percent: int) -> None:
    spacing = QTextBlockFormat()
    spacing.setLineHeight(percent, QTextBlockFormat.LineHeightTypes.ProportionalHeight.value)
    cursor = QTextCursor(document)
    cursor.select(QTextCursor.SelectionType.Document)
    cursor.mergeBlockFormat(spacing)


def _fill_error(document: QTextDocument, row: Row, theme: Theme) -> None:
    words = QTextCharFormat()
    words.setForeground(QColor(theme.error_text))
    cursor = QTextCursor(document)
    cursor.insertText(row.text, words)
    cursor.insertBlock()
    for title, action in (("Try again", "retry"), ("Copy error", "copy-error")):
        link = QTextCharFormat()
        link.setAnchor(True)
        link.setAnchorHref(ACTION_SCHEME + action)
        link.setForeground(QColor(theme.accent))
        link.setFontWeight(600)
        cursor.insertText(title, link)
        cursor.insertText("    ", words)
    _space_lines(document, 130)


def _fill_code(document: QTextDocument, row: Row, theme: Theme) -> None:
    block = row.block
    assert block is not None
    document.setDefaultFont(look.font(12.5, mono=True))
    cursor = QTextCursor(document)
    if block.is_open or not block.language or len(block.text) > HIGHLIGHT_LIMIT_CHARS:
        cursor.insertText(block.text)
    else:
        for text, colour in highlighted(block.text, block.language, theme):
            style = QTextCharFormat()
            if colour:
                style.setForeground(QColor(colour))
            cursor.insertText(text, style)
    _space_lines(document, 122)


def highlighted(code: str, language: str, theme: Theme) -> list[tuple[str, str]]:
    """(text, colour) pieces of ``code``; the colour is empty for ordinary text. Unknown languages stay plain."""
    try:
        lexer = get_lexer_by_name(language, stripnl=False, ensurenl=False)
    except ClassNotFound:
        return [(code, "")]
    return [(text, _colour(kind, theme)) for kind, text in lexer.get_tokens(code)]


def _colour(kind: object, theme: Theme) -> str:
    name = PygmentsToken.Name
    for parent, colour in (
        (PygmentsToken.Comment, theme.code_comment),
        (PygmentsToken.Keyword, theme.code_keyword),
        (PygmentsToken.Operator.Word, theme.code_keyword),
        (PygmentsToken.Literal.String, theme.code_string),
        (PygmentsToken.Literal.Number, theme.code_number),
        (name.Function, theme.code_name),
        (name.Class, theme.code_name),
        (name.Builtin, theme.code_name),
        (name.Decorator, theme.code_name),
        (name.Tag, theme.code_name),
    ):
        if kind in parent:
            return colour
    return ""
