"""Where the dock is: beside the chat, over it in a narrow window, or in a window of its own. The text never moves for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from PySide6.QtCore import QObject, Qt
from PySide6.QtGui import QAction
from PySide6.QtWidgets import QSplitter, QVBoxLayout, QWidget

from app.chat.panel import ChatPanel
from app.dock_window import DockWindow
from app.settings import SettingsStore

if TYPE_CHECKING:
    from app.tuning.dock import Dock

DOCK_NARROWEST, DOCK_WIDEST = 320, 560
OVERLAY_BELOW = 900  # window width under which the dock lies over the chat
LINE = 1
_NO_LIMIT = 16_777_215  # QWIDGETSIZE_MAX
_LEAST_CHAT = 40  # px of the chat that an overlay leaves free
_SHORTCUTS_OUTSIDE = ("dock", "detach", "preferences", "quit")


class DockPlace(QObject):
    """Places the dock in ``window`` and remembers how it was.

    Attributes:
        holder: the widget that moves.
        own_window: the dock's window while it is detached.
        is_overlay: the window is so narrow that the dock lies over the chat.
        wants_dock: it is shown wherever there is room.
    """

    def __init__(self, window: QWidget, dock: Dock, settings: SettingsStore, top: int) -> None:
        super().__init__(window)
        self._window, self._dock, self._settings, self._top = window, dock, settings, top
        self._splitter: QSplitter
        self._sidebar: QWidget
        self._panel: ChatPanel
        self._actions: Mapping[str, QAction]
        self.own_window: DockWindow | None = None
        self.is_overlay = False
        self.wants_dock: bool = settings.settings.dock_visible
        self._width = max(DOCK_NARROWEST, min(settings.settings.dock_width, DOCK_WIDEST))
        self.holder = self._make_holder()
        dock.detach_requested.connect(self.toggle_detached)

    def _make_holder(self) -> QWidget:
        holder = QWidget(self._window)
        holder.setObjectName("dock_holder")
        holder.setAttribute(Qt.WidgetAttribute.WA_StyledBackground)
        holder.setMinimumWidth(DOCK_NARROWEST)
        holder.setMaximumWidth(DOCK_WIDEST)
        layout = QVBoxLayout(holder)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.addWidget(self._dock)
        return holder

    def work_in(self, splitter: QSplitter, sidebar: QWidget, panel: ChatPanel, actions: Mapping[str, QAction]) -> None:
        """The columns, once they are laid out: the holder is the splitter's last."""
        self._splitter, self._sidebar, self._panel, self._actions = splitter, sidebar, panel, actions
        splitter.splitterMoved.connect(lambda _at, _index: self._keep_width())

    # ---- shown and hidden

    @property
    def is_shown(self) -> bool:
        return not (self.own_window or self.holder).isHidden()

    @property
    def is_detached(self) -> bool:
        return self.own_window is not None

    @property
    def _is_beside(self) -> bool:
        return self.is_shown and not self.is_overlay and not self.is_detached

    def toggle(self) -> None:
        self.show(not self.is_shown)
        if not self.is_overlay or self.is_detached:
            self.wants_dock = self.is_shown

    def show(self, is_shown: bool) -> None:
        self._actions["dock"].setChecked(is_shown)
        if self.own_window is not None:
            self.own_window.setVisible(is_shown)
            return
        self.holder.setVisible(is_shown)
        self._splitter.refresh()  # counts handles anew, before sizes are given out
        self._reserve()
        self._set_width(self._width if self._is_beside else 0)  # lays out at once: one step, no jump between
        self._panel.place()
        self.place_overlay()

    def _set_width(self, width: int) -> None:
        side = 0 if self._sidebar.isHidden() else self._sidebar.width() + LINE
        beside = width + LINE if width else 0
        self._splitter.setSizes([max(0, side - LINE), max(1, self._window.width() - side - beside), width])

    def _reserve(self) -> None:
        """Leave room for the dock beside the reading column while it is elsewhere, so that it comes without a jump."""
        self._panel.reserve(0 if self._is_beside or self.is_overlay else self._width + LINE)

    def _keep_width(self) -> None:
        width = self.holder.width()
        if self._window.isVisible() and DOCK_NARROWEST <= width <= DOCK_WIDEST:
            self._width = width

    # ---- over the chat

    def fit_to_width(self) -> None:
        """After the window's width: beside the chat or over it."""
        is_overlay = self._window.width() < OVERLAY_BELOW
        if is_overlay == self.is_overlay:
            return
        if is_overlay and self._is_beside:
            self._keep_width()
        self.is_overlay = is_overlay
        if self.is_detached:
            self._reserve()
            self._panel.place()
            return
        self._move_in()
        self.show(not is_overlay and self.wants_dock)

    def _move_in(self) -> None:
        self._frame(self.is_overlay)
        if self.is_overlay:
            self.holder.setParent(self._window)
        else:
            self._splitter.addWidget(self.holder)
            self._splitter.setStretchFactor(2, 0)

    def _frame(self, is_overlay: bool) -> None:
        """A line at its left while it lies over the chat; beside it the splitter draws one."""
        self.holder.setProperty("overlay", is_overlay)
        self.holder.setContentsMargins(LINE if is_overlay else 0, 0, 0, 0)
        self.holder.style().unpolish(self.holder)
        self.holder.style().polish(self.holder)

    def place_overlay(self) -> None:
        if self.is_overlay and self.is_shown and not self.is_detached:
            room = self._window.width()
            width = min(self._width, room - _LEAST_CHAT)
            self.holder.setGeometry(room - width, self._top, width, self._window.height() - self._top)
            self.holder.raise_()

    # ---- in its own window

    def toggle_detached(self) -> None:
        """The dock into a window of its own, or back."""
        if self.is_detached:
            self.attach()
            return
        self.detach()
        self.show(True)
        self.wants_dock = True

    def detach(self) -> None:
        """Into its own window, where that was last, not yet shown."""
        if self._is_beside:
            self._keep_width()
        self._frame(False)
        own = DockWindow(self._window)
        own.put_back(self._settings.settings.dock_geometry)
        own.closed.connect(self.attach)
        own.addActions([self._actions[key] for key in _SHORTCUTS_OUTSIDE])
        self._limit_width(_NO_LIMIT)
        own.hold(self.holder)
        self.own_window = own
        self._say_detached()
        self._splitter.refresh()
        self._reserve()
        self._panel.place()

    def attach(self) -> None:
        """Back beside the chat, or over it in a narrow window."""
        own, self.own_window = self.own_window, None
        if own is None:
            return
        self._settings.update(dock_geometry=own.geometry_text)
        self._limit_width(DOCK_WIDEST)
        self._move_in()
        own.hide()
        own.deleteLater()
        self._say_detached()
        self.show(True)
        self.wants_dock = True

    def _limit_width(self, most: int) -> None:
        for widget in (self.holder, self._dock):
            widget.setMaximumWidth(most)

    def _say_detached(self) -> None:
        self._actions["detach"].setChecked(self.is_detached)
        self._dock.show_detached(self.is_detached)

    # ---- beginning and end

    def restore(self) -> None:
        """As it was at the last end; the window has its size."""
        self.fit_to_width()
        if self._settings.settings.dock_detached:
            self.detach()  # shown with the window
        else:
            self.show(self.wants_dock and not self.is_overlay)

    def on_window_shown(self) -> None:
        if self.is_detached:
            self.show(self.wants_dock)
        elif self._is_beside:
            self._set_width(self._width)  # a splitter takes sizes only once it has been laid out

    def save(self) -> None:
        """Into the settings; sizes are true only while the window is shown."""
        if self._is_beside:
            self._keep_width()
        if self.own_window is not None:
            self._settings.update(dock_geometry=self.own_window.geometry_text)
        self._settings.update(dock_width=self._width, dock_visible=self.wants_dock, dock_detached=self.is_detached)

    def hide_own_window(self) -> None:
        if self.own_window is not None:
            self.own_window.hide()
