# For pyright only. The package's own __init__ names all of its models for a type checker, which takes a third of the
# whole check to read; we use their classes as Any. Imports from submodules are checked as usual.
from typing import Any

def __getattr__(name: str) -> Any: ...
