"""The model card of a run's LoRA: what it is, how it was trained, its held-out scores, and how to load it."""

import os
import tempfile
from contextlib import suppress
from pathlib import Path

import yaml

from deploy.folder.gallery import cell_of, read_gallery, write_grid
from deploy.folder.names import GALLERY
from deploy.folder.paired import paired_difference, why_unpaired
from deploy.folder.read import checkpoint_of, config_of, evaluation_scores
from deploy.report.runs import read_run
from deploy.tools.export import export_lora
from flowcredit.packages import VERSION
from protocol.config.run import RunConfig
from protocol.errors import ModelError, one_line
from protocol.ground.files import ADAPTER_FILE
from protocol.ground.resources import SCHEME, resolve

CARD, SAMPLES = "README.md", "before_after.png"


def write_card(run: Path, folder: Path, *, iteration: int | None = None, name: str | None = None) -> Path:
    """Write the card of a checkpoint, and images before and after training if the run has both, into `folder`.

    Args:
        folder: an existing folder.
        iteration: of the checkpoint; None takes the newest.
        name: the LoRA's repository; None for a folder that holds a whole model.

    Returns:
        The card's path.

    Raises:
        RunFolderError: there is no such run or checkpoint.
    """
    config = config_of(run)
    at = checkpoint_of(run, iteration)[0].iteration
    samples = ""
    with suppress(ValueError):  # a run need not have a gallery at this iteration
        before, after = (read_gallery(run / GALLERY, each) for each in (0, at))
        cells = [cell_of(prompt, before[prompt], after[prompt]) for prompt in before if prompt in after and at]
        if cells:
            write_grid(folder / SAMPLES, cells, f"before and after {at} iterations, same prompts, same noise")
            samples = f"\n![Images of held-out prompts before and after training]({SAMPLES})\n"
    path = folder / CARD
    path.write_text(_card(run, config, at, name, samples), encoding="utf-8")
    return path


def push(run: Path, repository: str, *, iteration: int | None, dtype: str | None, is_average: bool) -> str:
    """Upload the LoRA of a run with its card to a model repository of the hub, which is made if it does not exist.

    Args:
        repository: `OWNER/NAME`. HF_TOKEN, or the token of `hf auth login`, must be allowed to write there.
        iteration: as in `export_lora`.
        dtype: as in `export_lora`.
        is_average: as in `export_lora`.

    Returns:
        The address of the commit.

    Raises:
        ModelError: the hub refuses, or does not answer.
        RunFolderError: as in `export_lora`.
    """
    from huggingface_hub import HfApi

    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        export_lora(run, folder / ADAPTER_FILE, iteration=iteration, dtype=dtype, is_average=is_average)
        write_card(run, folder, iteration=iteration, name=repository)
        hub = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
        try:
            hub.create_repo(repository, exist_ok=True)
            return hub.upload_folder(
                repo_id=repository, folder_path=folder, commit_message=f"flowcredit {VERSION}"
            ).commit_url
        except Exception as error:  # the library and its HTTP client raise many kinds; all mean that it is not there
            raise ModelError(
                f"--push {repository} must be a repository that you may write to, got {one_line(error)}: check the name"
                " and HF_TOKEN"
            ) from error


def _card(run: Path, config: RunConfig, iteration: int, name: str | None, samples: str) -> str:
    model, lora = config.model, config.model.lora
    is_on_hub = not model.path.startswith(SCHEME) and not resolve(model.path).exists()
    header = {
        **({"base_model": model.path} if is_on_hub else {}),
        "library_name": "diffusers",
        "pipeline_tag": "text-to-image",
        "tags": [*(["lora"] if name else []), "reinforcement-learning", "flowcredit"],
    }
    watched = [each for each, reward in config.rewards.items() if reward.use == "evaluate"]
    facts = {
        "base model": model.path + (f" at {model.revision}" if model.revision else ""),
        "adapter": f"LoRA, rank {lora.rank}, alpha {lora.alpha}" + ("" if name else ", merged"),
        "reward": config.mixture.removeprefix("reward = "),
        **({"only evaluated": ", ".join(watched)} if watched else {}),
        "credit": f"{config.credit.rule}, normalised {config.credit.normalise}",
        "objective": config.learner.objective,
        "rollouts": f"{config.sampling.kernel}, {config.sampling.steps} steps",
        "training": f"{iteration} iterations of {config.group.per_iteration} groups of {config.group.size}",
    }
    load = (
        f'pipeline = DiffusionPipeline.from_pretrained("{model.path}")\npipeline.load_lora_weights("{name}")'
        if name
        else 'pipeline = DiffusionPipeline.from_pretrained("PATH_OF_THIS_FOLDER")'
    )
    rows = "\n".join(f"| {key} | {value} |" for key, value in facts.items())
    fields = yaml.safe_dump(config.outcome_fields(), sort_keys=False, allow_unicode=True)
    return f"""---
{yaml.safe_dump(header, sort_keys=False)}---

# {name or model.path}

Trained with reinforcement learning by flowcredit {VERSION}, with credit for every denoising step.

| | |
|---|---|
{rows}

## Held-out score

{_scores(run, config, iteration)}
{samples}
## Load it

```python
from diffusers import DiffusionPipeline

{load}
```

## Config

Every key that can change a result:

```yaml
{fields}```
"""


def _scores(run: Path, config: RunConfig, iteration: int) -> str:
    """Say the score before training and at this iteration, and the interval of their difference over the prompts."""
    scores, heldout = evaluation_scores(run), {each.iteration: each for each in read_run(run).heldout}
    if 0 not in scores or iteration not in scores or not iteration:
        return f"There is no evaluation both before training and at iteration {iteration}."
    said = f"`{config.evaluation.component}`: {scores[0]:.3f} before, {scores[iteration]:.3f} after"
    is_paired = 0 in heldout and iteration in heldout and not why_unpaired(heldout[0], heldout[iteration])
    change = paired_difference([heldout[0]], [heldout[iteration]]) if is_paired else None
    interval = f", {change} (95 % by a paired bootstrap over {change.prompts} prompts)" if change else ""
    return said + interval + (", of the running mean" if config.evaluation.adapter == "average" else "") + ".\n"
