"""All cases on real weights, one after the other: `python -m tests.engines.run [NAME-PART ...]`; one JSON line each.

`--write` puts the table into docs/engines.md; with `--lines FILE ...` that of lines printed before, nothing is run.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from lamella.errors import UserError
from lamella.export.prompts import prompts_of
from lamella.export.run import ADAPTERS, Ask, export, prove, prove_answers
from lamella.export.verify import SERVE, TARGETS
from tests.engines.cases import CASES, Case, python_of
from tests.engines.prepare import trained

DOC = Path(__file__).parent.parent.parent / "docs" / "engines.md"
MARKS = ("<!-- table: python -m tests.engines.run --write -->", "<!-- end -->")


def run_case(case: Case, scratch: Path) -> dict[str, Any]:
    """Export, KL of a merged model, the engine's answer."""
    _, store, run = trained(case.model)
    begin_s = time.perf_counter()
    out = scratch / case.name
    prompts = prompts_of(store, run)
    found = export(Ask(run, out, case.to, store, max_loss=case.max_loss), None if case.to in ADAPTERS else prompts)
    kl = found.facts["divergence"]["kl_mean"] if found.kind == "merged" else None
    if case.engine == SERVE.name:
        answered = prove_answers(found, SERVE, python_of(case.engine), (), dtype=case.dtype)
        return {
            "case": case.name, "model": case.model, "to": case.to, "engine": answered.engine, "dtype": case.dtype,
            "kl_from_adapter_on_base": kl, "same_answers": answered.same, "base_answers": answered.base, "chats": answered.chats,
            "seconds": round(time.perf_counter() - begin_s, 1),
        }  # fmt: skip
    proven = prove(found, TARGETS[case.engine], python_of(case.engine), prompts, scratch / case.model, dtype=case.dtype)
    return {
        "case": case.name, "model": case.model, "to": case.to, "engine": proven.engine, "dtype": case.dtype,
        "kl_from_adapter_on_base": kl, "largest_logprob_difference": proven.tuned.largest, "kl": proven.tuned.kl,
        "top1": proven.tuned.top1, "positions": proven.positions, "differs_from_base": proven.from_base.largest,
        "limit": proven.limit, "seconds": round(time.perf_counter() - begin_s, 1),
    }  # fmt: skip


def _kl(value: float) -> str:
    return f"{value:.1e}" if value > 1e-9 else "below 1e-9"  # fp32 log p tell no less


def table(rows: list[dict[str, Any]]) -> str:
    head = "| model | export | engine | computes in | KL of weights | log p within | KL there | same top token | moves from base |"
    lines = [head, "|---|---|---|---|---|---|---|---|---|"]
    for r in rows:
        if "refused" in r:
            lines.append(
                f"| {r['model']} | {r['to']} | {r['engine']} | {r['dtype']} | fails: {r['refused'].replace('|', '/')} | | | | |"
            )
            continue
        if "same_answers" in r:
            told = (
                f"{r['same_answers']:.0%} of {r['chats']} greedy answers the same; {r['base_answers']:.0%} the base's"
            )
            first = f"| {r['model']} | {r['to']} | {r['engine']} serve | {r['dtype']}"
            lines.append(f"{first} | {r['kl_from_adapter_on_base']:.1e} | {told} | | | |")
            continue
        kl = "exact" if r["kl_from_adapter_on_base"] is None else f"{r['kl_from_adapter_on_base']:.1e}"
        lines.append(
            f"| {r['model']} | {r['to']} | {r['engine']} | {r['dtype']} | {kl} | {r['largest_logprob_difference']:.1e} | {_kl(r['kl'])} | "
            f"{100 * r['top1']:.1f} % | {r['differs_from_base']:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    wanted = [part for part in sys.argv[1:] if not part.startswith("--")]
    if "--lines" in sys.argv:
        lines = [
            json.loads(line) for name in wanted for line in Path(name).read_text().splitlines() if line.startswith("{")
        ]
        found = {row["case"]: row for row in lines}
        write([found[case.name] for case in CASES if case.name in found])
        return
    rows = []
    with tempfile.TemporaryDirectory(prefix="lamella-engines-") as scratch:
        for case in CASES:
            if wanted and not any(part in case.name for part in wanted):
                continue
            try:
                rows.append(run_case(case, Path(scratch)))
            except UserError as error:
                rows.append({"case": case.name, "model": case.model, "to": case.to, "engine": case.engine, "dtype": case.dtype,
                             "refused": error.what.strip().splitlines()[-1].strip()[:160]})  # fmt: skip
            print(json.dumps(rows[-1]), flush=True)
    if "--write" in sys.argv:
        write(rows)


def write(rows: list[dict[str, Any]]) -> None:
    """The table's rows between its marks."""
    text = DOC.read_text()
    before, after = text.index(MARKS[0]) + len(MARKS[0]), text.index(MARKS[1])
    DOC.write_text(f"{text[:before]}\n{table(rows)}\n{text[after:]}")


if __name__ == "__main__":
    main()
