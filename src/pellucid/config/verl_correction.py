"""verl's `algorithm.rollout_correction` block, read into this schema's flat keys; `migrate.py` calls it.

There one string holds level, bounds or a list of rules (`"0.5_5.0"`, `"token_k1,seq_max_k2"`); here each is a key.
"""

from __future__ import annotations

import math
from typing import Any, get_args

from pellucid.config.convert import hints_of
from pellucid.config.schema import RejectionRuleConfig
from pellucid.errors import UserError, did_you_mean

BLOCK = "algorithm.rollout_correction"
_FLAT = ("rollout_is_threshold_lower", "rollout_is_level", "rollout_is_mode", "rollout_is_veto_threshold")
_KEYS = (
    "rollout_is",
    "rollout_is_threshold",
    "rollout_is_batch_normalize",
    "rollout_rs",
    "rollout_rs_threshold",
    "rollout_rs_threshold_lower",
    "rollout_token_veto_threshold",
    "bypass_mode",
    "loss_type",
    "use_policy_gradient",
    *_FLAT,
)
_OLD_RULES = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}
_STATISTICS, _LEVELS = (get_args(hints_of(RejectionRuleConfig)[name]) for name in ("statistic", "level"))
_RULES = [f"{level}_{statistic}" for level in _LEVELS for statistic in _STATISTICS]


def is_off(block: Any) -> bool:
    """Tell whether the block changes nothing: no weights, no rejection, no bypass."""
    return block is None or (isinstance(block, dict) and not flat_keys(block))


def flat_keys(block: Any) -> dict[str, Any]:
    """Return the dotted keys and values that mean the same as the block; empty when it is off.

    Raises:
        UserError: an unknown key or word, or a bound that is not a number.
    """
    if not isinstance(block, dict):
        raise UserError(BLOCK, "this is a section of keys, not a value.", f"Keys: {', '.join(_KEYS)}.")
    for key in block:
        if key not in _KEYS:
            raise UserError(f"{BLOCK}.{key}", "there is no such key.", did_you_mean(str(key), _KEYS))
    flat: dict[str, Any] = {}
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


def _weights(block: dict[str, Any], level: Any, applied: bool) -> dict[str, Any]:
    """Return the keys of the weights; with a clipped loss in bypass mode verl computes them and applies none."""
    if level is not True and level not in ("token", "sequence", "geometric"):
        raise UserError(
            f"{BLOCK}.rollout_is", f"'{level}' is no level.", did_you_mean(str(level), ("token", "sequence"))
        )
    lower, upper = _bounds(block.get("rollout_is_threshold", 2.0), "rollout_is_threshold")
    keys: dict[str, Any] = {"rollout_is_threshold": upper, "rollout_is": applied}
    if level is not True:
        keys["rollout_is_level"] = level
        # verl has no veto unless it is asked for; here there is one by default.
        keys["rollout_is_veto_threshold"] = block.get("rollout_token_veto_threshold")
    if lower is not None:
        keys |= {"rollout_is_mode": "clip", "rollout_is_threshold_lower": lower}
    if block.get("rollout_is_batch_normalize") is True:
        keys["rollout_is_batch_normalize"] = True
    return keys | {key: block[key] for key in _FLAT if key in block}


def _rules(block: dict[str, Any], words: str) -> list[dict[str, Any]]:
    """Return the rejection rules, each with its own bounds."""
    names = list(dict.fromkeys(_OLD_RULES.get(word.strip(), word.strip()) for word in words.split(",") if word.strip()))
    for name in names:
        if name not in _RULES:
            raise UserError(f"{BLOCK}.rollout_rs", f"'{name}' is no rule.", did_you_mean(name, _RULES))
    threshold = _word(block.get("rollout_rs_threshold"))
    bounds = [part for part in str(threshold).split(",") if part.strip()] if threshold is not None else []
    if len(bounds) not in (1, len(names)):
        raise UserError(
            f"{BLOCK}.rollout_rs_threshold",
            f"{len(bounds)} bounds for {len(names)} rules.",
            "Give one bound for all rules, or one for each.",
        )
    made = []
    for name, bound in zip(names, bounds * len(names) if len(bounds) == 1 else bounds, strict=True):
        level, _, statistic = name.rpartition("_")
        lower, upper = _bounds(bound, "rollout_rs_threshold")
        old_lower = _word(block.get("rollout_rs_threshold_lower"))
        if statistic == "k1" and lower is not None and not math.isclose(lower * upper, 1, rel_tol=1e-5):
            # verl holds the inverse ratio (rollout ÷ training) within the bounds of k1.
            lower, upper = float(f"{1 / upper:.7g}"), float(f"{1 / lower:.7g}")
        elif statistic == "k1" and lower is None and old_lower is not None:
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
        raise UserError(
            f"{BLOCK}.{key}", f"'{value}' is no bound.", "Write an upper bound, or lower_upper such as 0.5_5.0."
        )
    return (numbers[0] if len(numbers) == 2 else None), numbers[-1]
