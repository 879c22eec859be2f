"""Evaluation suites: the published files become prompts, the words of a release are read in its own file."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from deploy.cli.app import app
from deploy.cli.reports import evaluation_lines
from deploy.folder.heldout import heldout_of
from deploy.folder.suites import read_suites
from deploy.presets import load_config
from deploy.report.page import report_of
from deploy.report.runs import read_runs
from deploy.tools import suites
from deploy.tools.evaluate import Assessed, document
from deploy.tools.prompts.fetched import Source
from deploy.tools.prompts.sets import GENEVAL_2_SCRIPT, SETS, PromptSet
from deploy.tools.suites import GEDIT, SUITES, instruction_of, suite_of, words_for
from learner.loop.evaluate import Evaluation
from protocol.config.run import EvaluationConfig, RunConfig
from protocol.errors import ConfigError, PromptError, ScorerError
from protocol.messages import Prompt
from protocol.prompts import read_prompts
from rewards.editing.answers import require_judge
from rewards.editing.judge import RELEASED
from rewards.images import encode_png
from tests.support.rewards.reward_servers import Answer, Asked, http_server
from tests.support.runs.long import a_long_run
from tests.support.worlds.tiny_models import write_kontext

DPG = """item_id,text,proposition_id,dependency,tuple,question_natural_language
a,A dog in the rain,1,0,entity - whole (dog),Is there a dog?
a,A dog in the rain,2,0,entity - whole (rain),Is there rain?
a,A dog in the rain,3,2,attribute - state (rain),Is the rain heavy?
b,"Two cats, asleep",1,"0,0",entity - whole (cats),Are there cats?
"""
ATOMS = {"prompt": "two red cats", "atom_count": 3, "vqa_list": [["How many cats?", "two"]], "skills": ["count"]}
SCRIPT = "ask('{} Say one word.'.format(question), 1)\nask('{} Say one word.'.format(question), 2)\n"
GENEVAL = [
    {"tag": tag, "include": [{"class": "circle", "count": 1}], "prompt": f"a circle: {tag}"}
    for tag in ("single_object", "counting")
]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Puts the heldout file of a set into the cache, as if it had been fetched."""
    monkeypatch.setattr(suites, "CACHE", tmp_path / "cache")

    def put(name: str, content: str) -> Path:
        source = SETS[name].heldout
        assert source is not None
        path = tmp_path / "cache" / name / Path(source.url).name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        pinned = Source(source.url, sha256=_sha256(content), read=source.read, suffix=source.suffix)
        monkeypatch.setitem(SETS, name, PromptSet(about="", heldout=pinned))
        return tmp_path / "cache"

    return put


def _sha256(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()


def prompts_by(words: list[str]) -> list[tuple[str, dict[str, object]]]:
    data = load_config("toy_geneval", overrides=[word for word in words if word.startswith("data.")]).data
    return [(prompt.text, dict(prompt.metadata)) for prompt in read_prompts(data, data.heldout)]


def test_dpgs_table_becomes_prompts_with_questions(cache: Callable[[str, str], Path]) -> None:
    cache("dpg", DPG)
    (first, facts), (second, others) = prompts_by(words_for(SUITES["dpg-ours"], load_config("toy_geneval")))
    assert (first, second) == ("A dog in the rain", "Two cats, asleep")
    assert facts["questions"] == [
        {"id": 2, "question": "Is there rain?", "parents": [0]},
        {"id": 3, "question": "Is the rain heavy?", "parents": [2]},
    ], "the release leaves out the first row"
    assert others["questions"] == [{"id": 1, "question": "Are there cats?", "parents": [0, 0]}]


def test_geneval2_takes_its_words_from_the_release(
    cache: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = cache("geneval2", json.dumps(ATOMS) + "\n")
    script = Source(GENEVAL_2_SCRIPT.url, sha256=_sha256(SCRIPT))
    monkeypatch.setattr(suites, "GENEVAL_2_SCRIPT", script)
    (folder / "geneval2" / "evaluation.py").write_text(SCRIPT)
    words = words_for(SUITES["geneval2"], load_config("sd35_geneval"))
    ((_, facts),) = prompts_by(words)
    assert facts["tag"] == "atoms_03"
    config = load_config("sd35_geneval", overrides=words)
    assert config.rewards["geneval2"].args["instruction"] == "{question} Say one word."
    assert (config.rewards["geneval2"].actors, config.rewards["geneval2"].gpus) == (8, 0.5)
    assert list(config.rewards) == ["geneval2"]
    (folder / "geneval2" / "evaluation.py").write_text("other")
    with pytest.raises(PromptError, match="must have the sha256"):
        instruction_of(folder)


def test_a_suite_that_has_another_judge_says_so_in_its_name() -> None:
    with pytest.raises(ConfigError, match="unknown suite 'dpg': known: dpg-ours"):
        suite_of("dpg")
    help_text = CliRunner().invoke(app, ["eval", "--help"], env={"COLUMNS": "400"}).output
    assert all(name in help_text for name in SUITES)


def test_a_suite_evaluates_a_model_folder(cache: Callable[[str, str], Path], tiny_sd3: Path, tmp_path: Path) -> None:
    """GenEval's aggregate: the mean over tasks of the share of correct images, four of each prompt."""
    cache("flow_grpo_geneval", "".join(json.dumps(line) + "\n" for line in GENEVAL))
    detector = "rewards.geneval.args.detector=toyworld.world.detector:ShapeDetector"
    small = ["model.dtype=float32", "model.height=16", "model.width=16", "model.max_sequence_length=2"]
    small += [
        "cluster.rollout.gpus=0",
        "cluster.learner.gpus=0",
        "model.embedding_cache=null",
        "evaluation.steps=2",
        "evaluation.batch=4",
        "model.lora.rank=4",
    ]
    words = ["eval", str(tiny_sd3), "--suite", "geneval", detector, *small, "--local", "--json"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    (only,) = found["results"]
    assert (found["suite"], only["name"], only["images"]) == ("geneval", "base", 8)
    assert only["scores"]["component"] == "geneval/correct"
    assert only["score"] == pytest.approx(sum(only["by_tag"].values()) / 2)
    assert list(only["by_tag"]) == ["single_object", "counting"]


def test_the_report_shows_a_runs_suites(tmp_path: Path, tiny_config: Callable[..., RunConfig]) -> None:
    run = tmp_path / "mine"
    a_long_run(run, tiny_config(), iterations=3, steps=3)
    base = {"name": "base", "score": 0.41, "iteration": 0, "images": 8, "missing": 0}
    own = {**base, "name": "adapter", "score": 0.58, "iteration": 3, "missing": 1}
    change = {"value": 0.17, "low": 0.05, "high": 0.29, "prompts": 2}
    home = run / "suites" / "geneval"
    home.mkdir(parents=True)
    (home / "evaluation.json").write_text(json.dumps({"results": [base, own], "differences": {"all kinds": change}}))
    (run / "suites" / "broken").mkdir()
    (run / "suites" / "broken" / "evaluation.json").write_text("{")
    (score,) = read_suites(run)
    assert (score.suite, score.base, score.score, score.missing) == ("geneval", 0.41, 0.58, 1)
    page = report_of(read_runs([run]))
    assert "Evaluation suites" in page
    assert "0.410" in page and "0.580" in page and "[+0.050, +0.290]" in page


EDITED = ("en/color_alter", "en/color_alter", "en/text_change", "cn/color_alter")
"""Kinds of four prompts."""


def edited_by(name: str, semantics: list[float], quality: list[float]) -> Assessed:
    """An evaluation with a judge's fabricated numbers for each of the four images."""
    parts = {"gedit/semantics": np.array(semantics)[:, None], "gedit/quality": np.array(quality)[:, None]}
    values = np.sqrt(parts["gedit/semantics"] * parts["gedit/quality"])
    readings = {"score": values, "gedit": values, **parts}
    tags = np.array(EDITED)
    by_tag = {tag: float(values[tags == tag].mean()) for tag in dict.fromkeys(EDITED)}
    found = Evaluation(
        score=float(np.mean(list(by_tag.values()))),
        by_tag=by_tag,
        missing=0,
        images=4,
        readings={name: float(each.mean()) for name, each in readings.items() if name != "score"},
        prompts=tuple(Prompt(index=row, text=f"{row}", metadata={"tag": tag}) for row, tag in enumerate(EDITED)),
        by_image=readings,
    )
    return Assessed(name, int(name == "adapter"), found, heldout_of(0, found, EvaluationConfig()), None, None, None)


def test_gedit_is_averaged_by_task_and_by_language_as_its_release_does() -> None:
    """English: two tasks, of which one has two images; so its mean semantics are ((8 + 2) / 2 + 9) / 2 = 7."""
    base = edited_by("base", [8, 2, 9, 5], [2, 8, 4, 5])
    adapter = edited_by("adapter", [8, 8, 9, 5], [8, 8, 4, 7.2])
    found = document([base, adapter], suite="gedit")
    first, second = found["results"]
    assert first["by_family"] == {"en": 5, "cn": 5}
    assert second["by_family"] == {"en": pytest.approx((8 + 6) / 2), "cn": pytest.approx(6)}
    assert first["parts"]["gedit/semantics"]["en"] == 7 and first["parts"]["gedit/quality"]["en"] == 4.5
    assert first["parts"]["gedit/semantics"]["all kinds"] == pytest.approx((5 + 9 + 5) / 3)
    assert found["differences"]["en"]["value"] == pytest.approx(2)
    assert found["part_differences"]["gedit/semantics"]["en"]["value"] == pytest.approx(1.5)
    lines = {line[: line.index("  ")].strip(): line for line in evaluation_lines([base, adapter], None, GEDIT.parts)}
    assert lines["en"].split()[1:4] == ["5.000", "7.000", "+2.000"]
    assert lines["gedit/semantics en"].split()[2:5] == ["7.000", "8.500", "+1.500"]
    assert lines["gedit/quality cn"].split()[2:5] == ["5.000", "7.200", "+2.200"]
    assert "[" in lines["en"] and "overall" in lines


@pytest.mark.parametrize(("name", "url"), [("gedit", True), ("gedit-ours", False), ("imgedit", True)])
def test_an_editing_suite_names_its_judge_and_the_release_s_words(
    name: str, url: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite = SUITES[name]
    template = Source("https://example.org/words", sha256=_sha256("words"))
    home = tmp_path / suite.prompts
    home.mkdir()
    (home / "words").write_text("words")
    (home / "heldout_prompts.jsonl").write_text('{"prompt": "Make it red.", "tag": "en/color_alter"}\n')
    words = words_for(replace(suite, template=template), load_config("sd35_geneval"), tmp_path)
    config = load_config("sd35_geneval", overrides=words)
    (reward,) = config.rewards.values()
    assert config.data.heldout == str(home / "heldout_prompts.jsonl") and config.evaluation.images_per_prompt == 1
    assert reward.args["template"] == str(home / "words")
    assert (reward.gpus, reward.cpus) == ((0, 0) if url else (0.5, None))
    if url:
        with pytest.raises(ScorerError, match=r"url of a judge must be .*set rewards.NAME.args.judge.url="):
            require_judge(reward.args["judge"])
        key = f"rewards.{suite.prompts}.args.judge.url=http://127.0.0.1:9/v1"
        (reward,) = load_config("sd35_geneval", overrides=[*words, key]).rewards.values()
        assert reward.args["judge"]["url"] == "http://127.0.0.1:9/v1" and reward.args["judge"]["model"].startswith(
            "gpt"
        )


def test_gedit_edits_with_a_model_and_asks_an_endpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The judge says [8, 6] to the two images of an edit and [9, 7] to the edited one: 6, 7 and their root."""
    model, home = write_kontext(tmp_path / "kontext"), tmp_path / "cache" / "gedit"
    (home / "images").mkdir(parents=True)
    lines = []
    for tag in ("en/color_alter", "cn/color_alter"):
        name = f"images/{tag[:2]}.png"
        (home / name).write_bytes(encode_png(np.random.default_rng(0).integers(0, 256, (32, 48, 3), np.uint8)))
        lines.append(json.dumps({"prompt": "Make it red.", "image": name, "tag": tag}) + "\n")
    (home / "heldout_prompts.jsonl").write_text("".join(lines))
    words = "".join(f"{name} = 'words'\n" for names in RELEASED.values() for name in names)
    (home / "vie_prompts.py").write_text(words)
    monkeypatch.setattr(suites, "CACHE", tmp_path / "cache")
    template = Source("https://example.org/vie_prompts.py", sha256=_sha256(words))
    monkeypatch.setitem(SUITES, "gedit", replace(GEDIT, template=template))

    def answer(asked: Asked) -> Answer:
        shown = len(json.loads(asked.body)["messages"][0]["content"]) - 1 if asked.body else 0
        text = {0: "", 1: "[9, 7]", 2: "[8, 6]"}[shown]
        return 200, "application/json", json.dumps({"choices": [{"message": {"content": text}}]}).encode()

    small = {
        "model.path": model,
        "model.dtype": "float32",
        "model.height": 32,
        "model.width": 48,
        "model.condition_side": 32,
        "model.max_sequence_length": 8,
        "model.lora.rank": 4,
        "model.embedding_cache": "null",
        "cluster.layout": "separate",
        "cluster.offload": "false",
        "cluster.rollout.gpus": 0,
        "cluster.learner.gpus": 0,
        "evaluation.steps": 2,
        "evaluation.batch": 2,
    }
    with http_server(answer) as (url, _):
        given = [f"{key}={value}" for key, value in small.items()]
        given.append(f"rewards.gedit.args.judge.url={url}/v1")
        done = CliRunner().invoke(app, ["eval", "flux_pickscore", "--suite", "gedit", *given, "--local", "--json"])
    assert done.exit_code == 0, done.output
    (only,) = json.loads(done.stdout)["results"]
    assert only["by_family"] == {"en": pytest.approx(42**0.5, abs=1e-4), "cn": pytest.approx(42**0.5, abs=1e-4)}
    assert [only["parts"][f"gedit/{part}"]["en"] for part in ("semantics", "quality")] == [6, 7]
    assert (only["images"], only["missing"]) == (2, 0)
