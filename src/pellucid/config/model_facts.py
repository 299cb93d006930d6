"""A model's shape, read from its folder without torch: `config.json` and the headers of its safetensors files.

`plan.py` estimates memory from it; `pellucid doctor` and `config check` show it.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pellucid.errors import UserError

_BUILTIN = Path(__file__).parents[1] / "assets" / "builtin"


@dataclass(frozen=True)
class ModelFacts:
    """A model's shape, as its files state it."""

    num_parameters: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    sliding_window: int | None = None
    is_tied: bool = False
    """Whether the output layer has the embedding's weights."""
    num_experts: int = 0
    """Of each layer; 0: its MLP is one."""
    expert_size: int = 0
    """Columns of an expert's matrices."""
    experts_per_token: int = 0
    has_qk_norm: bool = False
    """Whether attention norms its queries and keys, as Qwen3's does."""


def read_model_facts(path: str) -> ModelFacts | None:
    """Read a model's shape from its folder; `builtin` is the shipped one.

    Returns:
        None when `path` is not a local folder with safetensors weights (a hub id that was not downloaded).

    Raises:
        UserError: a config or weights file cannot be read.
    """
    folder = _BUILTIN if path == "builtin" else Path(path)
    weights, config = list(folder.glob("model*.safetensors")), folder / "config.json"
    if not weights or not config.is_file():
        return None
    try:
        facts: dict[str, Any] = json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(str(config), f"this file is not valid JSON ({error}).", "Fetch the model again.") from error
    num_parameters = sum(map(_num_parameters, weights))
    try:
        heads, hidden = facts["num_attention_heads"], facts["hidden_size"]
        return ModelFacts(
            num_parameters=num_parameters,
            hidden_size=hidden,
            intermediate_size=facts["intermediate_size"],
            num_layers=facts["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=facts.get("num_key_value_heads") or heads,
            head_dim=facts.get("head_dim") or hidden // heads,
            vocab_size=facts["vocab_size"],
            sliding_window=facts.get("sliding_window"),
            is_tied=facts.get("tie_word_embeddings", False),
            num_experts=facts.get("num_experts") or facts.get("num_local_experts") or 0,
            expert_size=facts.get("moe_intermediate_size") or 0,
            experts_per_token=facts.get("num_experts_per_tok") or 0,
            has_qk_norm=facts.get("model_type", "").startswith("qwen3"),
        )
    except KeyError:
        return None


def _num_parameters(file: Path) -> int:
    """Return how many numbers the tensors of a file have; safetensors refuses a file that is cut off or altered."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="np") as stream:
            return sum(math.prod(stream.get_slice(name).get_shape()) for name in stream.keys())  # noqa: SIM118, no dict
    except (SafetensorError, OSError) as error:
        raise UserError(str(file), f"this weights file cannot be read ({error}).", "Fetch the model again.") from error
