"""The ASGI application: routes, the API key, and errors in OpenAI's format."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from uncast.server import completions
from uncast.server.errors import ApiError
from uncast.server.metrics import CONTENT_TYPE
from uncast.server.openapi import document
from uncast.server.prepare import check_model
from uncast.server.responses import ModelCard, ModelList, ProfileStatus, Status
from uncast.server.state import ServerState
from uncast.server.stream import ClientGone

CLIENT_CLOSED_REQUEST = 499
Handler = Callable[[Request], Awaitable[Response]]


def create_app(state: ServerState) -> Starlette:
    """The application of one server."""
    locked = _lock(state.config.api_key)
    routes = [
        Route("/health", _health, methods=["GET"]),
        Route("/ready", _ready, methods=["GET"]),
        Route("/metrics", _metrics, methods=["GET"]),
        Route("/openapi.json", _openapi, methods=["GET"]),
        Route("/v1/models", locked(_models), methods=["GET"]),
        Route("/v1/models/{model:path}", locked(_model), methods=["GET"]),
        Route("/v1/completions", locked(completions.complete), methods=["POST"]),
        Route("/v1/chat/completions", locked(completions.chat), methods=["POST"]),
        Route("/start_profile", locked(_start_profile), methods=["POST"]),
        Route("/stop_profile", locked(_stop_profile), methods=["POST"]),
    ]
    app = Starlette(
        routes=routes,
        exception_handlers={
            ApiError: _on_api_error,
            HTTPException: _on_http_error,
            ClientGone: _on_client_gone,
            Exception: _on_bug,
        },
        middleware=[Middleware(_CountResponses, state=state)],
    )
    app.router.redirect_slashes = False
    app.state.server = state
    return app


def _lock(key: str | None) -> Callable[[Handler], Handler]:
    """Wraps handlers so that they need the API key, if there is one."""
    if key is None:
        return lambda handler: handler
    wanted = key.encode()

    def locked(handler: Handler) -> Handler:
        async def checked(request: Request) -> Response:
            scheme, _, given = request.headers.get("authorization", "").partition(" ")
            if not hmac.compare_digest(given.encode("latin-1", "replace"), wanted) or scheme.lower() != "bearer":
                raise ApiError(
                    401,
                    "the API key is missing or wrong: send it as 'Authorization: Bearer KEY'",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
            return await handler(request)

        return checked

    return locked


async def _health(request: Request) -> Response:
    failed = _state(request).phase == "failed"
    return _json(Status(status="failed" if failed else "ok"), 503 if failed else 200)


async def _ready(request: Request) -> Response:
    phase: Any = _state(request).phase
    return _json(Status(status=phase), 200 if phase == "ready" else 503)


async def _metrics(request: Request) -> Response:
    return Response(_state(request).metrics.text(), headers={"Content-Type": CONTENT_TYPE})


async def _openapi(request: Request) -> Response:
    return JSONResponse(document(_state(request)))


async def _models(request: Request) -> Response:
    return _json(ModelList(object="list", data=[_card(_state(request))]))


async def _model(request: Request) -> Response:
    state = _state(request)
    check_model(request.path_params["model"], state.config.model_name)
    return _json(_card(state))


async def _start_profile(request: Request) -> Response:
    profiler = _state(request).profiler
    if profiler.possible:
        await asyncio.to_thread(profiler.prepare)
    path = profiler.start()
    return _json(ProfileStatus(status="started", path=str(path)))


async def _stop_profile(request: Request) -> Response:
    path = await asyncio.to_thread(_state(request).profiler.stop)
    return _json(ProfileStatus(status="written", path=str(path)))


def _card(state: ServerState) -> ModelCard:
    served = state.served
    return ModelCard(
        id=state.config.model_name,
        object="model",
        created=state.created,
        owned_by="uncast",
        max_model_len=served.context,
    )


def _state(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state


def _json(answer: Any, status: int = 200) -> Response:
    return Response(answer.model_dump_json(), status_code=status, media_type="application/json")


async def _on_api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        message = f"there is no {request.url.path[:200]!r} here"
    elif error.status_code == 405:
        message = f"{request.method[:20]} is not allowed here"
    else:
        message = error.detail
    return ApiError(error.status_code, message, headers=dict(error.headers or {})).response()


async def _on_client_gone(_: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _on_bug(_: Request, error: Exception) -> Response:
    return ApiError(500, f"the server failed: {type(error).__name__}", code="internal_error").response()


class _CountResponses:
    """Counts answers by route and status."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app, self._state = app, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path", "other")
                self._state.metrics.responses.labels(route, str(message["status"])).inc()
            await send(message)

        await self._app(scope, receive, counted)
