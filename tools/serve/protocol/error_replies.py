"""Errors in the shape of the OpenAI API, with the status of each kind."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from starlette.responses import Response

from piecegraph.errors import shorten

RETRY_AFTER_S = 1
"""The value of Retry-After: requests end all the time, so a place may be free soon."""

MOST_CHARACTERS = 2000
"""The most characters of an error's message."""

_TYPES = {
    HTTPStatus.BAD_REQUEST: "invalid_request_error",
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "service_unavailable_error",
    HTTPStatus.INTERNAL_SERVER_ERROR: "server_error",
}

_NAMED = re.compile(
    r"(\w+)(?:\[[^]]*\])?=|(?:unknown field|unknown parameter|.*sampling parameter) '(\w+)'|(\w+) is not available"
)
"""The beginnings of messages that name the field."""


class ApiError(Exception):
    """A refusal with its status, for the client."""

    def __init__(self, status: HTTPStatus, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.message = shorten(message, MOST_CHARACTERS)  # it may quote what was sent

    def body(self) -> dict[str, Any]:
        """Return the error as the API has it."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """Return the error as a response."""
        headers = {}
        if self.status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
            headers["Retry-After"] = str(RETRY_AFTER_S)
        if self.status == HTTPStatus.UNAUTHORIZED:
            headers["WWW-Authenticate"] = "Bearer"
        return json_response(self.body(), self.status, headers)


def bad_request(message: str, *, code: str | None = None) -> ApiError:
    """Return the error for a request that cannot be served; `param` is the field that the message begins with."""
    named = _NAMED.match(message)
    param = next((name for name in named.groups() if name is not None), None) if named else None
    return ApiError(HTTPStatus.BAD_REQUEST, message, param=param, code=code)


def invalid_body(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """Return the error for a body that pydantic has refused."""
    first = errors[0] if errors else {}
    place = [str(part) for part in first.get("loc", ()) if part != "body"]
    text = str(first.get("msg", "the body is malformed")).removeprefix("Value error, ")
    if first.get("type") == "json_invalid":
        return ApiError(HTTPStatus.BAD_REQUEST, f"the body is not JSON: {first.get('ctx', {}).get('error', text)}")
    if not place:
        return bad_request(shorten(text, 600))
    found = "" if first.get("type") == "missing" else f" (found {shorten(repr(first.get('input')))})"
    return ApiError(HTTPStatus.BAD_REQUEST, f"{'.'.join(place)}: {text}{found}.", param=place[0])


def json_text(value: Any) -> str:
    """Return JSON of `value` in which half of a surrogate pair, which no encoding has, is replaced."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def json_response(value: Any, status: HTTPStatus = HTTPStatus.OK, headers: Mapping[str, str] | None = None) -> Response:
    """Return a response with `value` as JSON."""
    return Response(json_text(value), int(status), dict(headers or {}), media_type="application/json")
