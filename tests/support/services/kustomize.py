"""Renders the kustomizations of `deploy/kuberay/` as `kustomize build` does; an unknown field is an error."""

import copy
import json
from pathlib import Path
from typing import Any

import yaml

Document = dict[str, Any]
KEYS = {"apiVersion", "kind", "resources", "components", "images", "patches", "replacements"}


def build(folder: Path, base: list[Document] | None = None) -> list[Document]:
    """The documents of a kustomization; those of a component are `base`, changed by it."""
    spec = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert set(spec) <= KEYS, f"{folder}: this renderer does not know {set(spec) - KEYS}"
    assert spec["kind"] == ("Kustomization" if base is None else "Component")
    documents = list(base or [])
    for name in spec.get("resources", ()):
        path = folder / name
        documents += build(path) if path.is_dir() else _read(path)
    for name in spec.get("components", ()):
        documents = build(folder / name, documents)
    for entry in spec.get("patches", ()):
        documents = _patched(documents, folder, **entry)
    for image in spec.get("images", ()):
        _set_image(documents, **image)
    for entry in spec.get("replacements", ()):
        _replace(documents, **entry)
    return documents


def _read(path: Path) -> list[Document]:
    # Through JSON, so that what YAML's aliases share is copied: a patch changes one field only.
    return json.loads(json.dumps(list(yaml.safe_load_all(path.read_text()))))


def _patched(
    documents: list[Document], folder: Path, *, target: dict[str, str], patch: str = "", path: str = ""
) -> list[Document]:
    change = yaml.safe_load(patch or (folder / path).read_text())
    matching = _of_kind(documents, **target)
    if isinstance(change, dict):
        assert change.pop("$patch") == "delete"
        return [document for document in documents if document not in matching]
    for document in matching:
        for operation in change:
            _apply(document, **operation)
    return documents


def _apply(document: Document, *, op: str, path: str, value: Any) -> None:
    *parents, last = [part.replace("~1", "/").replace("~0", "~") for part in path.removeprefix("/").split("/")]
    node: Any = document
    for part in parents:
        node = node[int(part)] if isinstance(node, list) else node[part]
    if op == "add" and last == "-":
        node.append(copy.deepcopy(value))
        return
    assert op == "add" or (op == "replace" and last in node), f"{op} {path}: no such field"
    node[last] = copy.deepcopy(value)


def _set_image(node: Any, *, name: str, newTag: str) -> None:  # kustomize's own name
    if isinstance(node, list):
        for each in node:
            _set_image(each, name=name, newTag=newTag)
    elif isinstance(node, dict):
        for key, value in node.items():
            if key == "image" and str(value).partition(":")[0] == name:
                node[key] = f"{name}:{newTag}"
            else:
                _set_image(value, name=name, newTag=newTag)


def _replace(documents: list[Document], *, source: dict[str, str], targets: list[dict[str, Any]]) -> None:
    (found,) = _of_kind(documents, kind=source["kind"])
    for target in targets:
        assert target["options"] == {"create": True}
        (document,) = _of_kind(documents, **target["select"])
        for field in target["fieldPaths"]:
            *parents, last = field.split(".")
            node = document
            for part in parents:
                node = node[part]
            node[last] = copy.deepcopy(found[source["fieldPath"]])


def _of_kind(documents: list[Document], *, kind: str) -> list[Document]:
    found = [document for document in documents if document["kind"] == kind]
    assert found, f"no {kind} to change"
    return found
