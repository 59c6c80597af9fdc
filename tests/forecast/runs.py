"""Folders of runs that never were: a plan, and steps as a second set of times would have made them."""

import json

from lamella.forecast.document import write_plan
from lamella.forecast.events import play
from lamella.forecast.items import Route, step_items
from lamella.forecast.pieces import CAUSES
from lamella.plan.costs import RowCost
from lamella.plan.split import Split, Stage
from lamella.plan.work import Action, StepPlan
from lamella.trace.chrome import RankSpans, write_trace
from lamella.trace.recorder import Span, StepSpans
from tests.forecast.cases import rank_plan, shape, sites
from tests.forecast.outcomes import forecast_of, question_of, rank_of
from tests.forecast.test_present import document_of

LAYERS = 6
HERE = {"device": "G80", "threads": 2, "dtype": "bf16"}
RATES = {"disk": 10.0}
ALONE = Split((Stage(0, LAYERS, (0,), (1.0,)),))


def listed(times, lengths, resident=range(LAYERS), split=ALONE):
    """A step of rows of these lengths: by one rank, or by all ranks of one stage, a row each in turn."""
    (stage,) = split.stages
    world = len(stage.ranks)
    rows = [RowCost(n, n // 2) for n in lengths]
    owners = tuple((k % world,) for k in range(len(rows)))
    numbers = tuple(range(len(rows)))
    plan = StepPlan(tuple((k,) for k in numbers), (numbers,), (owners,), ((Action("F", 0), Action("B", 0)),))
    own = rank_plan(times, resident, read=Route(("disk",)))
    return step_items(split, plan, shape(LAYERS), rows, [own] * world, {}, sites(LAYERS))


def spans_of(items, played, rank, begin_s):
    """As a recorder has them. A layer's bytes are waited for in the lane that computes."""
    found = []
    for n, item in enumerate(items):
        if item.rank == rank:
            lane = "main" if item.lane == "compute" else item.lane
            cause = "wait_peer" if item.kind == "meet" else CAUSES[item.kind]
            name = "meeting, step 1" if item.kind == "meet" else item.name
            found.append(
                Span(cause, name, begin_s + played.start_s[n], begin_s + played.end_s[n], item.nbytes, None, lane)
            )
    return found


def write_run(
    folder, planned, truth, lengths=(40, 20), resident=range(LAYERS), split=ALONE, steps=6, traced=4, factors=None,
    receipt=True, real=None, dtype="bf16",
):  # fmt: skip
    """A run that was expected to take `planned` and took `truth` (`StepTimes`), of rows of these `lengths` (in truth `real`).

    The first two steps took ten times as long. `factors` were in `planned` already; `dtype`: that was in effect.
    """
    folder.mkdir(parents=True)
    world, tokens, real = len(split.stages[0].ranks), sum(lengths), real or lengths
    expected = play(listed(planned, lengths, resident, split), RATES)
    items = listed(truth, real, resident, split)
    played = play(items, RATES)
    question = question_of()
    found = forecast_of(question, ranks=[rank_of(k) for k in range(world)])
    needs = [{"device": k, "need": 1000} for k in range(world)]
    document = document_of(question, found, figures={
        "step_s": expected.step_s, "step_tokens": float(tokens), "tokens_per_s": tokens / expected.step_s,
        "played": expected.to_dict(), "ranks": needs, "calibrated": [{"identity": HERE, "factors": factors or {}}] * world,
    })  # fmt: skip
    write_plan(folder / "plan.json", document)
    lines, kept = [], [[] for _ in range(world)]
    for step in range(steps):
        slow = 10 if step < 2 else 1
        step_s = played.step_s * slow
        devices = [
            {"rank": r, "step_s": step_s, "busy_s": played.busy[r] * step_s, "compute_s": 0.0, "wait_s": dict(played.wait_s[r]),
             "move_s": {}, "read_s": 0.0, "tokens": sum(real), "rows": len(real), "peak_bytes": 900 + 100 * r,
             "bytes": {"disk": sum(i.nbytes for i in items if i.kind == "load" and i.rank == r)}}
            for r in range(world)
        ]  # fmt: skip
        lines.append({"step": step + 1, "step_s": step_s, "tokens": sum(real), "devices": devices, "skipped": None})
        for r in range(world):
            begin_s = 1e5 * step
            kept[r].append(StepSpans(step, begin_s, spans_of(items, played, r, begin_s)))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if traced:
        write_trace(folder / "trace.json", [RankSpans(r, "cpu", kept[r][-traced:]) for r in range(world)])
    if receipt:
        engine = {"device": "cpu", "threads": 2, "dtype": dtype}
        (folder / "receipt.json").write_text(json.dumps({"status": "ok", "engine": engine}))
    return folder
