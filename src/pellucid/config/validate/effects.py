"""Keys that act in some modes only: changing one in another mode is an error, not a silent nothing.

What a key needs stands beside it in the schema (`fields.Needs`); `validate` in the package calls `changed_keys` and
`mistakes`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from pellucid.algo.catalog import ESTIMATORS, POLICY_LOSSES
from pellucid.config.fields import Needs, default_of, link_of, yaml_word
from pellucid.config.schema import RunConfig, SftConfig
from pellucid.config.trees import Tree, follow
from pellucid.errors import UserError

_ACTOR = "actor_rollout_ref.actor"


@dataclasses.dataclass(frozen=True)
class Changed:
    """A key whose value differs from its default or, where it follows another key, from that one's value."""

    value: Any
    section: str
    """Dotted name of the section that holds the key."""
    needs: tuple[Needs, ...]
    """What the key and the sections around it need in order to act."""


def changed_keys(config: RunConfig | SftConfig) -> dict[str, Changed]:
    """Return each changed key of a config by its dotted name."""
    return dict(_changed(dataclasses.asdict(config), config, "", ()))


def _changed(tree: Tree, part: Any, section: str, around: tuple[Needs, ...]) -> Iterator[tuple[str, Changed]]:
    for item in dataclasses.fields(part):
        value, needs = vars(part)[item.name], (*around, *item.metadata.get("needs", ()))
        key = f"{section}.{item.name}".lstrip(".")
        if dataclasses.is_dataclass(value):
            yield from _changed(tree, value, key, needs)
        elif value != (default_of(item) if (link := link_of(item)) is None else follow(tree, section, link)):
            yield key, Changed(value, section, (*needs, *_needs_of_algorithms(key)))


def _needs_of_algorithms(key: str) -> Iterator[Needs]:
    """Yield what a key needs that some estimators or losses read, by their entries; those of the user's own get
    them all.
    """
    if names := [name for name, entry in ESTIMATORS.items() if key.removeprefix("algorithm.") in entry.settings]:
        yield Needs("algorithm.adv_estimator", tuple(names))
    if names := [name for name, entry in POLICY_LOSSES.items() if key.removeprefix(f"{_ACTOR}.") in entry.settings]:
        yield Needs("algorithm.loss_type", ("ppo_clip",))
        yield Needs(f"{_ACTOR}.policy_loss.loss_mode", tuple(names))


def mistakes(config: RunConfig | SftConfig, changed: dict[str, Changed]) -> Iterator[UserError]:
    """Yield a mistake for each changed key that does nothing in this mode."""
    for key, change in changed.items():
        missing = next(filter(None, (need.missing(config, change.section) for need in change.needs)), None)
        if missing is not None:
            why, remedy = missing
            yield UserError(key, f"{yaml_word(change.value)} has no effect {why}.", f"{remedy}, or remove the key.")
