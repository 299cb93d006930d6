"""Keys that users of verl have and this version does not act on.

A key at its "off" value is accepted, dropped and named in one notice; any other value is an error, never ignored.
`load.py` applies the table before the schema sees the tree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from pellucid.config.convert import raise_all
from pellucid.errors import UserError

if TYPE_CHECKING:
    from omegaconf import DictConfig

Off = tuple[Any, ...] | Callable[[Any, "DictConfig"], bool]


def _not_enabled(value: Any, tree: DictConfig) -> bool:
    """A block is off when it is null or its `enable` is false or unset."""
    return value is None or (isinstance(value, dict) and value.get("enable") in (None, False))


@dataclass(frozen=True)
class Deferred:
    """One pattern of dotted keys.

    Attributes:
        pattern: the key, with `*` for any text.
        off: the accepted values, or a test of the value and the whole tree; empty refuses every value but null.
        belongs: what the key belongs to, for the error text.
        instead: what happens in its place, for keys that are accepted at any value.
    """

    pattern: str
    off: Off
    belongs: str
    instead: str = ""

    def accepts(self, value: Any, tree: DictConfig) -> bool:
        """Tell whether `value` means "off"."""
        if callable(self.off):
            return self.off(value, tree)
        return any(value == off and isinstance(value, bool) == isinstance(off, bool) for off in (None, *self.off))

    def error(self, key: str, value: Any) -> UserError:
        """Return the error for a value that asks for what this version does not have."""
        if callable(self.off):
            remedy = "Remove it, or switch it off (enable: false)." if self.off is _not_enabled else "Remove it."
        else:
            off = next(iter(self.off), None)
            remedy = f"Remove it or set it to {_yaml_word(off)}."
        shown = "this section" if isinstance(value, dict) else f"the value {_yaml_word(value)}"
        return UserError(key, f"{shown} belongs to {self.belongs}, which this version does not have.", remedy)


def _yaml_word(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


_ENGINES = "the vLLM and SGLang engines"
_REWARD_FSDP = "a reward model spread in a way of its own"

DEFERRED: tuple[Deferred, ...] = (
    *(
        Deferred(
            f"global_profiler.global_tool_config.torch_memory.{key}", (default,), "further kinds of memory snapshots"
        )
        for key, default in (("context", "all"), ("stacks", "all"), ("kw_args", {}))
    ),
    Deferred("reward_model.launch_reward_fn_async", (False,), "asynchronous rewards"),
    Deferred("reward_model.reward_manager", ("naive",), "reward managers"),
    Deferred("actor_rollout_ref.hybrid_engine", (True,), "split placement"),
    Deferred("*.use_fused_kernels", (False,), "fused kernels"),
    Deferred("*.freeze_vision_tower", (False,), "models that see images; this run's model is text-only"),
    Deferred(
        "*.fsdp_config.forward_prefetch",
        (True, False),
        "FSDP's own settings",
        "FSDP gathers layers ahead as it sees fit",
    ),
    Deferred("*.fsdp_config.wrap_policy.min_num_params", (0,), "other units of sharding than a decoder layer"),
    Deferred("reward_model.model.fsdp_config.fsdp_size", (-1,), _REWARD_FSDP),
    Deferred("reward_model.model.fsdp_config.param_offload", (False,), _REWARD_FSDP),
    Deferred("reward_model.model.fsdp_config.reshard_after_forward", (True,), _REWARD_FSDP),
    Deferred("*.megatron", (), "the Megatron engine"),
    Deferred("*.ulysses_sequence_parallel_size", (1,), "sequence parallelism"),
    Deferred("actor_rollout_ref.rollout.tensor_model_parallel_size", (1,), _ENGINES),
    Deferred("actor_rollout_ref.rollout.mode", ("sync",), "the asynchronous schedule"),
    Deferred("actor_rollout_ref.rollout.multi_turn", _not_enabled, "conversations of several turns"),
    Deferred("actor_rollout_ref.rollout.agent", (), "agent loops"),
    *(
        Deferred(f"actor_rollout_ref.rollout.{key}", (), _ENGINES)
        for key in (
            "gpu_memory_utilization",
            "enforce_eager",
            "free_cache_engine",
            "load_format",
            "max_model_len",
            "enable_chunked_prefill",
            "disable_log_stats",
            "engine_kwargs",
            "layered_summon",
        )
    ),
)


def drop_deferred(user: DictConfig, merged: DictConfig, notices: list[str]) -> None:
    """Take the table's keys out of `user`.

    Args:
        user: the keys the user set; changed in place.
        merged: the same over the defaults, where interpolations resolve.
        notices: one line that names the accepted keys is appended, and one more for each `Deferred.instead`.

    Raises:
        UserError: a key asks for something that this version does not have (`ConfigError` for several).
    """
    from omegaconf import OmegaConf

    errors: list[UserError] = []
    dropped: list[str] = []
    instead: dict[str, list[str]] = {}
    for key, entry in list(_matches(user, "")):
        value = _resolved(merged, key)
        if entry.accepts(value, merged):
            dropped.append(key)
            instead.setdefault(entry.instead, []).append(key)
            parent, _, leaf = key.rpartition(".")
            del (OmegaConf.select(user, parent) if parent else user)[leaf]
        else:
            errors.append(entry.error(key, value))
    raise_all(errors)
    for parent in sorted({key.rpartition(".")[0] for key in dropped} - {""}, key=len, reverse=True):
        _prune(user, parent)
    for why, keys in instead.items():
        said = f"dropped ({why})" if why else "but nothing in this version acts on (they are off)"
        notices.append(f"Accepted, {said}: " + ", ".join(keys))


def _matches(node: DictConfig, prefix: str) -> Iterator[tuple[str, Deferred]]:
    """Yield each key of the table that the tree holds, outermost first."""
    from omegaconf import DictConfig

    for name, child in node.items_ex(resolve=False):
        key = f"{prefix}{name}"
        entry = next((entry for entry in DEFERRED if fnmatchcase(key, entry.pattern)), None)
        if entry is not None:
            yield key, entry
        elif isinstance(child, DictConfig) and not child._is_none() and not child._is_interpolation():
            yield from _matches(child, f"{key}.")


def _resolved(merged: DictConfig, key: str) -> Any:
    """Return a resolved value; of a block only its switches, since links inside an off block may lead nowhere."""
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        value = OmegaConf.select(merged, key)
    except OmegaConfBaseException as error:
        raise UserError(key, f"its interpolation cannot be resolved ({str(error).splitlines()[0]}).") from error
    if not isinstance(value, DictConfig):
        return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    return {str(name): None for name in value} | {
        name: OmegaConf.select(value, name) for name in ("enable", "steps", "tool") if name in value
    }


def _prune(user: DictConfig, key: str) -> None:
    """Remove a section that became empty, and its parents while they are empty too."""
    from omegaconf import OmegaConf

    while key and OmegaConf.is_dict(node := OmegaConf.select(user, key)) and not node:
        parent, _, leaf = key.rpartition(".")
        del (OmegaConf.select(user, parent) if parent else user)[leaf]
        key = parent
