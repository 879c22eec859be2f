"""A torch.compile backend for tests: it notes the graphs that it compiles, and runs them as they are."""

from functools import cache
from typing import Any

import torch

COUNTING = "counting"
"""Its name for `model.compile`, once `compiled_graphs` was called."""


@cache
def compiled_graphs() -> list[Any]:
    """The graphs that the backend has compiled in this process; a test may clear the list."""
    found: list[Any] = []

    def compile_graph(graph: Any, _: Any) -> Any:
        found.append(graph)
        return graph.forward

    torch._dynamo.register_backend(compile_graph, name=COUNTING)
    return found
