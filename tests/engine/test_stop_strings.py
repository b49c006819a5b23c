"""Stop strings over any division of the text (FIELD 41), against a naive search on the whole."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.stop_strings import StopStrings


def naive(text: str, stop: tuple[str, ...]) -> tuple[str, bool]:
    """Read the text one character at a time; stop as soon as what was read ends with a stop string."""
    for end in range(1, len(text) + 1):
        starts = [end - len(s) for s in stop if text[:end].endswith(s)]
        if starts:
            return text[: min(starts)], True
    return text, False


def streamed(pieces: list[str], stop: tuple[str, ...]) -> tuple[str, bool]:
    finder, out = StopStrings(stop), ""
    for piece in pieces:
        text, stopped = finder.push(piece)
        out += text
        if stopped:
            return out, True
    return out + finder.flush(), False


@given(
    st.lists(st.text("ab<|é", max_size=4), max_size=12),
    st.lists(st.text("ab<|é", min_size=1, max_size=5), max_size=4).map(tuple),
)
def test_equals_a_naive_search_for_every_division(pieces: list[str], stop: tuple[str, ...]) -> None:
    assert streamed(pieces, stop) == naive("".join(pieces), stop)


def test_nothing_emitted_is_ever_part_of_a_stop_string() -> None:
    finder = StopStrings(("<|end|>",))
    assert finder.push("Hi <|e") == ("Hi ", False)
    assert finder.push("nd") == ("", False)
    assert finder.push("|> and more") == ("", True)
    assert finder.push("ignored") == ("", True)
    assert finder.flush() == ""


def test_a_false_start_is_released() -> None:
    finder = StopStrings(("<|end|>",))
    assert finder.push("a <|en") == ("a ", False)
    assert finder.push("glish") == ("<|english", False)


def test_held_text_comes_out_at_the_end() -> None:
    finder = StopStrings(("stop", "\n\nUser:"))
    assert finder.push("one\n\nUs") == ("one", False)
    assert finder.flush() == "\n\nUs"
    assert finder.flush() == ""


def test_without_stop_strings_text_passes_through() -> None:
    finder = StopStrings(())
    assert finder.push("anything") == ("anything", False)
    assert finder.flush() == ""
