"""The page: one self-contained HTML file that asks for nothing (`write_report`), or the frame that `watch` serves."""

from __future__ import annotations

import base64
import hashlib
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from lamella.errors import UserError
from lamella.files import write_text
from lamella.report.artifacts import marks_of, sections_of
from lamella.report.collect import RunFiles, find_runs
from lamella.report.view import detail, summary

POINTS = 2000
"""Of a series in a report; `watch` fetches parts in full."""
SCRIPTS = ("charts.js", "draw.js", "app.js")


def static(name: str) -> str:
    """A file of `static/`."""
    return (files("lamella.report") / "static" / name).read_text(encoding="utf-8")


def write_report(folder: Path, target: Path | None = None) -> Path:
    """Write the page of a run, or of a folder of runs, to `target` (default `<folder>/report.html`).

    Raises:
        UserError: the folder is missing, holds nothing to show, or a file in it is not JSON.
    """
    if not folder.is_dir():
        raise UserError("no such folder", fix="give the folder of a run, such as runs/demo", path=folder)
    page = render(folder)
    target = target or folder / "report.html"
    try:
        return write_text(target, page)
    except OSError as error:
        raise UserError(
            f"cannot be written: {error.strerror}", fix="give another --out, in a folder that is there", path=target
        ) from error


def render(folder: Path) -> str:
    """The page's HTML, with its data in it."""
    return frame(report_data(folder))


def report_data(folder: Path) -> dict[str, Any]:
    """All that a report shows: every run in full, comparisons, load tests and decisions beside them.

    Raises:
        UserError: nothing to show, or a file that is not JSON.
    """
    found = find_runs(folder)
    beside = sections_of(folder)
    if not found and not beside:
        raise UserError("nothing to report on", fix="a run's folder holds metrics.jsonl and receipt.json", path=folder)
    details = {}
    for path in found:
        run = RunFiles.of(path)
        run.update()
        details[run.name] = detail(run, max(POINTS // max(len(found) // 4, 1), 100))
    return {"live": False, "folder": folder.name, "runs": [summary(path) for path in found], "details": details,
            "artifacts": beside, "points": POINTS}  # fmt: skip


def script_json(data: Any) -> str:
    """JSON that can stand in a script element: nothing in it ends the element or begins a comment."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False)
    for mark in "<>&\u2028\u2029":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return text


def frame(data: dict[str, Any]) -> str:
    """The page around its data.

    Its policy allows the scripts and styles in it by their hashes alone, and requests to its own server only where live.
    """
    style, scripts = static("app.css"), [static(name) for name in SCRIPTS]
    hashes = " ".join(f"'sha256-{_digest(text)}'" for text in scripts)
    connect = "'self'" if data["live"] else "'none'"
    policy = (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; connect-src {connect}; "
        "base-uri 'none'; form-action 'none'"
    )
    env = Environment(loader=PackageLoader("lamella.report", "static"), autoescape=True, undefined=StrictUndefined)
    return env.get_template("page.html").render(
        title=f"{data['folder']}: runs", policy=policy, style=style, scripts=scripts, data=script_json(data)
    )


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


__all__ = ["frame", "marks_of", "render", "report_data", "script_json", "write_report"]
