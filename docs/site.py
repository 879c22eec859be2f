"""Pages of the documentation site that are made from something else; mkdocs runs this file (`mkdocs.yml`).

The README and its neighbours become pages of the site. The reference pages are read from the code: the config tree, the
command line and the HTTP API.
"""

import json
import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mkdocs_gen_files
import typer
from pydantic import BaseModel
from pydantic_core import PydanticUndefined
from typer.cli import get_docs_for_click

from deploy.api.app import make_app
from deploy.api.auth import Access
from deploy.api.folder_source import FolderSource
from deploy.cli.app import app
from protocol.config.run import RunConfig

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "toyworld/README.md": "toyworld.md",
}


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
    head = (
        "# Configuration\n\nA config is a YAML file or a preset, with `key=value` overrides on the command line."
        " A dot leads into a section, for example `group.size=16`. Unknown keys are refused.\n"
    )
    return head + "".join(section(RunConfig, ""))


def section(model: type[BaseModel], prefix: str) -> Iterator[str]:
    """The keys of one section, then those of the sections inside it."""
    inner = []
    yield f"\n## {prefix.rstrip('.') or 'The run'}\n\n{first_paragraph(model)}\n\n"
    for name, field in model.model_fields.items():
        key, own = f"{prefix}{name}", nested(field.annotation)
        if own:
            inner.append((own, f"{key}.NAME." if typing.get_origin(field.annotation) is dict else f"{key}."))
            continue
        default = "required" if field.default is PydanticUndefined and not field.default_factory else shown(field)
        limits = ", ".join(filter(None, map(limit, field.metadata)))
        facts = "; ".join(filter(None, (f"`{kind(field.annotation)}`", limits, default)))
        yield f"**`{key}`** ({facts})\n:   {plain(field.description or '')}\n\n"
    for own, inside in inner:
        yield from section(own, inside)


def nested(annotation: Any) -> type[BaseModel] | None:
    """The section behind an annotation, or None for a plain value."""
    for each in (annotation, *typing.get_args(annotation)):
        if isinstance(each, type) and issubclass(each, BaseModel):
            return each
    return None


def kind(annotation: Any) -> str:
    """A type in words: a literal as its values, a union with |."""
    origin = typing.get_origin(annotation)
    if origin is typing.Literal:
        return " | ".join(map(str, typing.get_args(annotation)))
    if origin in (typing.Union, types.UnionType):
        return " | ".join("null" if each is type(None) else kind(each) for each in typing.get_args(annotation))
    if origin is typing.Annotated:
        return kind(typing.get_args(annotation)[0])
    if origin:
        inner = ", ".join(kind(each) for each in typing.get_args(annotation) if each is not Ellipsis)
        return f"{getattr(origin, '__name__', origin)}[{inner}]"
    return getattr(annotation, "__name__", str(annotation))


def shown(field: Any) -> str:
    """The default as one would write it in YAML."""
    if field.default_factory_takes_validated_data:
        return "default from other keys"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, (tuple, frozenset)):
        value = list(value)
    return f"default `{json.dumps(value) if isinstance(value, bool | list | None) else value}`"


def limit(metadata: Any) -> str:
    """A range, from annotated-types' marks."""
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    found = [f"{sign} {shortened(getattr(metadata, name))}" for name, sign in signs.items() if hasattr(metadata, name)]
    return ", ".join(found)


def shortened(number: float) -> str:
    """A number as people write it."""
    return "2^63" if number == 2**63 else f"{number:g}"


def first_paragraph(model: type[BaseModel]) -> str:
    """What a section is for."""
    return plain((model.__doc__ or "").split("\n\n")[0])


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
