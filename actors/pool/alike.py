"""All actors of a role must compute alike, so that a result does not depend on which of them made it."""

from collections.abc import Mapping

from protocol.errors import InputError


def require_same_facts(first: Mapping[str, str], other: Mapping[str, str], *, joining: str, role: str) -> None:
    """Refuse a process that would round differently.

    Args:
        first: the facts that decide the bits of the first process, by name: device model, versions, code.

    Raises:
        InputError: they differ; the message names both values.
    """
    odd = [f"{name} {other.get(name)} instead of {held}" for name, held in first.items() if other.get(name) != held]
    if odd:
        raise InputError(
            f"all {role} must compute alike (device model, library versions, code, files), got {joining} with"
            f" {', '.join(odd)}: give them equal nodes, installations and files"
        )
