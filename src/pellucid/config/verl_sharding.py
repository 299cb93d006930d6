"""verl's `fsdp_config` blocks, read into this schema's keys; `migrate.py` calls it.

There each role names number formats of its own and the critic's block sits under its model; here a run computes in one
format, and each block sits beside the role's `strategy`.
"""

from __future__ import annotations

from typing import Any

from pellucid.errors import UserError, did_you_mean

_FORMATS = {"fp32": "float32", "float32": "float32", "bf16": "bfloat16", "bfloat16": "bfloat16"}
_PRECISION = ("param_dtype", "reduce_dtype", "buffer_dtype")
_FROZEN = ("actor_rollout_ref.ref.", "reward_model.")


def precision_keys(parent: str, block: Any) -> dict[str, Any]:
    """Return the dotted keys and values that mean the same as a role's `mixed_precision`.

    Args:
        parent: the role's `fsdp_config`, where gradients have `reduce_dtype`; a frozen model has none.
        block: the value of its `mixed_precision`.

    Raises:
        UserError: an unknown key or format, or buffers in another format than float32.
    """
    section = f"{parent}.mixed_precision"
    if not isinstance(block, dict):
        raise UserError(section, "this is a section of keys, not a value.", f"Keys: {', '.join(_PRECISION)}.")
    formats = {key: _format(section, str(key), value) for key, value in block.items() if value is not None}
    if formats.get("buffer_dtype", "float32") != "float32":
        raise UserError(f"{section}.buffer_dtype", "buffers are kept in float32 here.", "Set it to fp32, or remove it.")
    keys = {}
    if "param_dtype" in formats:
        keys["actor_rollout_ref.model.dtype"] = formats["param_dtype"]
    if "reduce_dtype" in formats and not parent.startswith(_FROZEN):
        keys[f"{parent}.reduce_dtype"] = formats["reduce_dtype"]
    return keys


def offload_keys(parent: str) -> dict[str, Any]:
    """Return the keys that mean `offload_policy: true` in the block `parent`: weights, gradients, optimizer state."""
    frozen = parent.startswith(_FROZEN)
    return {f"{parent}.param_offload": True} | ({} if frozen else {f"{parent}.optimizer_offload": True})


def critic_keys(block: Any) -> dict[str, Any]:
    """Return the keys under `critic.fsdp_config` that mean the same as verl's `critic.model.fsdp_config`.

    Raises:
        UserError: as `precision_keys`, or the block is no section.
    """
    if not isinstance(block, dict):
        raise UserError("critic.model.fsdp_config", "this is a section of keys, not a value.", "Remove it.")
    parent = "critic.fsdp_config"
    rest = {key: value for key, value in block.items() if key not in ("mixed_precision", "offload_policy")}
    keys = {f"{parent}.{key}": value for key, value in rest.items()}
    if block.get("offload_policy"):
        keys |= offload_keys(parent)
    return keys | (precision_keys(parent, block["mixed_precision"]) if block.get("mixed_precision") else {})


def _format(section: str, key: str, value: Any) -> str:
    if key not in _PRECISION:
        raise UserError(f"{section}.{key}", "there is no such key.", did_you_mean(key, _PRECISION))
    if str(value) not in _FORMATS:
        raise UserError(
            f"{section}.{key}", f"'{value}' is no number format of this version.", "Set it to fp32 or bf16."
        )
    return _FORMATS[str(value)]
