"""The commands about rewards: `scorers` and `serve-rewards`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from deploy.cli.options import AllowHost, Host, IsJson, Port, Proxy, TokenFile, show_rows
from deploy.presets import read_tree, read_value
from protocol.errors import ConfigError


def scorers(is_json: IsJson = False) -> None:
    """List the built-in scorers, their import paths and what to install.

    `python -m pydoc rewards.ocr.scorer.Ocr` explains one: formula, weights and arguments.
    """
    from rewards.scorer import SCORERS

    def line(row: dict[str, Any]) -> str:
        needed = f"pip install -e .[{row['extra']}]" if row["extra"] else ""
        return f"{row['name']:12} {row['path']:36} {needed}".rstrip()

    rows = [{"name": name, "path": path, "extra": extra or None} for name, (path, extra) in SCORERS.items()]
    show_rows(rows, line, is_json=is_json)


def serve_rewards(
    names: Annotated[
        list[str], typer.Argument(metavar="SCORER...", help="Name of a scorer, or NAME=package.module:Class.")
    ],
    args: Annotated[
        list[str] | None, typer.Option("--arg", help="An argument of a scorer, NAME.KEY=VALUE; repeatable.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="YAML file with a `rewards` section, as in a run's config, to take NAMEs from.")
    ] = None,
    host: Host = "127.0.0.1",
    port: Port = 8100,
    token_file: TokenFile = None,
    allow_host: AllowHost = None,
    proxy: Proxy = None,
    deadline: Annotated[
        float, typer.Option(help="Seconds for one request to a scorer; then its process is started again.", min=1)
    ] = 300.0,
    max_waiting: Annotated[int, typer.Option(help="Images that may wait for one scorer.", min=1)] = 1024,
) -> None:
    """Serve scorers over HTTP for reward actors on other machines (`rewards.NAME.scorer: remote`).

    Each scorer has a process of its own and takes one request at a time. An image has at most 4096 x 4096 pixels (a
    larger one is not decoded and has no score), a request 1,024 images and 64 MiB. A server with too much to do answers
    503, and the client tries again.
    """
    from deploy.api.auth import Access, read_token
    from deploy.api.rewards import make_app
    from deploy.api.scorer_process import ScorerProcess
    from deploy.api.serve import listen, serve_until_interrupted

    wanted = wanted_scorers(names, args or [], config)
    token = read_token(token_file)
    access = Access(host=host, token=token, allowed_hosts=tuple(allow_host or ()))
    slots: dict[str, ScorerProcess] = {}
    try:
        for name, (spec, arguments) in wanted.items():
            slots[name] = ScorerProcess(spec, arguments, deadline_s=deadline)
        listener, address = listen(host, port)
        announcement = f"serving {', '.join(slots)} on {address}"
        announcement += "" if token else ", open to all users of this machine"
        app = make_app(slots, access, max_waiting=max_waiting)
        serve_until_interrupted(app, listener, announcement=announcement, proxies=proxy or ())
    finally:
        for slot in slots.values():
            slot.close()


def wanted_scorers(
    names: list[str], args: list[str], config: Path | None = None
) -> dict[str, tuple[str, dict[str, Any]]]:
    """Read which scorers to serve.

    Args:
        names: `NAME` or `NAME=package.module:Class`.
        args: `NAME.KEY=VALUE`, arguments that override the config's.
        config: a YAML file with a `rewards` section that defines names.

    Returns:
        Each scorer's built-in name or import path and its arguments, by the name it is served under.

    Raises:
        ConfigError: an argument is malformed or for a scorer that is not served, or the config lacks a name.
    """
    from protocol.config.parse import parse_reward
    from protocol.config.reward import RewardConfig

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


def _rewards_section(path: Path) -> dict[str, Any]:
    section = read_tree(path).get("rewards")
    if not isinstance(section, dict):
        raise ConfigError(f"config file {path} must have a section `rewards`, got none")
    return {str(name): reward for name, reward in section.items()}
