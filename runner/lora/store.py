"""`AdapterStore`, the adapters that an engine has loaded, on the CPU."""

from __future__ import annotations

import threading
from collections import OrderedDict

import torch

from piecegraph.errors import CheckpointError, RequestError
from piecegraph.runner.lora.adapter import LoadedAdapter, read_adapter
from piecegraph.runner.lora.base_weights import FindBases
from piecegraph.runner.lora.modules import AdaptedModules
from piecegraph.runner.lora.request import LoRARequest


class AdapterStore:
    """The loaded adapters by number, at most `capacity`, of which the least recently used goes first; pinned ones stay.

    An adapter that has gone is read again when a request names it. Requests hold the adapters that they run with, so
    neither removal nor eviction touches a request that was added before. Any thread may call any method: files are read
    outside the lock, so a thread that reads an adapter delays nobody.
    """

    def __init__(self, modules: AdaptedModules, *, capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        self._modules = modules
        self._capacity = capacity
        self._dtype = dtype
        self._locks_pages = device.type == "cuda"  # so that a copy to the device does not wait
        self._lock = threading.Lock()
        self._adapters: OrderedDict[int, LoadedAdapter] = OrderedDict()  # the least recently used first
        self._pinned: set[int] = set()
        self._digests_to_pin: dict[int, bytes] = {}  # by number; see `pin_with_digest`
        self.pinned_digests: set[bytes] = set()
        """The digests of pinned adapters, which keep their slots on the device, too."""
        self.bases: FindBases | None = None
        """Where to find the model's own weights; None: in this process alone."""

    @property
    def modules(self) -> AdaptedModules:
        """The modules that adapters may change."""
        return self._modules

    def add(self, request: LoRARequest) -> LoadedAdapter:
        """Return the adapter of a request, read from its folder unless it is loaded.

        Raises what `read_adapter` raises, with nothing changed; `RequestError` if the number belongs to a loaded
        adapter from another folder, or if all loaded adapters are pinned and there is room for no other.
        """
        found = self._find(request)
        if found is not None:
            return found
        made = read_adapter(request, self._modules, self._dtype, pinned=self._locks_pages, bases=self.bases)
        with self._lock:
            if request.lora_int_id not in self._adapters:
                self._make_room()
                self._adapters[request.lora_int_id] = made
            return self._adapters[request.lora_int_id]

    def add_with_digest(self, request: LoRARequest, digest: bytes) -> LoadedAdapter:
        """Return the adapter of a request that another process has read, from files with the same contents.

        A loaded adapter of the same number with other contents is replaced. Raises what `add` raises, and
        `CheckpointError` if the files have another digest here; no adapter of that number is loaded then. Neither ends
        a pin by `pin_with_digest`: a request whose digest is not the pinned one was read before the adapter was
        replaced, and raises `CheckpointError`.
        """
        number = request.lora_int_id
        with self._lock:
            to_pin = self._digests_to_pin.get(number)
            if to_pin is not None and to_pin != digest:
                raise CheckpointError(
                    f"adapter {number}, {request.lora_name!r}, was replaced while the request was on its way: its "
                    f"digest was {digest.hex()[:16]}, and is {to_pin.hex()[:16]} now. Send the request again."
                )
            found = self._adapters.get(number)
            if found is not None and (found.request.lora_path, found.digest) != (request.lora_path, digest):
                self._unload(number)
        made = self.add(request)
        if made.digest != digest:
            with self._lock:
                self._unload(number)
            raise CheckpointError(
                f"the files of the adapter {request.lora_name!r} in {request.lora_path} are not those that were "
                f"checked: their digest was {digest.hex()[:16]}, and is {made.digest.hex()[:16]} where the request "
                f"runs. If they were replaced, remove adapter {number}, so that all engines read it again; if the "
                "folder is another one on that machine, copy it there."
            )
        if to_pin is not None:
            self.pin(number)
        return made

    def remove(self, lora_int_id: int) -> bool:
        """Drop an adapter, pinned or not, and return whether it was loaded. Requests that run with it go on."""
        with self._lock:
            return self._remove(lora_int_id)

    def pin(self, lora_int_id: int) -> bool:
        """Keep an adapter until it is removed; return whether it is loaded.

        Raises `RequestError` if no slot on the device would be left for an adapter that is not pinned.
        """
        with self._lock:
            if lora_int_id not in self._adapters:
                return False
            digests = self.pinned_digests | {self._adapters[lora_int_id].digest}
            most = self._modules.options.num_slots - 1
            if len(digests) > most:
                raise RequestError(
                    f"adapter {lora_int_id} cannot be pinned: max_loras={most + 1} leaves room for {most} pinned "
                    "ones, so that others can run. Raise max_loras, or remove a pinned adapter."
                )
            self._keep(lora_int_id)
            return True

    def pin_with_digest(self, request: LoRARequest, digest: bytes) -> None:
        """Keep the adapter that another process has read and pinned, until it is removed.

        Raises what `add_with_digest` and `pin` raise, for instance because the files were replaced since. The pin is
        not lost then: the first `add_with_digest` that can load the adapter pins it.
        """
        with self._lock:
            self._digests_to_pin[request.lora_int_id] = digest
        self.add_with_digest(request, digest)

    def loaded(self) -> dict[int, LoRARequest]:
        """Return the requests of all loaded adapters by number."""
        with self._lock:
            return {number: adapter.request for number, adapter in self._adapters.items()}

    def _find(self, request: LoRARequest) -> LoadedAdapter | None:
        with self._lock:
            found = self._adapters.get(request.lora_int_id)
            if found is None:
                return None
            if found.request.lora_path != request.lora_path:
                raise RequestError(
                    f"lora_int_id={request.lora_int_id} is the adapter {found.request.lora_name!r} from "
                    f"{found.request.lora_path!r}, not one from {request.lora_path!r}; give each adapter its own "
                    "number, or remove that one first."
                )
            self._adapters.move_to_end(request.lora_int_id)
            return found

    def _make_room(self) -> None:
        while len(self._adapters) >= self._capacity:
            victim = next((number for number in self._adapters if number not in self._pinned), None)
            if victim is None:
                raise RequestError(
                    f"all {len(self._adapters)} loaded adapters are pinned, and max_cpu_loras={self._capacity}; remove "
                    "one, or raise it."
                )
            self._drop(victim)

    def _remove(self, number: int) -> bool:
        """Do what `remove` does; called with the lock."""
        self._digests_to_pin.pop(number, None)
        return self._unload(number)

    def _unload(self, number: int) -> bool:
        """Drop an adapter and return whether it was loaded; called with the lock. Forgets no digest to pin."""
        was_loaded = number in self._adapters
        if was_loaded:
            self._drop(number)
        self._pinned.discard(number)
        self._update_digests()
        return was_loaded

    def _keep(self, number: int) -> None:
        """Pin a loaded adapter; called with the lock."""
        self._pinned.add(number)
        self._update_digests()

    def _drop(self, number: int) -> None:
        """Forget a loaded adapter; called with the lock."""
        del self._adapters[number]

    def _update_digests(self) -> None:
        """Make `pinned_digests`, which others hold, those of the pinned adapters."""
        digests = {self._adapters[number].digest for number in self._pinned}
        self.pinned_digests &= digests
        self.pinned_digests |= digests
