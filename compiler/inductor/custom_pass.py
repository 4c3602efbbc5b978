"""The hook for a pass inside Inductor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

POST_GRAD_OPTION = "post_grad_custom_post_pass"


def custom_graph_pass(function: Callable[[fx.Graph], None], uuid: Any) -> Any:
    """Return a value for `POST_GRAD_OPTION`.

    Inductor calls `function` on its graph after its own passes, and makes `uuid` a part of its cache key. With None it
    caches nothing.
    """
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Call(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            function(graph)

        def uuid(self) -> Any:
            return uuid

    return Call()
