"""Every rank's sums through one vector."""

import pytest

from lamella.trace.recorder import Recorder, Span
from lamella.trace.totals import devices_of, slot_size, totals_vector


def totals_of(*spans):
    recorder = Recorder()
    for span in spans:
        recorder.add(span)
    return recorder.take_totals()


def span(cause, seconds, **more):
    return Span(cause, "x", 1.0, 1.0 + seconds, **more)


def test_what_ranks_put_in_comes_out_by_rank():
    world = 3
    each = [
        totals_of(span("compute", 2.0), span("wait_peer", 1.0), span("wait_peer", 0.5, peer=2), span("load", 0.25),
                  span("load", 3.0, nbytes=600, lane="read")),
        totals_of(span("compute", 1.0), span("dequantise", 0.5), span("wait_peer", 2.0),
                  span("send", 0.25, nbytes=40, peer=0), span("send", 4.0, nbytes=60, peer=0, lane="send"),
                  span("receive", 0.125, nbytes=99, peer=2), span("receive", 0.5, nbytes=11)),
        totals_of(span("compute", 4.0), span("optimizer", 0.5), span("wait_peer", 0.0625),
                  span("reduce", 0.25, nbytes=8), span("wait_host", 0.5, nbytes=70), span("wait_disk", 0.75)),
    ]  # fmt: skip
    vectors = [totals_vector(t, rank, world, 100 * (rank + 1), rank, 1000 + rank) for rank, t in enumerate(each)]
    assert all(len(v) == world * slot_size(world) for v in vectors)
    devices = devices_of([sum(column) for column in zip(*vectors, strict=True)], world)
    assert [d["step_s"] > 0 for d in devices] == [True] * 3
    for d in devices:
        del d["step_s"]
    assert devices[0] == {
        "rank": 0, "busy_s": 2.0, "compute_s": 2.0, "wait_s": {"rank 2": 1.5, "disk": 0.25}, "move_s": {}, "read_s": 3.0,
        "tokens": 100, "rows": 0, "peak_bytes": 1000, "bytes": {"disk": 600},
    }  # fmt: skip
    assert devices[1] == {
        "rank": 1, "busy_s": 1.5, "compute_s": 1.0, "wait_s": {"rank 2": 2.0}, "move_s": {"rank 0": 0.25, "rank 2": 0.125, "group": 0.5},
        "read_s": 0.0, "tokens": 200, "rows": 1, "peak_bytes": 1001, "bytes": {"group": 11, "rank 0": 100},
    }  # fmt: skip
    # rank 2 came last to the meeting: what it took there is no waiting
    assert devices[2] == {
        "rank": 2, "busy_s": 4.5, "compute_s": 4.0, "wait_s": {"disk": 0.75, "host": 0.5}, "move_s": {"reduce": 0.3125},
        "read_s": 0.0, "tokens": 300, "rows": 2, "peak_bytes": 1002, "bytes": {"host": 70, "reduce": 8},
    }  # fmt: skip


def test_one_rank_alone():
    (device,) = devices_of(totals_vector(totals_of(span("compute", 1.5)), 0, 1, 10, 2), 1)
    assert device.pop("step_s") < 60
    assert device == {"rank": 0, "busy_s": 1.5, "compute_s": 1.5, "wait_s": {}, "move_s": {}, "read_s": 0.0,
                      "tokens": 10, "rows": 2, "peak_bytes": 0, "bytes": {}}  # fmt: skip
    assert pytest.approx(1.5) == device["busy_s"]
