"""One row of the preferences dialog: title, the editor that fits the setting's kind, description, and what is wrong."""

from __future__ import annotations

from PySide6.QtCore import QEvent, QObject, QPointF, Qt, Signal
from PySide6.QtGui import QColor, QPainter, QPaintEvent, QPen, QWheelEvent
from PySide6.QtWidgets import QComboBox, QHBoxLayout, QLabel, QLineEdit, QPlainTextEdit, QVBoxLayout, QWidget

from app import theme as look
from app.preferences.table import Preference

LABEL_WIDTH = 150
GAP = 18  # between title and editor
NUMBER_WIDTH = 130
_TEXT_LINES = {"text": 4, "lines": 2}


class Choice(QComboBox):
    """Takes the wheel only while it has the keyboard: scrolling the page must not change a setting.

    The style sheet leaves its arrow out; it is drawn here, in the colour of the theme.
    """

    def __init__(self, preference: Preference, parent: QWidget) -> None:
        super().__init__(parent)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        for value, label in preference.choices:
            self.addItem(label, value)

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: N802
        super().paintEvent(event)
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setPen(QPen(QColor(look.current().muted), 1.5))
        x, y = self.width() - 17.0, self.height() / 2 - 1.0
        painter.drawPolyline([QPointF(x - 4, y - 1), QPointF(x, y + 3), QPointF(x + 4, y - 1)])
        painter.end()

    def wheelEvent(self, event: QWheelEvent) -> None:  # noqa: N802
        if self.hasFocus():
            super().wheelEvent(event)
        else:
            event.ignore()


class Row(QWidget):
    """A setting. Holds no value of its own: it shows one and tells what was typed.

    Signals:
        edited: the text or choice, as Preference.check takes it.
    """

    edited = Signal(str)

    def __init__(self, preference: Preference, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.preference = preference
        self.editor: QComboBox | QLineEdit | QPlainTextEdit = self._make_editor()
        self.editor.setObjectName(preference.key)
        self.editor.setAccessibleName(preference.title)
        self.editor.setAccessibleDescription(preference.description)
        self.problem = QLabel(self)
        self.problem.setProperty("look", "error")
        self.problem.setWordWrap(True)
        self.problem.hide()
        self._lay_out()

    def _make_editor(self) -> QComboBox | QLineEdit | QPlainTextEdit:
        preference = self.preference
        if preference.kind == "choice":
            choice = Choice(preference, self)
            choice.activated.connect(lambda at: self.edited.emit(choice.itemData(at)))
            return choice
        if preference.kind == "number":
            number = QLineEdit(self)
            number.setFixedWidth(NUMBER_WIDTH)
            number.setPlaceholderText(preference.when_empty)
            number.textEdited.connect(self.edited)
            return number
        text = QPlainTextEdit(self)
        text.setProperty("look", "field")
        text.setTabChangesFocus(True)
        text.textChanged.connect(lambda: self.edited.emit(text.toPlainText()))
        text.installEventFilter(self)
        self._fit(text)
        return text

    def _fit(self, text: QPlainTextEdit) -> None:
        lines = _TEXT_LINES[self.preference.kind]
        text.setFixedHeight(text.fontMetrics().lineSpacing() * lines + 2 * int(text.document().documentMargin()) + 12)

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:  # noqa: N802
        if event.type() is QEvent.Type.FontChange and isinstance(watched, QPlainTextEdit):
            self._fit(watched)
        return super().eventFilter(watched, event)

    def _lay_out(self) -> None:
        title = QLabel(self.preference.title, self)
        title.setWordWrap(True)
        title.setFixedWidth(LABEL_WIDTH)
        title.setContentsMargins(0, 7, 0, 0)  # on the line of the editor's text
        title.setAlignment(Qt.AlignmentFlag.AlignTop)
        title.setBuddy(self.editor)
        description = QLabel(self.preference.description, self)
        description.setProperty("look", "small")
        description.setWordWrap(True)
        right = QVBoxLayout()
        right.setSpacing(4)
        is_short = isinstance(self.editor, QComboBox | QLineEdit)
        right.addWidget(self.editor, 0, Qt.AlignmentFlag.AlignLeft if is_short else Qt.AlignmentFlag(0))
        right.addWidget(self.problem)
        right.addWidget(description)
        row = QHBoxLayout(self)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(GAP)
        row.addWidget(title)
        row.addLayout(right, 1)

    @property
    def shown(self) -> str:
        """What the editor holds."""
        if isinstance(self.editor, QComboBox):
            return str(self.editor.currentData())
        return self.editor.text() if isinstance(self.editor, QLineEdit) else self.editor.toPlainText()

    def show_value(self, shown: str) -> None:
        """Put a value in the editor without telling anybody."""
        self.show_problem("")
        if shown == self.shown:
            return
        was_blocked = self.editor.blockSignals(True)
        if isinstance(self.editor, QComboBox):
            self.editor.setCurrentIndex(self.editor.findData(shown))
        elif isinstance(self.editor, QLineEdit):
            self.editor.setText(shown)
        else:
            self.editor.setPlainText(shown)
        self.editor.blockSignals(was_blocked)

    def show_problem(self, words: str) -> None:
        """Say beside the editor what is wrong; "" when nothing is."""
        self.problem.setText(words)
        self.problem.setVisible(bool(words))
        if self.editor.property("wrong") != bool(words):
            self.editor.setProperty("wrong", bool(words))
            self.editor.style().unpolish(self.editor)
            self.editor.style().polish(self.editor)
