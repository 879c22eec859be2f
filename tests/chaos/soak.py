"""The longer soak: plan after plan of faults until the time is over. `python -m tests.chaos.soak --minutes 60`"""

import argparse
import tempfile
import time
from pathlib import Path

from tests.chaos.scene import Driver, preset, require_undisturbed, story
from tests.chaos.test_cluster import disturbed


def main() -> None:
    """Ends with the number of plans, or with the first one that changed something."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1, help="of the first plan; the next ones follow")
    parser.add_argument("--model", type=Path, required=True, help="a small model folder in diffusers' format")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    path = preset(folder, given.model)
    Driver(path, folder / "undisturbed", "--local").finish()
    expected = story(folder / "undisturbed")
    deadline = time.monotonic() + 60 * given.minutes
    seed = given.seed
    while time.monotonic() < deadline:
        done = disturbed(path, folder / f"seed_{seed}", seed)
        require_undisturbed(folder / f"seed_{seed}", expected)
        print(f"seed {seed}: {', '.join(done)}: the same {expected[0][:12]}", flush=True)  # noqa: T201
        seed += 1
    print(f"{seed - given.seed} plans, all the same; {folder}")  # noqa: T201


if __name__ == "__main__":
    main()
