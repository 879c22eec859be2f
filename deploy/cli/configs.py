"""The commands about configs: `config`, `presets`, `methods`, `init`, `calibrate-noise`."""

from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from deploy.cli.options import IsJson, Overrides, Preset, complete_preset, show_rows
from deploy.presets import (
    DEFAULT,
    about_preset,
    load_config,
    method_names,
    method_of,
    preset_names,
    read_method,
    sources,
)
from protocol.errors import ConfigError


def config(
    preset: Annotated[
        str | None,
        typer.Argument(
            metavar="[PRESET|RUN]",
            help="Name of a preset, path of a YAML file, or a run folder.",
            autocompletion=complete_preset,
        ),
    ] = None,
    overrides: Overrides = None,
    has_keys: Annotated[bool, typer.Option("--keys", help="List every key with its meaning and unit.")] = False,
    is_changed: Annotated[bool, typer.Option("--changed", help="Show only what was set.")] = False,
    is_json: IsJson = False,
) -> None:
    """Show the config of a preset with overrides, or of a run, and what set each value. --keys lists every key.

    --changed shows only what a preset, a method, a file or an override sets.
    """
    if has_keys:
        _show_keys(preset, overrides or [], is_json=is_json)
        return
    if preset is None:
        raise ConfigError("a preset must be named, or --keys given: `flowcredit presets` lists them")
    if (run := Path(preset)).is_dir() and not overrides:
        from deploy.folder.read import config_of, origin_of

        loaded, origin = config_of(run), origin_of(run)
        found = origin.sources if origin else {}
    else:
        loaded = load_config(preset, overrides=overrides or [])
        found = sources(preset, overrides=overrides or [])
    fields = loaded.flat_fields()
    rows = [{"key": key, "value": value, "source": found.get(key, DEFAULT)} for key, value in fields.items()]
    rows = [row for row in rows if row["source"] != DEFAULT or not is_changed]
    if not is_json and (method := method_of(loaded)):
        typer.echo(f"# method {method}")
    width = max((len(row["key"]) for row in rows), default=0)
    show_rows(rows, lambda row: f"{row['key']:{width}}  {written(row['value'])}  # {row['source']}", is_json=is_json)


def presets(is_json: IsJson = False) -> None:
    """List the presets, one per line."""
    _show_names({name: about_preset(name) for name in preset_names()}, is_json=is_json)


def methods(is_json: IsJson = False) -> None:
    """List the methods that `method=NAME` lays over a preset."""
    _show_names({name: read_method(name)["about"] for name in method_names()}, is_json=is_json)


def init(
    folder: Annotated[Path, typer.Argument(help="Folder to create.")] = Path("mine"),
    has_credit: Annotated[bool, typer.Option("--credit", help="Write a credit rule too.")] = False,
) -> None:
    """Write a commented preset, a reward and prompt files as a start for your own run."""
    from deploy.starter.start import write_starter

    for path in write_starter(folder, has_credit=has_credit):
        typer.echo(path)
    typer.echo(f"next: flowcredit train {folder / 'run.yaml'} --dry-run, then without --dry-run")


def calibrate_noise(
    preset: Preset,
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option(help="YAML file to write.")] = Path("calibrated.yaml"),
    rounds: Annotated[int, typer.Option(min=1, help="Rounds at most.")] = 30,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts per round; one shard of each is rolled out.")] = 8,
) -> None:
    """Calibrate a noise level for each step on the base model and write the config with these levels.

    A `flow_sde` becomes the `dance_sde` with equal stds, because the levels are the diffusion itself.
    """
    from deploy.run.inputs import check_inputs
    from deploy.tools.noise_calibration import calibrated_config, require_writable
    from protocol.ground.files import write_whole, writing

    require_writable(out)
    config = load_config(preset, overrides=overrides or [])
    inputs = check_inputs(config, is_local=True)
    calibrated = calibrated_config(config, inputs.prompts, typer.echo, rounds=rounds, prompts_per_round=prompts)
    typer.echo(f"noise levels {list(calibrated.sampling.noise_levels)}")
    with writing(out, "--out"):
        write_whole(out, calibrated.to_yaml())
    typer.echo(f"written to {out}: flowcredit train {out} (naming a method there would replace the noise levels)")


def written(value: Any) -> str:
    """Write a value as YAML in one line."""
    text = yaml.safe_dump(value, default_flow_style=True, width=float("inf"), allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def _show_keys(preset: str | None, overrides: list[str], *, is_json: bool) -> None:
    from protocol.config.reference import sections

    if preset is not None or overrides:
        raise ConfigError("--keys lists the keys of every config: leave preset and overrides out")

    def line(row: dict[str, Any]) -> str:
        default = row["default"] if row["default"] == "required" else f"default {row['default']}"
        return f"{row['key']}  ({'; '.join(filter(None, (row['kind'], row['limits'], default)))})\n    {row['meaning']}"

    show_rows([vars(key) for section in sections() for key in section.keys], line, is_json=is_json)


def _show_names(about: dict[str, str], *, is_json: bool) -> None:
    rows = [{"name": name, "about": text} for name, text in about.items()]
    show_rows(rows, lambda row: f"{row['name']:20} {row['about']}", is_json=is_json)
