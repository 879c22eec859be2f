"""The Python of docs and of the toy world's page runs.

`tests/deploy/cli/test_shown_commands.py` runs the commands, `tests/rewards/test_docs.py` the scorers,
`tests/deploy/run/test_own.py` docs/own.md, and `tests/docs/test_commands.py` reads the YAML.
"""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
import yaml

import flowcredit
from deploy.presets import load_config
from flow.adapter.lora_file import write_lora
from flow.maths.noise import normal
from flow.models.located import adapter_config
from flow.rollout import RolloutPolicy
from protocol.ground.resources import resolve
from protocol.messages import Adapter, GenerateRequest, Prompt, digest_of
from tests.support.pages import PAGES, name_of
from tests.support.paths import ROOT


def blocks(page: str, language: str = "python") -> list[str]:
    """The fenced blocks of a page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def run(code: str, page: str) -> dict[str, Any]:
    """Run code of a page; its names."""
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(code, page, "exec"), names)
    return names


def test_every_snippet_is_here() -> None:
    pages = {name_of(page): re.findall(r"^```(\w+)", page.read_text(encoding="utf-8"), re.MULTILINE) for page in PAGES}
    held = {name: set(languages) - {"text"} for name, languages in pages.items()}
    assert {name for name, languages in held.items() if languages} == {
        "README.md",
        "docs/editing.md",
        "docs/method/methods.md",
        "docs/models.md",
        "docs/own.md",
        "docs/python.md",
        "docs/rewards.md",
        "toyworld/README.md",
    }
    assert set.union(*held.values()) == {"json", "python", "yaml"}


@pytest.mark.whole
def test_python_s_page_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = run("\n".join(blocks("docs/python.md")), "docs/python.md")
    assert len(flowcredit.read_run("runs/python").iterations) == 3
    assert (names["base"].name, names["adapter"].iteration) == ("base", 2)


def test_a_plain_pipeline_draws_the_last_steps_with_the_base_model_as_we_do(tmp_path: Path) -> None:
    (code,) = blocks("docs/models.md")
    config = load_config("toy_geneval")
    policy = RolloutPolicy(config)
    first = policy.first_adapter()
    arrays = {name: 0.05 * normal(name, shape=array.shape).numpy() for name, array in first.arrays.items()}
    adapter = Adapter(version=1, arrays=arrays, digest=digest_of(arrays))
    policy.receive(adapter)
    write_lora(tmp_path, adapter, adapter_config(config.model))
    pipeline = diffusers.DiffusionPipeline.from_pretrained(
        resolve(config.model.path), text_encoder_3=None, tokenizer_3=None, torch_dtype=torch.float32
    )
    pipeline.set_progress_bar_config(disable=True)
    pipeline.load_lora_weights(tmp_path)
    text = "a photo of a red circle"
    options = {"guidance_scale": 1.0, "max_sequence_length": config.model.max_sequence_length, "output_type": "np"}
    latents = normal("draw", 5, 0, 0, shape=(4, 8, 8)).unsqueeze(0)
    draw = run(code, "docs/models.md")["draw"]
    theirs = [(draw(pipeline, text, latents=latents, **options) * 255).round().astype(np.uint8) for _ in range(2)]
    request = GenerateRequest(
        prompts=(Prompt(index=0, text=text),),
        numbers=(0,),
        seed=5,
        steps=8,
        adapter_version=1,
        adapter_digest=adapter.digest,
        adapter_steps=5,
    )
    _, ours = policy.generate(request)
    _, whole = policy.generate(replace(request, adapter_steps=None))
    assert not np.array_equal(ours, whole)
    for images in theirs:
        np.testing.assert_array_equal(images, ours)


def test_the_scorer_that_sees_a_group_is_shown_in_a_section_that_a_config_takes() -> None:
    (section,) = (yaml.safe_load(text) for text in blocks("docs/rewards.md", "yaml"))
    chosen = ["method=flow_grpo", "evaluation.component=clipscore"]
    read = load_config("toy_geneval", overrides=[f"rewards={json.dumps(section['rewards'])}", *chosen])
    assert (read.rewards["wins"].scorer, read.rewards["wins"].sees) == ("win_rate", "group")


def test_the_snippets_of_the_toy_world_s_page_draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "toyworld").symlink_to(ROOT / "toyworld")
    monkeypatch.chdir(tmp_path)
    for code in blocks("toyworld/README.md"):
        run(code, "toyworld/README.md")
    assert all((tmp_path / name).stat().st_size > 0 for name in ("circle.png", "edited.png"))
