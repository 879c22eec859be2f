"""All actors of a role compute alike, so a result does not depend on which of them made it; another kind is refused."""

from collections.abc import Mapping

from protocol.errors import InputError


def require_same_facts(first: Mapping[str, str], other: Mapping[str, str], *, who: str, role: str) -> None:
    """Refuse a process that would round differently.

    Args:
        first: what the bits of the process that sets the rule depend on, by name: device model, versions, code.
        other: the same of the process that joins it.
        who: the process that joins, for the message.
        role: all the processes that must agree, for the message.

    Raises:
        InputError: they differ; the message names both values.
    """
    odd = [f"{name} {other.get(name)} instead of {held}" for name, held in first.items() if other.get(name) != held]
    if odd:
        raise InputError(
            f"all {role} must compute alike (device model, library versions, code), got {who} with {', '.join(odd)}:"
            " give them equal nodes with equal installations"
        )
