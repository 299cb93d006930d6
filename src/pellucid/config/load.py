"""The one way in: a recipe and overrides become a checked dataclass, with everything resolved.

compose (Hydra) → old spellings → keys of later work → unknown keys → resolve → types and ranges → cross-field rules.
"""

from __future__ import annotations

import dataclasses
import operator
from dataclasses import dataclass
from difflib import get_close_matches
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pellucid.config.compose import compose_user_tree
from pellucid.config.convert import convert, defaults_tree, flat_hints, hints_of, raise_all
from pellucid.config.deferred import drop_deferred
from pellucid.config.fields import link_of
from pellucid.config.migrate import drop_old, drop_targets
from pellucid.config.presets import expand_preset, forget_earlier_preset
from pellucid.config.schema import RunConfig, SftConfig
from pellucid.config.schema.actor import SEQUENCE_MEAN_LOSSES
from pellucid.config.schema.msprobe_json import LEVELS, SECTION, read_json
from pellucid.config.schema.profiler import ACTOR_FOLLOWERS, PROFILED_SECTIONS
from pellucid.config.validate import validate
from pellucid.config.verl_precision import drop_moved
from pellucid.errors import UserError

if TYPE_CHECKING:
    from omegaconf import DictConfig

Root = TypeVar("Root", bound=RunConfig | SftConfig)


@dataclass(frozen=True)
class Loaded(Generic[Root]):
    """A loaded config."""

    config: Root
    """The checked config, everything resolved."""
    yaml: str
    """The resolved YAML; loading it again gives the same config."""
    notices: list[str]
    """Lines to print once before the run starts."""


def load_config(source: str | Path | None, overrides: list[str], root: type[Root] = RunConfig) -> Loaded[Root]:
    """Load a recipe.

    Args:
        source: path of the YAML recipe; None starts from the defaults.
        overrides: command-line overrides in Hydra's grammar.
        root: `RunConfig` or `SftConfig`.

    Raises:
        UserError: anything wrong with the recipe or the overrides, named by its full key (`ConfigError` for several).
    """
    notices: list[str] = []
    config = convert(root, resolved_tree(source, overrides, root, notices), notices)
    notices += validate(config)
    return Loaded(config, to_yaml(config), notices)


def to_yaml(config: Any) -> str:
    """Return a config as YAML text."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(config)))


def resolved_tree(source: str | Path | None, overrides: list[str], root: type, notices: list[str]) -> dict[str, Any]:
    """Return the whole tree with interpolations resolved, types not yet checked.

    Raises:
        UserError: unreadable input, an old or later or unknown key, a link that leads nowhere, a key left at `???`.
    """
    from omegaconf import DictConfig, OmegaConf

    user = compose_user_tree(source, overrides)
    if root is RunConfig:
        forget_earlier_preset(user, source, overrides)
    drop_targets(user, notices)
    drop_old(user, notices)
    _drop_null_links(user, root)
    defaults = OmegaConf.create(defaults_tree(root))
    merged = OmegaConf.merge(defaults, user)
    assert isinstance(merged, DictConfig)
    drop_deferred(user, merged, notices)
    if root is RunConfig:
        drop_moved(user, merged, notices)
    raise_all(list(_unknown_keys(user, root)))
    if root is RunConfig:
        _follow_actor_profiler(user, merged)
        _default_micro_batching(merged, notices)
        _default_aggregation(user, merged, notices)
        expand_preset(user, merged, notices)
    missing: list[str] = []
    tree = _resolve(merged, root, "", missing)
    if missing:
        raise UserError(
            ", ".join(missing),
            "must be set (it is ???)." if len(missing) == 1 else "must be set (they are ???).",
            f"Set it in the recipe or as an override: {missing[0]}=…",
        )
    if root is RunConfig:
        _default_tool(user, tree, notices)
        _default_level(tree, notices)
    return tree


def _follow_actor_profiler(user: DictConfig, merged: DictConfig) -> None:
    """Let ref and rollout take from the actor's `profiler` what they do not set: a schedule, and the ranks, as a whole."""
    from omegaconf import DictConfig, OmegaConf

    actor = _select(user, f"{PROFILED_SECTIONS['actor']}.profiler")
    if not isinstance(actor, DictConfig):
        return
    for role in ACTOR_FOLLOWERS:
        key = f"{PROFILED_SECTIONS[role]}.profiler"
        own = _select(user, key) or OmegaConf.create()
        wholes = (("schedule",), ("ranks", "all_ranks"))
        replaced = {name for whole in wholes if any(name in own for name in whole) for name in whole}
        followed = OmegaConf.masked_copy(actor, [str(name) for name in actor if name not in replaced])
        OmegaConf.update(merged, key, OmegaConf.merge(followed, own))


def _default_tool(user: DictConfig, tree: dict[str, Any], notices: list[str]) -> None:
    """Take the one tool that the profiled roles have settings of, where none is chosen."""
    profiler = tree["global_profiler"]
    if profiler["tool"] is not None or not profiler["steps"]:
        return
    toolless: list[dict[str, Any]] = []
    named: set[str] = set()
    for role, own in _profilers(tree).items():
        if own["tool"] is None:
            toolless.append(own)
            if str(own["enable"]).lower() == "true":
                settled = [PROFILED_SECTIONS[role], *([PROFILED_SECTIONS["actor"]] if role in ACTOR_FOLLOWERS else [])]
                named |= {str(name) for key in settled for name in _select(user, f"{key}.profiler.tool_config") or ()}
    if len(named) == 1:
        [tool] = named
        profiler["tool"] = tool
        for own in toolless:
            own["tool"] = tool
        notices.append(f"global_profiler.tool: {tool}, the one tool that the profiled roles have settings of.")


def _profilers(tree: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return each role's `profiler` section."""
    return {
        role: reduce(operator.getitem, f"{section}.profiler".split("."), tree)
        for role, section in PROFILED_SECTIONS.items()
    }


def _default_level(tree: dict[str, Any], notices: list[str]) -> None:
    """Take the precision debugger's level from msprobe's JSON file, where it is set there alone."""
    profiler = tree["global_profiler"]
    settings = profiler["global_tool_config"]["precision_debugger"]
    used = any(own["tool"] == "precision_debugger" for own in _profilers(tree).values())
    path = settings["config_path"]
    if used and profiler["steps"] and settings["level"] is None and isinstance(path, str):
        try:
            level = read_json(path).get("level")
        except UserError:  # what is wrong with the file the rules say, in runs that use it
            return
        if level in LEVELS:
            settings["level"] = level
            notices.append(f"{SECTION}.level: {level}, from {path}.")


def _select(tree: DictConfig, key: str) -> Any:
    """Return the value of a key that may not be there.

    Raises:
        UserError: its interpolation leads nowhere.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return OmegaConf.select(tree, key)
    except OmegaConfBaseException as error:
        raise UserError(key, f"its interpolation cannot be resolved ({str(error).splitlines()[0]}).") from error


def _default_micro_batching(merged: DictConfig, notices: list[str]) -> None:
    """Form micro-batches by tokens when nothing says how; no gradient depends on it."""
    from omegaconf import OmegaConf

    actor = OmegaConf.select(merged, "actor_rollout_ref.actor")
    if actor.use_dynamic_bsz is False and actor.ppo_micro_batch_size_per_gpu is None:
        actor.use_dynamic_bsz = True
        notices.append(
            "actor_rollout_ref.actor: no use_dynamic_bsz and no ppo_micro_batch_size_per_gpu is set, so "
            "micro-batches are formed by tokens (use_dynamic_bsz: true); the gradient is the same."
        )


def _default_aggregation(user: DictConfig, merged: DictConfig, notices: list[str]) -> None:
    """Give losses that are means over sequences their own aggregation, unless the user chose one."""
    from omegaconf import OmegaConf

    actor = OmegaConf.select(merged, "actor_rollout_ref.actor")
    chosen = "loss_agg_mode" in (OmegaConf.select(user, "actor_rollout_ref.actor") or {})
    loss = str(OmegaConf.select(actor, "policy_loss.loss_mode"))
    if not chosen and loss.replace("-", "_") in SEQUENCE_MEAN_LOSSES:
        actor.loss_agg_mode = "seq-mean-token-mean"
        notices.append(
            f"actor_rollout_ref.actor.loss_agg_mode: seq-mean-token-mean, which loss_mode: {loss} is defined with."
        )


def _drop_null_links(user: DictConfig, cls: type) -> None:
    """Remove nulls of keys that follow another key: null means "follow"."""
    from omegaconf import DictConfig, OmegaConf

    hints = hints_of(cls)
    for item in dataclasses.fields(cls):
        if (
            item.name not in user
            or OmegaConf.is_interpolation(user, item.name)
            or OmegaConf.is_missing(user, item.name)
        ):
            continue
        value = user[item.name]
        if dataclasses.is_dataclass(hints[item.name]):
            if isinstance(value, DictConfig):
                _drop_null_links(value, hints[item.name])
            elif value is None and item.metadata.get("null_is_off"):
                del user[item.name]
        elif value is None and link_of(item) is not None:
            del user[item.name]


def _unknown_keys(user: DictConfig, root: type) -> Any:
    """Yield an error for each key that the schema does not have, and for values in the place of sections."""
    from omegaconf import DictConfig, OmegaConf

    known = flat_hints(root)

    def walk(node: DictConfig, prefix: str) -> Any:
        for name, child in node.items_ex(resolve=False):
            key = f"{prefix}{name}"
            if key not in known:
                while isinstance(child, DictConfig) and not child._is_none() and len(child) == 1:
                    [(inner, child)] = child.items_ex(resolve=False)
                    key += f".{inner}"
                yield UserError(key, "there is no such key.", _suggest(key, known))
            elif not dataclasses.is_dataclass(known[key]) or (
                OmegaConf.is_config(child) and OmegaConf.is_interpolation(child)
            ):
                continue
            elif not isinstance(child, DictConfig) or child._is_none():
                yield UserError(
                    key,
                    "this is a section of keys, not a value.",
                    f"Set its keys, e.g. {key}.{next(iter(hints_of(known[key])))}.",
                )
            else:
                yield from walk(child, f"{key}.")

    return walk(user, "")


def _suggest(key: str, known: dict[str, Any]) -> str:
    """Name the key that was probably meant: the same end elsewhere, a like name in the section, or a like full key."""
    parent, _, leaf = key.rpartition(".")
    siblings = {name.rpartition(".")[2]: name for name in known if name.rpartition(".")[0] == parent}
    close = [siblings[word] for word in get_close_matches(leaf, siblings, n=1, cutoff=0.7)]
    elsewhere = [name for name in known if name.endswith(f".{key}") or name.rpartition(".")[2] == leaf]
    elsewhere = [name for name in elsewhere if not name.startswith("critic.")] or elsewhere
    others = [name for name in known if not key.startswith(f"{name}.")]
    candidates = (
        close or get_close_matches(key, elsewhere, n=1, cutoff=0.0) or get_close_matches(key, others, n=1, cutoff=0.6)
    )
    if candidates:
        return f"Did you mean '{candidates[0]}'?"
    return (
        f"Keys{f' of {parent}' if parent else ''}: {', '.join(siblings)}." if siblings else "See: pellucid config keys"
    )


def _resolve(node: Any, cls: Any, prefix: str, missing: list[str]) -> dict[str, Any]:
    """Return a section's values with links resolved; keys left at `???` are appended to `missing`."""
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    values: dict[str, Any] = {}
    for item, (name, hint) in zip(dataclasses.fields(cls), hints_of(cls).items()):
        key = prefix + name
        try:
            value = "???" if OmegaConf.is_missing(node, name) else node[name]
            if dataclasses.is_dataclass(hint):
                if not isinstance(value, DictConfig):
                    raise UserError(key, "its interpolation gives a value, but this is a section of keys.")
                values[name] = _resolve(value, hint, f"{key}.", missing)
                continue
            values[name] = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        except OmegaConfBaseException as error:
            if "MissingMandatoryValue" not in str(error) and "Missing mandatory" not in str(error):
                raise UserError(key, f"its interpolation cannot be resolved ({str(error).splitlines()[0]}).") from error
            value = "???"
        if isinstance(value, str) and value == "???" and not _follows(node, item):
            missing.append(key)
    return values


def _follows(node: DictConfig, item: dataclasses.Field[Any]) -> bool:
    """Tell whether a field still follows the key that the schema links it to (that key is reported in its place)."""
    from omegaconf import OmegaConf

    return link_of(item) is not None and OmegaConf.is_interpolation(node, item.name)
