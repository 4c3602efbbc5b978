"""The server's life: listen, serve, drain, end."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from piecegraph.errors import ConfigError
from piecegraph.tools.serve.endpoints.generation_service import GenerationService
from piecegraph.tools.serve.endpoints.pooling_service import PoolingService
from piecegraph.tools.serve.endpoints.service import Service
from piecegraph.tools.serve.endpoints.settings import ServeSettings
from piecegraph.tools.serve.http.app import make_app
from piecegraph.tools.serve.http.connection import Connection

if TYPE_CHECKING:
    from piecegraph.runner.llm import LLM

logger = logging.getLogger(__name__)

FLUSH_S = 5
"""Seconds that connections have to take what was sent to them, once no request runs."""

STOP_S = 10.0
"""Seconds that the engine's thread has to end its step."""

ENDED_BY_SIGNAL = 128
"""The exit code of a process that a signal ends, less the signal's number."""


class _Server(uvicorn.Server):
    """uvicorn's server with our signals: the first drains, the second ends at once."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None
        self.ended_by: int | None = None  # the signal that has ended the server at once

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {one: signal.signal(one, self.handle_exit) for one in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for one, handler in before.items():
                signal.signal(one, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._service.is_draining:
            self.ended_by = sig
            self.should_exit = self.force_exit = True
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._end_connections)
            return
        self._service.is_draining = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._start_drain)

    def fail(self, error: BaseException) -> None:
        """End the server because its engine has failed; called in any thread."""
        self._service.is_draining = True
        self.should_exit = True

    def _end_connections(self) -> None:
        for task in tuple(self.server_state.tasks):
            task.cancel()
        for connection in tuple(self.server_state.connections):
            connection.transport.abort()

    def _start_drain(self) -> None:
        logger.info("no new requests; %d %s run to their ends", self._service.num_open, self._service.unit)
        self._draining = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        """Let the running requests end, then have uvicorn close its connections."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._service.settings.shutdown_timeout_s):
                while self._service.num_open:
                    await asyncio.sleep(0.02)
        self.should_exit = True


def listen(settings: ServeSettings) -> socket.socket:
    """Return a socket that listens on the settings' address. Raises `ConfigError` if there is no such address."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind)
    except OSError as error:
        raise ConfigError(f"host={settings.host!r} is no address of this machine: {error}.") from error
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(2048)
    except OSError as error:
        listening.close()
        raise ConfigError(
            f"port={settings.port} of {settings.host} cannot be listened on: {error.strerror}. Choose another, or 0 "
            "for any that is free."
        ) from error
    return listening


def serve(
    llm: LLM, settings: ServeSettings, listening: socket.socket, *, on_start: Callable[[str], None] = lambda url: None
) -> int:
    """Serve a model until a signal comes, and return the exit code; `on_start` is called with the address.

    The first SIGTERM or SIGINT drains: running requests end, new ones get status 503. The second ends at once.
    """
    failures: list[BaseException] = []
    servers: list[_Server] = []

    def on_failure(error: BaseException) -> None:
        failures.append(error)
        for server in servers:
            server.fail(error)

    kind = GenerationService if llm.pooling_task is None else PoolingService
    service = kind(llm, settings, on_failure=on_failure)
    config = uvicorn.Config(
        make_app(service),
        http=functools.partial(  # type: ignore[arg-type]  # it is called like a class
            Connection, header_timeout_s=settings.header_timeout_s, send_timeout_s=settings.send_timeout_s
        ),
        log_config=None,
        access_log=settings.access_log,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=FLUSH_S,
        loop="asyncio",
        ws="none",
    )
    server = _Server(config, service)
    servers.append(server)
    service.thread.start()
    host, port = listening.getsockname()[:2]
    on_start(f"http://{f'[{host}]' if ':' in host else host}:{port}")
    try:
        server.run(sockets=[listening])
    finally:
        has_stopped = service.close(STOP_S)
    code = 1 if failures else 0 if server.ended_by is None else ENDED_BY_SIGNAL + server.ended_by
    if not has_stopped:  # a step that does not end: nothing may be freed under it
        logger.error("the engine's step does not end; the process ends without it")
        os._exit(code or 1)
    return code
