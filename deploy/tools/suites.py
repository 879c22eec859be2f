"""The field's evaluation suites: published prompts, how many images of each, scorers, and the published aggregate.

The aggregate of each suite is the mean over kinds of prompts of the mean over a kind's images, which is how a held-out
score is defined; kinds are told apart only where the suite does so. `docs/suites.md` compares each with its release.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deploy.tools.prompts.edits import GEDIT_WORDS, IMGEDIT_WORDS
from deploy.tools.prompts.fetched import Source, fetch
from deploy.tools.prompts.sets import CACHE, GENEVAL_2_SCRIPT, SETS, fetch_set
from protocol.config.run import RunConfig
from protocol.errors import ConfigError, PromptError, suggest

TEMPLATE = re.compile(r"'(\{\} [^'\n]*)'\.format\(question\)")
"""The words about a question in the release of GenEval 2."""


@dataclass(frozen=True)
class Suite:
    about: str
    prompts: str
    """Its set in `SETS`."""
    rewards: Mapping[str, Mapping[str, Any]]
    """Scorers by the name of their reward; `--scorer` and overrides add others."""
    component: str
    images_per_prompt: int = 1
    parts: tuple[str, ...] = ()
    """Readings that the release averages over kinds of prompts as the score."""
    template: Source | None = None
    """The release's file with the judge's words, which the scorers read."""


ELSEWHERE = {"cpus": 0, "gpus": 0}
"""What an actor reserves that asks an endpoint."""
GEDIT = Suite(
    about="GEdit-Bench, English and Chinese: root of semantics and quality by GPT-4.1, mean of eleven tasks",
    prompts="gedit",
    rewards={"gedit": {"scorer": "edit_judge", "args": {"judge": {"url": None, "model": "gpt-4.1"}}, **ELSEWHERE}},
    component="gedit",
    parts=("gedit/semantics", "gedit/quality"),
    template=GEDIT_WORDS,
)
IMGEDIT = Suite(
    about="ImgEdit-Bench's 737 basic edits: mean of three numbers by GPT-4o, by type",
    prompts="imgedit",
    rewards={"imgedit": {"scorer": "imgedit_judge", "args": {"judge": {"url": None, "model": "gpt-4o"}}, **ELSEWHERE}},
    component="imgedit",
    parts=("imgedit/plain",),
    template=IMGEDIT_WORDS,
)
PREFERENCE = {"pickscore": {"scorer": "pickscore"}, "clipscore": {"scorer": "clipscore"}}
SUITES = {
    "geneval": Suite(
        about="GenEval: 553 prompts, 4 images each; share of correct images, mean of the six tasks",
        prompts="flow_grpo_geneval",
        rewards={
            "geneval": {"scorer": "geneval", "args": {"detector": "rewards.geneval.photo_detector:PhotoDetector"}}
        },
        component="geneval/correct",
        images_per_prompt=4,
    ),
    "geneval2": Suite(
        about="GenEval 2: 800 prompts, Soft-TIFA's geometric mean by a Qwen3-VL-8B",
        prompts="geneval2",
        rewards={"geneval2": {"scorer": "soft_tifa"}},
        component="geneval2",
    ),
    "dpg-ours": Suite(
        about="DPG-Bench's 1,065 prompts and questions, 4 images each, asked to a Qwen3-VL-8B in words of ours",
        prompts="dpg",
        rewards={"dpg": {"scorer": "dpg_questions"}},
        component="dpg",
        images_per_prompt=4,
    ),
    "drawbench": Suite(
        about="DrawBench's prompts; mean PickScore, and CLIPScore beside it",
        prompts="drawbench",
        rewards=PREFERENCE,
        component="pickscore",
    ),
    "partiprompts": Suite(
        about="PartiPrompts; mean PickScore, and CLIPScore beside it",
        prompts="partiprompts",
        rewards=PREFERENCE,
        component="pickscore",
    ),
    "ocr": Suite(
        about="Flow-GRPO's 1,018 prompts that quote a text; mean similarity of the text that is read",
        prompts="flow_grpo_ocr",
        rewards={"ocr": {"scorer": "ocr", "args": {"text": "flow_grpo"}}},
        component="ocr",
    ),
    "gedit": GEDIT,
    "gedit-ours": replace(
        GEDIT,
        about="GEdit-Bench's instructions and words, asked to a Qwen3-VL-8B",
        rewards={"gedit": {"scorer": "edit_judge"}},
    ),
    "imgedit": IMGEDIT,
    "imgedit-ours": replace(
        IMGEDIT,
        about="ImgEdit-Bench's basic edits and rubrics, asked to a Qwen3-VL-8B",
        rewards={"imgedit": {"scorer": "imgedit_judge"}},
    ),
}
"""The suites by name. A name ends in `-ours` where the judge or its words are not the published ones."""


def suite_of(name: str) -> Suite:
    """Find a suite (ConfigError: there is none of this name)."""
    if name not in SUITES:
        raise ConfigError(f"unknown suite {name!r}: {suggest(name, list(SUITES))}")
    return SUITES[name]


def words_for(suite: Suite, config: RunConfig, cache: Path | None = None) -> list[str]:
    """Return the overrides that turn a config into the suite's evaluation; its files are fetched if they are not here.

    The rewards of the config go. A scorer gets as many actors as there are rollout actors; where several actors share a
    GPU, it gets up to half of one.

    Args:
        config: the config of a run or a preset.
        cache: folder for fetched files; None takes the default.

    Raises:
        PromptError: a file cannot be fetched.
    """
    folder, cluster = cache or CACHE, config.cluster
    ((_, path, _),) = fetch_set(suite.prompts, SETS[suite.prompts], folder, keys=("heldout",))
    words = [
        f"data.heldout={json.dumps(str(path))}",
        "data.tags=[]",
        f"evaluation.images_per_prompt={suite.images_per_prompt}",
        f"evaluation.component={suite.component}",
        *(f"rewards.{name}=null" for name in config.rewards),
    ]
    left = 1 - cluster.rollout.gpus
    share = {"gpus": round(min(0.5, left), 3)} if 0 < left < 1 else {}
    for name, reward in suite.rewards.items():
        args = dict(reward.get("args", {}))
        if reward["scorer"] == "soft_tifa":
            args["instruction"] = instruction_of(folder)
        if suite.template:
            args["template"] = str(fetch(suite.template, folder / suite.prompts)[0])
        words.append(
            f"rewards.{name}={json.dumps({'actors': cluster.rollout_actors, **share, **reward, 'args': args})}"
        )
    return words


def instruction_of(folder: Path) -> str:
    """Return what GenEval 2's release asks, read in its own file, with `{question}` in it.

    Raises:
        PromptError: the file cannot be fetched, or does not hold the words.
    """
    path, _ = fetch(GENEVAL_2_SCRIPT, folder / "geneval2")
    found = set(TEMPLATE.findall(path.read_text(encoding="utf-8")))
    if len(found) != 1:
        raise PromptError(f"{path} must hold one template of a question, got {len(found)}: delete it")
    return found.pop().replace("{}", "{question}")
