"""What callers are told when something is wrong, in OpenAI's shape. Imports no torch."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: HTTP status.
        message: what is wrong, and what to do.
        param: the field of the request concerned.
        code: for programs.
        retry_s: seconds after which to try again (`Retry-After`).
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None,
        retry_s: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_s = retry_s

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": writable(self.message), "type": kind_of(self.status), "param": self.param,
                          "code": self.code}}  # fmt: skip

    @property
    def headers(self) -> dict[str, str]:
        told = {} if self.retry_s is None else {"Retry-After": str(max(1, round(self.retry_s + 0.5)))}
        return told | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, self.headers)


_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error",
          503: "service_unavailable_error", 504: "timeout_error"}  # fmt: skip


def kind_of(status: int) -> str:
    return _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")


def writable(text: str) -> str:
    """The text without halves of surrogate pairs, which UTF-8 cannot write."""
    return text.encode("utf-8", "replace").decode("utf-8")


def no_such_model(name: str) -> ApiError:
    """The same for models that do not exist and for those that the key does not reach."""
    return ApiError(
        404, f"the model {name[:128]!r} does not exist, or this key does not reach it; see /v1/models", param="model",
        code="model_not_found",
    )  # fmt: skip
