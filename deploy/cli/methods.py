"""The command that finds noise levels: `calibrate-noise`."""

from pathlib import Path
from typing import Annotated

import typer

from deploy.cli.options import Overrides, Preset
from deploy.presets import load_config


def calibrate_noise(
    preset: Preset,
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option(help="YAML file to write.")] = Path("calibrated.yaml"),
    rounds: Annotated[int, typer.Option(min=1, help="Rounds at most.")] = 30,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts per round; one shard of each is drawn.")] = 8,
) -> None:
    """Calibrate a noise level for each step on the base model and write the config with these levels."""
    from deploy.run.inputs import check_inputs
    from deploy.tools.noise_calibration import NoiseCalibration, calibrated_config, require_writable, write_config

    require_writable(out)
    config = load_config(preset, overrides=overrides or [])
    found, _ = check_inputs(config, is_local=True)
    settings = NoiseCalibration(rounds=rounds, prompts=prompts)
    calibrated = calibrated_config(config, found, settings, typer.echo)
    typer.echo(f"noise levels {list(calibrated.sampling.noise_levels)}")
    write_config(calibrated, out)
    typer.echo(f"written to {out}: flowcredit train {out} (naming a method there would replace the noise levels)")
