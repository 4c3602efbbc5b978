"""`Connection`, uvicorn's HTTP connection with bounds on how long its client may do nothing."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from piecegraph.tools.serve.protocol.error_replies import ApiError, json_text


class Connection(H11Protocol):
    """An HTTP connection that ends if no request arrives in time, or if what was sent to it is never read.

    uvicorn bounds neither: a client that sends a line of a header now and then, or asks for much and reads nothing,
    would keep its connection for as long as it likes. A client that closes its half of the connection counts as gone,
    as with uvicorn. Errors of the protocol have the API's shape.
    """

    def __init__(self, *arguments: Any, header_timeout_s: float, send_timeout_s: float, **options: Any) -> None:
        """`header_timeout_s`: the longest time in which the headers of a request arrive, counted from the start of the
        connection or the end of the request before. `send_timeout_s`: the longest time for which a client may read
        nothing of what is sent to it."""
        super().__init__(*arguments, **options)
        self._header_timeout_s, self._send_timeout_s = header_timeout_s, send_timeout_s
        self._header_timer: asyncio.TimerHandle | None = None
        self._read_timer: asyncio.TimerHandle | None = None
        self._has_resumed = False  # the client has read much since the timer was set

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        super().connection_made(transport)
        self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._header_timer, self._read_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._has_request and self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def on_response_complete(self) -> None:
        super().on_response_complete()  # which begins the next request if that has come already
        if not self._has_request:
            self._expect_request()
        self._expect_reading()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._has_resumed = True

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are no HTTP request, and close the connection."""
        if self.cycle is not None and self.cycle.response_started:
            self.transport.abort()  # they are of a request that has been answered, or half of it
            return
        error = ApiError(HTTPStatus.BAD_REQUEST, "these bytes are no HTTP request, or its headers are too long.")
        body = json_text(error.body()).encode()
        length = (b"content-length", b"%d" % len(body))
        headers = [(b"content-type", b"application/json"), length, (b"connection", b"close")]
        for event in (
            h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
        self._expect_reading()

    @property
    def _has_request(self) -> bool:
        """Whether the headers of a request have come that is not yet answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def _expect_request(self) -> None:
        if self._header_timer is None and not self.transport.is_closing():
            self._header_timer = self.loop.call_later(self._header_timeout_s, self.transport.abort)

    def _expect_reading(self) -> None:
        """Watch whether the client reads what waits to be sent, unless that is done already."""
        num_unsent_bytes = self.transport.get_write_buffer_size()
        if num_unsent_bytes and self._read_timer is None:
            self._has_resumed = False
            self._read_timer = self.loop.call_later(self._send_timeout_s, self._end_unless_read, num_unsent_bytes)

    def _end_unless_read(self, num_unsent_before: int) -> None:
        """End the connection if nothing was read since there were `num_unsent_before` bytes to send."""
        self._read_timer = None
        if not self._has_resumed and self.transport.get_write_buffer_size() >= num_unsent_before:
            self.transport.abort()
        else:
            self._expect_reading()
