"""Errors in OpenAI's format: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

from starlette.responses import JSONResponse

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    409: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "unavailable_error",
}


class ApiError(Exception):
    """A request that is answered with an error; the message is one sentence.

    Attributes:
        status: the HTTP status.
        param: the field at fault as a dotted path, e.g. `messages.0.role`.
        code: a word for programs, e.g. `context_length_exceeded`.
        headers: extra response headers, e.g. Retry-After.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = headers or {}

    def body(self) -> dict[str, object]:
        """The JSON body."""
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, "invalid_request_error"),
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), status_code=self.status, headers=self.headers)


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400."""
    return ApiError(400, message, param=param, code=code)


def aborted() -> ApiError:
    """The end of a request that is not finished when the grace time after SIGTERM is over."""
    return ApiError(503, "the request was aborted: the server is shutting down", code="aborted")


def draining() -> ApiError:
    """The answer to new requests after SIGTERM."""
    return ApiError(
        503, "the server is shutting down and takes no new requests", code="draining", headers={"Retry-After": "5"}
    )
