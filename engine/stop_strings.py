"""Stop strings over streamed text: a stop string may straddle any number of pieces."""

from __future__ import annotations


class StopStrings:
    """Finds the first stop string to be completed, whatever the pieces the text arrives in.

    Text that could still turn out to be the beginning of a stop string is held back until that is decided, so what was
    emitted never has to be taken back. When several stop strings end at the same place, the text is cut before the one
    that begins first. The stop string itself is not emitted.
    """

    def __init__(self, stop: tuple[str, ...]) -> None:
        assert all(stop), stop
        self._stop = stop
        self._prefixes = frozenset(string[:end] for string in stop for end in range(1, len(string)))
        self._longest = max((len(string) for string in stop), default=0)
        self._held = ""
        self._stopped = False

    def push(self, text: str) -> tuple[str, bool]:
        """Take more text; returns (text that is now certain, whether a stop string was completed).

        After a stop, further text is ignored.
        """
        if self._stopped:
            return "", True
        if not self._stop:
            return text, False
        text = self._held + text
        match = min(self._matches(text), default=None)
        if match is not None:
            self._stopped, self._held = True, ""
            return text[: match[1]], True
        keep = self._num_held(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        """The text still held back; call it when the reply ends for another reason."""
        held, self._held = self._held, ""
        return held

    def _matches(self, text: str) -> list[tuple[int, int]]:
        """(end, start) of the first occurrence of each stop string in ``text``."""
        found = ((text.find(string), len(string)) for string in self._stop)
        return [(start + length, start) for start, length in found if start >= 0]

    def _num_held(self, text: str) -> int:
        """Length of the longest tail of ``text`` with which a stop string could begin."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if text[-length:] in self._prefixes:
                return length
        return 0
