"""Requests to a server, with errors as one sentence."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from http.client import HTTPException
from typing import Any

from uncast.doctor.errors import LiveError

TIMEOUT_S = 10.0


class HttpError(LiveError):
    """An answer other than 2xx. `status` and the body's beginning."""

    def __init__(self, url: str, status: int, body: str) -> None:
        super().__init__(f"{url} answered {status}: {body.strip()[:300] or 'nothing'}")
        self.status, self.body = status, body


def get(url: str, api_key: str | None = None) -> bytes:
    """The body of a GET.

    Raises:
        HttpError: an answer other than 2xx.
        LiveError: no answer.
    """
    return _open(url, None, _headers(api_key), "GET", TIMEOUT_S)


def post(url: str, body: dict[str, Any] | None, api_key: str | None = None, timeout_s: float = TIMEOUT_S) -> bytes:
    """The body of a POST of JSON (of nothing for None); errors as `get`."""
    data = b"" if body is None else json.dumps(body).encode()
    headers = _headers(api_key) | ({} if body is None else {"Content-Type": "application/json"})
    return _open(url, data, headers, "POST", timeout_s)


def _headers(api_key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def _open(url: str, data: bytes | None, headers: dict[str, str], method: str, timeout_s: float) -> bytes:
    if not url.startswith(("http://", "https://")):
        raise LiveError(f"{url} is no address: it starts with http:// or https://")
    try:
        request = urllib.request.Request(url, data=data, headers=headers, method=method)
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return bytes(answer.read())
    except urllib.error.HTTPError as error:
        raise HttpError(url, error.code, error.read(2000).decode("utf-8", errors="replace")) from None
    except (OSError, ValueError, HTTPException) as error:
        raise LiveError(f"{url} does not answer: {getattr(error, 'reason', error)}") from None
