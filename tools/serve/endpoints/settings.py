"""The settings of a server, which nothing changes once it runs."""

from __future__ import annotations

from dataclasses import dataclass, fields

from piecegraph.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """The settings of a server; its model has its own. Raises `ConfigError` for a value out of range.

    The names of what vLLM's server has too are vLLM's.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    """The port; 0: any that is free."""
    served_model_name: tuple[str, ...] = ()
    """The names that requests may call the model by, the first in replies; empty: as it was given."""
    api_keys: tuple[str, ...] = ()
    """The keys of which a request must have one; empty: none is needed."""
    max_body_bytes: int = 8 << 20
    """The largest body of a request."""
    header_timeout_s: float = 30.0
    """The longest time in which the headers of a request must arrive, from the start of its connection on."""
    body_timeout_s: float = 30.0
    """The longest time in which a body must arrive."""
    send_timeout_s: float = 60.0
    """The longest time for which a client may read nothing of what is sent to it."""
    max_concurrent_requests: int = 2048
    """The most requests that are read, run or answered at once; more get status 429."""
    max_num_queued_reqs: int = 1024
    """The most completions that wait besides the `max_num_seqs` that run; more get status 429."""
    max_wait_s: float | None = 300.0
    """The longest time until a request first runs, after which it gets status 503; None: no limit."""
    shutdown_timeout_s: float | None = None
    """The longest time for which a shutdown waits for running requests; None: until they end."""
    trust_request_chat_template: bool = False
    """Whether a request may bring its own chat template, which is code, although sandboxed."""
    lora_modules: tuple[tuple[str, str], ...] = ()
    """The names by which requests may call LoRA adapters, each with its folder."""
    allow_runtime_lora_updating: bool = False
    """Whether requests may load adapters, from any folder that the server can read, and unload them."""
    enable_sleep_mode: bool = False
    """Whether requests may give the memory of an idle engine back (`/sleep`) and restore it (`/wake_up`)."""
    access_log: bool = False
    """Whether every request is logged on stderr."""

    def __post_init__(self) -> None:
        if not 0 <= self.port < 65536:
            raise ConfigError(f"port={self.port}; it must be from 0 (any that is free) to 65535.")
        for field in fields(self):
            value = getattr(self, field.name)
            is_count = field.name.startswith("max_") or field.name.endswith("_s")
            least = 0 if field.name in ("max_num_queued_reqs", "shutdown_timeout_s") else None
            if is_count and value is not None and (value < 0 or (value == 0 and least is None)):
                wanted = "0 or more" if least == 0 else "above 0"
                raise ConfigError(f"{field.name}={value}; it must be {wanted}.")

    @property
    def is_open_to_others(self) -> bool:
        """Return whether other machines may reach the server."""
        return self.host not in ("127.0.0.1", "localhost", "::1") and not self.host.startswith("127.")
