"""The program of an engine in a process of its own: it loads, then steps as long as it has requests.

Note [the boundary of an engine]: a request travels to the engine once, as tokens and parameters; what travels back each
step are the new tokens, texts and log probabilities of its requests, and the scheduler's counters. Prompts are checked
and tokenized at the front door, and text is made in the engine's process, which knows stop strings and grammars. Ranks
of an engine are processes of the engine's, so the front door reaches them only through it.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from piecegraph.errors import PiecegraphError, WorkerError
from piecegraph.runner.common.outputs import CompletionOutput, RequestOutput
from piecegraph.runner.distributed.child_process import pickled
from piecegraph.runner.distributed.child_program import run_child
from piecegraph.runner.distributed.worker import compare_on_all_stages

if TYPE_CHECKING:
    import torch

    from piecegraph.compiler.common.report import CompileReport
    from piecegraph.progress import Phase
    from piecegraph.runner.common.engine_config import EngineConfig
    from piecegraph.runner.common.sampling_params import SamplingParams
    from piecegraph.runner.distributed.protocol import Executor
    from piecegraph.runner.inspect.selfcheck import SelfcheckReport
    from piecegraph.runner.lora.modules import AdaptedModules
    from piecegraph.runner.lora.request import LoRARequest
    from piecegraph.runner.scheduling.scheduler_stats import SchedulerStats
    from piecegraph.runner.startup.loaded import Loaded

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
"""How often an engine says that its process runs."""

LINGER_S = 0.002
"""How long an engine waits for the next call of several before it goes on with its steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What the front door knows of an engine that is ready."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    embedding_size: int | None
    sampling_defaults: Mapping[str, Any]
    dtype: torch.dtype
    notes: tuple[str, ...]
    report: CompileReport
    selfcheck: SelfcheckReport | None
    stats: SchedulerStats
    adapted: AdaptedModules | None  # what adapters are checked by; None: they are not enabled


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRequest:
    """A request on its way to an engine."""

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams  # with a seed; deltas, unless only the final output is read
    prompt: str | None
    priority: int
    cache_salt: str
    prompt_embeds: torch.Tensor | None
    lora_request: LoRARequest | None
    lora_digest: bytes | None  # of the adapter, as the front door has read it
    is_final_only: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StepNews:
    """What travels to the front door after a step."""

    outputs: list[RequestOutput]  # without the prompt, which the front door has
    scheduled: tuple[str, ...]  # requests that were scheduled for the first time
    stats: SchedulerStats
    num_output_tokens: int
    num_forced_tokens: int


class _Channel:
    """The channel to the front door, to which the loop and the heartbeat both write."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, name: str, *values: Any) -> None:
        message = pickled((name, *values), "what the call returns")  # `Connection.send` would share tensors' memory
        with self._lock:
            self._connection.send_bytes(message)

    def start_heartbeat(self) -> None:
        def beat() -> None:
            pause = threading.Event()
            while not pause.wait(HEARTBEAT_S):
                try:
                    self.send("alive")
                except OSError:
                    return

        threading.Thread(target=beat, name="piecegraph heartbeat", daemon=True).start()


class _EngineLoop:
    """An engine that is driven by messages.

    Engines that share experts run each step together. From the first "wake" message on, which all get for each request
    of one of them, an engine without requests takes part in the steps of the others. All sleep at the same time, once
    none has requests and all have had the same messages, so that no message is of a step that is over.
    """

    def __init__(self, connection: Connection, channel: _Channel, executor: Executor, loaded: Loaded) -> None:
        from piecegraph.runner.distributed.lockstep_runner import LeadingLockstepRunner

        self._connection = connection
        self._channel = channel
        self._executor = executor
        self._loaded = loaded
        self._engine = loaded.engine
        self._unscheduled: dict[str, None] = {}  # requests that no step has run
        runner = loaded.runner
        self._lockstep = runner if isinstance(runner, LeadingLockstepRunner) else None
        self._is_awake = False  # whether some engine that this one steps with may have requests

    def run(self) -> None:
        """Step the engine as long as it has requests, and take messages between steps, until told to close."""
        engine = self._engine
        wait_s = 0.0
        while True:
            while not (engine.has_unfinished or self._is_awake) or self._connection.poll(wait_s):
                name, *values = self._next_message()
                if name == "close":
                    return
                wait_s = LINGER_S if self._take(name, values) else 0.0
            wait_s = 0.0
            if engine.has_unfinished:
                self._tell(engine.step())
            else:
                assert self._lockstep is not None, "an engine that steps alone sleeps without requests"
                self._lockstep.run_idle()
                self._is_awake = not self._lockstep.agreement.is_over

    def _next_message(self) -> tuple[Any, ...]:
        """Wait for a message and return it. Raises `WorkerError` if a rank of this engine ends meanwhile."""
        look_s: float | None = 0.0
        while look_s is not None and not self._connection.poll(look_s):
            look_s = self._executor.check_idle()
        message: tuple[Any, ...] = self._connection.recv()
        return message

    def _take(self, name: str, values: list[Any]) -> bool:
        """Do what a message says. Return whether the front door waits for an answer and may have another message."""
        if name == "add":
            self._add(*values)
            return False
        if name == "wake":
            assert self._lockstep is not None, "an engine that steps alone is woken by its requests"
            self._is_awake, self._lockstep.agreement.num_seen = True, *values
            return False
        if name == "remove_lora":
            self._engine.adapters.remove(*values)
            return False
        if name == "pin_lora":
            self._pin_adapter(*values)
            return False
        question, *arguments = values
        answer: Any = None
        if name == "abort":
            (request_id,) = arguments
            output = self._engine.abort(request_id)
            self._unscheduled.pop(request_id, None)
            answer = None if output is None else _without_prompt(output)
        elif name == "call":
            answer = self._executor.collective_rpc(self._loaded, *arguments)
        else:
            assert name == "reset_prefix_cache", name
            self._engine.reset_prefix_cache()
        self._channel.send("result", (question, answer))
        return True

    def _pin_adapter(self, lora_request: LoRARequest, digest: bytes) -> None:
        """Pin an adapter, as the front door has done in its own list."""
        try:
            self._engine.adapters.pin_with_digest(lora_request, digest)
        except PiecegraphError as error:  # its files have changed since; requests with it say so
            logger.warning("the adapter %r is not pinned until it can be read: %s", lora_request.lora_name, error)

    def _add(self, new: NewRequest) -> None:
        try:
            if new.lora_request is not None:
                assert new.lora_digest is not None, "the front door has read it"
                self._engine.adapters.add_with_digest(new.lora_request, new.lora_digest)
            self._engine.add_request(
                new.request_id,
                new.prompt_token_ids,
                new.params,
                prompt=new.prompt,
                priority=new.priority,
                cache_salt=new.cache_salt,
                prompt_embeds=new.prompt_embeds,
                lora_request=new.lora_request,
                is_final_only=new.is_final_only,
            )
        except PiecegraphError as error:  # the front door has checked the same, so it does not wait for this
            self._tell([_refused(new, error)])
        else:
            self._unscheduled[new.request_id] = None

    def _tell(self, outputs: list[RequestOutput]) -> None:
        scheduled = tuple(one for one in self._unscheduled if not self._engine.is_waiting(one))
        for request_id in scheduled:
            del self._unscheduled[request_id]
        engine = self._engine
        if outputs or scheduled:
            news = StepNews(
                outputs=[_without_prompt(output) for output in outputs],
                scheduled=scheduled,
                stats=engine.stats,
                num_output_tokens=engine.num_output_tokens,
                num_forced_tokens=engine.num_forced_tokens,
            )
            self._channel.send("news", news)


def main() -> None:
    """Serve the front door until it says that all is over, or ends."""
    run_child("engine", _serve)


def _serve(connection: Connection, number: int) -> None:
    from piecegraph.runner.clusters.make_executor import make_executor

    config, peers = connection.recv()
    channel = _Channel(connection)
    executor = make_executor(config, peers)
    try:
        try:
            with executor.while_loading():
                loaded = _load(config, channel if number == 0 else None, executor)
        except WorkerError:
            raise  # no refusal: the front door looks for the engine that is the cause
        except PiecegraphError as error:
            channel.send("refused", error)
            return
        compare_on_all_stages(executor, loaded)
        channel.send("ready", _facts(loaded))
        channel.start_heartbeat()
        _EngineLoop(connection, channel, executor, loaded).run()
    finally:
        executor.close()


def _load(config: EngineConfig, channel: _Channel | None, executor: Executor) -> Loaded:
    """Load the engine; the phases go to `channel`."""
    from piecegraph.runner.startup.load_engine import load_engine

    def on_phase(phase: Phase) -> None:
        assert channel is not None
        channel.send("phase", phase)

    return load_engine(config, executor.watched(None if channel is None else on_phase), executor.parallel())


def _facts(loaded: Loaded) -> EngineFacts:
    engine = loaded.engine
    return EngineFacts(
        max_model_len=loaded.max_model_len,
        vocab_size=engine.vocab_size,
        eos_token_ids=engine.eos_token_ids,
        embedding_size=engine.embedding_size,
        sampling_defaults=dict(loaded.sampling_defaults),
        dtype=loaded.model.dtype,
        notes=loaded.notes,
        report=loaded.compiled.report(),
        selfcheck=loaded.selfcheck,
        stats=engine.stats,
        adapted=None if loaded.model.adapted is None else engine.adapters.modules.without_weights(),
    )


def _without_prompt(output: RequestOutput) -> RequestOutput:
    return dataclasses.replace(output, prompt=None, prompt_token_ids=[])


def _refused(new: NewRequest, error: PiecegraphError) -> RequestOutput:
    """Return the final output of a request that the engine did not take."""
    outputs = [
        CompletionOutput(index=index, text="", token_ids=[], finish_reason="error", error=str(error))
        for index in range(new.params.n)
    ]
    return RequestOutput(request_id=new.request_id, prompt=None, prompt_token_ids=[], finished=True, outputs=outputs)


if __name__ == "__main__":
    # Pickles name classes of this module by its full name, so this runs as an imported module too.
    from piecegraph.runner.data_parallel import engine_program

    engine_program.main()
