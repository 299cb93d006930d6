"""The keys of verl's first Nsight guide (`trainer.profile_steps`, `<role>.profile_ranks`, …), read into today's; `migrate.py` calls it.

There a role without ranks is not profiled, no role follows another, and each writes of its own whether it is discrete.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pellucid.config.schema.algorithm import CRITIC_ESTIMATORS, AlgorithmConfig
from pellucid.config.schema.profiler import ACTOR_FOLLOWERS, PROFILED_SECTIONS
from pellucid.errors import UserError

STEPS = "trainer.profile_steps"
_NAMES = ("profile_ranks", "profile_ranks_all", "profile_discrete")
PATTERNS = (STEPS, *(f"*.{name}" for name in _NAMES))
_OLD_SECTIONS = {"actor_rollout_ref.critic": "critic", "actor_rollout_ref.rm": "reward_model"}
_DISCRETE_TOOLS = ("nsys", "npu", "torch")


def section_of(parent: str) -> str:
    """Return today's section of a role that the guide has in another place."""
    return _OLD_SECTIONS.get(parent, parent)


def new_keys(old: dict[str, Any], get: Callable[[str], Any], said: list[str]) -> dict[str, Any]:
    """Return the dotted keys and values that mean the same as the guide's keys; empty when they ask for nothing.

    Args:
        old: the guide's keys in a user's tree with their values, resolved.
        get: returns the value of any other key of that tree, None where it is not set.
        said: lines that explain what is not as it looks are appended.

    Raises:
        UserError: roles with ranks disagree about `profile_discrete`, or a key belongs to no role.
    """
    if all(value is None or value is False or value == [] for value in old.values()):
        return {}
    roles = _roles(old)
    steps = old.get(STEPS)
    new: dict[str, Any] = {}
    tool = get("global_profiler.tool") or "nsys"
    if STEPS in old:
        new = {"global_profiler.tool": tool, "global_profiler.steps": steps or None}
    _check_discrete(roles)
    for section, keys in roles.items():
        block = f"{section}.profiler"
        if (why := _absence(section, get)) is not None:
            if keys.get("profile_ranks_all") or keys.get("profile_ranks"):
                said.append(f"{', '.join(_spelled(old, section))}: dropped, {why}.")
            continue
        if keys.get("profile_ranks_all"):
            new |= {f"{block}.enable": True, f"{block}.all_ranks": True}
        elif keys.get("profile_ranks"):
            new |= {f"{block}.enable": True, f"{block}.ranks": keys["profile_ranks"]}
        elif steps and "profile_ranks" in keys:
            new |= {f"{block}.enable": True, f"{block}.ranks": []}
            said.append(
                f"{section}.profile_ranks: {'null' if keys['profile_ranks'] is None else '[]'} is read as no ranks, as the "
                "guide's text has it; a comment in its example says all. For all ranks write profile_ranks_all: true."
            )
        if keys.get("profile_discrete"):
            new[f"{block}.tool_config.{tool if tool in _DISCRETE_TOOLS else 'torch'}.discrete"] = True
    if new.get(f"{PROFILED_SECTIONS['actor']}.profiler.enable"):
        for role in ACTOR_FOLLOWERS:
            block = f"{PROFILED_SECTIONS[role]}.profiler"
            if f"{block}.enable" not in new and get(block) is None:
                new[f"{block}.enable"] = False
    return new


def _roles(old: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return section → the role's keys by their last name."""
    roles: dict[str, dict[str, Any]] = {}
    for key, value in old.items():
        parent, _, name = key.rpartition(".")
        if key == STEPS:
            continue
        if section_of(parent) not in PROFILED_SECTIONS.values():
            sections = ", ".join(PROFILED_SECTIONS.values())
            raise UserError(key, f"{parent} is no role that can be profiled.", f"Roles: {sections}.")
        roles.setdefault(section_of(parent), {})[name] = value
    return roles


def _check_discrete(roles: dict[str, dict[str, Any]]) -> None:
    discrete = {
        section: bool(keys.get("profile_discrete"))
        for section, keys in roles.items()
        if keys.get("profile_ranks") or keys.get("profile_ranks_all")
    }
    on = [section for section, value in discrete.items() if value]
    if on and len(on) < len(discrete):
        odd = next(section for section, value in discrete.items() if not value)
        raise UserError(
            f"{odd}.profile_discrete",
            f"is false while {', '.join(f'{section}.profile_discrete' for section in on)} is true; all roles that are "
            "profiled must agree.",
            "Set all of them alike.",
        )


def _absence(section: str, get: Callable[[str], Any]) -> str | None:
    """Return why a run of this config does not have the role; None when it may have it."""
    estimator = get("algorithm.adv_estimator") or AlgorithmConfig.adv_estimator
    if section == "critic" and estimator not in CRITIC_ESTIMATORS:
        return f"adv_estimator: {estimator} has no critic"
    kl_switches = ("actor_rollout_ref.actor.use_kl_loss", "algorithm.use_kl_in_reward")
    if section == "actor_rollout_ref.ref" and not any(get(key) for key in kl_switches):
        return "no KL term compares to a reference model"
    if section == "reward_model" and not get("reward_model.enable"):
        return "reward_model.enable is false"
    return None


def _spelled(old: dict[str, Any], section: str) -> list[str]:
    return [key for key in old if key != STEPS and section_of(key.rpartition(".")[0]) == section]
