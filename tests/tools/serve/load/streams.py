"""A locustfile: users who stream completions without a pause, and compare each with its offline answer."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import requests
from locust import User, events, task


@events.init_command_line_parser.add_listener  # type: ignore[untyped-decorator]  # locust has no types
def add_arguments(parser: Any) -> None:
    parser.add_argument("--cases", help="JSON list of {prompt, expected}, both of token ids")


@events.test_start.add_listener  # type: ignore[untyped-decorator]
def read_cases(environment: Any, **others: object) -> None:
    environment.cases = json.loads(Path(environment.parsed_options.cases).read_text())


class Reader(User):
    """One connection after another, of which some close before their answers end."""

    @task
    def stream(self) -> None:
        case = random.choice(self.environment.cases)
        leaves = random.random() < 0.05
        body = {
            "prompt": case["prompt"],
            "max_tokens": len(case["expected"]),
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        began, tokens, error, first_s = time.perf_counter(), [], None, 0.0
        try:
            with requests.post(f"{self.host}/v1/completions", json=body, stream=True, timeout=300) as reply:
                reply.raise_for_status()
                for line in reply.iter_lines():
                    if not line.startswith(b"data: {"):
                        continue
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise ValueError(event["error"]["message"])
                    first_s = first_s or time.perf_counter() - began
                    tokens += event["choices"][0]["token_ids"]
                    if leaves and len(tokens) > len(case["expected"]) // 2:
                        break
            wanted = case["expected"][: len(tokens)] if leaves else case["expected"]
            if tokens != wanted:
                raise ValueError(f"tokens differ from the offline answer: {tokens} and {wanted}")
        except Exception as failure:  # counted by locust, which goes on
            error = failure
        fire = self.environment.events.request.fire
        end_s = time.perf_counter() - began
        for name, seconds in (("first token", first_s), ("left early" if leaves else "stream", end_s)):
            fire(
                request_type="SSE", name=name, response_time=1e3 * seconds, response_length=len(tokens), exception=error
            )
