"""Rounds, and what is left out when time runs short."""

import torch

from lamella.hardware.machine import KernelRates
from lamella.probe.in_place import measure_in_place
from lamella.probe.timing import Clock, Effort, Piece, measure


def test_every_piece_has_one_round_whatever_the_time():
    pieces = [Piece(name, lambda: None) for name in "ab"]
    clock = Clock(limit_s=0.0)
    measure(pieces, Effort(3, 0.0), clock)
    assert [len(p.seconds) for p in pieces] == [1, 1] and clock.cut


def test_with_time_all_rounds_are_taken():
    pieces = [Piece(name, lambda: None) for name in "ab"]
    clock = Clock()
    measure(pieces, Effort(3, 0.0), clock)
    assert [len(p.seconds) for p in pieces] == [3, 3] and not clock.cut


def test_small_models_are_left_out_when_time_is_over():
    told: list[str] = []
    rates = KernelRates.model_construct()
    assert measure_in_place(rates, torch.float32, True, told.append, Clock(limit_s=0.0)) == ()
    assert told == ["steps of a small model", "steps of a small model with experts"]
