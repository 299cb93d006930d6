"""Rules that span several keys, checked before a model is touched.

Each rule looks at a converted config and yields the mistakes it finds; `load.py` calls `validate`. Keys that act in
some modes only say so in the schema (`fields.Needs`): changing one in another mode is an error, not a silent nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import cache
from typing import Any

from pellucid.algo.catalog import ESTIMATORS, POLICY_LOSSES
from pellucid.config.convert import NoEffectError, defaults_tree, flat_hints, hints_of, raise_all
from pellucid.config.fields import Needs, yaml_word
from pellucid.config.schema import RunConfig, SftConfig
from pellucid.config.trees import follow, get, has_link
from pellucid.config.validate import correction, megatron, profiling, ranks, steps
from pellucid.errors import UserError

_ACTOR = "actor_rollout_ref.actor"


def validate(config: RunConfig | SftConfig) -> list[str]:
    """Check the rules between keys.

    Returns:
        Lines about settings that are allowed but unusual.

    Raises:
        UserError: a rule is broken; the arithmetic is spelled out (`ConfigError` for several).
    """
    changed = changed_keys(config)
    if isinstance(config, SftConfig):
        raise_all([*steps.sft_mistakes(config), *_without_effect(config, changed)])
        return []
    rules = (ranks.mistakes, megatron.mistakes, steps.mistakes, correction.mistakes, profiling.mistakes)
    found = [error for rule in rules for error in rule(config)]
    distinct: list[UserError] = []
    for error in [*found, *_without_effect(config, changed)]:  # keys that follow another one repeat its mistake
        if not any(error.field == said.field or error.reason == said.reason for said in distinct):
            distinct.append(error)
    raise_all(distinct)
    return [note for rule in (steps, ranks, profiling) for note in rule.unusual(config, changed)]


def changed_keys(config: RunConfig | SftConfig) -> dict[str, Any]:
    """Return the keys whose value differs from the default or, where they follow another key, from that one's value."""
    tree, defaults, changed = dataclasses.asdict(config), defaults_tree(type(config)), dict[str, Any]()
    for key, hint in flat_hints(type(config)).items():
        if not dataclasses.is_dataclass(hint):
            value, default = get(tree, key), get(defaults, key)
            if value != (follow(tree, default, key.rpartition(".")[0]) if has_link(default) else default):
                changed[key] = value
    return changed


@cache
def needs_of(root: type, section: str = "", around: tuple[Needs, ...] = ()) -> dict[str, tuple[Needs, ...]]:
    """Return dotted key → what the key and the sections around it need in order to act."""
    found: dict[str, tuple[Needs, ...]] = {}
    for item in dataclasses.fields(root):
        hint, key = hints_of(root)[item.name], f"{section}.{item.name}".lstrip(".")
        # Profiling a role that a run does not have collects nothing, and is said to.
        needs = (*(around if item.name != "profiler" else ()), *item.metadata.get("needs", ()))
        if dataclasses.is_dataclass(hint):
            found |= needs_of(hint, key, needs)  # pyright: ignore[reportArgumentType]
        else:
            found[key] = (*needs, *_needs_of_algorithms(key))
    return found


def _needs_of_algorithms(key: str) -> Iterator[Needs]:
    """Yield what a key needs that some estimators or losses read; those of the user's own get them all."""
    if names := [name for name, entry in ESTIMATORS.items() if key.removeprefix("algorithm.") in entry.settings]:
        yield Needs("algorithm.adv_estimator", tuple(names))
    if names := [name for name, entry in POLICY_LOSSES.items() if key.removeprefix(f"{_ACTOR}.") in entry.settings]:
        yield Needs("algorithm.loss_type", ("ppo_clip",))
        yield Needs(f"{_ACTOR}.policy_loss.loss_mode", tuple(names))


def _without_effect(config: RunConfig | SftConfig, changed: dict[str, Any]) -> Iterator[UserError]:
    """Yield a mistake for each changed key that does nothing in this mode."""
    for key, value in changed.items():
        missing = (need.missing(config, key.rpartition(".")[0]) for need in needs_of(type(config))[key])
        if (first := next(filter(None, missing), None)) is not None:
            why, remedy = first
            yield NoEffectError(key, f"{yaml_word(value)} has no effect {why}.", f"{remedy}, or remove the key.")
