"""The one way in: a recipe and overrides become a checked dataclass, with everything resolved.

compose (Hydra) → old spellings → unknown keys → defaults that depend on other keys → links → types and ranges → rules.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml

from pellucid.algo.catalog import loss_entry
from pellucid.config.compat import drop_targets, translate
from pellucid.config.compose import compose_user_tree
from pellucid.config.convert import ConfigError, convert, defaults_tree, flat_hints, hints_of, raise_all
from pellucid.config.describe import yaml_value
from pellucid.config.presets import PRESETS
from pellucid.config.schema import RunConfig, SftConfig
from pellucid.config.schema.msprobe_json import SECTION as PRECISION
from pellucid.config.schema.profiler import ACTOR_FOLLOWERS, PROFILED_SECTIONS, ScheduleConfig
from pellucid.config.trees import Tree, get, has_link, merged, put, resolve, walk
from pellucid.config.validate import validate
from pellucid.errors import UserError

Root = TypeVar("Root", bound=RunConfig | SftConfig)
_ACTOR = "actor_rollout_ref.actor"


@dataclass(frozen=True)
class Loaded(Generic[Root]):
    """A loaded config."""

    config: Root
    """The checked config, everything resolved."""
    notices: list[str]
    """Lines to print once before the run starts."""

    @property
    def yaml(self) -> str:
        """The resolved YAML; loading it again gives the same config."""
        return resolved_yaml(self.config)


def resolved_yaml(config: RunConfig | SftConfig) -> str:
    """Return a checked config as YAML; loading it again gives the same config."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(config)))


def load_config(
    source: str | Path | Mapping[str, Any] | None,
    overrides: list[str],
    root: type[Root] = RunConfig,
    sections: Mapping[str, Any] | None = None,
) -> Loaded[Root]:
    """Load a recipe.

    Args:
        source: path of the YAML recipe, or its keys; None starts from the defaults.
        overrides: command-line overrides in Hydra's grammar.
        root: `RunConfig` or `SftConfig`.
        sections: keys that win over the recipe's.

    Raises:
        UserError: anything wrong with the recipe or the overrides, named by its full key (`ConfigError` for several).
    """
    notices: list[str] = []
    user, defaults = merged(compose_user_tree(source, overrides), dict(sections or {})), defaults_tree(root)
    drop_targets(user, notices)
    translate(user, defaults, notices)
    _drop_nulls(user, defaults)
    if unknown := list(_unknown_keys(user, flat_hints(root))):
        raise_all([*unknown, *_other_mistakes(user, defaults, root)])
    tree = merged(defaults, user)
    if root is RunConfig:
        _separate_followers(user, tree)
        _default_training(user, tree, notices)
        _default_tools(user, tree, notices)
        _expand_preset(user, tree, notices)
    if missing := [key for key, value in walk(tree) if value == "???"]:
        raise UserError(", ".join(missing), "must be set.", f"Set it in the recipe or as an override: {missing[0]}=…")
    config = convert(root, resolve(tree))
    return Loaded(config, notices + validate(config))


def changes(before: str, now: str) -> list[str]:
    """Return `key: value → value` for every key that differs between two configs, written as `resolved_yaml` does."""
    sides = [dict(walk(yaml.safe_load(text))) for text in (before, now)]
    keys = [key for key in {**sides[0], **sides[1]} if not isinstance(sides[1].get(key, sides[0].get(key)), dict)]
    values = {key: [yaml_value(side.get(key)) for side in sides] for key in keys}
    return [f"{key}: {a} → {b}" for key, (a, b) in values.items() if a != b]


def _other_mistakes(user: Tree, defaults: Tree, root: type) -> list[UserError]:
    """Return what is wrong with the values of the keys that there are, where others are unknown."""
    known = flat_hints(root)
    tree = merged(defaults, {})
    for key, value in walk(user):
        if key in known and not dataclasses.is_dataclass(known[key]):
            put(tree, key, value)
    try:
        if not [key for key, value in walk(tree) if value == "???"]:
            convert(root, resolve(tree))
    except ConfigError as error:
        return error.errors
    except UserError as error:
        return [error]
    return []


def _drop_nulls(user: Tree, defaults: Tree) -> None:
    """Remove nulls of keys that follow another key ("follow" is what null means) and of sections (their defaults)."""
    for name, value in list(user.items()):
        default = defaults.get(name)
        if value is None and (isinstance(default, dict) or has_link(default)):
            del user[name]
        elif isinstance(value, dict) and isinstance(default, dict):
            _drop_nulls(value, default)


def _unknown_keys(user: Tree, known: dict[str, Any], prefix: str = "") -> Iterator[UserError]:
    """Yield an error for each key that the schema does not have, and for values in the place of sections."""
    for name, value in user.items():
        key = f"{prefix}{name}"
        if key not in known:
            while isinstance(value, dict) and len(value) == 1:
                [(inner, value)] = value.items()
                key += f".{inner}"
            yield UserError(key, "there is no such key.", _suggest(key, known))
        elif not dataclasses.is_dataclass(known[key]) or (isinstance(value, str) and has_link(value)):
            continue
        elif isinstance(value, dict):
            yield from _unknown_keys(value, known, f"{key}.")
        else:
            example = f"Set its keys, e.g. {key}.{next(iter(hints_of(known[key])))}."
            yield UserError(key, "this is a section of keys, not a value.", example)


def _suggest(key: str, known: dict[str, Any]) -> str:
    """Name the key that was probably meant: a like name in the section, the same name elsewhere, or a like full key."""
    parent, _, leaf = key.rpartition(".")
    siblings = {name.rpartition(".")[2]: name for name in known if name.rpartition(".")[0] == parent}
    close = [siblings[word] for word in get_close_matches(leaf, siblings, n=1, cutoff=0.7)]
    elsewhere = [name for end in (key, leaf) for name in known if name.endswith(f".{end}")]
    elsewhere.sort(key=lambda name: name.partition(".")[0] != key.partition(".")[0])
    candidates = close or elsewhere or get_close_matches(key, known, n=1)
    return f"Did you mean '{candidates[0]}'?" if candidates else "See: pellucid config keys"


def _separate_followers(user: Tree, tree: Tree) -> None:
    """Let ref and rollout, which follow the actor's `profiler` by key, take its ranks and schedule whole or not."""
    for role in ACTOR_FOLLOWERS:
        key = f"{PROFILED_SECTIONS[role]}.profiler"
        if isinstance(own := get(user, key), dict):
            alone: Tree = {"ranks": [], "all_ranks": False} if own.keys() & {"ranks", "all_ranks"} else {}
            if "schedule" in own:
                alone["schedule"] = dataclasses.asdict(ScheduleConfig())
            put(tree, key, merged(get(tree, key) | alone, own))


def _default_training(user: Tree, tree: Tree, notices: list[str]) -> None:
    """Form micro-batches by tokens when nothing says how, and give a loss the aggregation that it is defined with."""
    actor = tree["actor_rollout_ref"]["actor"]
    sizes = [resolve(tree, f"{_ACTOR}.{name}") for name in ("use_dynamic_bsz", "ppo_micro_batch_size_per_gpu")]
    if sizes == [False, None]:
        actor["use_dynamic_bsz"] = True
        notices.append(f"{_ACTOR}.use_dynamic_bsz: true, so micro-batches are formed by tokens; no size is set.")
    loss = str(resolve(tree, f"{_ACTOR}.policy_loss.loss_mode"))
    if "loss_agg_mode" not in get(user, _ACTOR, {}) and loss_entry(loss).sequence_mean:
        actor["loss_agg_mode"] = "seq-mean-token-mean"
        notices.append(f"{_ACTOR}.loss_agg_mode: seq-mean-token-mean, which loss_mode: {loss} is defined with.")


def _expand_preset(user: Tree, tree: Tree, notices: list[str]) -> None:
    """Put in the keys of the chosen preset where the user set none, and name those that he set otherwise."""
    preset_key = "algorithm.rollout_correction_preset"
    preset_name, own = resolve(tree, preset_key), get(user, "algorithm", {})
    preset = PRESETS.get(preset_name, {})
    tree["algorithm"] |= {key: value for key, value in preset.items() if key not in own}
    chosen = {key: resolve(tree, f"algorithm.{key}") for key in preset}
    if kept := [f"algorithm.{key}: {value}" for key, value in chosen.items() if value != preset[key]]:
        notices.append(f"{preset_key}: {preset_name}, but for what is set itself: {', '.join(kept)}")


def _default_tools(user: Tree, tree: Tree, notices: list[str]) -> None:
    """Take the one tool that the profiled roles have settings of where none is chosen, and msprobe for its file."""
    profiler = tree["global_profiler"]
    if profiler["tool"] is None and profiler["steps"]:
        blocks = [get(user, f"{section}.profiler", {}) for section in PROFILED_SECTIONS.values()]
        toolless = [own for own in blocks if get(own, "enable") and get(own, "tool") is None]
        named = {tool for own in toolless for tool in own.get("tool_config", {})}
        if len(named) == 1:
            [profiler["tool"]] = named
            chosen = f"global_profiler.tool: {profiler['tool']}"
            notices.append(f"{chosen}, the one tool that profiled roles have settings of.")
    if get(user, f"{PRECISION}.config_path") is not None and get(user, f"{PRECISION}.backend") is None:
        put(tree, f"{PRECISION}.backend", "msprobe")
        notices.append(f"{PRECISION}.backend: msprobe, whose file config_path names.")
