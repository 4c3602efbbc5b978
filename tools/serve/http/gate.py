"""The gate in front of the application: the key, the body's size and time, the number of requests, slow readers."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
from collections.abc import Mapping
from contextlib import ExitStack
from http import HTTPStatus

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from piecegraph.tools.serve.endpoints.generation import EXIT_STACK
from piecegraph.tools.serve.endpoints.service import Service
from piecegraph.tools.serve.protocol.error_replies import ApiError

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health", "/ready"})
"""Paths that need no key and have no bound: probes ask for them."""

HANDLERS = frozenset(
    {
        *("/health", "/ready", "/metrics", "/version", "/tokenize", "/detokenize"),
        *("/v1/models", "/v1/chat/completions", "/v1/completions", "/v1/embeddings"),
        *("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
        *("/sleep", "/wake_up", "/is_sleeping"),
    }
)
"""Paths that metrics name; all others are counted as one, or a client could make any number of them."""


class Gate:
    """An ASGI application around another one. It reads a request's body whole before it passes the request on."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service
        self._key_digests = [_digest(key.encode()) for key in service.settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        service, status = self._service, 0

        async def send_in_time(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            async with asyncio.timeout(service.settings.send_timeout_s):
                await send(message)

        service.num_requests += 1
        try:
            with ExitStack() as stack:
                scope[EXIT_STACK] = stack
                try:
                    received = await self._pass(scope, receive)
                except ApiError as error:
                    await error.response()(scope, receive, send_in_time)
                else:
                    if received is not None:
                        await self._app(scope, received, send_in_time)
        except TimeoutError:
            logger.warning("a client read nothing for %g s; its request ends", service.settings.send_timeout_s)
        finally:
            service.num_requests -= 1
            path = scope["path"] if scope["path"] in HANDLERS else "other"
            service.metrics.count_http(scope["method"] if scope["method"] in _METHODS else "other", status, path)

    async def _pass(self, scope: Scope, receive: Receive) -> Receive | None:
        """Return a `receive` with the request's whole body; None if the client has gone. Raises `ApiError`."""
        if scope["path"] in OPEN_PATHS:
            return receive
        headers = {name.lower(): value for name, value in scope["headers"]}
        self._check_key(headers)
        settings = self._service.settings
        if self._service.num_requests > settings.max_concurrent_requests:
            raise ApiError(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"{settings.max_concurrent_requests} requests are in progress; try again later.",
                code="too_many_requests",
            )
        body = await self._body(headers, receive)
        if body is None:
            return None
        is_passed = False

        async def received() -> Message:
            nonlocal is_passed
            if is_passed:
                return await receive()
            is_passed = True
            return {"type": "http.request", "body": body, "more_body": False}

        return received

    def _check_key(self, headers: Mapping[bytes, bytes]) -> None:
        """Raise `ApiError` unless the request has one of the keys; all are compared, each in constant time."""
        if not self._key_digests:
            return
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        found = _digest(key.strip())
        matches = [hmac.compare_digest(found, digest) for digest in self._key_digests]
        if scheme.lower() != b"bearer" or not any(matches):
            raise ApiError(
                HTTPStatus.UNAUTHORIZED,
                "the API key is missing or wrong; send it as `Authorization: Bearer KEY`.",
                code="invalid_api_key",
            )

    async def _body(self, headers: Mapping[bytes, bytes], receive: Receive) -> bytes | None:
        """Return the whole body; None if the client goes away before it has come. Raises `ApiError`."""
        settings = self._service.settings
        declared = headers.get(b"content-length", b"0")
        if declared.isdigit() and int(declared[:20]) > settings.max_body_bytes:
            raise _too_large(settings.max_body_bytes)
        parts, size = [], 0
        try:
            async with asyncio.timeout(settings.body_timeout_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    part = message.get("body", b"")
                    size += len(part)
                    if size > settings.max_body_bytes:
                        raise _too_large(settings.max_body_bytes)
                    parts.append(part)
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            raise ApiError(
                HTTPStatus.REQUEST_TIMEOUT, f"the body did not arrive within {settings.body_timeout_s:g} s."
            ) from None


_METHODS = frozenset({"GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH"})


def _too_large(limit: int) -> ApiError:
    return ApiError(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body has more than {limit} bytes.", code="body_too_large"
    )


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
