"""The named settings of rollout correction (`algorithm.rollout_correction_preset`) and the keys each stands for.

`load.py` expands a preset before types are checked. Keys not listed stay at their defaults: token level, truncate, veto.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pellucid.config.compose import compose_user_tree
from pellucid.config.convert import defaults_tree
from pellucid.config.schema import AlgorithmConfig

if TYPE_CHECKING:
    from omegaconf import DictConfig

_KEY = "algorithm.rollout_correction_preset"
_METRICS = {"rollout_is_threshold": 2.0}
_TOKEN = {"rollout_is_threshold": 2.0, "rollout_is": True}
_SEQUENCE = {**_TOKEN, "rollout_is_level": "sequence"}
_CLIP = {"rollout_is_mode": "clip", "rollout_is_threshold_lower": 0.5, "rollout_is_threshold": 5.0}
_SEQUENCE_REJECTION = {"rollout_rs": [{"statistic": "k1", "level": "seq_sum", "lower": 0.5, "upper": 2.0}]}
_GEOMETRIC = {"rollout_rs": [{"statistic": "k1", "level": "seq_mean", "lower": 0.999, "upper": 1.001}]}
_K3 = {"rollout_rs": [{"statistic": "k3", "level": "seq_mean", "upper": 0.01}]}
_BYPASS = {"bypass_mode": True}
_REINFORCE = {**_BYPASS, "loss_type": "reinforce"}

PRESETS: dict[str, dict[str, Any]] = {
    "disabled": _METRICS,
    "token_is": _TOKEN,
    "seq_is": _SEQUENCE,
    "token_icepop": _TOKEN | _CLIP,
    "seq_is_rs": _SEQUENCE | _SEQUENCE_REJECTION,
    "geo_rs": _GEOMETRIC,
    "geo_rs_token_tis": _TOKEN | _GEOMETRIC,
    "k3_rs": _K3,
    "k3_rs_token_tis": _TOKEN | _K3,
    "bypass_ppo_clip": _BYPASS,
    "bypass_ppo_clip_geo_rs": _BYPASS | _GEOMETRIC,
    "bypass_ppo_clip_k3_rs": _BYPASS | _K3,
    "bypass_pg_is": _REINFORCE | _TOKEN,
    "bypass_pg_geo_rs": _REINFORCE | _GEOMETRIC,
    "bypass_pg_geo_rs_token_tis": _REINFORCE | _TOKEN | _GEOMETRIC,
}


def forget_earlier_preset(user: DictConfig, source: str | Path | None, overrides: list[str]) -> None:
    """Let a preset named in an override act on a resolved YAML, where every key is there without being the user's.

    The source's keys that equal what its own preset stands for, or the defaults where it has none, are removed. What an
    override sets stays, and without a preset among the overrides everything does.

    Args:
        user: the keys of source and overrides; changed in place.
        source: the recipe's path, as `compose_user_tree` takes it.
        overrides: the command line's overrides.
    """
    from omegaconf import DictConfig, OmegaConf

    keys = [word.lstrip("+").partition("=")[0] for word in overrides]
    own = OmegaConf.select(user, "algorithm")
    if _KEY not in keys or not isinstance(own, DictConfig):
        return
    before = compose_user_tree(source, [word for word, key in zip(overrides, keys) if key != _KEY])
    standing = defaults_tree(AlgorithmConfig) | PRESETS.get(str(OmegaConf.select(before, _KEY)), {})
    values: Any = OmegaConf.to_container(own, resolve=False)
    for key in {key for preset in PRESETS.values() for key in preset} & values.keys():
        if f"algorithm.{key}" not in keys and _without_nulls(values[key]) == standing[key]:
            del own[key]


def expand_preset(user: DictConfig, merged: DictConfig, notices: list[str]) -> None:
    """Fill in the keys of the chosen preset.

    Args:
        user: the keys the user set; these are left as they are.
        merged: the same over the defaults; changed in place.
        notices: a line is appended that names the user's keys which differ from the preset.
    """
    from omegaconf import OmegaConf

    algorithm = merged.algorithm
    name = algorithm.rollout_correction_preset
    own = OmegaConf.select(user, "algorithm")
    kept: list[str] = []
    for key, value in PRESETS.get(name, {}).items():
        if key not in own:
            algorithm[key] = value
        elif _without_nulls(given := algorithm[key]) != value:
            kept.append(f"algorithm.{key}: {given}")
    if kept:
        notices.append(f"algorithm.rollout_correction_preset: {name}, but for what is set itself: {', '.join(kept)}")


def _without_nulls(rules: Any) -> Any:
    """Return a list of rules without the bounds that are null, which are the same as bounds that are not there."""
    from omegaconf import OmegaConf

    plain: Any = OmegaConf.to_container(rules) if OmegaConf.is_config(rules) else rules
    if not isinstance(plain, list):
        return plain
    return [
        {key: value for key, value in rule.items() if value is not None} if isinstance(rule, dict) else rule
        for rule in plain
    ]
