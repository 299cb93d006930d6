"""The one way in: a recipe and overrides become a checked dataclass, with everything resolved.

compose (Hydra) → old spellings → unknown keys → defaults that depend on other keys → links → types and ranges → rules.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

from pellucid.algo.catalog import loss_entry
from pellucid.config.compat import drop_targets, translate
from pellucid.config.compose import compose_user_tree
from pellucid.config.convert import convert, defaults_tree, flat_hints, hints_of, raise_all
from pellucid.config.fields import link_of
from pellucid.config.presets import expand_preset
from pellucid.config.schema import RunConfig, SftConfig
from pellucid.config.schema.msprobe_json import SECTION as PRECISION
from pellucid.config.schema.profiler import ACTOR_FOLLOWERS, PROFILED_SECTIONS
from pellucid.config.trees import Tree, get, has_link, merged, put, resolve, resolve_all, walk
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

    @cached_property
    def yaml(self) -> str:
        """The resolved YAML; loading it again gives the same config."""
        from omegaconf import OmegaConf

        return OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(self.config)))


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
    config = convert(root, _resolved_tree(source, overrides, root, notices))
    return Loaded(config, notices + validate(config))


def _resolved_tree(source: str | Path | None, overrides: list[str], root: type, notices: list[str]) -> Tree:
    """Return the whole tree with links followed, types not yet checked.

    Raises:
        UserError: unreadable input, an old or unknown key, a link that leads nowhere, a key left at `???`.
    """
    user, defaults = compose_user_tree(source, overrides), defaults_tree(root)
    drop_targets(user, notices)
    translate(user, defaults, notices)
    _drop_nulls(user, root)
    raise_all(list(_unknown_keys(user, flat_hints(root))))
    tree = merged(defaults, user)
    if root is RunConfig:
        tree = _follow_actor_profiler(user, tree)
        _default_training(user, tree, notices)
        expand_preset(user, tree, notices)
    if missing := [key for key, value in walk(tree) if value == "???"]:
        raise UserError(", ".join(missing), "must be set.", f"Set it in the recipe or as an override: {missing[0]}=…")
    tree = resolve_all(tree, defaults)
    if root is RunConfig:
        _default_tools(user, tree, notices)
    return tree


def _drop_nulls(user: Tree, cls: type) -> None:
    """Remove nulls of keys that follow another key ("follow" is what null means) and of sections (their defaults)."""
    hints = hints_of(cls)
    for item in dataclasses.fields(cls):
        value, is_section = user.get(item.name, ""), dataclasses.is_dataclass(hints[item.name])
        if value is None and (is_section or link_of(item)):
            del user[item.name]
        elif isinstance(value, dict) and is_section:
            _drop_nulls(value, hints[item.name])


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
    if candidates:
        return f"Did you mean '{candidates[0]}'?"
    return f"Keys of {parent}: {', '.join(siblings)}." if parent and siblings else "See: pellucid config keys"


def _follow_actor_profiler(user: Tree, tree: Tree) -> Tree:
    """Let ref and rollout take from the actor's `profiler` what they do not set: a schedule, and the ranks, as a
    whole.
    """
    actor = get(user, f"{_ACTOR}.profiler")
    for role in ACTOR_FOLLOWERS if isinstance(actor, dict) else ():
        key = f"{PROFILED_SECTIONS[role]}.profiler"
        if not isinstance(own := get(user, key, {}), dict):
            continue  # a link to another section
        wholes = (("schedule",), ("ranks", "all_ranks"))
        replaced = {name for whole in wholes if any(name in own for name in whole) for name in whole}
        followed: Tree = {}
        put(followed, key, merged({name: value for name, value in actor.items() if name not in replaced}, own))
        tree = merged(tree, followed)
    return tree


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


def _default_tools(user: Tree, tree: Tree, notices: list[str]) -> None:
    """Take the one tool that the profiled roles have settings of where none is chosen, and msprobe for its file."""
    profiler = tree["global_profiler"]
    if profiler["tool"] is None and profiler["steps"]:
        blocks = {role: get(tree, f"{section}.profiler") for role, section in PROFILED_SECTIONS.items()}
        toolless = {role: own for role, own in blocks.items() if own["tool"] is None}
        settled = {role for role, own in toolless.items() if str(own["enable"]).lower() == "true"}
        if settled & set(ACTOR_FOLLOWERS):
            settled.add("actor")
        named = {tool for role in settled for tool in get(user, f"{PROFILED_SECTIONS[role]}.profiler.tool_config", {})}
        if len(named) == 1:
            [profiler["tool"]] = named
            for own in toolless.values():
                own["tool"] = profiler["tool"]
            notices.append(
                f"global_profiler.tool: {profiler['tool']}, the one tool that the profiled roles have settings of."
            )
    if get(tree, f"{PRECISION}.config_path") is not None and get(user, f"{PRECISION}.backend") is None:
        put(tree, f"{PRECISION}.backend", "msprobe")
        notices.append(f"{PRECISION}.backend: msprobe, whose file config_path names.")
