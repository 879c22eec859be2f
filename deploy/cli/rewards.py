"""The commands about rewards: `flowcredit serve-rewards`, `flowcredit scorers`."""

import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from deploy.presets import read_value
from protocol.config.parse import parse_reward
from protocol.config.reward import RewardConfig
from protocol.errors import ConfigError, one_line


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command("serve-rewards")(serve_rewards)
    app.command("scorers")(scorers)


def scorers() -> None:
    """List the built-in scorers, where each is, and what its installation needs."""
    from rewards.scorer import SCORERS

    for name, (path, extra) in SCORERS.items():
        typer.echo(f"{name:12} {path:36} {f'pip install -e .[{extra}]' if extra else ''}".rstrip())


def serve_rewards(
    names: Annotated[
        list[str], typer.Argument(metavar="SCORER...", help="A scorer's name, or NAME=package.module:Class.")
    ],
    args: Annotated[
        list[str] | None, typer.Option("--arg", help="A scorer's argument: NAME.KEY=VALUE; may be given repeatedly.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="YAML with a `rewards` section as in a run's config; names pick from it.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8100,
    max_waiting: Annotated[int, typer.Option(help="Images that may wait for one scorer.", min=1)] = 1024,
    token_env: Annotated[
        str | None, typer.Option(help="Environment variable with the bearer token that callers must show.")
    ] = None,
) -> None:
    """Serve scorers over HTTP for reward actors elsewhere (`rewards.NAME.scorer: remote`)."""
    import uvicorn

    from deploy.api.rewards import make_app
    from rewards.scorer import build_scorer

    wanted = wanted_scorers(names, args or [], config)
    token = None
    if token_env:
        token = os.environ.get(token_env)
        if not token:
            raise ConfigError(f"the environment variable {token_env} must hold the token, got none")
    built = {name: build_scorer(spec, **arguments) for name, (spec, arguments) in wanted.items()}
    listening = _listen(host, port)
    where = f"http://{host}:{listening.getsockname()[1]}"
    typer.echo(f"serving {', '.join(built)} on {where}" + ("" if token else ", open to all who reach it"))
    app = make_app(built, max_waiting=max_waiting, token=token)
    with suppress(KeyboardInterrupt):
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listening])


def wanted_scorers(
    names: list[str], args: list[str], config: Path | None = None
) -> dict[str, tuple[str, dict[str, Any]]]:
    """Each scorer's import path or built-in name and its arguments, by the name it is served under.

    Raises:
        ConfigError: an argument for a scorer that is not served, a broken one, a config that does not know a name.
    """
    section = _rewards_section(config) if config else {}
    wanted: dict[str, tuple[str, dict[str, Any]]] = {}
    for entry in names:
        name, _, path = entry.partition("=")
        if config and not path and name not in section:
            raise ConfigError(f"{config} has no reward {name!r}, only {sorted(section)}")
        held = parse_reward(name, section[name]) if name in section else RewardConfig(scorer=name)
        wanted[name] = (path or held.scorer, dict(held.args))
    for entry in args:
        key, equals, text = entry.partition("=")
        name, _, argument = key.partition(".")
        if not equals or not argument or name not in wanted:
            raise ConfigError(f"--arg must read NAME.KEY=VALUE with NAME one of {sorted(wanted)}, got {entry!r}")
        wanted[name][1][argument] = read_value(f"--arg {key}", text)
    return wanted


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"{host}:{port} cannot be listened on: {error}; set --host and --port") from None


def _rewards_section(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"config file {path} cannot be read: {one_line(error)}") from None
    section = tree.get("rewards") if isinstance(tree, dict) else None
    if not isinstance(section, dict):
        raise ConfigError(f"config file {path} must have a section `rewards`, got none")
    return section
