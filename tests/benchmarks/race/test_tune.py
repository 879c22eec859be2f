"""The race's tuning: every setting is a whole config, halving keeps the best, and a race reads the tuned ones."""

import json
from pathlib import Path

import pytest
import typer

from benchmarks.race import tune
from benchmarks.race.cell import Cell, cell_config
from benchmarks.race.tune import GOALS, KNOBS, PUBLISHED, RATES, RUNGS, SEED, Setting, Tuning, settings_of, todo

METHOD = "elbo"


def measured(tuning: Tuning, setting: Setting, rung: int, share: float) -> None:
    """Note cells that have gone this share of the way to the goals."""
    for reward, goal in GOALS.items():
        cell = {"method": setting.method, "rate": setting.rate, "value": setting.value, "reward": reward, "rung": rung}
        tuning.cells.append(cell | {"iterations": 4, "start": goal - 0.1, "score": goal - 0.1 + share * 0.1})


@pytest.mark.parametrize("method", KNOBS)
def test_a_method_has_nine_settings_that_are_whole_configs(method: str) -> None:
    settings = settings_of(method)
    assert len({(each.rate, each.value) for each in settings}) == 9 == RUNGS[0][0]
    assert [each.rate == RATES[0] or each.value == KNOBS[method][1][0] for each in settings] == [True] * 5 + [False] * 4
    for setting in settings[-1:]:
        for reward in GOALS:
            config = cell_config(Cell(method, SEED, reward), iterations=2, every=0, extra=setting.keys)
            value: object = config
            for name in KNOBS[method][0].split("."):
                value = getattr(value, name)
            assert (config.learner.learning_rate, value) == (setting.rate, setting.value)


def test_the_best_of_each_rung_train_on(tmp_path: Path) -> None:
    tuning, settings = Tuning(tmp_path / "tuning.json"), settings_of(METHOD)
    for number, setting in enumerate(settings[:-1]):
        measured(tuning, setting, 0, share=number / 10)
    assert tuning.best(METHOD) == settings[-2], "a race may begin before a rung has ended"
    assert tuning.entrants(METHOD, 1) == [], "the next rung may not"
    assert list(todo(tuning, [METHOD], 0, most=9)) == [(settings[-1], reward) for reward in GOALS]
    measured(tuning, settings[-1], 0, share=-0.1)
    assert tuning.gain(settings[7], 0) == pytest.approx(0.7)
    assert tuning.entrants(METHOD, 1) == [settings[7], settings[6]]
    for setting, share in zip(tuning.entrants(METHOD, 1), (0.8, 0.9), strict=True):
        measured(tuning, setting, 1, share)
    assert tuning.best(METHOD) == settings[6], "the longer rung counts"
    tuning.write()
    assert Tuning.read(tuning.path).best(METHOD) == settings[6]
    with pytest.raises(typer.BadParameter, match="must be tuned, got awm"):
        tuning.best("awm")


def test_a_cell_that_was_measured_is_not_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[tuple[str, int]] = []

    def run_cell(cell: Cell, runs: Path, *, iterations: int, **__: object) -> None:
        trained.append((cell.reward, iterations))
        lines = [{"iteration": at, "seconds/iteration": 5.0} for at in range(1, iterations + 1)]
        lines += [{"iteration": at, "evaluation/score": 0.1 * at} for at in (0, iterations)]
        (runs / cell.folder).mkdir(parents=True)
        (runs / cell.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    monkeypatch.setattr(tune, "run_cell", run_cell)
    out = tmp_path / "tuning.json"
    for _ in range(2):
        tune.run(only=[METHOD], rungs=1, most=1, runs=tmp_path / "runs", out=out)
    assert trained == [("geneval", 3), ("pickscore", 3), ("geneval", 6), ("pickscore", 6)], "30 s of 5 s an iteration"
    tuning = Tuning.read(out)
    assert [cell["score"] for cell in tuning.cells] == [pytest.approx(0.6)] * 2
    assert tuning.paces == {"elbo/geneval": 5.0, "elbo/pickscore": 5.0}


def test_published_results_are_of_settings_that_exist() -> None:
    for cell in Tuning.read(PUBLISHED).cells:
        assert Setting(cell["method"], cell["rate"], cell["value"]) in settings_of(cell["method"])
