"""The offsets between ranks' clocks are within the bounds that are told."""

import random

import pytest

from lamella.trace.clock import Readings, clocks_of, read_clock


def rounds(offsets, seed, count=16, kernels=("a", "b", "c", "d")):
    """Readings of ranks whose clocks are ahead of rank 0's by `offsets`, around collectives with random delays."""
    rng = random.Random(seed)
    now, enter, leave = 100.0, [[] for _ in offsets], [[] for _ in offsets]
    for _ in range(count):
        came = [now + rng.expovariate(2000) for _ in offsets]
        gone = [max(came) + 5e-5 + rng.expovariate(3000) for _ in offsets]
        for rank, offset in enumerate(offsets):
            enter[rank].append(came[rank] + offset)
            leave[rank].append(gone[rank] + offset)
        now = max(gone) + 1e-3
    return [Readings(tuple(e), tuple(x), k) for e, x, k in zip(enter, leave, kernels, strict=False)]


@pytest.mark.parametrize("seed", range(20))
def test_the_true_offset_is_within_the_error(seed):
    ahead = [0.0, 3600.5, -12.25, 1e-4]
    clocks = clocks_of(rounds(ahead, seed))
    assert (clocks[0].offset_s, clocks[0].error_s) == (0.0, 0.0)
    for clock, offset in zip(clocks[1:], ahead[1:], strict=True):
        assert abs(clock.offset_s + offset) <= clock.error_s + 1e-9
        assert clock.error_s < 1e-3


def test_more_rounds_never_loosen_the_bound():
    errors = [clocks_of(rounds([0.0, 5.0], 3, count))[1].error_s for count in (1, 4, 16, 64)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < errors[0]


def test_one_kernel_is_one_clock_unless_the_readings_say_otherwise():
    same = clocks_of(rounds([0.0, 0.0], 1, kernels=("a", "a")))[1]
    assert (same.offset_s, same.error_s) == (0.0, 0.0)
    unknown = clocks_of(rounds([0.0, 0.0], 1, kernels=("", "")))[1]
    assert unknown.error_s > 0
    other_namespace = clocks_of(rounds([0.0, 50.0], 1, kernels=("a", "a")))[1]
    assert other_namespace.offset_s == pytest.approx(-50.0, abs=1e-3)


def test_reading_goes_around_the_collective():
    times = iter(range(100))
    entered = []
    readings = read_clock(lambda: entered.append(next(times)), 3, lambda: next(times))
    assert (readings.enter_s, entered, readings.leave_s) == ((0, 3, 6), [1, 4, 7], (2, 5, 8))
