"""A run leaves a timeline of all ranks, and says per step and at its end what each device did."""

import json
import signal
import time
from dataclasses import replace

import pytest
import torch

from lamella.config import build_run_config
from lamella.errors import RunFailed
from lamella.store.reader import Store
from lamella.trace.chrome import RankSpans, pack, trace_of, unpack
from lamella.trace.clock import clocks_of, read_clock
from lamella.trace.recorder import RECORDER
from lamella.train.loop import train_run
from tests.distributed import run_as_ranks
from tests.trace.format import check, slices
from tests.train import fake
from tests.train.processes import run_ranks, start

pytestmark = pytest.mark.distributed

AHEAD_S = 7.0


def read(run_dir):
    """Trace (checked), lines of metrics, receipt."""
    trace = json.loads((run_dir / "trace.json").read_text())
    check(trace)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return trace, lines, json.loads((run_dir / "receipt.json").read_text())


def check_shares(line):
    """Nothing is counted twice: what a device did fits into its time."""
    for device in line["devices"]:
        told = device["busy_s"] + sum(device["wait_s"].values()) + sum(device["move_s"].values())
        assert 0 <= device["compute_s"] <= device["busy_s"] and told <= device["step_s"] + 1e-6


def test_two_ranks_on_one_timeline(tmp_path):
    sections = {"train": {"steps": 5}, "trace": {"steps": 2}, "checkpoint": {"every_steps": 4}}
    codes, texts = run_ranks(2, tmp_path, sections)
    assert codes == [0, 0], texts
    trace, lines, receipt = read(tmp_path / "run")
    about = trace["otherData"]
    assert (about["ranks"], about["missing_ranks"], about["dropped_spans"]) == ([0, 1], [], 0)
    assert len(about["clock"]["offset_s"]) == len(about["clock"]["error_s"]) == 2
    assert max(about["clock"]["error_s"]) < 1
    for rank in (0, 1):
        assert {e["args"]["step"] for e in slices(trace, rank=rank)} == {4, 5}
        assert len(slices(trace, "optimizer", rank)) == 4  # norm and update
        assert slices(trace, "reduce", rank)
        assert slices(trace, "wait_peer", rank)
    assert slices(trace, "save", 0) and not slices(trace, "save", 1)
    for line in lines:
        assert [d["rank"] for d in line["devices"]] == [0, 1]
        assert sum(d["tokens"] for d in line["devices"]) == line["tokens"]
        assert sum(d["rows"] for d in line["devices"]) == line["rows"]
        check_shares(line)
    devices = receipt["devices"]
    assert (devices["steps"], devices["split"], len(devices["each"])) == (5, "tokens", 2)
    assert [one["tokens"] for one in devices["each"]] == [
        sum(line["devices"][r]["tokens"] for line in lines) for r in (0, 1)
    ]
    assert devices["findings"]
    assert {link["link"] for link in devices["links"]} == {"sums over ranks"}


def test_of_a_failed_run_rank_0_shows_its_own_lane(tmp_path):
    codes, _ = run_ranks(2, tmp_path, {"train": {"steps": 6}}, {"fail_rank": 1})
    assert codes[0] == 1
    trace, lines, receipt = read(tmp_path / "run")
    assert (trace["otherData"]["ranks"], trace["otherData"]["missing_ranks"]) == ([0], [1])
    assert {e["args"]["step"] for e in slices(trace)} == {1, 2, 3}
    assert receipt["devices"]["steps"] == len(lines) == 2


def test_a_run_that_fails_alone_has_its_trace(tmp_path):
    with pytest.raises(RunFailed):
        fake.run(tmp_path, fake.Options(nan_rows=list(range(60))), train={"steps": 6, "max_bad_steps": 2})
    trace, _, _ = read(tmp_path / "run")
    assert [e["name"] for e in trace["traceEvents"] if e["ph"] == "i"] == ["step 1", "step 2"]


def test_a_stopped_run_has_its_trace_and_a_resumed_one_goes_on(tmp_path):
    sections = {"train": {"steps": 400}}
    process = start(tmp_path, sections, options={"sleep_s": 0.02})
    metrics = tmp_path / "run" / "metrics.jsonl"
    limit = time.monotonic() + 60
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < limit:
        time.sleep(0.01)
    process.send(signal.SIGINT)
    code, text = process.finish()
    assert code == 130, text
    trace, lines, receipt = read(tmp_path / "run")
    assert receipt["status"] == "interrupted"
    assert slices(trace)[-1]["args"]["step"] == len(lines) == receipt["devices"]["steps"]
    fake.run(tmp_path, mode="resume", train={"steps": len(lines) + 2}, trace={"steps": 1})
    trace, more, receipt = read(tmp_path / "run")
    assert {e["args"]["step"] for e in slices(trace)} == {len(lines) + 2}
    assert receipt["devices"]["steps"] == len(more) == len(lines) + 2


def test_no_trace_when_none_is_asked_for_but_numbers_all_the_same(tmp_path):
    fake.run(tmp_path, train={"steps": 3}, trace={"steps": 0})
    assert not (tmp_path / "run" / "trace.json").exists()
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert all(json.loads(line)["devices"][0]["step_s"] > 0 for line in lines)


def test_the_real_engine_in_one_process(tmp_path, stores, real_config, capsys):
    config = real_config("dense", train={"steps": 3}, trace={"steps": 3}, memory={"recompute": "always"})
    train_run(config)
    trace, lines, receipt = read(tmp_path / "run")
    for step in (1, 2, 3):
        computed = [e["name"] for e in slices(trace, "compute") if e["args"]["step"] == step]
        layers = ["compute embed", *(f"compute forward {i}" for i in range(4)), "compute head"]
        assert computed == layers + [f"compute backward {i}" for i in reversed(range(4))]
        assert len([e for e in slices(trace, "dequantise") if e["args"]["step"] == step]) == 7 - (
            step > 1
        )  # layer 0 is still there
    loads = slices(trace, "load")
    assert {e["args"]["step"] for e in loads} == {1}
    store = Store.open(stores / "dense")
    assert lines[0]["devices"][0]["bytes"] == {"disk": sum(store.group_bytes(i) for i in range(4))}
    for line in lines:
        check_shares(line)
        (device,) = line["devices"]
        assert (device["tokens"] > 0, device["rows"], device["wait_s"].keys() <= {"disk"}) == (True, 4, True)
    (one,) = receipt["devices"]["each"]
    assert one["device"] == "cpu" and 0 < one["busy"] <= 1
    assert "device cpu: " in capsys.readouterr().out


def train_as_rank(tree):
    torch.set_num_threads(1)
    train_run(build_run_config(tree))


def test_stages_with_an_arrow_for_every_transfer(tmp_path, real_config):
    """Two stages of the real engine: what one sends the other receives, later."""
    config = real_config(
        "dense", train={"steps": 3, "rows_per_step": 8, "micro_batch_tokens": 128}, trace={"steps": 2},
        split={"kind": "stages", "layers": [3, 1], "groups": 2, "rebalance": False},
    )  # fmt: skip
    run_as_ranks(2, train_as_rank, config.model_dump(mode="json"), join=False)
    trace, lines, receipt = read(tmp_path / "run")
    flows, _ = check(trace)
    sent = [[e for e in slices(trace, "send", rank) if "bytes" in e["args"]] for rank in (0, 1)]
    came = [[e for e in slices(trace, "receive", rank) if "bytes" in e["args"]] for rank in (0, 1)]
    assert len(flows) == len(sent[0]) + len(sent[1]) and min(map(len, sent)) >= 4
    for out, back in ((sent[0], came[1]), (sent[1], came[0])):
        assert [e["args"]["bytes"] for e in out] == [e["args"]["bytes"] for e in back]
    clock = trace["otherData"]["clock"]
    assert clock["received_before_sent_s"] <= sum(clock["error_s"])
    layers = [{e["name"].split()[-1] for e in slices(trace, "compute", rank)} for rank in (0, 1)]
    assert layers == [{"embed", "0", "1", "2"}, {"embed", "3", "head"}]
    for line in lines:
        check_shares(line)
        assert all(d["bytes"][f"rank {1 - d['rank']}"] > 0 for d in line["devices"])
    assert receipt["devices"]["split"] == "stages"
    assert {"rank 0 to rank 1", "rank 1 to rank 0"} <= {link["link"] for link in receipt["devices"]["links"]}


def transfer(ranks):
    """Rank 1 waits for what rank 0 sends: spans and readings of a clock that is ahead on rank 1."""
    RECORDER.keep(1)
    RECORDER.begin_step(0)
    tensor = torch.zeros(1 << 16)
    for _ in range(5):
        (ranks.send(tensor, 1, 0) if ranks.first else ranks.receive(tensor, 0, 0)).wait()
        time.sleep(0.002 * ranks.rank)
    packed = pack(RECORDER.steps)
    readings = read_clock(lambda: ranks.sum_numbers([0.0]), clock=lambda: time.perf_counter() + ranks.rank * AHEAD_S)
    return packed, readings


def test_transfers_between_clocks_that_differ_are_in_order():
    told = run_as_ranks(2, transfer)
    clocks = clocks_of([replace(readings, kernel="") for _, readings in told])
    assert abs(clocks[1].offset_s + AHEAD_S) <= clocks[1].error_s
    steps = [unpack(packed) for packed, _ in told]
    (step,) = steps[1]
    spans = [s._replace(start_s=s.start_s + AHEAD_S, end_s=s.end_s + AHEAD_S) for s in step.spans]
    ahead = replace(step, start_s=step.start_s + AHEAD_S, spans=spans)
    trace = trace_of([RankSpans(0, "", steps[0], clocks[0]), RankSpans(1, "", [ahead], clocks[1])])
    flows, _ = check(trace)
    assert len(flows) == 5
    assert trace["otherData"]["clock"]["received_before_sent_s"] <= clocks[1].error_s
