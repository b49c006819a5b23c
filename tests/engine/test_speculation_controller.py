"""How many tokens are guessed: lengths follow acceptance and cost, guessing ends where it does not pay, and comes back."""

from __future__ import annotations

import itertools
import random

import pytest

from engine.speculation.controller import (
    FIRST_WAIT,
    LENGTHS,
    LONGEST_WAIT,
    PLAIN_SAMPLES,
    SETTLING_STEPS,
    STEPS_BETWEEN_PLAIN,
    Controller,
    Outcome,
)

PLAIN = 0.010
BEFORE = SETTLING_STEPS + PLAIN_SAMPLES  # steps until it guesses


def run(controller: Controller, steps: int, right: float, extra: float, batch: int = 1) -> list[int]:
    """Steps of ``batch`` chats whose guesses are right with a share of ``right``, each costing ``extra`` seconds."""
    lengths = []
    luck = random.Random(7)
    for _ in range(steps):
        outcomes, total = [], 0
        for number in range(1, batch + 1):
            length = controller.length_for(number, batch)
            accepted = 0
            while accepted < length and luck.random() < right:
                accepted += 1
            outcomes.append(Outcome(number, length, min(length, accepted + 1), accepted))
            total += length
            lengths.append(length)
        controller.observe(outcomes, PLAIN + total * extra)
    return lengths


def test_it_measures_plain_steps_before_it_guesses() -> None:
    lengths = run(Controller("adaptive"), BEFORE + 1, right=1.0, extra=0.001)
    assert lengths[:-1] == [0] * BEFORE
    assert lengths[-1] > 0


def test_right_guesses_make_long_drafts_and_poor_ones_short() -> None:
    assert run(Controller("adaptive"), 40, right=1.0, extra=0.0005)[-1] == LENGTHS[-1]
    assert 0 < run(Controller("adaptive"), 60, right=0.5, extra=0.001)[-1] <= 3


@pytest.mark.parametrize("length", ["adaptive", "2", "8"])
def test_guessing_that_does_not_pay_turns_itself_off_and_says_so(length: str) -> None:
    controller = Controller(length)
    lengths = run(controller, 200, right=0.02, extra=0.004)
    assert lengths[20:].count(0) > 170
    assert controller.state()[1][0]
    assert "off by itself" in controller.summary()


def test_it_waits_longer_each_time_and_comes_back_when_guesses_become_right() -> None:
    controller = Controller("adaptive")
    lengths = run(controller, 1500, right=0.0, extra=0.004)
    tries = [index for index, length in enumerate(lengths) if length]
    gaps = [b - a for a, b in itertools.pairwise(tries)]
    assert gaps[-1] > FIRST_WAIT
    assert max(gaps) <= LONGEST_WAIT + 2
    back = run(controller, 600, right=1.0, extra=0.001)
    assert back[-1] > 0
    assert controller.summary() == "on"


def test_a_fixed_length_is_that_length_or_none() -> None:
    assert set(run(Controller("3"), 300, right=0.9, extra=0.001)) == {0, 3}


def test_a_full_batch_makes_tokens_too_cheap_to_guess() -> None:
    """The same guesses at the same cost pay for one chat and not for sixteen."""
    assert run(Controller("adaptive"), 40, right=0.7, extra=0.002)[-1] > 0
    assert run(Controller("adaptive"), 40, right=0.7, extra=0.002, batch=16)[-16:] == [0] * 16


def test_now_and_then_a_step_without_guesses_is_measured() -> None:
    lengths = run(Controller("adaptive"), 4 * STEPS_BETWEEN_PLAIN, right=1.0, extra=0.001)
    assert 2 * (SETTLING_STEPS + 1) <= lengths[BEFORE:].count(0) <= 4 * (SETTLING_STEPS + 1)


def test_guessing_is_not_compared_with_the_slowness_it_brings_about() -> None:
    """A step behind one of many rows takes twice as long as one that follows its like (caches): guesses that only make
    up for that do not pay."""
    controller = Controller("2")
    behind_guesses, guessed = 0, 0
    for _ in range(400):
        length = controller.length_for(1, 1)
        guessed += length > 0
        slow = 2 * PLAIN if behind_guesses > 0 else PLAIN
        controller.observe([Outcome(1, length, length, length // 2)], slow + length * 0.8 * PLAIN if length else slow)
        behind_guesses = 3 if length else behind_guesses - 1
    assert guessed < 20


def test_an_ended_chat_is_forgotten() -> None:
    controller = Controller("adaptive")
    run(controller, 10, right=1.0, extra=0.001)
    controller.forget(1)
    controller.observe([Outcome(1, 2, 2, 2)], PLAIN)
    assert controller.state() == {}


def test_without_automatic_off_it_always_guesses() -> None:
    assert set(run(Controller("4", automatic_off=False), 50, right=0.0, extra=1.0)) == {4}
