"""The paths that give an idle engine's memory back and restore it: `/sleep`, `/wake_up`, `/is_sleeping`."""

from __future__ import annotations

import asyncio
from http import HTTPStatus

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from piecegraph.errors import UsageError, did_you_mean, shorten
from piecegraph.runner.late_start.fast_start import FULL_SPEED
from piecegraph.tools.serve.endpoints.service import Service
from piecegraph.tools.serve.protocol.error_replies import ApiError, bad_request, json_response


def add_sleep(app: FastAPI, service: Service) -> None:
    """Add the routes, with the parameters of vLLM's server. They run in the engine's thread, one at a time.

    What a query has besides is refused: a misspelled `level` would be another sleep than the one that was asked for.
    """
    one_at_a_time = asyncio.Lock()

    @app.post("/sleep", response_model=None)
    async def sleep(request: Request) -> Response:
        level = _level(_query(request, "level"))
        async with one_at_a_time:
            _refuse_unless_idle(service)
            service.is_falling_asleep = True  # from now on no request gets a place
            try:
                freed_bytes = await service.thread.call(lambda: service.llm.sleep(level))
            except UsageError as error:
                raise bad_request(str(error)) from error
            finally:
                service.is_falling_asleep = False
        return json_response({"is_sleeping": True, "freed_bytes": freed_bytes})

    @app.post("/wake_up", response_model=None)
    async def wake_up(request: Request) -> Response:
        tags = _query(request, "tags") or None
        async with one_at_a_time:
            try:
                await service.thread.call(lambda: service.llm.wake_up(tags))
            except UsageError as error:
                raise bad_request(str(error)) from error
        return json_response({"is_sleeping": False})

    @app.get("/is_sleeping", response_model=None)
    async def is_sleeping(request: Request) -> Response:
        _query(request)
        return json_response({"is_sleeping": service.is_asleep})


def _query(request: Request, *names: str) -> list[str]:
    """Return the values of the parameter that a query may have. Raises `ApiError` for any other."""
    for name in request.query_params:
        if name not in names:
            known = did_you_mean(name, names) or " The path takes none."
            raise bad_request(f"unknown parameter {shorten(name)!r}.{known}")
    return [value for name in names for value in request.query_params.getlist(name)]


def _level(values: list[str]) -> int:
    """Return the level that a query names; 1 unless it does. Raises `ApiError` unless it is one number."""
    try:
        (value,) = values or ["1"]
        return int(value)
    except ValueError:
        raise bad_request(f"level={shorten(' and '.join(values))}; it must be one number, 1 or 2.") from None


def _refuse_unless_idle(service: Service) -> None:
    """Raise `ApiError` while requests run, wait or are being tokenized, and before the start is over."""
    if service.num_open:
        message = f"{service.num_open} {service.unit} run or wait; sleep once they are finished."
        raise ApiError(HTTPStatus.CONFLICT, message, code="not_idle")
    start = str(service.llm.start_progress)
    if start != FULL_SPEED:
        message = f"the start is not over ({start}); sleep once /ready says {FULL_SPEED!r}."
        raise ApiError(HTTPStatus.CONFLICT, message, code="starting")
