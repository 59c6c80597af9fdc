"""The rules of the Chrome trace event format that viewers rely on."""

from collections import defaultdict


def check(trace):
    """Fails unless `trace` is a JSON object trace whose slices nest on every thread and whose arrows have both ends."""
    events = trace["traceEvents"]
    named, flows, threads = defaultdict(set), defaultdict(list), defaultdict(list)
    last = 0.0
    for event in events:
        assert event["ph"] in ("X", "M", "s", "f", "i"), event
        assert isinstance(event["pid"], int) and event["pid"] > 0 and isinstance(event["tid"], int), event
        if event["ph"] == "M":
            named[event["name"]].add((event["pid"], event["tid"]))
            assert set(event["args"]) == ({"name"} if event["name"].endswith("_name") else {"sort_index"})
            continue
        assert event["ts"] >= last, "events come in order of time"
        last = event["ts"]
        assert (event["pid"], event["tid"]) in named["thread_name"] and (event["pid"], 0) in named["process_name"]
        if event["ph"] == "X":
            assert event["dur"] >= 0 and event["name"] and event["cat"] and "step" in event["args"]
            threads[event["pid"], event["tid"]].append(event)
        elif event["ph"] in "sf":
            flows[event["id"]].append(event)
    for slices in threads.values():
        open_until = []
        for event in slices:
            end = round(event["ts"] + event["dur"], 3)
            while open_until and open_until[-1] <= event["ts"]:
                open_until.pop()
            assert not open_until or end <= open_until[-1], f"{event} overlaps the slice before it"
            open_until.append(end)
    for ends in flows.values():
        assert sorted(e["ph"] for e in ends) == ["f", "s"]
        assert all(
            any(s["ts"] <= e["ts"] <= round(s["ts"] + s["dur"], 3) for s in threads[e["pid"], e["tid"]]) for e in ends
        )
        start, finish = sorted(ends, key=lambda e: e["ph"], reverse=True)
        assert finish.get("bp") == "e" and start["pid"] != finish["pid"]
    return flows, threads


def slices(trace, cause=None, rank=None):
    """The slices of a cause and a rank (None: any), in order."""
    return [
        e
        for e in trace["traceEvents"]
        if e["ph"] == "X" and cause in (None, e["cat"]) and (rank is None or e["pid"] == rank + 1)
    ]
