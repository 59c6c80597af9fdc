"""The page, live: reads the runs folder when it is asked, never writes, answers this machine alone unless told otherwise."""

from __future__ import annotations

import ipaddress
import math
import threading
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, HTTPException, Query, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from starlette.middleware.base import RequestResponseEndpoint

from lamella.errors import UserError
from lamella.report.artifacts import marks_of, sections_of
from lamella.report.collect import RunFiles, find_runs
from lamella.report.page import frame
from lamella.report.view import detail, series_of, summary

POINTS = 1200
MOST_POINTS = 20_000


class Watched:
    """A folder of runs; what has been read of each is kept."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._runs: dict[str, RunFiles] = {}
        self._summaries: dict[str, tuple[Any, dict[str, Any]]] = {}
        self._beside: tuple[Any, list[dict[str, Any]]] = (None, [])
        self._lock = threading.Lock()

    def runs(self) -> list[dict[str, Any]]:
        """A line per run; read again where its metrics, receipt or measurements have changed, or it may have stopped."""
        with self._lock:
            found = []
            for path in find_runs(self.folder):
                mark = tuple(
                    _mark(path / name) for name in ("metrics.jsonl", "receipt.json", "config.json", "eval/metrics.json")
                )
                old = self._summaries.get(path.name)
                if old is None or old[0] != mark or old[1]["status"] in ("running", "not started"):
                    old = self._summaries[path.name] = (mark, summary(path))
                found.append(old[1])
            return found

    def artifacts(self) -> list[dict[str, Any]]:
        with self._lock:
            mark = marks_of(self.folder)
            if mark != self._beside[0]:
                self._beside = (mark, sections_of(self.folder))
            return self._beside[1]

    def run(self, name: str) -> RunFiles:
        """A run, read up to now. Names are looked up among what is there: none leads out of the folder.

        Raises:
            KeyError: no such run.
            UserError: a file that is no JSON.
        """
        with self._lock:
            paths = {path.name: path for path in find_runs(self.folder)}
            path = paths[name]
            run = self._runs.setdefault(name, RunFiles.of(path))
            run.update()
            return run


def _mark(path: Path) -> tuple[int, int] | None:
    from lamella.report.collect import mark_of

    return mark_of(path)


def make_app(folder: Path, hosts: frozenset[str] = frozenset()) -> FastAPI:
    """The server.

    Args:
        hosts: names by which it may be called, beside those of this machine: a page of another site that resolves its name
            to this address gets nothing.
    """
    app = FastAPI(title="lamella watch", docs_url=None, redoc_url=None, openapi_url=None)
    watched = Watched(folder)
    page = frame(
        {"live": True, "folder": folder.resolve().name, "runs": [], "details": {}, "artifacts": [], "points": POINTS}
    )

    @app.middleware("http")
    async def only_called_by_name(request: Request, call_next: RequestResponseEndpoint) -> Response:
        host = _host_of(request.headers.get("host", ""))
        if not (_is_this_machine(host) or host in hosts):
            return JSONResponse({"error": "this name is not served here; give it with --allow-host"}, status_code=421)
        response = await call_next(request)
        response.headers["Cache-Control"] = "no-store"
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["X-Frame-Options"] = "DENY"
        response.headers["Referrer-Policy"] = "no-referrer"
        return response

    @app.exception_handler(UserError)
    async def told(request: Request, error: UserError) -> JSONResponse:
        return JSONResponse({"error": str(error)}, status_code=422)

    @app.get("/", response_class=HTMLResponse)
    def whole() -> str:
        return page

    @app.get("/api/runs")
    def runs() -> dict[str, Any]:
        return {"runs": watched.runs(), "artifacts_version": hash(marks_of(folder)) & 0xFFFFFFFF}

    @app.get("/api/artifacts")
    def artifacts() -> list[dict[str, Any]]:
        return watched.artifacts()

    @app.get("/api/runs/{name}")
    def one(name: str, version: str = "") -> Response:
        run = _found(watched, name)
        tree = detail(run, POINTS)
        if version and version == tree["version"] and tree["status"] != "running":
            return Response(status_code=304)
        return JSONResponse(tree)

    @app.get("/api/runs/{name}/series")
    def part(
        name: str, first: Annotated[float, Query()] = -math.inf, last: Annotated[float, Query()] = math.inf,
        points: Annotated[int, Query(ge=10, le=MOST_POINTS)] = POINTS,
    ) -> list[Any]:  # fmt: skip
        run = _found(watched, name)
        return series_of(run.metrics, run.validation, points, first, last)

    return app


def _found(watched: Watched, name: str) -> RunFiles:
    try:
        return watched.run(name)
    except KeyError as error:
        raise HTTPException(404, f"no run {name!r}") from error


def _host_of(header: str) -> str:
    if header.startswith("["):
        return header[1 : header.find("]")]
    return header.rpartition(":")[0] if ":" in header else header


def _is_this_machine(host: str) -> bool:
    if host in ("localhost", ""):
        return bool(host)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
