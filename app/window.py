"""The main window: chats, reading column, dock; the top bar above; actions from the table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from PySide6.QtCore import QByteArray, QSize, Qt, QTimer, Signal
from PySide6.QtGui import (
    QCloseEvent,
    QGuiApplication,
    QPaintEvent,
    QResizeEvent,
    QShowEvent,
)
from PySide6.QtWidgets import (
    QApplication,
    QDialog,
    QGridLayout,
    QHBoxLayout,
    QLabel,
    QMainWindow,
    QMenu,
    QSplitter,
    QToolButton,
    QVBoxLayout,
    QWidget,
)

from app import theme as look
from app.actions import fill_menu, help_rows, make_actions
from app.chat.panel import ChatPanel
from app.dock_place import LINE, DockPlace
from app.icons import line_icon
from app.model_chooser import ListedModel, ModelChooser
from app.notice import Notice
from app.preferences.dialog import PreferencesDialog
from app.settings import SettingsStore

if TYPE_CHECKING:
    from app.application import Lifetime
    from app.bridge import EngineBridge
    from app.chat.controller import ChatController
    from app.chat.sidebar import Sidebar
    from app.tuning.dock import Dock

DEFAULT_SIZE = QSize(1280, 800)
SMALLEST = QSize(560, 420)
_BAR_HEIGHT = 49


class MainWindow(QMainWindow):
    """Three columns. Owns no chat state: it shows the controller's.

    Signals:
        first_painted: once, when the window has been drawn.

    Attributes:
        on_close: called once, when the window closes for good.
        lifetime: what on_close ends, set by app.application.
    """

    first_painted = Signal()

    def __init__(
        self,
        controller: ChatController,
        bridge: EngineBridge,
        dock: Dock,
        settings: SettingsStore,
        sidebar: Sidebar,
        verdict: QWidget,
        list_models: Callable[[], Sequence[ListedModel]],
    ) -> None:
        super().__init__()
        self.setWindowTitle("Ridgeline")
        self.setMinimumSize(SMALLEST)
        self.on_close: Callable[[], None] = lambda: None
        self.lifetime: Lifetime
        self._controller, self._settings, self._sidebar = controller, settings, sidebar
        self._is_closed = self._is_painted = False
        self._listed: set[str] = set()
        self._preferences: PreferencesDialog | None = None
        self.notice = Notice(self)
        self.chooser = ModelChooser(bridge, settings, self.notice, list_models, self)
        self.panel = ChatPanel(controller, self.chooser, self.notice, self)
        self.dock_place = DockPlace(self, dock, settings, _BAR_HEIGHT)
        self.dock = self.dock_place.holder
        self.actions_by_key = make_actions(self, self._handlers())
        self._lay_out(verdict)
        sidebar.chat_chosen.connect(self.show_chat)
        sidebar.message_chosen.connect(lambda _chat, message: self.panel.view.show_message(message))
        sidebar.new_chat_requested.connect(self.new_chat)
        controller.chats_changed.connect(self._on_chats_changed)
        look.notifier().theme_changed.connect(self._on_theme_changed)
        self._restore()

    # ---- building

    def _lay_out(self, verdict: QWidget) -> None:
        centre = QWidget(self)
        centre.setObjectName("centre")
        column = QVBoxLayout(centre)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(0)
        column.addWidget(self._make_top_bar(verdict))
        column.addWidget(self.panel, 1)
        self.splitter = QSplitter(Qt.Orientation.Horizontal, self)
        self.splitter.setHandleWidth(LINE)
        self.splitter.setChildrenCollapsible(False)
        for widget in (self._sidebar, centre, self.dock):
            self.splitter.addWidget(widget)
        self.splitter.setStretchFactor(0, 0)
        self.splitter.setStretchFactor(1, 1)
        self.splitter.setStretchFactor(2, 0)
        self.dock_place.work_in(self.splitter, self._sidebar, self.panel, self.actions_by_key)
        self.setCentralWidget(self.splitter)

    def _make_top_bar(self, verdict: QWidget) -> QWidget:
        bar = QWidget(self)
        bar.setObjectName("topbar")
        bar.setAttribute(Qt.WidgetAttribute.WA_StyledBackground)
        bar.setFixedHeight(_BAR_HEIGHT)
        self._menu = QMenu(self)
        fill_menu(self._menu, self.actions_by_key)
        self.menu_button = self._bar_button("menu", "Menu")
        self.menu_button.setMenu(self._menu)
        self.menu_button.setPopupMode(QToolButton.ToolButtonPopupMode.InstantPopup)
        self.dock_button = self._bar_button("dock", "Live panel (Ctrl+J)")
        self.dock_button.clicked.connect(self.dock_place.toggle)
        row = QHBoxLayout(bar)
        row.setContentsMargins(8, 0, 8, 0)
        row.setSpacing(5)
        row.addWidget(self.menu_button)
        row.addWidget(self.chooser.pill)
        row.addStretch(1)
        row.addWidget(verdict)
        row.addWidget(self.dock_button)
        return bar

    def _bar_button(self, shape: str, hint: str) -> QToolButton:
        button = QToolButton(self)
        button.setProperty("shape", shape)
        button.setIcon(line_icon(shape, look.current().muted))
        button.setIconSize(QSize(18, 18))
        button.setToolTip(hint)
        button.setAccessibleName(hint)
        return button

    def _handlers(self) -> dict[str, Callable[[], None]]:
        panel = self.panel
        return {
            "new_chat": self.new_chat,
            "search": self.search,
            "stop": panel.stop,
            "regenerate": panel.regenerate_last,
            "edit_last": panel.edit_last,
            "latest": panel.view.jump_to_latest,
            "compose": panel.composer.edit.setFocus,
            "model": self.chooser.open,
            "sidebar": self.toggle_sidebar,
            "dock": self.dock_place.toggle,
            "detach": self.dock_place.toggle_detached,
            "theme_system": lambda: self.set_theme("system"),
            "theme_light": lambda: self.set_theme("light"),
            "theme_dark": lambda: self.set_theme("dark"),
            "preferences": self.show_preferences,
            "help": self.show_help,
            "quit": self.close_for_good,
        }

    # ---- chats

    def show_chat(self, chat_id: str) -> None:
        self.panel.show_chat(chat_id)
        self._sidebar.set_open_chat(chat_id)
        self._on_chats_changed()
        self.panel.composer.edit.setFocus()

    def new_chat(self) -> None:
        self.show_chat(self._controller.new_chat())

    def search(self) -> None:
        self._show_sidebar(True)
        self._sidebar.focus_search()

    def _on_chats_changed(self) -> None:
        chat_id = self.panel.chat_id
        listed = {chat.chat_id for chat in self._controller.chats()}
        was_deleted = chat_id in self._listed and chat_id not in listed
        self._listed = listed
        if was_deleted:
            self.new_chat()
            return
        title = self._controller.title(chat_id) if chat_id else ""
        self.setWindowTitle(f"{title} - Ridgeline" if title else "Ridgeline")

    # ---- sides

    @property
    def is_dock_shown(self) -> bool:
        return self.dock_place.is_shown

    @property
    def is_overlay(self) -> bool:
        return self.dock_place.is_overlay

    def toggle_sidebar(self) -> None:
        self._show_sidebar(self._sidebar.isHidden())

    def _show_sidebar(self, is_shown: bool) -> None:
        self._sidebar.setVisible(is_shown)
        self.actions_by_key["sidebar"].setChecked(is_shown)

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: N802
        super().paintEvent(event)
        if not self._is_painted:
            self._is_painted = True
            QTimer.singleShot(0, self, self.first_painted.emit)

    def showEvent(self, event: QShowEvent) -> None:  # noqa: N802
        super().showEvent(event)
        self.dock_place.on_window_shown()

    def resizeEvent(self, event: QResizeEvent) -> None:  # noqa: N802
        super().resizeEvent(event)
        self.dock_place.fit_to_width()
        self.dock_place.place_overlay()

    # ---- colours and help

    def set_theme(self, mode: look.Mode) -> None:
        app = QApplication.instance()
        assert isinstance(app, QApplication)
        self._settings.update(theme=mode)
        look.apply(app, mode)
        self._check_theme_actions()
        if self._preferences is not None:
            self._preferences.refresh()

    def _check_theme_actions(self) -> None:
        for mode in ("system", "light", "dark"):
            self.actions_by_key[f"theme_{mode}"].setChecked(self._settings.settings.theme == mode)

    def _on_theme_changed(self, theme: look.Theme) -> None:
        for button in (self.menu_button, self.dock_button):
            button.setIcon(line_icon(str(button.property("shape")), theme.muted))

    def show_preferences(self) -> None:
        """The dialog; made when it is first asked for."""
        if self._preferences is None:
            self._preferences = PreferencesDialog(self._settings, self)
            self._preferences.changed.connect(self._on_preferences_changed)
        self._preferences.refresh()
        self._preferences.show()
        self._preferences.activateWindow()

    def _on_preferences_changed(self, keys: frozenset[str]) -> None:
        if "theme" in keys:
            self.set_theme(self._settings.settings.theme)
        self.panel.on_preferences_changed()

    def show_help(self) -> None:
        """The shortcuts, from the table of actions."""
        dialog = QDialog(self)
        dialog.setWindowTitle("Keyboard shortcuts")
        dialog.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        grid = QGridLayout(dialog)
        grid.setContentsMargins(24, 20, 24, 24)
        grid.setHorizontalSpacing(22)
        grid.setVerticalSpacing(8)
        for line, (keys, title, words) in enumerate(help_rows()):
            for at, (text, kind) in enumerate(((keys, "strong"), (title, ""), (words, "muted"))):
                label = QLabel(text, dialog)
                label.setProperty("look", kind)
                grid.addWidget(label, line, at)
        dialog.open()

    # ---- beginning and end

    def _restore(self) -> None:
        settings = self._settings.settings
        self.resize(DEFAULT_SIZE)
        if settings.window_geometry:
            self.restoreGeometry(QByteArray.fromBase64(settings.window_geometry.encode("ascii", "ignore")))
        self._bring_on_screen()
        self._show_sidebar(settings.sidebar_visible)
        self.dock_place.restore()
        self._check_theme_actions()

    def _bring_on_screen(self) -> None:
        """A geometry from a screen that is gone, or from a damaged file, must not hide the window."""
        screen = QGuiApplication.screenAt(self.geometry().center()) or QGuiApplication.primaryScreen()
        room = screen.availableGeometry()
        self.resize(self.size().boundedTo(room.size()).expandedTo(SMALLEST))
        if not room.intersects(self.geometry()):
            self.move(room.topLeft())

    def save_layout(self) -> None:
        """Remember size, place and sides."""
        self.dock_place.save()
        self._settings.update(
            window_geometry=bytes(self.saveGeometry().toBase64().data()).decode("ascii"),
            sidebar_visible=not self._sidebar.isHidden(),
            last_chat=self.panel.chat_id,
        )

    def close_for_good(self) -> None:
        self.close()

    def closeEvent(self, event: QCloseEvent) -> None:  # noqa: N802
        if not self._is_closed:
            self._is_closed = True
            self.save_layout()  # before hiding: sizes are true only while the window is shown
            if self._preferences is not None:
                self._preferences.close()
            self.dock_place.hide_own_window()
            self.hide()
            self.on_close()
        super().closeEvent(event)
