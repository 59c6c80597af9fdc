"""From per-step numbers to what holds up whom, and what would relieve it."""

import io
import json

import pytest
from rich.console import Console

from lamella.trace.summary import DeviceFacts, rendered, summarise


def device(rank, step_s, busy_s, tokens=0, **more):
    return {"rank": rank, "step_s": step_s, "busy_s": busy_s, "compute_s": busy_s, "wait_s": {}, "move_s": {},
            "read_s": 0.0, "tokens": tokens, "rows": 1, "bytes": {}, **more}  # fmt: skip


def summary(*devices, steps=10, facts=(), split="tokens"):
    tree = summarise([{"step": k + 1, "devices": list(devices)} for k in range(steps)], facts, split)
    json.dumps(tree, allow_nan=False)
    return tree


def text_of(tree):
    console = Console(file=io.StringIO(), width=200, highlight=False)
    for part in rendered(tree):
        console.print(part)
    return console.file.getvalue()


def test_a_slow_device_is_named_with_the_shares_that_relieve_it():
    tree = summary(
        device(0, 1.0, 0.40, 400, wait_s={"rank 2": 0.60}),
        device(1, 1.0, 0.40, 400, wait_s={"rank 2": 0.60}),
        device(2, 1.0, 1.00, 400),
    )
    assert tree["bottleneck"] == "rank 2"
    # speeds 1000, 1000, 400 tokens/s: 1200 tokens take 0.5 s when balanced, 0.6 s without rank 2
    assert tree["findings"] == [
        "rank 0 waits 60%, rank 1 waits 60% for rank 2 (busy 100%): give it less (split.shares = [0.42, 0.42, 0.17] by "
        "what was measured: 0.5 s a step in place of 1 s)"
    ]
    assert [one["busy"] for one in tree["each"]] == pytest.approx([0.4, 0.4, 1.0])
    assert tree["each"][0]["wait"] == pytest.approx({"rank 2": 0.6})


def test_a_device_that_adds_little_may_be_left_out():
    tree = summary(device(0, 1.0, 0.2, 900, wait_s={"rank 1": 0.8}), device(1, 1.0, 1.0, 100))
    assert tree["findings"][0].endswith("or leave it out (0.22 s)")


@pytest.mark.parametrize(("split", "words"), [("stages", "fewer layers"), ("experts", "fewer experts")])
def test_relief_follows_the_split(split, words):
    tree = summary(device(0, 1.0, 0.5, 10, wait_s={"rank 1": 0.5}), device(1, 1.0, 1.0, 10), split=split)
    assert words in tree["findings"][0]


def test_who_waits_for_a_device_that_waits_for_its_disk_is_sent_there():
    facts = [DeviceFacts("cpu"), DeviceFacts("cpu", streamed=20, layer_bytes=10**8)]
    tree = summary(
        device(0, 1.0, 0.5, 10, wait_s={"rank 1": 0.5}),
        device(1, 1.0, 0.4, 10, wait_s={"disk": 0.6}, read_s=0.9, bytes={"disk": 18 * 10**8}),
        facts=facts,
    )
    assert tree["bottleneck"] == "disk of rank 1"
    assert tree["findings"] == [
        "rank 1 waits 60% for its disk (2 GB/s): raise its budget by 1.4 GB to hold 14 more of 20 streamed layers, or "
        "take more tokens per step",
        "rank 0 waits 50% for rank 1 (busy 40%): it waits itself 60% for its disk; see there",
    ]
    assert {link["link"]: link["bytes_per_step"] for link in tree["links"]} == {"disk of rank 1": 18 * 10**8}


def test_layers_read_for_the_first_time_call_for_no_budget():
    tree = summary(device(0, 1.0, 0.5, 10, wait_s={"disk": 0.5}, read_s=0.5, bytes={"disk": 5}), steps=1)
    assert "reading them the first time" in tree["findings"][0]


def test_links_that_carry_too_much():
    tree = summary(
        *(device(rank, 40.0, 10.0, 10, move_s={"reduce": 28.0}, bytes={"reduce": 3_100_000_000}) for rank in range(2))
    )
    assert tree["bottleneck"] == "links (sums over ranks)"
    assert tree["findings"] == [
        "adding up 3.1 GB a step over ranks at 111 MB/s takes 70%: take more tokens per step, a lower lora.rank, or "
        "split by stages"
    ]
    tree = summary(*(device(rank, 1.0, 0.8, 10, move_s={"reduce": 0.2}, bytes={"reduce": 800}) for rank in range(2)))
    assert tree["findings"] == [
        "meeting for sums of 800 B a step takes 20%: steps are short; take more tokens per step"
    ]
    tree = summary(
        device(0, 1.0, 0.5, 10, move_s={"rank 1": 0.4}, bytes={"rank 1": 4 * 10**6}),
        device(1, 1.0, 0.5, 10, move_s={"rank 0": 0.4}),
        split="stages",
    )
    assert tree["bottleneck"] == "link between rank 0 and rank 1"
    assert tree["findings"][0].startswith("ranks 0 and 1 exchange 4 MB a step at 10 MB/s, which takes 40% of the time")


def test_copies_from_host_memory():
    tree = summary(
        device(0, 1.0, 0.6, 10, wait_s={"host": 0.4}, bytes={"host": 100}), facts=[DeviceFacts("cuda:0", 7, 5)]
    )
    assert tree["bottleneck"] == "host memory of rank 0"
    assert "(7 layers come from there)" in tree["findings"][0]


def test_all_busy():
    tree = summary(device(0, 1.0, 0.97, 10), device(1, 1.0, 0.99, 10, wait_s={"rank 0": 0.01}))
    assert tree["bottleneck"] == "arithmetic"
    assert tree["findings"] == ["no wait takes 5% of any device's time; busy 97% to 99%"]


def test_steps_of_another_number_of_devices_are_left_out():
    alone, two = [device(0, 1.0, 1.0, 5)], [device(0, 1.0, 0.5, 5), device(1, 1.0, 0.5, 5)]
    lines = [{"devices": d} for d in (alone, alone, two, two, two)] + [{"devices": []}]
    tree = summarise(lines)
    assert (tree["steps"], len(tree["each"]), tree["each"][1]["tokens"]) == (3, 2, 15)
    assert summarise([{"step": 1}]) is None


def test_printed_for_several_and_for_one():
    several = text_of(
        summary(
            device(0, 1.0, 0.69, 300, wait_s={"rank 1": 0.31}, bytes={"rank 1": 10**6}),
            device(1, 1.0, 0.95, 100, move_s={"reduce": 0.02}),
            facts=[DeviceFacts("cpu"), DeviceFacts("cuda:1 on box")],
        )
    )
    for words in ("rank 0 cpu", "rank 1 cuda:1 on box", "69.0%", "rank 1 31.0%", "bottleneck: rank 1", "split.shares",
                  "rank 0 to rank 1: 1 MB a step"):  # fmt: skip
        assert words in several, several
    one = text_of(
        summary(
            device(0, 1.0, 0.9, 10, wait_s={"disk": 0.04}, read_s=0.5, bytes={"disk": 10**9}),
            facts=[DeviceFacts("cpu")],
        )
    )
    assert one.splitlines() == [
        "  device cpu: 90% busy; 4% waiting for its disk; 6% other; disk of rank 0: 1 GB a step at 2 GB/s; no wait takes 5%"
    ]


def test_two_that_wait_for_each_other():
    pair = (
        device(0, 1.0, 0.5, 10, wait_s={"rank 1": 0.45}, bytes={"rank 1": 10**6}),
        device(1, 1.0, 0.6, 10, wait_s={"rank 0": 0.3}),
    )
    assert summary(*pair, split="stages")["findings"][0] == (
        "rank 0 waits 45% for rank 1 (busy 60%): which itself waits 30% for rank 0, and 1 MB a step pass between them: "
        "more groups in flight (split.groups), or a faster link"
    )
    assert "more rows per step" in summary(*pair)["findings"][0]
