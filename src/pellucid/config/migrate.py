"""Old spellings that users still have: one table for the error text of a run and for `pellucid config migrate`.

Input is the tree a user wrote, unresolved; output is the new tree, or an error that shows the new YAML.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pellucid.config import verl_profiling
from pellucid.config.convert import flat_hints, in_one_spelling, raise_all
from pellucid.config.schema import RunConfig
from pellucid.config.verl_correction import BLOCK, flat_keys, is_off
from pellucid.config.verl_sharding import critic_keys, offload_keys, precision_keys
from pellucid.errors import UserError

if TYPE_CHECKING:
    from omegaconf import DictConfig


@dataclass(frozen=True)
class Old:
    """One old key: the values that mean off, and what takes its place.

    Attributes:
        pattern: the dotted key, with `*` for any text.
        off: values that change nothing and need no replacement.
        new: from the key's parent and value to the new dotted keys and values.
        why: what a run says beside the new YAML.
        translated: a run reads the key as the new YAML and says so; otherwise it stops.
    """

    pattern: str
    off: Callable[[Any], bool]
    new: Callable[[str, Any], dict[str, Any]]
    why: str
    translated: bool = False


def _tis(parent: str, value: Any) -> dict[str, Any]:
    return {
        "algorithm.rollout_is_threshold": value,
        "algorithm.rollout_is": True,
        "algorithm.rollout_is_level": "token",
        "algorithm.rollout_is_mode": "truncate",
        "actor_rollout_ref.rollout.calculate_log_probs": True,
    }


def _empty(value: Any) -> bool:
    return value in (None, False, [])


OLD: tuple[Old, ...] = (
    Old(
        "actor_rollout_ref.actor.tis_imp_ratio_cap",
        lambda value: value is None or (isinstance(value, int | float) and value <= 0),
        _tis,
        "The key was removed: importance sampling of the rollout is set under algorithm. `pellucid config migrate` "
        "rewrites the file.",
    ),
    Old(
        "*.ppo_micro_batch_size",
        lambda value: value is None,
        lambda parent, value: {f"{parent}.ppo_micro_batch_size_per_gpu": value},
        "The global micro-batch size is gone; the new key counts samples on one rank.",
    ),
    Old(
        BLOCK,
        is_off,
        lambda parent, value: flat_keys(value),
        "The block's keys are flat here.",
        translated=True,
    ),
    Old(
        "critic.model.fsdp_config",
        lambda value: not value,
        lambda parent, value: critic_keys(value),
        "The block sits beside critic.strategy here.",
        translated=True,
    ),
    Old(
        "*.fsdp_config.mixed_precision",
        lambda value: not value,
        precision_keys,
        "All roles compute in the model's number format.",
        translated=True,
    ),
    Old(
        "*.fsdp_config.offload_policy",
        _empty,
        lambda parent, value: offload_keys(parent),
        "The two keys mean the same for fsdp and fsdp2.",
        translated=True,
    ),
    *(
        Old(f"actor_rollout_ref.rollout.log_prob_{name}", lambda value: True, lambda parent, value: {}, "")
        # How the pass for the old log-probabilities is cut changes no number, and it follows the actor's own keys.
        for name in ("micro_batch_size", "micro_batch_size_per_gpu", "use_dynamic_bsz", "max_token_len_per_gpu")
    ),
)


@dataclass(frozen=True)
class Found:
    """Old keys in a user's tree that are read together, mostly one alone.

    Attributes:
        keys: the old keys with their values.
        new: what takes their place; empty when they are off.
        why: what a run says beside the new YAML.
        translated: as in `Old`.
        notes: lines on what is not as it looks.
    """

    keys: dict[str, Any]
    new: dict[str, Any]
    why: str
    translated: bool
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The old keys in one line."""
        return ", ".join(self.keys)


def find_old(tree: DictConfig) -> list[Found]:
    """Return the old keys that `tree` holds, in file order; those of profiling come last and are one entry.

    Raises:
        UserError: one of them cannot be read.
    """
    single: list[Found] = []
    profiling: dict[str, Any] = {}
    for key, parent in _walk(tree, ""):
        name = key.rpartition(".")[2]
        if any(fnmatchcase(key, pattern) for pattern in verl_profiling.PATTERNS):
            profiling[key] = _plain(parent, name, key, resolve=True)
        elif (old := next((old for old in OLD if fnmatchcase(key, old.pattern)), None)) is not None:
            value = _plain(parent, name, key, resolve=old.translated)
            new = {} if old.off(value) else old.new(key.rpartition(".")[0], value)
            single.append(Found({key: value}, new, old.why, old.translated))
    if not profiling:
        return single
    notes: list[str] = []
    new = verl_profiling.new_keys(profiling, lambda key: _get(tree, key), notes)
    why = "`pellucid config migrate` rewrites the file."
    return [*single, Found(profiling, new, why, translated=True, notes=tuple(notes))]


def _walk(node: DictConfig, prefix: str) -> Iterator[tuple[str, DictConfig]]:
    """Yield each key of a tree with the node that holds it; what is inside an old key belongs to that."""
    from omegaconf import DictConfig

    patterns = [*verl_profiling.PATTERNS, *(old.pattern for old in OLD)]
    for name, child in node.items_ex(resolve=False):
        key = f"{prefix}{name}"
        yield key, node
        inside = isinstance(child, DictConfig) and not child._is_none() and not child._is_interpolation()
        if inside and not any(fnmatchcase(key, pattern) for pattern in patterns):
            yield from _walk(child, f"{key}.")


def _get(tree: DictConfig, key: str) -> Any:
    """Return the value of a key that may not be there, None too where it is a link that leads nowhere."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return OmegaConf.select(tree, key)
    except OmegaConfBaseException:
        return None  # reported by its own name, once the links are resolved


def _plain(parent: DictConfig, name: str, key: str, resolve: bool) -> Any:
    """Return an entry of `parent` as a plain value, its links resolved or as text."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        node = parent[name] if resolve else dict(parent.items_ex(resolve=False))[name]
        return OmegaConf.to_container(node, resolve=resolve) if OmegaConf.is_config(node) else node
    except OmegaConfBaseException as error:
        raise UserError(key, f"its interpolation cannot be resolved ({str(error).splitlines()[0]}).") from error


def drop_old(user: DictConfig, notices: list[str]) -> None:
    """Take old keys that are off out of `user`, replace those that can be translated; stop at any other.

    Raises:
        UserError: an old key is set, and the text shows the YAML that takes its place; or a key is set both in the old
            and the new spelling, to different values (`ConfigError` for several).
    """
    from omegaconf import OmegaConf

    found, hints = find_old(user), flat_hints(RunConfig)
    raise_all(
        [
            UserError(item.name, "this spelling is replaced by\n" + _yaml(item.new), item.why)
            for item in found
            if item.new and not item.translated
        ]
    )
    for item in found:
        for key in item.keys:
            _delete(user, key)
        for key, value in item.new.items():
            own = OmegaConf.select(user, key)
            if own is not None and in_one_spelling(own, hints.get(key)) != value:
                raise UserError(key, f"is also set, to another value, by {item.name}.", "Keep one of the two.")
            OmegaConf.update(user, key, value, force_add=True)
        if item.new:
            notices.append(f"{item.name} {'is' if len(item.keys) == 1 else 'are'} read as\n{_yaml(item.new)}{item.why}")
        notices += item.notes
    if off := [key for item in found if not item.new for key in item.keys]:
        notices.append("Old keys that change nothing here, dropped: " + ", ".join(off))


def drop_targets(tree: DictConfig, notices: list[str]) -> None:
    """Remove the `_target_` keys of Hydra's instantiation, with one notice."""
    if count := _drop_targets(tree):
        notices.append(f"Ignored {count} `_target_` key{'s' * (count > 1)}: classes are not chosen by name here.")


def migrate(source: Path) -> tuple[str, list[str]]:
    """Rewrite an old config.

    Args:
        source: the YAML file; comments are not kept.

    Returns:
        The new YAML text, and one line for each change.

    Raises:
        UserError: the file cannot be read, or roles disagree about discrete profiling.
    """
    from omegaconf import OmegaConf

    from pellucid.config.compose import read_yaml

    tree = read_yaml(source)
    changes: list[str] = []
    drop_targets(tree, changes)
    for item in find_old(tree):
        for key in item.keys:
            _delete(tree, key)
        for key, value in item.new.items():
            OmegaConf.update(tree, key, value)
        changes.append(f"{_line(item.keys)} → {_line(item.new) or 'removed (changes nothing here)'}")
        changes += item.notes
    return OmegaConf.to_yaml(tree), changes


def _drop_targets(node: Any) -> int:
    from omegaconf import DictConfig, ListConfig

    if isinstance(node, ListConfig) and not node._is_none() and not node._is_interpolation():
        return sum(_drop_targets(child) for child in node._iter_ex(resolve=False))
    if not isinstance(node, DictConfig) or node._is_none() or node._is_interpolation():
        return 0
    count = int(node.pop("_target_", None) is not None)
    return count + sum(_drop_targets(child) for _, child in node.items_ex(resolve=False))


def _delete(tree: DictConfig, key: str) -> None:
    """Delete a key, and its parents while they become empty."""
    from omegaconf import OmegaConf

    while key:
        parent, _, leaf = key.rpartition(".")
        node = OmegaConf.select(tree, parent) if parent else tree
        del node[leaf]
        if node:
            return
        key = parent


def _line(keys: dict[str, Any]) -> str:
    return ", ".join(f"{key}: {_word(value)}" for key, value in keys.items())


def _word(value: Any) -> str:
    """Return a value as one line of YAML."""
    import yaml

    return yaml.safe_dump(value, default_flow_style=True, width=10**6, sort_keys=False).removesuffix("...\n").strip()


def _yaml(keys: dict[str, Any]) -> str:
    from omegaconf import OmegaConf

    tree = OmegaConf.create()
    for key, value in keys.items():
        OmegaConf.update(tree, key, value)
    return OmegaConf.to_yaml(tree)
