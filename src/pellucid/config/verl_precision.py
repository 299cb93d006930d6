"""Keys of verl's `precision_debugger` block that are said elsewhere here: each is refused with where it goes.

verl has the block under `global_tool_config` and a copy of it under every role's `tool_config`; here there is the global one.
`load.py` calls `drop_moved` before the schema sees the tree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pellucid.config.convert import raise_all
from pellucid.config.schema.msprobe_json import SECTION
from pellucid.config.schema.profiler import PROFILED_SECTIONS
from pellucid.errors import UserError

if TYPE_CHECKING:
    from omegaconf import DictConfig

_TOOL = "precision_debugger"
_MOVED = {
    "enable": ("the tool is chosen by its name.", "Set global_profiler.tool: precision_debugger, or null for none."),
    "data_dir": ("the run decides where captures go.", "Set global_profiler.save_path for another folder."),
    "dump_path": ("the run decides where captures go.", "Set global_profiler.save_path for another folder."),
    "steps": ("global_profiler.steps alone says which steps are captured.", "Set global_profiler.steps."),
    "step": ("global_profiler.steps alone says which steps are captured.", "Set global_profiler.steps."),
    "ranks": ("each role says which of its ranks are captured.", "Set the role's profiler.ranks."),
    "rank": ("each role says which of its ranks are captured.", "Set the role's profiler.ranks."),
    "concurrency": ("a process makes one capture at a time.", ""),
    "task": ("msprobe's JSON file says it.", "Set task in the file at config_path."),
}
"""Key → why it is not here, and what to write instead."""


def drop_moved(user: DictConfig, merged: DictConfig, notices: list[str]) -> None:
    """Take keys of verl's blocks that change nothing out of `user`.

    Args:
        user: the keys the user set; changed in place.
        merged: the same over the defaults, where interpolations resolve.
        notices: one line that names the keys taken out is appended.

    Raises:
        UserError: a key asks for something (`ConfigError` for several).
    """
    errors, dropped = list[UserError](), list[str]()
    unused = _get(merged, "global_profiler.tool") != _TOOL
    whole = _block(merged, SECTION) or {}
    # The roles' copies first: their links lead to the global block.
    for section in PROFILED_SECTIONS.values():
        key = f"{section}.profiler.tool_config.{_TOOL}"
        if (own := _block(merged, key)) is None:
            continue
        if (unused and own.get("enable") is False) or all(
            value in (None, whole.get(name)) for name, value in own.items()
        ):
            dropped.append(key)
        else:
            what = ", ".join(name for name, value in own.items() if value not in (None, whole.get(name)))
            errors.append(UserError(key, f"the tool has one setting for all roles ({what}).", f"Set {SECTION}."))
    off = unused and whole.get("enable") is False
    for name, (why, remedy) in _MOVED.items():
        key = f"{SECTION}.{name}"
        if name not in whole:
            continue
        if off or whole[name] is None:
            dropped.append(key)
        else:
            errors.append(UserError(key, f"there is no such key: {why}", f"Remove it. {remedy}".strip()))
    raise_all(errors)
    for key in dropped:
        _delete(user, key)
    if dropped:
        notices.append(f"Keys of verl that change nothing here, dropped: {', '.join(dropped)}")


def _block(tree: DictConfig, key: str) -> dict[str, Any] | None:
    """Return a block as plain values; None where there is none, or a value in its place, which the schema reports."""
    value = _get(tree, key)
    return value if isinstance(value, dict) else None


def _get(tree: DictConfig, key: str) -> Any:
    """Return a key's plain value, its links resolved; None where there is none.

    Raises:
        UserError: a link leads nowhere.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        value = OmegaConf.select(tree, key)
        return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    except OmegaConfBaseException as error:
        raise UserError(key, f"its interpolation cannot be resolved ({str(error).splitlines()[0]}).") from error


def _delete(tree: DictConfig, key: str) -> None:
    """Delete a key; of sections that are linked the first deletion is of all."""
    from omegaconf import DictConfig, OmegaConf

    parent, _, leaf = key.rpartition(".")
    node = OmegaConf.select(tree, parent)
    if isinstance(node, DictConfig):
        node.pop(leaf, None)
