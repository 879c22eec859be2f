"""Making things worse, by a seed: mutated trees, damaged files."""

import random
from pathlib import Path
from typing import Any

ODD: tuple[Any, ...] = (
    None,
    "",
    "x",
    "0",
    -1,
    0,
    1,
    2**63,
    10**400,
    -0.5,
    1e308,
    float("nan"),
    float("inf"),
    True,
    [],
    {},
    [[]],
    {"a": {"b": 1}},
    ["attn.to_q", 3],
    "\x00",
    "\ud800",
    "../../etc/passwd",
    "rewards.geneval.scorer:GenEval",
    {1: 2},
    {None: 1},
)
"""Values that somebody once typed into a config."""


def mutated(tree: Any, numbers: random.Random) -> Any:
    """A copy of a tree of dicts with one to three changes anywhere."""
    for _ in range(numbers.randint(1, 3)):
        tree = _changed(tree, numbers)
    return tree


def damage(path: Path, numbers: random.Random) -> str:
    """Harm a file in one of the ways in which disks and people do, and say how."""
    kind = numbers.choice(("bit", "truncated", "missing", "empty", "zeros", "tail", "swapped", "folder"))
    content = bytearray(path.read_bytes())
    if kind == "bit":
        index = numbers.randrange(len(content))
        content[index] ^= 1 << numbers.randrange(8)
    elif kind == "truncated":
        del content[numbers.randrange(len(content)) :]
    elif kind == "empty":
        content.clear()
    elif kind == "zeros":
        index = numbers.randrange(len(content))
        content[index : index + 64] = bytes(len(content[index : index + 64]))
        if bytes(content) == path.read_bytes():
            content += b"\x00"
    elif kind == "tail":
        content += numbers.randbytes(numbers.randint(1, 64))
    elif kind == "swapped":
        half = len(content) // 2
        content = content[half:] + content[:half] + b"."
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind != "missing":
        path.write_bytes(content)
    return kind


def _changed(node: Any, numbers: random.Random) -> Any:
    if not isinstance(node, dict) or not node or numbers.random() < 0.1:
        return numbers.choice(ODD)
    tree = dict(node)
    key = numbers.choice(list(tree))
    kind = numbers.choice(("descend", "descend", "descend", "drop", "rename", "add"))
    if kind == "descend":
        tree[key] = _changed(tree[key], numbers)
    elif kind == "drop":
        del tree[key]
    elif kind == "rename":
        tree[_misspelt(str(key), numbers)] = tree.pop(key)
    else:
        tree[numbers.choice(("x", "", "seed ", "model.path", 3, None, "steps"))] = numbers.choice(ODD)
    return tree


def _misspelt(key: str, numbers: random.Random) -> str:
    index = numbers.randrange(len(key) + 1)
    return numbers.choice((key[:index] + "e" + key[index:], key[:index] + key[index + 1 :], key.upper()))
