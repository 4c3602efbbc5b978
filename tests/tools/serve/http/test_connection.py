"""Connections of clients that send nothing, too much, nonsense or half of a request, and of those that read nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from piecegraph.tools.serve.http.connection import Connection

BIG = 32 << 20
"""Bytes of a reply that no socket's buffers hold."""

Use = Callable[["Client"], Awaitable[None]]


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the number of bytes of the body, or with `BIG` bytes for `/big`."""
    size, is_complete = 0, False
    while not is_complete:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        size += len(message["body"])
        is_complete = not message.get("more_body", False)
    body = bytes(BIG) if scope["path"] == "/big" else str(size).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


class Client:
    """A server of `app`, and sockets that are connected with it."""

    def __init__(self, server: uvicorn.Server, port: int) -> None:
        self.server, self._port = server, port

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self._port)

    async def send(self, data: bytes, *, half_closes: bool = False) -> bytes:
        """Return everything that comes back for some bytes until the connection ends."""
        reader, writer = await self.connect()
        writer.write(data)
        if half_closes:
            writer.write_eof()
        found = await reader.read()
        writer.close()
        return found

    async def until_unconnected(self) -> None:
        while self.server.server_state.connections:
            await asyncio.sleep(0.01)


def serve(use: Use, *, header_timeout_s: float = 60, send_timeout_s: float = 60) -> None:
    """Have `use` talk with a server; it answers an ordinary request afterwards, too."""

    async def run() -> None:
        protocol: Any = partial(Connection, header_timeout_s=header_timeout_s, send_timeout_s=send_timeout_s)
        config = uvicorn.Config(app, http=protocol, lifespan="off", log_config=None, ws="none", timeout_keep_alive=60)
        server = uvicorn.Server(config)
        listening = socket.create_server(("127.0.0.1", 0))
        serving = asyncio.create_task(server._serve([listening]))
        try:
            client = Client(server, listening.getsockname()[1])
            async with asyncio.timeout(60):
                while not server.started:
                    await asyncio.sleep(0.01)
                await use(client)
                answer = await client.send(
                    b"POST / HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: 2\r\n\r\nab"
                )
                assert answer.startswith(b"HTTP/1.1 200") and answer.endswith(b"\r\n\r\n2")
        finally:
            server.should_exit = server.force_exit = True
            await serving
            listening.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"POST / HTTP/1.1\r\nHost: a\r\n", id="half of the headers"),
        pytest.param(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\nPOST / HT", id="behind a request"),
    ],
)
def test_a_client_that_sends_no_request_is_cut_off(sent: bytes) -> None:
    async def use(client: Client) -> None:
        found = await client.send(sent)
        assert found.count(b"HTTP/1.1 200") == sent.count(b"\r\n\r\n")
        await client.until_unconnected()

    serve(use, header_timeout_s=0.1)


def test_headers_that_come_byte_by_byte_are_cut_off() -> None:
    """What arrives now and then gives a client no more time."""

    async def use(client: Client) -> None:
        reader, writer = await client.connect()
        with contextlib.suppress(ConnectionError):
            while not reader.at_eof():
                writer.write(b"X")
                await writer.drain()
                await asyncio.sleep(0.02)
        await client.until_unconnected()

    serve(use, header_timeout_s=0.1)


def test_a_body_that_is_awaited_has_the_applications_time() -> None:
    async def use(client: Client) -> None:
        reader, writer = await client.connect()
        writer.write(b"POST / HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: 3\r\n\r\n")
        for _ in range(3):
            await asyncio.sleep(0.1)
            writer.write(b"x")
        assert (await reader.read()).endswith(b"\r\n\r\n3")
        writer.close()

    serve(use, header_timeout_s=0.1)


@pytest.mark.parametrize("end", [b"", b"Connection: close\r\n"], ids=["stays", "closes"])
def test_a_client_that_reads_nothing_of_a_whole_reply_is_cut_off(end: bytes) -> None:
    """The application has sent everything, so nobody but the connection waits for it."""

    async def use(client: Client) -> None:
        _, writer = await client.connect()
        writer.write(b"GET /big HTTP/1.1\r\nHost: a\r\n" + end + b"\r\n")
        while not client.server.server_state.connections:
            await asyncio.sleep(0.01)
        await client.until_unconnected()
        writer.close()

    serve(use, send_timeout_s=0.2)


def test_a_client_that_reads_slowly_gets_everything() -> None:
    async def use(client: Client) -> None:
        reader, writer = await client.connect()
        writer.write(b"GET /big HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        size = 0
        while part := await reader.read(4 << 20):
            size += len(part)
            await asyncio.sleep(0.001)
        assert size > BIG
        writer.close()

    serve(use, send_timeout_s=5)


NO_REQUESTS = {
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "no HTTP": b"HELLO\r\n\r\n",
    "long header": b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 200_000 + b"\r\n\r\n",
    "long path": b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
    "no ASCII": b"GET /\xff HTTP/1.1\r\nHost: a\r\n\r\n",
    "no length": b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: x\r\n\r\n",
    "negative length": b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
    "bad chunk": b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    "no host": b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
}


def test_what_is_no_request_is_refused_in_the_apis_shape() -> None:
    async def use(client: Client) -> None:
        for name, sent in NO_REQUESTS.items():
            with contextlib.suppress(ConnectionError):  # it may be closed before all was sent
                head, _, body = (await client.send(sent)).partition(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 400"), (name, head)
                assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}, name
        await client.until_unconnected()

    serve(use)


def test_nonsense_behind_an_answered_request_ends_the_connection() -> None:
    async def use(client: Client) -> None:
        found = await client.send(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nabHELLO\r\n\r\n")
        assert found.startswith(b"HTTP/1.1 200")

    serve(use)


def test_chunks_old_versions_and_an_expected_continue() -> None:
    async def use(client: Client) -> None:
        chunks = b"3\r\nabc\r\n1;x=y\r\nd\r\n0\r\nTrailer: x\r\n\r\n"
        head = b"POST / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n"
        assert (await client.send(head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks)).endswith(b"\r\n\r\n4")
        old = await client.send(b"POST / HTTP/1.0\r\nContent-Length: 3\r\n\r\nabc")
        assert old.startswith(b"HTTP/1.1 200") and old.endswith(b"\r\n\r\n3")
        expecting = await client.send(head + b"Expect: 100-continue\r\nContent-Length: 1\r\n\r\na")
        assert b"HTTP/1.1 200" in expecting and expecting.endswith(b"\r\n\r\n1")

    serve(use)


def test_a_client_that_closes_its_half_counts_as_gone() -> None:
    """In the middle of the headers, of the body and behind a request; no connection is left."""

    async def use(client: Client) -> None:
        for sent in (
            b"POST / HT",
            b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nabc",
            b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc",
        ):
            await client.send(sent, half_closes=True)
        await client.until_unconnected()

    serve(use)
