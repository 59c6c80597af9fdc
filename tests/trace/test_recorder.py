"""Spans nest, lanes are apart, and what is kept stays bounded."""

import threading

import pytest

from lamella.trace import recorder as module
from lamella.trace.recorder import Recorder, Span


def test_a_span_within_another_counts_once():
    recorder = Recorder()
    recorder.begin_step(0)
    with recorder.span("compute", "layer 1"), recorder.span("wait_disk", "layer 1"):
        pass
    inner, outer = recorder.steps[-1].spans
    assert (inner.cause, outer.cause) == ("wait_disk", "compute")
    assert outer.start_s <= inner.start_s <= inner.end_s <= outer.end_s
    seconds = recorder.take_totals().seconds
    assert seconds["compute"] + seconds["wait_disk"] == pytest.approx(outer.end_s - outer.start_s)


def test_an_error_ends_its_span_and_the_next_one_is_not_inside_it():
    recorder = Recorder()
    recorder.begin_step(0)
    with pytest.raises(KeyError), recorder.span("compute", "a"):
        raise KeyError
    with recorder.span("save", "b"):
        pass
    assert [s.name for s in recorder.steps[-1].spans] == ["a", "b"]
    a, b = recorder.steps[-1].spans
    assert recorder.totals.seconds == {"compute": a.end_s - a.start_s, "save": b.end_s - b.start_s}


def test_other_lanes_give_bytes_but_no_time_of_the_walk():
    recorder = Recorder()
    recorder.begin_step(0)

    def read() -> None:
        for _ in range(200):
            with recorder.span("load", "layer", nbytes=3, lane="read"):
                pass

    threads = [threading.Thread(target=read) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    with recorder.span("send", "x", peer=1, lane="send") as span:
        span.nbytes = 7
    with recorder.span("wait_peer", "x", peer=1):
        pass
    totals = recorder.take_totals()
    assert set(totals.seconds) == {"wait_peer"}
    assert totals.wait_s == {1: totals.seconds["wait_peer"]}
    assert totals.nbytes == {"load": 2400, "send": 7}
    assert (totals.sent, totals.read_s > 0) == ({1: 7}, True)
    assert recorder.take_totals().nbytes == {}


def test_only_the_last_steps_are_kept_and_only_so_many_spans(monkeypatch):
    monkeypatch.setattr(module, "MOST_SPANS", 10)
    recorder = Recorder(keep_steps=2)
    span = Span("compute", "x", 0.0, 0.5)
    recorder.add(span)
    assert not recorder.steps
    for step in range(4):
        recorder.begin_step(step)
        for _ in range(12):
            recorder.add(span)
    assert [(s.step, len(s.spans), s.dropped) for s in recorder.steps] == [(2, 10, 2), (3, 10, 2)]
    assert recorder.totals.seconds == {"compute": 0.5 * 49}
    recorder.keep(0)
    recorder.begin_step(4)
    recorder.add(span)
    assert not recorder.steps
