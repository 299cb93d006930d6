"""Trees of plain dictionaries, keys in dotted form: what a user wrote, and all of a config before it has types.

`compose.py` makes one from YAML and overrides; `compat.py` and `load.py` change it and resolve its links.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from pellucid.errors import UserError

Tree = dict[str, Any]
_LINK = re.compile(r"\$\{([\w.]+)\}")


def get(tree: Tree, key: str, default: Any = None) -> Any:
    """Return the value of a key as it is written, or `default` where there is none."""
    node: Any = tree
    for name in key.split("."):
        if not isinstance(node, dict) or name not in node:
            return default
        node = node[name]
    return node


def put(tree: Tree, key: str, value: Any) -> None:
    """Set a key; sections on the way are made where they are missing."""
    *parents, name = key.split(".")
    for parent in parents:
        if not isinstance(tree.get(parent), dict):
            tree[parent] = {}
        tree = tree[parent]
    tree[name] = value


def remove(tree: Tree, key: str) -> None:
    """Remove a key, and the sections around it that become empty."""
    parent, _, name = key.rpartition(".")
    section = get(tree, parent) if parent else tree
    del section[name]
    if parent and not section:
        remove(tree, parent)


def merged(under: Tree, over: Tree) -> Tree:
    """Return a new tree of `under` with the keys of `over`; lists and values are replaced, mappings merged."""
    result = {name: merged(value, {}) if isinstance(value, dict) else value for name, value in under.items()}
    for name, value in over.items():
        old = result.get(name)
        result[name] = merged(old if isinstance(old, dict) else {}, value) if isinstance(value, dict) else value
    return result


def walk(tree: Tree, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each dotted key with its value, a section before what is in it."""
    for name, value in list(tree.items()):
        yield f"{prefix}{name}", value
        if isinstance(value, dict):
            yield from walk(value, f"{prefix}{name}.")


def has_link(value: Any) -> bool:
    """Tell whether a value is a link to another key (`${…}`) or holds one."""
    if isinstance(value, dict):
        return any(map(has_link, value.values()))
    return any(map(has_link, value)) if isinstance(value, list) else isinstance(value, str) and "${" in value


def follow(tree: Tree, value: Any, section: str) -> Any:
    """Return a value that stands in `section` with its links followed, as far as each names one other key.

    Raises:
        KeyError: a link does more than that, or leads nowhere.
    """

    def value_of(match: re.Match[str]) -> Any:
        key = f"{section}{match[1]}" if match[1].startswith(".") else match[1]
        target = get(tree, key, "???")
        return follow(tree, target, key if isinstance(target, dict) else key.rpartition(".")[0])

    if isinstance(value, dict):
        below = {name: f"{section}.{name}".lstrip(".") for name, part in value.items() if isinstance(part, dict)}
        return {name: follow(tree, part, below.get(name, section)) for name, part in value.items()}
    if isinstance(value, list):
        return [follow(tree, item, section) for item in value]
    if value == "???":
        raise KeyError(section)
    if not has_link(value):
        return value
    whole = _LINK.fullmatch(value)
    followed = value_of(whole) if whole else _LINK.sub(lambda match: str(value_of(match)), value)
    if has_link(followed) or "\\$" in value:
        raise KeyError(value)
    return followed


def resolve(tree: Tree, key: str = "") -> Any:
    """Return the value of a key, or where none is named the whole tree, with links of any kind followed.

    Raises:
        UserError: a link leads nowhere.
    """
    value = get(tree, key) if key else tree
    try:
        return follow(tree, value, key if isinstance(value, dict) else key.rpartition(".")[0])
    except (KeyError, RecursionError):  # OmegaConf takes a hundred times as long, and knows more kinds of links
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        try:
            config: Any = OmegaConf.create(tree)
            value = OmegaConf.select(config, key) if key else config
            return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        except OmegaConfBaseException as error:
            reason = f"its interpolation cannot be resolved ({str(error).splitlines()[0]})."
            raise UserError(key or str(error.full_key), reason) from error
