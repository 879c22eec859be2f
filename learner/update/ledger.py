"""What the learner looks at before it learns: that the groups are this iteration's own, and that members differ."""

from collections.abc import Sequence

from protocol.errors import ContractError
from protocol.messages import Rollout, ScoredGroup


def ledger(groups: Sequence[ScoredGroup], *, iteration: int) -> dict[str, float]:
    """The places in the run of the groups that an iteration learns from, `ledger/first` to `ledger/last`.

    Over a run they follow each other without a gap or a repetition, so that no group is lost or counted twice.

    Raises:
        ContractError: other groups than 0 to G - 1 of this iteration, in order.
    """
    held = [{(s.rollout.request.iteration, s.rollout.request.group) for s in group.shards} for group in groups]
    wanted = [{(iteration, place)} for place in range(len(groups))]
    if held != wanted:
        odd = next(place for place, (got, want) in enumerate(zip(held, wanted, strict=True)) if got != want)
        raise ContractError(
            f"iteration {iteration} must learn from its own groups 0 to {len(groups) - 1} in order,"
            f" got (iteration, group) {sorted(held[odd])} at place {odd}"
        )
    first = iteration * len(groups)
    return {"ledger/first": float(first), "ledger/last": float(first + len(groups) - 1)}


def duplicates(rollouts: Sequence[Rollout]) -> int:
    """Members of one group whose final latents another member of it has too, bit for bit."""
    finals = [row.tobytes() for rollout in rollouts for row in rollout.latents[:, -1]]
    return len(finals) - len(set(finals))
