"""Pages of the documentation site that are made from something else; mkdocs runs this file (`mkdocs.yml`).

The README and its neighbours become pages of the site. The reference pages are read from the code: the config tree, the
command line and the HTTP API.
"""

import re
from pathlib import Path

import mkdocs_gen_files
import typer
from typer.cli import get_docs_for_click

from deploy.api.app import make_app
from deploy.api.auth import Access
from deploy.api.folder_source import FolderSource
from deploy.cli.app import app
from protocol.config.reference import sections

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "toyworld/README.md": "toyworld.md",
}

SPOKEN = {"required": "required", "from other keys": "default from other keys"}
"""Defaults that are no value, in the words of the page."""


def write(name: str, text: str) -> None:
    """Write a page of the site."""
    with mkdocs_gen_files.open(name, "w") as file:
        file.write(text)


def moved(text: str) -> str:
    """Make links of a page outside `docs/` lead to the pages of the site."""
    for source, page in PAGES.items():
        text = re.sub(rf"\]\((?:\.\./)?{re.escape(source)}", f"]({page}", text)
    text = re.sub(r"\]\((?:\.\./)?docs/method\)", "](method/README.md)", text)
    return re.sub(r"\]\((?:\.\./)?docs/", "](", text)


def configuration() -> str:
    """Every key of the config tree with type, default, range and meaning."""
    lines = [
        "# Configuration\n\nA config is a YAML file or a preset, with `key=value` overrides on the command line."
        " A dot leads into a section, for example `group.size=16`. Unknown keys are refused."
        " `flowcredit config PRESET` shows the values of a preset, `flowcredit config --keys` this page.\n"
    ]
    for section in sections():
        lines.append(f"\n## {section.name or 'The run'}\n\n{section.about}\n\n")
        for each in section.keys:
            default = each.default if each.default in SPOKEN else f"default `{each.default}`"
            facts = "; ".join(filter(None, (f"`{each.kind}`", each.limits, SPOKEN.get(default, default))))
            lines.append(f"**`{each.key}`** ({facts})\n:   {each.meaning}\n\n")
    return "".join(lines)


def plain(text: str) -> str:
    """A docstring as one line."""
    return " ".join(text.split())


def api() -> str:
    """Every route of the status API with its parameters and answers."""
    described = make_app(FolderSource(ROOT), Access(host="127.0.0.1", token=None)).openapi()
    lines = [
        "# HTTP API\n",
        f"\n{described['info']['description']} [Status, page and control](../service.md) shows examples.\n",
    ]
    for path, methods in described["paths"].items():
        for method, route in methods.items():
            lines.append(f"\n## {method.upper()} {path}\n\n{plain(route.get('description') or route['summary'])}\n\n")
            for each in route.get("parameters", []):
                lines.append(
                    f"- `{each['name']}` ({each['in']}): {plain(each.get('description', '')) or 'see the path'}\n"
                )
            lines.append("\n")
            for code, answer in route["responses"].items():
                lines.append(f"- **{code}**: {plain(answer['description'])}\n")
    return "".join(lines)


for source, page in PAGES.items():
    write(page, moved((ROOT / source).read_text(encoding="utf-8")))
command = typer.main.get_command(app)
with typer.Context(command, info_name="flowcredit") as context:
    write(
        "reference/commands.md", get_docs_for_click(obj=command, ctx=context, name="flowcredit", title="Command line")
    )
write("reference/configuration.md", configuration())
write("reference/api.md", api())
