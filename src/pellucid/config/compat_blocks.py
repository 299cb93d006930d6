"""Blocks of verl's keys that are read as a whole: rollout correction, FSDP, and the first Nsight guide's profiling
keys.

`compat.py` names these functions in its table. Each returns the dotted keys and values that mean the same here.
"""

from __future__ import annotations

import math
from typing import Any, get_args

from pellucid.algo.catalog import estimator_entry
from pellucid.config.convert import hints_of
from pellucid.config.schema.algorithm import RejectionRuleConfig
from pellucid.config.schema.profiler import ACTOR_FOLLOWERS, PROFILED_SECTIONS
from pellucid.config.trees import Tree, get, has_link
from pellucid.errors import UserError, did_you_mean

CORRECTION = "algorithm.rollout_correction"
STEPS = "trainer.profile_steps"
PROFILING = (STEPS, "*.profile_ranks", "*.profile_ranks_all", "*.profile_discrete")
"""Patterns of the keys that `profiling_keys` reads together."""
_FLAT = ("rollout_is_threshold_lower", "rollout_is_level", "rollout_is_mode", "rollout_is_veto_threshold")
_CORRECTION_KEYS = (
    *("rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize"),
    *("rollout_rs", "rollout_rs_threshold", "rollout_rs_threshold_lower", "rollout_token_veto_threshold"),
    *("bypass_mode", "loss_type", "use_policy_gradient"),
    *_FLAT,
)
_OLD_RULES = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}
_STATISTICS, _LEVELS = (get_args(hints_of(RejectionRuleConfig)[name]) for name in ("statistic", "level"))
_RULES = [f"{level}_{statistic}" for level in _LEVELS for statistic in _STATISTICS]
_FORMATS = {"fp32": "float32", "float32": "float32", "bf16": "bfloat16", "bfloat16": "bfloat16"}
_PRECISION = ("param_dtype", "reduce_dtype", "buffer_dtype")
_FROZEN = ("actor_rollout_ref.ref.", "reward_model.")
_OLD_SECTIONS = {"actor_rollout_ref.critic": "critic", "actor_rollout_ref.rm": "reward_model"}
_SWITCHES = {
    "actor_rollout_ref.ref": (
        ("actor_rollout_ref.actor.use_kl_loss", "algorithm.use_kl_in_reward"),
        "no KL term compares to a reference model",
    ),
    "reward_model": (("reward_model.enable",), "reward_model.enable is false"),
}
"""Section of a role → the keys of which one must be true for a run to have it, and what is said where none is."""
_DISCRETE_TOOLS = ("nsys", "npu", "torch")


def _section(block: Any, key: str, known: tuple[str, ...]) -> dict[str, Any]:
    """Return a block's keys that are set, or raise where it is no section or has a key that is not known."""
    if not isinstance(block, dict):
        raise UserError(key, "this is a section of keys, not a value.", f"Keys: {', '.join(known)}.")
    for name in block:
        if name not in known:
            raise UserError(f"{key}.{name}", "there is no such key.", did_you_mean(str(name), known))
    return block


def correction_keys(block: Any) -> Tree:
    """Read `algorithm.rollout_correction`, where one string holds a level, bounds or a list of rules (`0.5_5.0`).

    Raises:
        UserError: an unknown key or word, or a bound that is not a number.
    """
    block = _section(block, CORRECTION, _CORRECTION_KEYS)
    flat: Tree = {}
    reinforce = block.get("loss_type") == "reinforce" or block.get("use_policy_gradient") is True
    bypass = block.get("bypass_mode") is True
    if (level := _word(block.get("rollout_is"))) is not None:
        flat |= _weights(block, level, applied=reinforce or not bypass)
    if (rules := _word(block.get("rollout_rs"))) is not None:
        flat["rollout_rs"] = rules if isinstance(rules, list) else _rules(block, str(rules))
    if bypass:
        flat["bypass_mode"] = True
        if reinforce:
            flat["loss_type"] = "reinforce"
    return {f"algorithm.{key}": value for key, value in flat.items()}


def _word(value: Any) -> Any:
    """Return None for the ways to say "off"."""
    return None if value is None or value is False or value in ("", "null", "none", "None", []) else value


def _weights(block: Tree, level: Any, applied: bool) -> Tree:
    """Return the keys of the weights; with a clipped loss in bypass mode verl computes them and applies none."""
    if level is not True and level not in ("token", "sequence", "geometric"):
        known = did_you_mean(str(level), ("token", "sequence"))
        raise UserError(f"{CORRECTION}.rollout_is", f"'{level}' is no level.", known)
    lower, upper = _bounds(block.get("rollout_is_threshold", 2.0), "rollout_is_threshold")
    keys: Tree = {"rollout_is_threshold": upper, "rollout_is": applied}
    if level is not True:
        keys["rollout_is_level"] = level
        # verl has no veto unless it is asked for; here there is one by default.
        keys["rollout_is_veto_threshold"] = block.get("rollout_token_veto_threshold")
    if lower is not None:
        keys |= {"rollout_is_mode": "clip", "rollout_is_threshold_lower": lower}
    if block.get("rollout_is_batch_normalize") is True:
        keys["rollout_is_batch_normalize"] = True
    return keys | {key: block[key] for key in _FLAT if key in block}


def _rules(block: Tree, words: str) -> list[Tree]:
    """Return the rejection rules, each with its own bounds."""
    names = list(dict.fromkeys(_OLD_RULES.get(word.strip(), word.strip()) for word in words.split(",") if word.strip()))
    for name in names:
        if name not in _RULES:
            raise UserError(f"{CORRECTION}.rollout_rs", f"'{name}' is no rule.", did_you_mean(name, _RULES))
    threshold = _word(block.get("rollout_rs_threshold"))
    bounds = [part for part in str(threshold).split(",") if part.strip()] if threshold is not None else []
    if len(bounds) not in (1, len(names)):
        reason = f"{len(bounds)} bounds for {len(names)} rules."
        raise UserError(f"{CORRECTION}.rollout_rs_threshold", reason, "Give one bound for all rules, or one for each.")
    old_lower = _word(block.get("rollout_rs_threshold_lower"))
    made = []
    for name, bound in zip(names, bounds * len(names) if len(bounds) == 1 else bounds, strict=True):
        level, _, statistic = name.rpartition("_")
        lower, upper = _bounds(bound, "rollout_rs_threshold")
        if statistic == "k1" and lower is not None and not math.isclose(lower * upper, 1, rel_tol=1e-5):
            # verl holds the inverse ratio (rollout ÷ training) within the bounds of k1.
            lower, upper = float(f"{1 / upper:.7g}"), float(f"{1 / lower:.7g}")
        elif lower is None and old_lower is not None:
            lower = float(old_lower)
        rule = {"statistic": statistic, "level": level, "upper": upper}
        made.append(rule | {"lower": lower} if lower is not None and statistic == "k1" else rule)
    return made


def _bounds(value: Any, key: str) -> tuple[float | None, float]:
    """Return (lower or None, upper) of `2.0` or `"0.5_5.0"`."""
    parts = str(value).strip().split("_")
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2) or isinstance(value, bool):
        remedy = "Write an upper bound, or lower_upper such as 0.5_5.0."
        raise UserError(f"{CORRECTION}.{key}", f"'{value}' is no bound.", remedy)
    return (numbers[0] if len(numbers) == 2 else None), numbers[-1]


def precision_keys(parent: str, block: Any) -> Tree:
    """Read the `mixed_precision` of the block `parent`, a role's `fsdp_config`; here a run computes in one number
    format.

    Raises:
        UserError: an unknown key or format, or buffers in another format than float32.
    """
    key = f"{parent}.mixed_precision"
    formats = {}
    for name, value in _section(block, key, _PRECISION).items():
        if value is not None and str(value) not in _FORMATS:
            raise UserError(
                f"{key}.{name}", f"'{value}' is no number format of this version.", "Set it to fp32 or bf16."
            )
        formats[name] = _FORMATS.get(str(value))
    if formats.get("buffer_dtype") not in (None, "float32"):
        raise UserError(f"{key}.buffer_dtype", "buffers are kept in float32 here.", "Set it to fp32, or remove it.")
    keys = {"actor_rollout_ref.model.dtype": formats.get("param_dtype")}
    if not parent.startswith(_FROZEN):  # a frozen model has no gradients to add up
        keys[f"{parent}.reduce_dtype"] = formats.get("reduce_dtype")
    return {name: value for name, value in keys.items() if value is not None}


def offload_keys(parent: str) -> Tree:
    """Return the keys that mean `offload_policy: true` in the block `parent`: weights, gradients, optimizer state."""
    frozen = parent.startswith(_FROZEN)
    return {f"{parent}.param_offload": True} | ({} if frozen else {f"{parent}.optimizer_offload": True})


def critic_sharding_keys(block: Any) -> Tree:
    """Read verl's `critic.model.fsdp_config`, whose keys stand under `critic.fsdp_config` here, old ones among them."""
    if not isinstance(block, dict):
        raise UserError("critic.model.fsdp_config", "this is a section of keys, not a value.", "Remove it.")
    offloads = {"param_offload": True, "optimizer_offload": True} if block.get("offload_policy") else {}
    rest = {name: value for name, value in block.items() if name != "offload_policy"}
    return {f"critic.fsdp_config.{name}": value for name, value in (rest | offloads).items()}


def profiling_keys(old: Tree, user: Tree, tree: Tree, notes: list[str]) -> Tree:
    """Read the keys of verl's first Nsight guide: `trainer.profile_steps` and each role's `profile_*`.

    There a role without ranks is not profiled, no role follows another, and each says of its own whether it is
    discrete.

    Args:
        old: those keys of the user's tree with their values, resolved.
        user: the user's tree.
        tree: the same over the defaults; over none for a file that is a part of a config.
        notes: lines that explain what is not as it looks are appended.

    Returns:
        Nothing when the keys ask for nothing.

    Raises:
        UserError: a key belongs to no role.
    """
    if all(value is None or value is False or value == [] for value in old.values()):
        return {}
    roles = _roles(old)
    steps = old.get(STEPS)
    tool = get(tree, "global_profiler.tool") or "nsys"
    new: Tree = {"global_profiler.tool": tool, "global_profiler.steps": steps or None} if STEPS in old else {}
    for section, keys in roles.items():
        block, asks = f"{section}.profiler", bool(keys.get("profile_ranks_all") or keys.get("profile_ranks"))
        exists, why_not, needs = _has_role(section, tree)
        if exists is not True and asks:
            spelled = ", ".join(f"{section}.{name}" for name in keys)
            notes.append(f"{spelled}: {f'dropped, {why_not}' if exists is False else f'kept, for runs with {needs}'}.")
        if exists is False:
            continue
        if keys.get("profile_ranks_all"):
            new |= {f"{block}.enable": True, f"{block}.all_ranks": True}
        elif keys.get("profile_ranks"):
            new |= {f"{block}.enable": True, f"{block}.ranks": keys["profile_ranks"]}
        elif steps and "profile_ranks" in keys:
            new |= {f"{block}.enable": True, f"{block}.ranks": []}
            shown = "null" if keys["profile_ranks"] is None else "[]"
            notes.append(
                f"{section}.profile_ranks: {shown} is read as no ranks, as the guide's text has it; a comment in its "
                "example says all. For all ranks write profile_ranks_all: true."
            )
        if keys.get("profile_discrete"):
            new[f"{block}.tool_config.{tool if tool in _DISCRETE_TOOLS else 'torch'}.discrete"] = True
    if new.get(f"{PROFILED_SECTIONS['actor']}.profiler.enable"):
        for role in ACTOR_FOLLOWERS:
            block = f"{PROFILED_SECTIONS[role]}.profiler"
            if f"{block}.enable" not in new and get(user, block) is None:
                new[f"{block}.enable"] = False
    return new


def _roles(old: Tree) -> dict[str, Tree]:
    """Return today's section of each role with its keys by their last name."""
    roles: dict[str, Tree] = {}
    for key, value in old.items():
        parent, _, name = key.rpartition(".")
        section = _OLD_SECTIONS.get(parent, parent)
        if key == STEPS:
            continue
        if section not in PROFILED_SECTIONS.values():
            sections = ", ".join(PROFILED_SECTIONS.values())
            raise UserError(key, f"{parent} is no role that can be profiled.", f"Roles: {sections}.")
        roles.setdefault(section, {})[name] = value
    return roles


def _has_role(section: str, tree: Tree) -> tuple[bool | None, str, str]:
    """Return whether a run has a role, None where the tree does not say; why not; and what it needs to have it."""
    if section == "critic":
        estimator = get(tree, "algorithm.adv_estimator")
        exists = "values" in estimator_entry(estimator).needs if isinstance(estimator, str) else None
        return exists, f"adv_estimator: {estimator} has no critic", "algorithm.adv_estimator: gae"
    switches, why_not = _SWITCHES.get(section, ((), ""))
    values = [get(tree, key) for key in switches]
    exists = True if True in values or not values else None if any(map(_is_open, values)) else False
    return exists, why_not, f"{next(iter(switches), '')}: true"


def _is_open(value: Any) -> bool:
    return value is None or has_link(value)
