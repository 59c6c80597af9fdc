"""The server's routes. Imports no torch: the engine comes in a `Service`."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from lamella import __version__
from lamella.errors import UserError
from lamella.serve.answering import ENGINE_ERRORS, refusal, unless_gone, until_gone
from lamella.serve.backend import ScoreRequest
from lamella.serve.completions import (
    Job,
    chat_answer,
    chat_job,
    collect,
    completion_answer,
    completion_job,
    events,
    run,
    within,
)
from lamella.serve.errors import ApiError, no_such_model
from lamella.serve.gate import GONE, Gate
from lamella.serve.schema import AddAdapter, ChatRequest, ClassifyRequest, CompletionRequest
from lamella.serve.service import Model, Service, Visit, new_id


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    error: ErrorDetail


_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody} for status in (400, 401, 403, 404, 405, 408, 409, 413, 429, 500, 503, 504)
}
_STREAMED: dict[int | str, dict[str, Any]] = {
    **_ERRORS, 200: {"content": {"application/json": {}, "text/event-stream": {}}},
}  # fmt: skip


class EventStream(Response):
    """Server-sent events until they end, the client hangs up, or time is over; their generator is closed in any case."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], deadline_s: float) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._deadline_s = deadline_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def tell() -> None:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        async with aclosing(self._events):
            telling, watching = asyncio.create_task(tell()), asyncio.create_task(until_gone(receive))
            try:  # the events end by themselves at the deadline; a client that does not read them holds up `send`
                left_s = self._deadline_s - time.monotonic() + 5
                await asyncio.wait({telling, watching}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                if telling.done():
                    telling.result()
            finally:
                for task in (telling, watching):
                    task.cancel()
                await asyncio.gather(telling, watching, return_exceptions=True)


def create_app(service: Service) -> FastAPI:
    """The application of a server."""
    app = FastAPI(
        title="Lamella", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False, responses=_ERRORS,
        description="OpenAI-compatible server: one base, an adapter per tenant.",
    )  # fmt: skip
    app.router.route_class = _StrictRoute
    app.add_middleware(Gate, service=service)
    app.add_exception_handler(ApiError, _tell)
    app.add_exception_handler(RequestValidationError, _tell_invalid)
    app.add_exception_handler(HTTPException, _tell_http)
    app.add_exception_handler(Exception, _tell_bug)
    _add_health(app, service)
    _add_models(app, service)
    _add_completions(app, service)
    _add_classify(app, service)
    _add_admin(app, service)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


def _openapi(app: FastAPI) -> dict[str, Any]:
    """As FastAPI makes it, with 400 in the place of its 422."""
    if app.openapi_schema is None:
        tree = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        for path in tree["paths"].values():
            for operation in path.values():
                operation.get("responses", {}).pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            tree.get("components", {}).get("schemas", {}).pop(name, None)
        app.openapi_schema = tree
    return app.openapi_schema


# ---- bodies -----------------------------------------------------------------------------------------


class _StrictRequest(Request):
    """A key that stands twice is refused: another reader on the way may have taken the other value."""

    async def json(self) -> Any:
        def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            found = dict(pairs)
            if len(found) < len(pairs):
                names = [name for name, _ in pairs]
                twice = next(name for name in names if names.count(name) > 1)
                raise json.JSONDecodeError(f"the key {twice[:64]!r} stands twice in one object", "", 0)
            return found

        return json.loads(await self.body(), object_pairs_hook=once)


class _StrictRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def strict(request: Request) -> Response:
            return await handle(_StrictRequest(request.scope, request.receive))

        return strict


# ---- errors -----------------------------------------------------------------------------------------


async def _tell(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _tell_invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = [str(part)[:64] for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        told = f"the body is no JSON: {first.get('ctx', {}).get('error', '')} at character {where[0] if where else 0}"
        return ApiError(400, told).response()
    own = first.get("ctx", {}).get("field")
    if own is not None:
        where.append(str(own))
    param = ".".join(where) or None
    if not where and first["type"] in ("missing", "model_attributes_type", "model_type", "dict_type"):
        return ApiError(
            400, "no request in the body: send one JSON object, with `Content-Type: application/json`"
        ).response()
    message = first["msg"] if own is not None or param is None else f"`{param}`: {first['msg']}"
    return ApiError(400, message, param=param).response()


async def _tell_http(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    told = {404: "no such path: see /openapi.json", 405: "this path does not take this method: see /openapi.json",
            400: "the body cannot be read: send one JSON object"}  # fmt: skip
    response = ApiError(error.status_code, told.get(error.status_code, str(error.detail))).response()
    response.headers.update(error.headers or {})
    return response


async def _tell_bug(_: Request, error: Exception) -> Response:
    return ApiError(500, "the server made a mistake; see its log", code="internal_error").response()


# ---- routes -----------------------------------------------------------------------------------------


def _add_health(app: FastAPI, service: Service) -> None:
    def state() -> JSONResponse:
        ready = not service.stopping() and service.works()
        return JSONResponse({"live": True, "ready": ready}, 200 if ready else 503)

    @app.get("/health")
    async def health() -> Response:
        """200 when requests are taken, else 503."""
        return state()

    @app.get("/health/ready")
    async def ready() -> Response:
        """200 when requests are taken, else 503."""
        return state()

    @app.get("/health/live")
    async def live() -> Response:
        """200 while the process answers."""
        return JSONResponse({"live": True})

    @app.get("/metrics")
    async def metrics() -> Response:
        """Prometheus' text format."""
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)


def _model_card(model: Model) -> dict[str, Any]:
    found = model.classifier
    card: dict[str, Any] = {"id": model.name, "object": "model", "created": model.created, "owned_by": "lamella"}
    if found is not None:
        card |= {"task": found.task.config.name, "tenant": found.tenant, "labels": list(found.labels)}
    return card


def _add_models(app: FastAPI, service: Service) -> None:
    def reached(request: Request) -> list[Model]:
        caller = Visit.of(request).caller
        found = list(service.models.models.values())
        return [m for m in found if caller.reaches(None if m.adapter is None else m.name)]

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        """Models that the key reaches."""
        return JSONResponse({"object": "list", "data": [_model_card(model) for model in reached(request)]})

    @app.get("/v1/models/{name}")
    async def model(request: Request, name: str) -> Response:
        """One model."""
        found = next((m for m in reached(request) if m.name == name), None)
        if found is None:
            raise no_such_model(name)
        return JSONResponse(_model_card(found))


def _add_completions(app: FastAPI, service: Service) -> None:
    async def streamed(request: Request, job: Job, *, chat: bool, include_usage: bool) -> Response:
        visit = Visit.of(request)
        found = run(service, visit, job)

        async def begin() -> Any:
            return await anext(found)

        first = await unless_gone(request.receive, begin)  # errors before the first token have their own status
        if first is None:
            await found.aclose()
            return Response(status_code=GONE)
        return EventStream(events(job, found, first, chat=chat, include_usage=include_usage), visit.deadline_s)

    async def whole(request: Request, job: Job, *, chat: bool) -> Response:
        answers = await unless_gone(request.receive, lambda: collect(service, Visit.of(request), job))
        if answers is None:
            return Response(status_code=GONE)
        return JSONResponse(chat_answer(job, answers) if chat else completion_answer(job, answers))

    @app.post("/v1/chat/completions", responses=_STREAMED)
    async def chat(request: Request, body: ChatRequest) -> Response:
        """An answer to a chat. The adapter's own template and system text are used, as in its training."""
        job = await chat_job(service, Visit.of(request), body)
        if body.stream:
            usage = body.stream_options is not None and body.stream_options.include_usage
            return await streamed(request, job, chat=True, include_usage=usage)
        return await whole(request, job, chat=True)

    @app.post("/v1/completions", responses=_STREAMED)
    async def completions(request: Request, body: CompletionRequest) -> Response:
        """What follows a text or token ids; with `echo` and `logprobs`, log p of the prompt's own tokens."""
        job = await completion_job(service, Visit.of(request), body)
        if body.stream:
            usage = body.stream_options is not None and body.stream_options.include_usage
            return await streamed(request, job, chat=False, include_usage=usage)
        return await whole(request, job, chat=False)


def _add_classify(app: FastAPI, service: Service) -> None:
    @app.post("/v1/classify")
    async def classify(request: Request, body: ClassifyRequest) -> Response:
        """The label of each document, as `lamella eval` finds it: the task's prompt, every label scored."""
        visit = Visit.of(request)
        model = service.find(visit, body.model)
        found = model.classifier
        if found is None:
            raise ApiError(
                400,
                f"the model {body.model!r} has no task: set `task` (and `tenant`) in its [[adapters]]",
                param="model",
            )
        most = service.config.limits.max_documents
        if len(body.documents) > most:
            raise ApiError(400, f"{len(body.documents)} documents: send {most} at most", param="documents")
        rows = found.rows(body.documents)
        prompts = await service.encode(lambda: [found.prompt(row) for row in rows], "documents")
        for n, prompt in enumerate(prompts):
            service.check(prompt, found.answer_tokens, f"documents.{n}")
        request_id = new_id("classify")
        service.count(visit, "prompt", sum(map(len, prompts)))
        asked = ScoreRequest(request_id, model.adapter, tuple(prompts), found.trie)
        try:
            edges_NE = await unless_gone(request.receive, lambda: within(visit, service.backend.score(asked)))
        except ENGINE_ERRORS as error:
            raise refusal(error, model.name) from error
        if edges_NE is None:
            return Response(status_code=GONE)
        results = [
            {"index": n, "id": document.id, "label": said.label, "probabilities": said.probabilities,
             "logprobs": said.scores, "margin": said.margin, "usage": {"prompt_tokens": len(prompt)}}
            for n, (document, prompt, said) in enumerate(
                zip(body.documents, prompts, found.read(rows, edges_NE, body.mode), strict=True))
        ]  # fmt: skip
        total = sum(map(len, prompts))
        return JSONResponse({
            "id": request_id, "object": "classification", "created": int(time.time()), "model": model.name,
            "task": found.task.config.name, "tenant": found.tenant, "mode": body.mode, "labels": list(found.labels),
            "results": results, "usage": {"prompt_tokens": total, "total_tokens": total},
        })  # fmt: skip


def _add_admin(app: FastAPI, service: Service) -> None:
    def shown(model: Model) -> dict[str, Any]:
        loaded = model.loaded
        facts = {} if loaded is None else {"modules": loaded.modules, "rank": loaded.rank, "bytes": loaded.bytes,
                                           "effect": loaded.effect, "layout": loaded.layout}  # fmt: skip
        return {
            **_model_card(model),
            "path": str(model.folder),
            "in_flight": model.leases,
            "notes": list(model.notes),
            **facts,
        }

    @app.get("/admin/adapters")
    async def adapters() -> Response:
        """Adapters that are served."""
        found = [m for m in service.models.models.values() if m.adapter is not None]
        return JSONResponse({"adapters": [shown(model) for model in found]})

    @app.post("/admin/adapters", status_code=201)
    async def add(body: AddAdapter) -> Response:
        """Load an adapter beside what runs. With `replace` it takes the place of the one of this name."""
        if body.name in service.models.models and not body.replace:
            raise ApiError(
                409, f'{body.name!r} is served already: delete it first, or say "replace": true', param="name"
            )
        if "\0" in body.path + (body.task or ""):
            raise ApiError(400, "a path with a NUL character", param="path")
        task = None if body.task is None else Path(body.task)
        try:
            made = await asyncio.to_thread(
                service.models.add, body.name, Path(body.path), task, body.tenant, replace=body.replace
            )
        except UserError as error:
            raise ApiError(400, error.render()) from error
        return JSONResponse(shown(made), 201)

    @app.delete("/admin/adapters/{name}")
    async def remove(name: str) -> Response:
        """Serve an adapter no more; requests in flight keep it."""
        try:
            left = await asyncio.to_thread(service.models.remove, name)
        except UserError as error:
            raise ApiError(404, error.render(), param="name") from error
        return JSONResponse({"name": name, "deleted": True, "in_flight": left})
