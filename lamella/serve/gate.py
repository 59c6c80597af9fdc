"""What stands before every route: who asks, how much may come in, and what is given back at the end. No torch.

The key is looked at before the body is read, and the body is read whole, up to a bound, before a route sees it.
"""

from __future__ import annotations

import asyncio
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lamella.console import notice
from lamella.errors import UserError
from lamella.serve.errors import ApiError
from lamella.serve.keys import ANYONE, Caller
from lamella.serve.service import VISIT, Service, Visit
from lamella.serve.settings import request_bytes

_OPEN = ("/health", "/health/live", "/health/ready", "/openapi.json")
GONE = 499
"""Status, for the metrics, of a client that hung up."""


class Gate:
    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service
        self._most = request_bytes(service.config)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        service, status, begun = self._service, 500, False
        visit = Visit(ANYONE, time.monotonic() + service.config.limits.timeout_s)
        scope[VISIT] = visit

        async def noted(message: Message) -> None:
            nonlocal status, begun
            if message["type"] == "http.response.start":
                status, begun = message["status"], True
            await send(message)

        service.metrics.in_flight.inc()
        try:
            with visit.stack:
                try:
                    visit.caller = self._admit(scope)
                    if scope["method"] == "POST" and scope["path"].startswith("/v1/"):
                        visit.stack.enter_context(service.limiter.request(visit.caller))
                    body = await self._body(scope, receive)
                except ApiError as error:
                    error_response = error.response()
                    if scope["method"] != "GET":
                        error_response.headers["Connection"] = "close"  # a body may still be on its way
                    await error_response(scope, receive, noted)
                    return
                if body is None:
                    status = GONE
                    return
                try:
                    await self._app(scope, _replay(body, receive), noted)
                except asyncio.CancelledError:
                    if not service.stopping():
                        raise
                    if not begun:  # the time to drain is over; what was begun ends without its end
                        cut = ApiError(
                            503, "the server stopped before the answer was complete", code="stopping", retry_s=5
                        )
                        await cut.response()(scope, receive, noted)
        finally:
            service.metrics.in_flight.dec()
            route = getattr(scope.get("route"), "path", "other")
            service.metrics.requests.labels(route, visit.model, str(status)).inc()
            service.metrics.seconds.labels(route, visit.model).observe(time.monotonic() - visit.start_s)

    def _admit(self, scope: Scope) -> Caller:
        """Who asks, when they may ask here.

        Raises:
            ApiError: 401, 403; 503: the server stops, or its keys cannot be read.
        """
        path = scope["path"]
        if path in _OPEN:
            return ANYONE
        if self._service.stopping():
            raise ApiError(503, "the server is stopping: ask another one, or again later", code="stopping", retry_s=5)
        header = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        try:
            caller = self._service.caller(header.decode("latin-1"))
        except UserError as error:
            notice(f"warning: {error.what.splitlines()[0]} ({error.path}): all keys are refused")
            raise ApiError(503, "the server's keys cannot be read; see its log", code="keys", retry_s=30) from error
        if path.startswith("/admin") and not caller.admin:
            raise ApiError(403, "this needs an admin key: `lamella serve keys add --admin`", code="admin_key_needed")
        if path == "/metrics" and not caller.metrics:
            raise ApiError(
                403, "this needs a key for the metrics: `lamella serve keys add --metrics`", code="metrics_key_needed"
            )
        return caller

    async def _body(self, scope: Scope, receive: Receive) -> bytes | None:
        """The whole body; None: the client hung up.

        Raises:
            ApiError: 413: longer than the bound, said or seen; 400: a length that is no number; 408: it came too slowly.
        """
        said = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if not said.isdigit():
            raise ApiError(400, "`Content-Length` is no number")
        if len(said) > 15 or int(said) > self._most:
            raise self._too_large()
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._service.config.limits.body_timeout_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > self._most:
                        raise self._too_large()
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError as error:
            raise ApiError(408, "the request's body came too slowly: send it again", code="timeout") from error

    def _too_large(self) -> ApiError:
        return ApiError(
            413, f"the request is larger than {self._most} bytes: send less at once", code="request_too_large"
        )


def _replay(body: bytes, receive: Receive) -> Receive:
    """ASGI's receive of a body that was read already."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again
