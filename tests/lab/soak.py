"""The longer soak: plan after plan of all faults until the time is over. `python -m tests.lab.soak --minutes 60`

Each run works on two Ray nodes with the rewards of a server that answers 500 to a third of all requests, and keeps its
folder on a disk of 4 MiB that fills up once; every plan also kills and stops an actor of each kind, a node's raylet,
the board and the driver. A plan that changed something is told, its folder is kept, and the next one begins.
"""

import argparse
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.lab.faults.disks import NoRightToMountError, small_disk
from tests.lab.faults.plans import ALL_FAULTS, FULL_DISK, disturbed, plan
from tests.support.rewards.moody import moody_server
from tests.support.runs.scene import Driver, Story, events, preset, require_undisturbed, story
from tests.support.worlds.tiny_models import write_sd3


def main() -> None:
    """Exit code 1 when a plan changed something."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1, help="of the first plan; the next ones follow")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    model = write_sd3(folder / "model")
    Driver(preset(folder, model), folder / "undisturbed", "--local").finish(timeout_s=1800)
    expected = story(folder / "undisturbed")
    deadline = time.monotonic() + 60 * given.minutes
    seed, failed = given.seed, 0
    while time.monotonic() < deadline:
        failed += not _survives(folder, model, seed, expected)
        seed += 1
    _say(f"{seed - given.seed} plans, {failed} of them changed something; {folder}")
    sys.exit(1 if failed else 0)


def _survives(folder: Path, model: Path, seed: int, expected: Story) -> bool:
    began = time.monotonic()
    done: list[str] = []
    try:
        with _disk(folder / f"seed_{seed}") as (root, names), moody_server(seed) as (url, answered):
            rewards = {"redness": {"scorer": "remote", "args": {"url": url, "scorer": "redness", "tries": 10}}}
            run = root / "run"
            try:
                done = disturbed(preset(root, model, rewards=rewards), run, seed=seed, names=names)
                require_undisturbed(run, expected)
            finally:
                kept = shutil.copytree(run, folder / f"seed_{seed}_run", ignore=shutil.ignore_patterns("*.sock"))
    except Exception:  # noqa: BLE001  whatever a server says while it starts
        _say(f"seed {seed}: CHANGED, its plan {plan(seed, ALL_FAULTS)}\n{traceback.format_exc()}")
        return False
    lost = Counter(event["type"] for event in events(kept))
    _say(
        f"seed {seed}: {', '.join(done)}: the same {expected[0][:12]} after {time.monotonic() - began:.0f} s,"
        f" {lost['actor_failed']} actors and {lost['learner_failed']} learners lost,"
        f" {answered[500]} of {answered.total()} requests answered 500"
    )
    return True


@contextmanager
def _disk(folder: Path) -> Iterator[tuple[Path, list[str]]]:
    """Where a run may work, and the faults that it can be given there."""
    try:
        with small_disk(folder, size="4m") as disk:
            yield disk, list(ALL_FAULTS)
    except NoRightToMountError as error:
        _say(f"without the full disk: {error}")
        yield folder, [name for name in ALL_FAULTS if name != FULL_DISK]


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
