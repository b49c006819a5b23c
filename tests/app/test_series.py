"""Ring buffers, sliding sums and scales of the live plots."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.tuning.series import Scale, SlidingSums, TimeRing


def test_added_amounts_are_spread_over_the_slices_they_cover():
    ring = TimeRing(1, bucket_seconds=1.0, num_buckets=8)
    ring.add(0.5, 3.0 - 1e-9, [10.0])  # a half, a whole and a whole slice
    assert ring.window(2, 3)[0] == pytest.approx([2.0, 4.0, 4.0])


def test_amounts_in_one_slice_add_up():
    ring = TimeRing(2, bucket_seconds=1.0, num_buckets=8)
    ring.add(5.1, 5.2, [1.0, 2.0])
    ring.add(5.2, 5.9, [10.0, 20.0])
    assert ring.window(5, 1)[:, 0] == pytest.approx([11.0, 22.0])


def test_what_the_ring_does_not_have_is_nan_and_pauses_are_zero():
    ring = TimeRing(1, bucket_seconds=1.0, num_buckets=4)
    assert np.isnan(ring.window(7, 3)).all()
    ring.add(10.0, 10.5, [1.0])
    ring.add(12.0, 12.5, [2.0])
    shown = ring.window(13, 8)[0]  # slices 6 to 13; the ring keeps 9 to 12
    assert np.isnan(shown[[0, 1, 2, 7]]).all()
    assert shown[3:7] == pytest.approx([0.0, 1.0, 0.0, 2.0])


def test_a_long_pause_leaves_nothing_of_before():
    ring = TimeRing(1, bucket_seconds=1.0, num_buckets=4)
    ring.add(1.0, 1.5, [7.0])
    ring.add(1001.0, 1001.5, [1.0])
    assert ring.window(1001, 4)[0] == pytest.approx([0.0, 0.0, 0.0, 1.0])


def test_an_amount_older_than_the_ring_is_ignored():
    ring = TimeRing(1, bucket_seconds=1.0, num_buckets=4)
    ring.add(100.0, 100.5, [1.0])
    ring.add(3.0, 3.5, [9.0])
    assert ring.window(100, 4)[0] == pytest.approx([0.0, 0.0, 0.0, 1.0])


def test_put_values_hold_until_the_next():
    ring = TimeRing(1, bucket_seconds=1.0, num_buckets=8)
    ring.put(2.5, [5.0])
    ring.put(5.5, [7.0])
    assert np.isnan(ring.window(1, 1)).all()
    assert ring.window(5, 4)[0] == pytest.approx([5.0, 5.0, 5.0, 7.0])
    assert ring.window(7, 3, hold=True)[0] == pytest.approx([7.0, 7.0, 7.0])


@given(
    st.lists(st.tuples(st.floats(0, 50), st.floats(0, 5), st.floats(0, 100)), min_size=1, max_size=20),
)
def test_nothing_is_lost_or_made_up(spans):
    """Within the ring's reach the sum over all slices is the sum of what was added, in any order."""
    ring = TimeRing(1, bucket_seconds=0.5, num_buckets=256)
    for start, length, amount in spans:
        ring.add(start, start + length, [amount])
    total = np.nansum(ring.window(120, 121))
    assert total == pytest.approx(sum(amount for _, _, amount in spans), abs=1e-6)


def test_sliding_sums_keep_only_the_latest_seconds():
    window = SlidingSums(2.0, 2)
    for tokens in range(10):
        window.add((0.5, float(tokens)))
    seconds, tokens = window.sums()
    assert seconds == pytest.approx(2.0)
    assert tokens == pytest.approx(6 + 7 + 8 + 9)


def test_sliding_sums_keep_a_single_long_row():
    window = SlidingSums(2.0, 2)
    window.add((9.0, 1.0))
    assert window.sums() == pytest.approx((9.0, 1.0))
    window.add((5.0, 2.0))
    assert window.sums() == pytest.approx((5.0, 2.0))


def test_sliding_sums_do_not_grow_for_ever():
    window = SlidingSums(1.0, 1)
    for _ in range(20_000):
        window.add((0.01,))
    assert len(window._rows) < 2500
    assert len(window) == pytest.approx(100, abs=1)


@pytest.mark.parametrize(("value", "top"), [(0.9, 1.0), (1.0, 1.5), (97, 150), (118, 150), (26, 30), (0.0089, 0.01)])
def test_scale_tops_are_round(value, top):
    assert Scale.rounded(value) == pytest.approx(top)


def test_scale_changes_at_most_once_a_second():
    scale = Scale(smallest=10.0)
    assert scale.fit(90.0, now=0.0)
    assert not scale.fit(900.0, now=0.9)
    assert scale.top == 100.0
    assert scale.fit(900.0, now=1.1)
    assert scale.top == 1000.0


def test_scale_shrinks_only_when_much_is_empty():
    scale = Scale(smallest=1.0)
    scale.fit(100.0, now=0.0)
    assert not scale.fit(0.5 * scale.top, now=10.0)
    assert scale.fit(0.2 * scale.top, now=20.0)


def test_scale_ignores_nothing_and_never_goes_below_its_smallest():
    scale = Scale(smallest=10.0)
    assert not scale.fit(math.nan, now=0.0)
    scale.fit(500.0, now=5.0)
    scale.fit(0.0, now=10.0)
    assert scale.top == 10.0
