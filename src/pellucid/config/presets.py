"""The named settings of rollout correction (`algorithm.rollout_correction_preset`) and the keys each stands for.

`load.py` puts them in before types are checked; the others stay at their defaults: token level, truncate, veto.
"""

from typing import Any

_METRICS = {"rollout_is_threshold": 2.0}
_TOKEN = {"rollout_is_threshold": 2.0, "rollout_is": True}
_SEQUENCE = {**_TOKEN, "rollout_is_level": "sequence"}
_CLIP = {"rollout_is_mode": "clip", "rollout_is_threshold_lower": 0.5, "rollout_is_threshold": 5.0}
_SEQUENCE_REJECTION = {"rollout_rs": [{"statistic": "k1", "level": "seq_sum", "lower": 0.5, "upper": 2.0}]}
_GEOMETRIC = {"rollout_rs": [{"statistic": "k1", "level": "seq_mean", "lower": 0.999, "upper": 1.001}]}
_K3 = {"rollout_rs": [{"statistic": "k3", "level": "seq_mean", "lower": None, "upper": 0.01}]}
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
