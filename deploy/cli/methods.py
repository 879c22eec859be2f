"""Commands about methods: list them, calibrate a noise level for each step."""

from pathlib import Path
from typing import Annotated

import typer

from deploy.presets import load_config, method_names, read_method


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command()(methods)
    app.command()(calibrate)


def methods() -> None:
    """List the published methods that `method=NAME` lays over a preset."""
    for name in method_names():
        typer.echo(f"{name:20} {read_method(name)['about']}")


def calibrate(
    preset: Annotated[str, typer.Argument(help="Name of a preset, or path of a YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Config overrides, e.g. method=dense_grpo.")] = None,
    out: Annotated[Path, typer.Option(help="The YAML file that is written.")] = Path("calibrated.yaml"),
    rounds: Annotated[int, typer.Option(min=1, help="Rounds at most.")] = 30,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of one round, a shard of each.")] = 8,
) -> None:
    """Calibrate a noise level for each step on the base model and write the config with the frozen table."""
    from deploy.run.run import check_inputs
    from deploy.tools.noise_calibration import Calibration, calibrated_config, require_place, write_config

    require_place(out)
    config = load_config(preset, overrides=overrides or [])
    found, _ = check_inputs(config)
    settings = Calibration(rounds=rounds, prompts=prompts)
    calibrated = calibrated_config(config, found, settings, typer.echo)
    typer.echo(f"noise levels {list(calibrated.sampling.noise_levels)}")
    write_config(calibrated, out)
    typer.echo(f"written to {out}: flowcredit train {out} (naming a method there would put its noise back)")
