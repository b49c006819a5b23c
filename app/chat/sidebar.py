"""Sidebar: the left column. New chat, search, and the chats by age."""

from __future__ import annotations

from datetime import datetime

from PySide6.QtCore import QEvent, QModelIndex, QPoint, Qt, QTimer, Signal
from PySide6.QtGui import QCloseEvent, QHideEvent, QKeyEvent, QResizeEvent, QShowEvent
from PySide6.QtWidgets import (
    QAbstractItemView,
    QFrame,
    QHBoxLayout,
    QLabel,
    QLineEdit,
    QListView,
    QMenu,
    QPushButton,
    QSizePolicy,
    QVBoxLayout,
    QWidget,
)

from app import theme
from app.chat.chat_list import ChatListModel, ChatRowDelegate, chat_rows, hit_rows
from app.chat.controller import ChatController

WIDTH = 236  # px
_MINUTE = 60_000
_SEARCH_MILLISECONDS = 120
_UNDO_MILLISECONDS = 10_000


class Sidebar(QWidget):
    """Chats and search over a ChatController. Owns nothing but what is being searched for and which row is open."""

    chat_chosen = Signal(str)  # chat_id; when a found message was chosen its branch is shown already
    message_chosen = Signal(str, str)  # chat_id, message_id of a search hit, after chat_chosen
    new_chat_requested = Signal()

    def __init__(self, controller: ChatController, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._controller = controller
        self._open_chat = ""
        self._is_stale = False
        self.setObjectName("sidebar")
        self.setAttribute(Qt.WidgetAttribute.WA_StyledBackground)
        self.setFixedWidth(WIDTH)
        self.setAccessibleName("Chats")
        self._build()
        self._minute_timer = self._timer("sidebar ages", _MINUTE, self.refresh)
        self._search_timer = self._timer("sidebar search", _SEARCH_MILLISECONDS, self.refresh, once=True)
        self._undo_timer = self._timer("sidebar undo", _UNDO_MILLISECONDS, self._undo_bar.hide, once=True)
        controller.chats_changed.connect(self.refresh)
        theme.notifier().theme_changed.connect(self._on_theme_changed)
        self.refresh()

    # ---- for the window

    def set_open_chat(self, chat_id: str) -> None:
        """Mark the chat that the window shows."""
        self._open_chat = chat_id
        self._select_open()
        self._list.viewport().update()

    def focus_search(self) -> None:
        self._search.setFocus(Qt.FocusReason.ShortcutFocusReason)
        self._search.selectAll()

    def refresh(self) -> None:
        """Read the chats (or the hits) again."""
        if self._list.state() == QAbstractItemView.State.EditingState:
            self._is_stale = True  # a row that moves would close the field somebody is typing in
            return
        self._is_stale = False
        wanted = self._search.text().strip()
        if wanted:
            rows = hit_rows(self._controller.search(wanted))
        else:
            rows = chat_rows(self._controller.chats(), datetime.now())
        bar = self._list.verticalScrollBar()
        at, current = bar.value(), self._model.row(self._list.currentIndex())
        self._model.show_rows(rows)
        bar.setValue(at)
        if current is not None and self._list.hasFocus():
            self._list.setCurrentIndex(self._model.index_of(current.chat_id, current.message_id))
        else:
            self._select_open()
        self._empty.setVisible(not rows)

    # ---- building

    def _build(self) -> None:
        self._new_button = _HintedButton("New chat", "Ctrl N")
        self._new_button.clicked.connect(self.new_chat_requested)
        self._search = _HintedField("Search chats", "Ctrl K")
        self._search.textChanged.connect(lambda _text: self._search_timer.start())
        self._search.left_downwards.connect(self._on_search_left)
        self._model = ChatListModel(self)
        self._model.renamed.connect(self._controller.rename)
        self._list = self._build_list()
        self._empty = QLabel(
            "Chats you start stand here, and replies that are being written are marked by their colour."
        )
        self._empty.setProperty("look", "muted")
        self._empty.setWordWrap(True)
        self._empty.setContentsMargins(18, 10, 18, 0)
        self._undo_bar = _UndoBar()
        self._undo_bar.undo_requested.connect(self._on_undo)
        top = QVBoxLayout()
        top.setContentsMargins(10, 12, 10, 0)
        top.setSpacing(8)
        top.addWidget(self._new_button)
        top.addWidget(self._search)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(2)
        column.addLayout(top)
        column.addWidget(self._empty)
        column.addWidget(self._list, 1)
        column.addWidget(self._undo_bar)

    def _build_list(self) -> _ChatListView:
        view = _ChatListView()
        view.setModel(self._model)
        delegate = ChatRowDelegate(lambda chat_id: chat_id == self._open_chat, view)
        delegate.closeEditor.connect(self._on_editor_closed)
        view.setItemDelegate(delegate)
        view.clicked.connect(self._choose)
        view.entered_by_key.connect(self._choose)
        view.rename_requested.connect(self._rename)
        view.delete_requested.connect(self._delete)
        view.customContextMenuRequested.connect(self._show_menu)
        return view

    def _timer(self, name: str, milliseconds: int, on_timeout: object, once: bool = False) -> QTimer:
        timer = QTimer(self)
        timer.setObjectName(name)
        timer.setInterval(milliseconds)
        timer.setSingleShot(once)
        timer.timeout.connect(on_timeout)
        return timer

    # ---- what the user does

    def _choose(self, index: QModelIndex) -> None:
        row = self._model.row(index)
        if row is None or not row.chat_id:
            return
        if row.message_id is None:
            self.set_open_chat(row.chat_id)
            self.chat_chosen.emit(row.chat_id)
            return
        self._controller.reveal(row.chat_id, row.message_id)
        self._open_chat = row.chat_id
        self._list.viewport().update()
        self.chat_chosen.emit(row.chat_id)
        self.message_chosen.emit(row.chat_id, row.message_id)

    def _show_menu(self, at: QPoint) -> None:
        menu = self._menu_for(self._list.indexAt(at))
        if menu is not None:
            menu.popup(self._list.viewport().mapToGlobal(at))

    def _menu_for(self, index: QModelIndex) -> QMenu | None:
        row = self._model.row(index)
        if row is None or not row.chat_id:
            return None
        menu = QMenu(self)
        menu.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        chat_id = row.chat_id
        if not row.snippet:
            menu.addAction("Rename", lambda: self._rename(self._model.index_of(chat_id)))
        menu.addAction("Delete chat" if row.snippet else "Delete", lambda: self._delete_chat(chat_id, row.title))
        return menu

    def _rename(self, index: QModelIndex) -> None:
        if index.isValid():
            self._list.setCurrentIndex(index)
            self._list.edit(index)

    def _delete(self, index: QModelIndex) -> None:
        row = self._model.row(index)
        if row is None or not row.chat_id:
            return
        self._delete_chat(row.chat_id, row.title)

    def _delete_chat(self, chat_id: str, title: str) -> None:
        self._controller.delete(chat_id)
        self._undo_bar.offer(chat_id, title)
        self._undo_timer.start()
        if self._search.text():
            self.refresh()

    def _on_undo(self, chat_id: str) -> None:
        self._undo_timer.stop()
        self._undo_bar.hide()
        if self._controller.undo_delete(chat_id) is not None:
            self.set_open_chat(chat_id)
            self.chat_chosen.emit(chat_id)

    def _on_editor_closed(self) -> None:
        # The view leaves its editing state only after this signal.
        QTimer.singleShot(0, self, self._refresh_if_stale)

    def _refresh_if_stale(self) -> None:
        if self._is_stale:
            self.refresh()

    def _on_search_left(self) -> None:
        self.refresh()
        for i in range(self._model.rowCount()):
            index = self._model.index(i)
            if self._model.flags(index) & Qt.ItemFlag.ItemIsSelectable:
                self._list.setCurrentIndex(index)
                self._list.setFocus(Qt.FocusReason.TabFocusReason)
                return

    def _select_open(self) -> None:
        index = self._model.index_of(self._open_chat)
        if not index.isValid():
            self._list.clearSelection()
        else:
            self._list.setCurrentIndex(index)

    def _on_theme_changed(self, _theme: object) -> None:
        self._list.viewport().update()

    # ---- timers run only while the column is seen

    def showEvent(self, event: QShowEvent) -> None:  # noqa: N802
        super().showEvent(event)
        self.refresh()
        self._minute_timer.start()

    def hideEvent(self, event: QHideEvent) -> None:  # noqa: N802
        super().hideEvent(event)
        self._minute_timer.stop()
        self._search_timer.stop()

    def closeEvent(self, event: QCloseEvent) -> None:  # noqa: N802
        super().closeEvent(event)
        self._undo_timer.stop()


class _ChatListView(QListView):
    entered_by_key = Signal(QModelIndex)
    rename_requested = Signal(QModelIndex)
    delete_requested = Signal(QModelIndex)

    def __init__(self) -> None:
        super().__init__()
        self.setAccessibleName("List of chats")
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.setStyleSheet("QListView { background: transparent; border: 0; }")
        self.setMouseTracking(True)
        self.viewport().setAttribute(Qt.WidgetAttribute.WA_Hover)
        self.setVerticalScrollMode(QAbstractItemView.ScrollMode.ScrollPerPixel)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setEditTriggers(QAbstractItemView.EditTrigger.NoEditTriggers)
        self.setSelectionMode(QAbstractItemView.SelectionMode.SingleSelection)
        self.setContextMenuPolicy(Qt.ContextMenuPolicy.CustomContextMenu)

    def keyPressEvent(self, event: QKeyEvent) -> None:  # noqa: N802
        signal = {
            Qt.Key.Key_Return: self.entered_by_key,
            Qt.Key.Key_Enter: self.entered_by_key,
            Qt.Key.Key_F2: self.rename_requested,
            Qt.Key.Key_Delete: self.delete_requested,
        }.get(Qt.Key(event.key()))
        if signal is None or self.state() == QAbstractItemView.State.EditingState:
            super().keyPressEvent(event)
            return
        signal.emit(self.currentIndex())


class _Hint(QLabel):
    """A shortcut, small and muted, at the right edge of the widget it explains."""

    def __init__(self, text: str, parent: QWidget) -> None:
        super().__init__(text, parent)
        self._around = parent
        self.setProperty("look", "muted")
        self.setFont(theme.font(11))
        self.setAttribute(Qt.WidgetAttribute.WA_TransparentForMouseEvents)
        self.setStyleSheet("background: transparent; border: 0;")

    def settle(self) -> None:
        self.adjustSize()
        self.move(self._around.width() - self.width() - 10, (self._around.height() - self.height()) // 2)


class _HintedButton(QPushButton):
    def __init__(self, text: str, hint: str) -> None:
        super().__init__(text)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.setFixedHeight(34)
        self.setStyleSheet("text-align: left;")
        self._hint = _Hint(hint, self)

    def resizeEvent(self, event: QResizeEvent) -> None:  # noqa: N802
        super().resizeEvent(event)
        self._hint.settle()


class _HintedField(QLineEdit):
    left_downwards = Signal()

    def __init__(self, placeholder: str, hint: str) -> None:
        super().__init__()
        self.setPlaceholderText(placeholder)
        self.setAccessibleName(placeholder)
        self.setFixedHeight(34)
        self._hint = _Hint(hint, self)
        self.textChanged.connect(lambda text: self._hint.setVisible(not text))

    def resizeEvent(self, event: QResizeEvent) -> None:  # noqa: N802
        super().resizeEvent(event)
        self._hint.settle()

    def keyPressEvent(self, event: QKeyEvent) -> None:  # noqa: N802
        if event.key() == Qt.Key.Key_Escape and self.text():
            self.clear()
        elif event.key() in (Qt.Key.Key_Down, Qt.Key.Key_Return, Qt.Key.Key_Enter):
            self.left_downwards.emit()
        else:
            super().keyPressEvent(event)


class _UndoBar(QFrame):
    """What was deleted, and the way back."""

    undo_requested = Signal(str)  # chat_id

    def __init__(self) -> None:
        super().__init__()
        self._chat_id = ""
        self._title = ""
        self._label = QLabel()
        self._label.setProperty("look", "muted")
        self._label.setTextFormat(Qt.TextFormat.PlainText)
        self._button = QPushButton("Undo")
        self._button.clicked.connect(lambda: self.undo_requested.emit(self._chat_id))
        row = QHBoxLayout(self)
        row.setContentsMargins(18, 8, 10, 10)
        row.addWidget(self._label, 1)
        row.addWidget(self._button)
        self.hide()

    def offer(self, chat_id: str, title: str) -> None:
        self._chat_id, self._title = chat_id, title
        self.show()
        self._elide()

    def resizeEvent(self, event: QResizeEvent) -> None:  # noqa: N802
        super().resizeEvent(event)
        self._elide()

    def changeEvent(self, event: QEvent) -> None:  # noqa: N802
        super().changeEvent(event)
        if event.type() == QEvent.Type.FontChange:
            self._elide()

    def _elide(self) -> None:
        room = WIDTH - 40 - self._button.sizeHint().width()
        text = f"Deleted {self._title}"
        self._label.setText(self._label.fontMetrics().elidedText(text, Qt.TextElideMode.ElideRight, room))
        self._label.setToolTip(self._title)
