"""A server's loop over `Engine`: clients in their own threads ask, read text as it comes, and may hang up.

    python docs/examples/engine_loop.py [MODEL]

One thread, the one in `serve`, touches the engine; all others send it messages. Requests join and leave a batch
between any two steps. tests/runner/engine/test_engine_loop.py runs all of this.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from queue import SimpleQueue

from piecegraph import LLM, SamplingParams
from piecegraph.errors import RequestError

PROMPTS = ("The capital of France is", "Once upon a time", "To make bread, you need")


@dataclass(frozen=True, eq=False)
class Ask:
    """A client's request. `pieces` gets its text bit by bit, then None, or the error that refused it."""

    request_id: str
    prompt: str
    params: SamplingParams
    pieces: SimpleQueue[str | RequestError | None] = field(default_factory=SimpleQueue)


@dataclass(frozen=True)
class HangUp:
    """A client reads no more; harmless if its request has ended."""

    request_id: str


@dataclass(frozen=True)
class Stop:
    """The server ends, and whatever runs with it."""


Inbox = SimpleQueue[Ask | HangUp | Stop]


def serve(llm: LLM, inbox: Inbox) -> None:
    """Answer what comes in, all requests together, until `Stop`."""
    engine, tokenizer = llm.engine, llm.tokenizer
    assert tokenizer is not None
    asks: dict[str, Ask] = {}
    told: dict[str, int] = {}  # letters of each text that its client has
    try:
        while True:
            while not inbox.empty() or not engine.has_unfinished:  # with nothing to do, wait for a message
                match inbox.get():
                    case Ask() as ask:
                        try:
                            engine.add_request(ask.request_id, tokenizer(ask.prompt)["input_ids"], ask.params)
                        except RequestError as error:
                            ask.pieces.put(error)
                            continue
                        asks[ask.request_id], told[ask.request_id] = ask, 0
                    case HangUp(request_id):
                        engine.abort(request_id)
                        asks.pop(request_id, None)
                    case Stop():
                        return
            for output in engine.step():
                request_id, text = output.request_id, output.outputs[0].text
                if text[told[request_id] :]:
                    asks[request_id].pieces.put(text[told[request_id] :])
                    told[request_id] = len(text)
                if output.finished:
                    asks.pop(request_id).pieces.put(None)
    finally:  # however it ends, nobody waits for more
        for request_id, ask in asks.items():
            engine.abort(request_id)
            ask.pieces.put(None)


def read(ask: Ask) -> Iterator[str]:
    """A client's side: the pieces of its answer. Raises what refused the request."""
    while (piece := ask.pieces.get()) is not None:
        if isinstance(piece, RequestError):
            raise piece
        yield piece


def main() -> None:
    inbox: Inbox = SimpleQueue()
    asks = [Ask(str(i), prompt, SamplingParams(max_tokens=24, seed=i)) for i, prompt in enumerate(PROMPTS)]

    def client(ask: Ask) -> None:
        inbox.put(ask)
        sys.stdout.write(f"{ask.prompt}{''.join(read(ask))}\n")

    with LLM(*sys.argv[1:2]) as llm:
        server = threading.Thread(target=serve, args=(llm, inbox))
        clients = [threading.Thread(target=client, args=(ask,)) for ask in asks]
        for thread in (server, *clients):
            thread.start()
        for thread in clients:
            thread.join()
        inbox.put(Stop())
        server.join()


if __name__ == "__main__":
    main()
