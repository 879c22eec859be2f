"""Pages of the documentation site that are made from something else. `properdocs.yml` names this file.

The README and its neighbours become pages of the site, and so do the notebooks. The reference pages are read from the
code: the config tree, the command line, the HTTP API, the conditions and the errors.
"""

import inspect
import json
import re
from pathlib import Path

import mkdocs_gen_files
import typer
from typer.cli import get_docs_for_click

from deploy.api.app import make_app
from deploy.api.auth import Access
from deploy.api.folder_source import FolderSource
from deploy.cli.app import app
from protocol import errors
from protocol.config.reference import sections
from protocol.sink import CONDITIONS

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = {
    "configuration.md": "Every key of the config with type, default, range and meaning",
    "commands.md": "Every command with its options",
    "api.md": "Every route of the status API",
    "../metrics.md": "Every metric",
    "conditions.md": "Every condition",
    "errors.md": "Every error, with its exit code",
    "../notebooks/credit_by_hand.md": "Notebook: one step of credit by hand",
    "../notebooks/compare_two_runs.md": "Notebook: compare two runs",
    "../toyworld.md": "The toy world: model, prompts, figures",
    "../contributing.md": "Contributing",
    "../changelog.md": "Changes by version",
}
"""Pages that the page of the reference lists, with their names there: the menu has no room for them."""
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
    """Every route of the status API with its parameters and answers, and the fields of the answers."""
    described = make_app(FolderSource(ROOT), Access(host="127.0.0.1", token=None)).openapi()
    lines = [
        "# HTTP API\n",
        f"\n{described['info']['description']} [Operate runs](../cluster.md#the-api) shows examples.\n",
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
    for name, schema in described["components"]["schemas"].items():
        fields = schema.get("properties", {}).items()
        about = [f"- `{field}`: {plain(each['description'])}\n" for field, each in fields if "description" in each]
        if about:
            lines += [f"\n## {name}\n\n{plain(schema.get('description', ''))}\n\n", *about]
    return "".join(lines)


def conditions() -> str:
    """Every type of condition and what it says."""
    lines = [
        "# Conditions\n\nA condition has a type, a status, a reason in one word, a message in one line, and the time of"
        " its last change. `True` is good. The page, the terminal, `events.jsonl` and the status API show them, as"
        " they do warnings and errors of the log.\n\n"
    ]
    lines += [f"**`{name}`**\n:   {meaning}\n\n" for name, meaning in CONDITIONS.items()]
    return "".join(lines)


def errors_page() -> str:
    """Every error class of ours, below its exit code."""
    found = [each for _, each in inspect.getmembers(errors, inspect.isclass) if each.__module__ == errors.__name__]
    mistakes = [each for each in found if issubclass(each, errors.InputError)]
    others = [each for each in found if each not in mistakes and each is not errors.FlowcreditError]
    lines = [
        "# Errors\n\nEvery error of ours is a `protocol.errors.FlowcreditError` with one line: the rule, the value, the"
        " remedy. On the command line it stands on stderr after `flowcredit: `. A second Ctrl-C ends with code 130.\n"
    ]
    for title, classes in (("A mistake in the input: exit code 2", mistakes), ("The run failed: exit code 1", others)):
        lines.append(f"\n## {title}\n\n")
        lines += [f"**`{each.__name__}`**\n:   {plain(each.__doc__ or '')}\n\n" for each in classes]
    return "".join(lines)


def notebook(path: Path) -> str:
    """A notebook as a page: its texts, its code, and after the code that draws the images beside the notebook."""
    images = iter(sorted(path.parent.glob(f"{path.stem}_*.png")))
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        parts.append(f"```python\n{text}\n```" if cell["cell_type"] == "code" else text)
        if "plt.subplots" in text:
            parts.append(f"![What the cell draws]({next(images).name})")
    parts.insert(1, f"This page is the notebook [`docs/notebooks/{path.name}`]({path.name}); a test runs it.")
    return "\n\n".join(parts) + "\n"


for source, page in PAGES.items():
    write(page, moved((ROOT / source).read_text(encoding="utf-8")))
command = typer.main.get_command(app)
with typer.Context(command, info_name="flowcredit") as context:
    write(
        "reference/commands.md", get_docs_for_click(obj=command, ctx=context, name="flowcredit", title="Command line")
    )
write("reference/index.md", "# Reference\n\n" + "".join(f"- [{what}]({name})\n" for name, what in REFERENCE.items()))
write("reference/configuration.md", configuration())
write("reference/api.md", api())
write("reference/conditions.md", conditions())
write("reference/errors.md", errors_page())
for path in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
    write(f"notebooks/{path.stem}.md", notebook(path))
