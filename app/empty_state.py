"""What stands in the reading column before there is a conversation: it teaches."""

from __future__ import annotations

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QLabel, QPushButton, QSizePolicy, QVBoxLayout, QWidget

from app import theme as look

EXAMPLES = (
    ("Explain why ice floats, with numbers.", "A long answer: watch tokens per second settle."),
    ("Write a Python function that counts words, and explain it.", "Code streams in and is coloured when it ends."),
    ("What is the capital of France?", "A short answer: watch the time to the first token."),
)
PANEL_WORDS = (
    "The panel on the right (Ctrl+J) shows where each token's time goes: how long the machine reads weights, how long "
    "it computes, what is lost in between, and who holds the memory. Flip a switch there while a reply streams."
)
NO_MODEL_WORDS = (
    "Ridgeline runs language models on this machine. Nothing you write leaves it. The starter is small enough for any "
    "computer; larger models come as a GGUF file or a folder of safetensors."
)


class EmptyState(QWidget):
    """Three example prompts when a model is there (or loading); otherwise three ways to get one.

    Signals:
        example_chosen: a prompt to send.
        starter_requested, file_requested, folder_requested: how to get a model.
    """

    example_chosen = Signal(str)
    starter_requested = Signal()
    file_requested = Signal()
    folder_requested = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.title = _words("", "title", self)
        self.lead = _words("", "muted", self)
        self.examples = [self._example(prompt, note) for prompt, note in EXAMPLES]
        self.sources = [
            self._row("Use the starter model", "SmolLM2 135M Instruct, about 100 MB", self.starter_requested.emit),
            self._row("Open a GGUF file", "One file, as llama.cpp uses them", self.file_requested.emit),
            self._row("Open a safetensors folder", "A model folder with config.json", self.folder_requested.emit),
        ]
        self.footer = _words(PANEL_WORDS, "muted", self)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 24, 0, 24)
        layout.setSpacing(8)
        layout.addStretch(2)
        for widget in (self.title, self.lead):
            layout.addWidget(widget)
        layout.addSpacing(10)
        for row in (*self.examples, *self.sources):
            layout.addWidget(row)
        layout.addSpacing(10)
        layout.addWidget(self.footer)
        layout.addStretch(3)
        self.show_model("", is_loading=False)

    def show_model(self, name: str, is_loading: bool) -> None:
        """Fit the words: the model's name, a model on its way, or none."""
        has_model = bool(name) or is_loading
        for row in self.examples:
            row.setVisible(has_model)
        for row in self.sources:
            row.setVisible(not has_model)
        if not has_model:
            self.title.setText("Choose a model to begin")
            self.lead.setText(NO_MODEL_WORDS)
        elif is_loading:
            self.title.setText("Ask something")
            self.lead.setText("The model is loading. You can write already; the reply starts when it is ready.")
        else:
            self.title.setText("Ask something")
            self.lead.setText(f"{name} answers on this machine. Try one of these, or write your own.")

    def _example(self, prompt: str, note: str) -> QPushButton:
        return self._row(prompt, note, lambda: self.example_chosen.emit(prompt))

    def _row(self, text: str, note: str, do: object) -> QPushButton:
        row = QPushButton(self)
        row.setProperty("look", "example")
        row.setAccessibleName(f"{text} {note}")
        row.setToolTip(text)
        lines = QVBoxLayout(row)
        lines.setContentsMargins(14, 10, 14, 10)
        lines.setSpacing(2)
        for words, kind in ((text, ""), (note, "muted")):
            label = _words(words, kind, row)
            label.setWordWrap(False)
            label.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Preferred)
            label.setAttribute(Qt.WidgetAttribute.WA_TransparentForMouseEvents)
            if kind:
                label.setFont(look.font(12))
            lines.addWidget(label)
        row.setMinimumHeight(lines.sizeHint().height())
        row.clicked.connect(do)
        return row


def _words(text: str, kind: str, parent: QWidget) -> QLabel:
    label = QLabel(text, parent)
    label.setProperty("look", kind)
    label.setWordWrap(True)
    return label
