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
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True)
class ModelFacts:
    """A model's shape, as its files state it."""

    num_parameters: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    dtype: str
    """Number format of the weights on disk."""


def read_model_facts(path: str) -> ModelFacts | None:
    """Read a model's shape from its folder; `builtin` is the shipped one.

    Returns:
        None when `path` is not a local folder with safetensors weights (a hub id that was not downloaded).

    Raises:
        UserError: a config or weights file cannot be read.
    """
    folder = _BUILTIN if path == "builtin" else Path(path)
    weights = _weight_files(folder)
    if not weights or not (folder / "config.json").is_file():
        return None
    facts = _read_json(folder / "config.json")
    tensors = {name: tensor for file in weights for name, tensor in _read_header(file).items()}
    largest = max(tensors.values(), key=lambda tensor: math.prod(tensor[0]))
    try:
        heads, hidden = facts["num_attention_heads"], facts["hidden_size"]
        return ModelFacts(
            num_parameters=sum(math.prod(shape) for shape, _ in tensors.values()),
            hidden_size=hidden,
            intermediate_size=facts["intermediate_size"],
            num_layers=facts["num_hidden_layers"],
            num_kv_heads=facts.get("num_key_value_heads") or heads,
            head_dim=facts.get("head_dim") or hidden // heads,
            vocab_size=facts["vocab_size"],
            dtype=_DTYPES.get(largest[1], largest[1]),
        )
    except KeyError:
        return None


def _weight_files(folder: Path) -> list[Path]:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    return [folder / name for name in sorted(set(_read_json(index)["weight_map"].values()))] if index.is_file() else []


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(str(file), f"this file is not valid JSON ({error}).", "Fetch the model again.") from error


def _read_header(file: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return each tensor's shape and number format; safetensors refuses a file that is cut off or altered."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="np") as stream:
            slices = {name: stream.get_slice(name) for name in stream.keys()}  # noqa: SIM118, it is no dict
            return {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
    except (SafetensorError, OSError) as error:
        raise UserError(str(file), f"this weights file cannot be read ({error}).", "Fetch the model again.") from error
