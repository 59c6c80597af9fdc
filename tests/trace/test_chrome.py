"""The timeline of all ranks in the Chrome trace event format."""

import json

import pytest

from lamella.trace.chrome import RankSpans, pack, trace_of, unpack, write_trace
from lamella.trace.clock import Clock
from lamella.trace.recorder import Recorder, Span, StepSpans
from tests.trace.format import check, slices

AHEAD_S = 5000.0
"""Rank 1's clock is ahead by so much."""


def two_stages():
    """Two steps of two ranks: rank 0 computes and sends twice, rank 1 waits, receives and computes."""
    first, second = [], []
    for step in range(2):
        t = 100.0 + step
        one = [Span("compute", "group 0", t, t + 0.2), Span("send", "group 0", t + 0.2, t + 0.25, 4096, 1, "send"),
               Span("compute", "group 1", t + 0.21, t + 0.4), Span("send", "group 1", t + 0.4, t + 0.45, 4096, 1, "send"),
               Span("load", "layer 2", t + 0.1, t + 0.3, 1 << 20, None, "read")]  # fmt: skip
        t += AHEAD_S
        two = [Span("wait_peer", "group 0", t + 0.01, t + 0.255, 0, 0),
               Span("receive", "group 0", t + 0.2005, t + 0.2501, 4096, 0, "receive"),
               Span("compute", "group 0", t + 0.26, t + 0.4),
               Span("receive", "group 1", t + 0.4003, t + 0.4502, 4096, 0, "receive"),
               Span("wait_disk", "layer 3", t + 0.3, t + 0.35)]  # fmt: skip
        first.append(StepSpans(step, 100.0 + step, one))
        second.append(StepSpans(step, t, sorted(two, key=lambda s: s.end_s), dropped=step))
    return [RankSpans(0, "cpu", first), RankSpans(1, "cuda:0 on box", second, Clock(-AHEAD_S, 2e-4))]


def test_two_ranks_on_one_timeline():
    trace = json.loads(json.dumps(trace_of(two_stages()), allow_nan=False))
    flows, threads = check(trace)
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M" and e["name"] == "process_name"}
    assert names == {"rank 0 cpu", "rank 1 cuda:0 on box"}
    lanes = [e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M" and e["name"] == "thread_name"]
    assert lanes == ["main", "read", "send", "main", "receive"]
    assert (len(flows), len(threads), len(slices(trace))) == (4, 5, 20)
    sent, came = slices(trace, "send", 0), slices(trace, "receive", 1)
    for one, other in zip(sent, came, strict=True):
        assert one["name"].removeprefix("send") == other["name"].removeprefix("receive")
        assert other["ts"] + other["dur"] >= one["ts"]
    assert sent[0]["args"] == {"step": 1, "bytes": 4096, "peer": 1}
    assert (sent[0]["ts"], sent[0]["dur"]) == pytest.approx((2e5, 5e4))
    about = trace["otherData"]
    assert about["clock"]["offset_s"] == [0.0, -AHEAD_S] and about["clock"]["error_s"] == [0.0, 2e-4]
    assert (about["clock"]["received_before_sent_s"], about["dropped_spans"]) == (0.0, 1)
    assert [e["name"] for e in trace["traceEvents"] if e["ph"] == "i"] == ["step 1"] * 2 + ["step 2"] * 2


def test_a_receive_that_ends_before_its_send_starts_is_told():
    ranks = two_stages()
    wrong = RankSpans(1, "", ranks[1].steps, Clock(-AHEAD_S - 0.0601, 1e-4))
    assert trace_of([ranks[0], wrong])["otherData"]["clock"]["received_before_sent_s"] == pytest.approx(0.01, abs=1e-6)


def test_a_step_that_lost_a_transfer_gets_no_arrows():
    ranks = two_stages()
    step = ranks[1].steps[0]
    step.spans[:] = [s for s in step.spans if (s.cause, s.name) != ("receive", "group 1")]
    flows, _ = check(trace_of(ranks))
    assert len(flows) == 2


def test_transfers_under_way_at_once_get_lanes_of_their_own():
    ends = [(0.0, 4.0), (1.0, 2.0), (1.5, 3.0), (2.5, 5.0), (4.5, 6.0), (7.0, 8.0)]
    spans = [Span("send", str(n), a, b, 1, 1, "send") for n, (a, b) in enumerate(ends)]
    trace = trace_of([RankSpans(0, "", [StepSpans(0, 0.0, spans)])])
    check(trace)
    names = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    lanes = {e["name"]: names[e["tid"]] for e in slices(trace)}
    assert lanes == {
        "send 0": "send",
        "send 1": "send",
        "send 2": "send 2",
        "send 3": "send 3",
        "send 4": "send",
        "send 5": "send",
    }
    broken = json.loads(json.dumps(trace))
    for event in slices(broken):
        event["tid"] = 2
    with pytest.raises(AssertionError, match="overlaps"):
        check(broken)


def test_what_a_recorder_took_survives_the_wire_and_the_file(tmp_path):
    recorder = Recorder()
    for step in range(3):
        recorder.begin_step(step)
        with recorder.span("compute", "layer 0"), recorder.span("wait_disk", "layer 1"):
            pass
        with recorder.span("send", "grad \N{GREEK SMALL LETTER ALPHA}", nbytes=3, peer=1, lane="send"):
            pass
    steps = unpack(json.loads(json.dumps(pack(recorder.steps))))
    assert steps == list(recorder.steps)
    write_trace(tmp_path / "trace.json", [RankSpans(0, "cpu", steps)], missing=[1])
    trace = json.loads((tmp_path / "trace.json").read_text())
    check(trace)
    assert len(slices(trace)) == 9
    assert trace["otherData"]["missing_ranks"] == [1]
    assert trace["displayTimeUnit"] == "ms"


def test_nothing_recorded_is_a_valid_trace(tmp_path):
    write_trace(tmp_path / "trace.json", [RankSpans(0, "cpu", [])])
    check(json.loads((tmp_path / "trace.json").read_text()))
