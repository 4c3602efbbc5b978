"""`ServedAdapters`, the LoRA adapters that requests may name as their model."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from http import HTTPStatus
from typing import TYPE_CHECKING

from piecegraph.errors import ConfigError, PiecegraphError, shorten
from piecegraph.runner.lora.request import LoRARequest
from piecegraph.tools.serve.protocol.error_replies import ApiError, bad_request

if TYPE_CHECKING:
    from piecegraph.runner.llm import LLM
    from piecegraph.tools.serve.endpoints.settings import ServeSettings


class ServedAdapters:
    """The adapters by the names that requests call them by. Only the event loop's thread uses this object.

    Files are read by other threads, so neither the loop nor the engine waits for them.
    """

    def __init__(self, llm: LLM, settings: ServeSettings, model_names: tuple[str, ...]) -> None:
        """Read the adapters of `settings.lora_modules`.

        Raises `ConfigError` for a name that is given twice or names the model, and what reading an adapter raises.
        """
        self._llm, self._model_names = llm, model_names
        self._allows_changes = settings.allow_runtime_lora_updating
        self._requests: dict[str, LoRARequest] = {}
        self._num_loaded = 0
        for name, path in settings.lora_modules:
            if name in self._requests or name in model_names:
                raise ConfigError(f"lora_modules has {name!r}, the name of another model; give each a name of its own.")
            request = self._numbered(name, path)
            llm.engine.check_lora(request)
            self._requests[name] = request

    def __contains__(self, name: object) -> bool:
        return name in self._requests

    def __iter__(self) -> Iterator[LoRARequest]:
        return iter(self._requests.values())

    def find(self, name: str) -> LoRARequest | None:
        """Return the adapter of that name; None for any other name."""
        return self._requests.get(name)

    async def ready(self, name: str) -> LoRARequest | None:
        """Return the adapter of that name once it is loaded, which it is unless it was evicted; None for the model."""
        request = self._requests.get(name)
        if request is not None:
            await self._read(request)
        return request

    async def load(self, name: str, path: str) -> None:
        """Read an adapter, which requests may then name. Raises `ApiError`, with nothing changed."""
        self._check_changes()
        if name in self._requests or name in self._model_names:
            raise bad_request(f"lora_name={shorten(name)!r} is served already; unload that adapter first.")
        if not name.isprintable():  # half of a surrogate pair, for one, which no reply could name
            raise bad_request(f"lora_name={shorten(ascii(name))}; it must be of characters that can be printed.")
        request = self._numbered(name, path)
        await self._read(request)
        self._requests.setdefault(name, request)

    def unload(self, name: str) -> None:
        """Drop an adapter; requests that run with it go on. Raises `ApiError` if there is none of that name."""
        self._check_changes()
        request = self._requests.pop(name, None)
        if request is None:
            raise ApiError(HTTPStatus.NOT_FOUND, f"lora_name={shorten(name)!r} is not served.", param="lora_name")
        self._llm.engine.adapters.remove(request.lora_int_id)

    def _numbered(self, name: str, path: str) -> LoRARequest:
        taken = self._llm.engine.adapters.loaded()
        self._num_loaded = next(number for number in itertools.count(self._num_loaded + 1) if number not in taken)
        return LoRARequest(name, self._num_loaded, path)

    async def _read(self, request: LoRARequest) -> None:
        try:
            await asyncio.to_thread(self._llm.engine.check_lora, request)
        except PiecegraphError as error:
            raise bad_request(str(error)) from error

    def _check_changes(self) -> None:
        if not self._allows_changes:
            raise ApiError(
                HTTPStatus.FORBIDDEN,
                "adapters cannot be changed by requests (--allow-runtime-lora-updating allows it).",
            )
