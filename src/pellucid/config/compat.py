"""Keys that users of verl and of earlier guides have: one table for what a run says of them and for `pellucid config
migrate`.

A row translates a key, drops it where it asks for nothing, or refuses it with what to write instead. `load.py` applies
the table before the schema sees the user's tree. Blocks of several keys are read in `compat_blocks.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from pellucid.config import compat_blocks as blocks
from pellucid.config.compose import read_yaml
from pellucid.config.convert import flat_hints, in_one_spelling, raise_all
from pellucid.config.fields import yaml_word
from pellucid.config.schema import RunConfig
from pellucid.config.schema.msprobe_json import SECTION as PRECISION
from pellucid.config.trees import Tree, get, merged, put, remove, resolve
from pellucid.errors import UserError

Get = Callable[[str], Any]
"""Returns any key of the user's tree over the defaults, its links followed."""


@dataclass(frozen=True)
class Row:
    """One old key, or several by a pattern."""

    pattern: str
    """Dotted key; `*` stands for any text."""
    off: tuple[Any, ...] | Callable[[Any, Get], bool] = ()
    """Values that ask for nothing, null among them, or a test of the value: the key is dropped with a notice."""
    new: Callable[[str, Any], Tree] | None = None
    """From the section that holds the key and its value to the dotted keys and values that mean the same."""
    why: str = ""
    """What a run says beside the new keys; of a key without new ones, why it is refused."""
    remedy: str = ""
    """For a key without new ones: what to do about it."""
    instead: str = ""
    """What happens in place of a key that is dropped at any value."""
    stops: bool = False
    """Whether a run stops and shows the new keys, where otherwise it reads the old key as these and says so."""

    def is_off(self, value: Any, get: Get) -> bool:
        """Tell whether a value asks for nothing."""
        if callable(self.off):
            return self.off(value, get)
        return value is None or any(
            value == off and isinstance(value, bool) == isinstance(off, bool) for off in self.off
        )

    def refusal(self, key: str, value: Any) -> UserError:
        """Return the error for a key that has no meaning here."""
        shown = "this section" if isinstance(value, dict) else f"the value {yaml_word(value)}"
        off = yaml_word(next(iter(self.off), None)) if isinstance(self.off, tuple) else ""
        remedy = f"Remove it or set it to {off}." if off else "Remove it."
        return UserError(key, self.why.format(shown=shown), f"{remedy} {self.remedy}".strip())


def _later(pattern: str, off: Any, what: str) -> Row:
    """Return the row of a key that belongs to something this version does not have."""
    return Row(pattern, off, why=f"{{shown}} belongs to {what}, which this version does not have.")


def _not_enabled(value: Any, get: Get) -> bool:
    """A block is off when it is null or its `enable` is false or unset."""
    return value is None or (isinstance(value, dict) and value.get("enable") in (None, False))


def _moved(name: str, why: str, remedy: str) -> Row:
    """Return the row of a key of verl's precision debugger that is said elsewhere here."""

    def off(value: Any, get: Get) -> bool:
        unused = get("global_profiler.tool") != "precision_debugger"
        return value is None or (unused and get(f"{PRECISION}.enable") is False)

    return Row(f"{PRECISION}.{name}", off, why=f"there is no such key: {why}", remedy=remedy)


def _is_a_copy(value: Any, get: Get) -> bool:
    """A role's block is off when it repeats the global one, or says `enable: false` of a tool that is not used."""
    unused = get("global_profiler.tool") != "precision_debugger"
    whole = get(PRECISION)
    return value is None or (
        isinstance(value, dict)
        and (
            (unused and value.get("enable") is False)
            or all(entry in (None, whole.get(name)) for name, entry in value.items())
        )
    )


def _tis(parent: str, value: Any) -> Tree:
    return {
        "algorithm.rollout_is_threshold": value,
        "algorithm.rollout_is": True,
        "algorithm.rollout_is_level": "token",
        "algorithm.rollout_is_mode": "truncate",
        "actor_rollout_ref.rollout.calculate_log_probs": True,
    }


_MEMORY = "global_profiler.global_tool_config.torch_memory"
_ROLLOUT = "actor_rollout_ref.rollout"
_OF_ENGINES = (
    *("gpu_memory_utilization", "enforce_eager", "free_cache_engine", "load_format"),
    *("max_model_len", "enable_chunked_prefill", "disable_log_stats", "engine_kwargs", "layered_summon"),
)
_REWARD_FSDP = "a reward model spread in a way of its own"
_NO_STEPS = "global_profiler.steps alone says which steps are captured."
_NO_RANKS = "each role says which of its ranks are captured."
_NO_FOLDER = "the run decides where captures go."
_FOLDER = "Set global_profiler.save_path for another folder."

TABLE: tuple[Row, ...] = (
    Row(
        "actor_rollout_ref.actor.tis_imp_ratio_cap",
        lambda value, get: value is None or (isinstance(value, int | float) and value <= 0),
        _tis,
        "The key was removed: importance sampling of the rollout is set under algorithm. `pellucid config migrate` "
        "rewrites the file.",
        stops=True,
    ),
    Row(
        "*.ppo_micro_batch_size",
        (),
        lambda parent, value: {f"{parent}.ppo_micro_batch_size_per_gpu": value},
        "The global micro-batch size is gone; the new key counts samples on one rank.",
        stops=True,
    ),
    Row(
        blocks.CORRECTION,
        lambda value, get: value is None or (isinstance(value, dict) and not blocks.correction_keys(value)),
        lambda parent, value: blocks.correction_keys(value),
        "The block's keys are flat here.",
    ),
    Row(
        "critic.model.fsdp_config",
        ({},),
        lambda parent, value: blocks.critic_sharding_keys(value),
        "The block sits beside critic.strategy here.",
    ),
    Row(
        "*.fsdp_config.mixed_precision",
        ({},),
        blocks.precision_keys,
        "All roles compute in the model's number format.",
    ),
    Row(
        "*.fsdp_config.offload_policy",
        (False,),
        lambda parent, value: blocks.offload_keys(parent),
        "The two keys mean the same for fsdp and fsdp2.",
    ),
    # How the pass for the old log-probabilities is cut changes no number, and it follows the actor's own keys.
    *(
        Row(f"{_ROLLOUT}.log_prob_{name}", lambda value, get: True)
        for name in ("micro_batch_size", "micro_batch_size_per_gpu", "use_dynamic_bsz", "max_token_len_per_gpu")
    ),
    Row("*.fsdp_config.forward_prefetch", lambda value, get: True, instead="FSDP gathers layers ahead as it sees fit"),
    Row(
        "*.profiler.tool_config.precision_debugger",
        _is_a_copy,
        why="the tool has one setting for all roles.",
        remedy=f"Set {PRECISION}.",
    ),
    _moved(
        "enable", "the tool is chosen by its name.", "Set global_profiler.tool: precision_debugger, or null for none."
    ),
    _moved("data_dir", _NO_FOLDER, _FOLDER),
    _moved("dump_path", _NO_FOLDER, _FOLDER),
    _moved("steps", _NO_STEPS, "Set global_profiler.steps."),
    _moved("step", _NO_STEPS, "Set global_profiler.steps."),
    _moved("ranks", _NO_RANKS, "Set the role's profiler.ranks."),
    _moved("rank", _NO_RANKS, "Set the role's profiler.ranks."),
    _moved("concurrency", "a process makes one capture at a time.", ""),
    _moved("task", "msprobe's JSON file says it.", "Set task in the file at config_path."),
    _later(f"{_MEMORY}.context", ("all",), "further kinds of memory snapshots"),
    _later(f"{_MEMORY}.stacks", ("all",), "further kinds of memory snapshots"),
    _later(f"{_MEMORY}.kw_args", ({},), "further kinds of memory snapshots"),
    _later("reward_model.launch_reward_fn_async", (False,), "asynchronous rewards"),
    _later("reward_model.reward_manager", ("naive",), "reward managers"),
    _later("actor_rollout_ref.hybrid_engine", (True,), "split placement"),
    _later("*.use_fused_kernels", (False,), "fused kernels"),
    _later("*.freeze_vision_tower", (False,), "models that see images; this run's model is text-only"),
    _later("*.fsdp_config.wrap_policy.min_num_params", (0,), "other units of sharding than a decoder layer"),
    _later("reward_model.model.fsdp_config.fsdp_size", (-1,), _REWARD_FSDP),
    _later("reward_model.model.fsdp_config.param_offload", (False,), _REWARD_FSDP),
    _later("reward_model.model.fsdp_config.reshard_after_forward", (True,), _REWARD_FSDP),
    _later("*.megatron", (), "the Megatron engine"),
    _later("*.ulysses_sequence_parallel_size", (1,), "sequence parallelism"),
    _later(f"{_ROLLOUT}.tensor_model_parallel_size", (1,), "the vLLM and SGLang engines"),
    _later(f"{_ROLLOUT}.mode", ("sync",), "the asynchronous schedule"),
    _later(f"{_ROLLOUT}.multi_turn", _not_enabled, "conversations of several turns"),
    _later(f"{_ROLLOUT}.agent", (), "agent loops"),
    *(_later(f"{_ROLLOUT}.{name}", (), "the vLLM and SGLang engines") for name in _OF_ENGINES),
)


@dataclass(frozen=True)
class Found:
    """Old keys in a user's tree that are read together, mostly one alone."""

    keys: Tree
    """The old keys with their values."""
    new: Tree
    """What takes their place; empty when they are dropped."""
    why: str
    """What a run says beside the new keys, or of keys that are dropped, if anything."""
    error: UserError | None = None
    """What stops a run."""
    notes: tuple[str, ...] = ()
    """Lines on what is not as it looks."""


def _row_of(key: str) -> Row | None:
    return next((row for row in TABLE if fnmatchcase(key, row.pattern)), None)


def _is_of_profiling(key: str) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in blocks.PROFILING)


def _old_keys(node: Tree, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the old keys of a tree with their values; what is inside an old key belongs to that."""
    for name, value in node.items():
        key = f"{prefix}{name}"
        if _is_of_profiling(key) or _row_of(key) is not None:
            yield key, value
        elif isinstance(value, dict):
            yield from _old_keys(value, f"{key}.")


def find_old(user: Tree, defaults: Tree) -> list[Found]:
    """Return the old keys that a tree holds, in file order; those of profiling come last and are one entry.

    Args:
        user: the keys that are set.
        defaults: what other keys are where they are not set; empty for a file that is part of a config.

    Raises:
        UserError: one of them cannot be read.
    """
    tree = merged(defaults, user)
    found: list[Found] = []
    profiling: Tree = {}
    for key, value in _old_keys(user):
        if _is_of_profiling(key):
            profiling[key] = resolve(tree, key)
        elif (row := _row_of(key)) is not None:
            found.append(_found(row, key, value, tree))
    if profiling:
        notes: list[str] = []
        new = blocks.profiling_keys(profiling, user, tree, notes)
        why = "`pellucid config migrate` rewrites the file." if new else ""
        found.append(Found(profiling, new, why, notes=tuple(notes)))
    return found


def _found(row: Row, key: str, value: Any, tree: Tree) -> Found:
    """Read one old key by its row."""
    if not row.stops:
        try:
            value = resolve(tree, key)
        except UserError:
            if row.new is not None:  # of what is dropped or refused, links may lead nowhere
                raise
    if row.is_off(value, lambda other: resolve(tree, other)):
        return Found({key: value}, {}, row.instead)
    if row.new is None:
        return Found({key: value}, {}, row.why, row.refusal(key, value))
    new = row.new(key.rpartition(".")[0], value)
    error = UserError(key, "this spelling is replaced by\n" + _yaml(new), row.why) if row.stops else None
    return Found({key: value}, new, row.why, error)


def translate(user: Tree, defaults: Tree, notices: list[str]) -> None:
    """Take old keys out of the user's tree and put in what they mean; what changes nothing is dropped with a notice.

    Raises:
        UserError: an old key is refused, or a key is set both in the old and the new spelling, to different values
            (`ConfigError` for several).
    """
    hints = flat_hints(RunConfig)
    dropped: dict[str, list[str]] = {}
    while found := find_old(user, defaults):  # the keys that a block is read as may be old ones themselves
        raise_all([item.error for item in found if item.error is not None])
        for item in found:
            names = ", ".join(item.keys)
            for key in item.keys:
                remove(user, key)
            for key, value in item.new.items():
                if (own := get(user, key)) is not None and in_one_spelling(own, hints.get(key)) != value:
                    raise UserError(key, f"is also set, to another value, by {names}.", "Keep one of the two.")
                put(user, key, value)
            if item.new:
                notices.append(f"{names} {'is' if len(item.keys) == 1 else 'are'} read as\n{_yaml(item.new)}{item.why}")
            else:
                dropped.setdefault(item.why, []).extend(item.keys)
            notices += item.notes
    for why, keys in dropped.items():
        notices.append(f"Keys that change nothing here, dropped{f' ({why})' if why else ''}: {', '.join(keys)}")


def drop_targets(node: Any) -> int:
    """Remove the `_target_` keys of Hydra's instantiation from a tree and return how many there were."""
    if isinstance(node, list):
        return sum(map(drop_targets, node))
    if not isinstance(node, dict):
        return 0
    return int(node.pop("_target_", None) is not None) + sum(map(drop_targets, node.values()))


def migrate(source: Path) -> tuple[str, list[str]]:
    """Rewrite an old config; keys that this version refuses stay, and are named.

    Args:
        source: the YAML file; comments are not kept.

    Returns:
        The new YAML text, and one line for each change.

    Raises:
        UserError: the file, or an old key in it, cannot be read.
    """
    from omegaconf import OmegaConf

    tree: Any = OmegaConf.to_container(read_yaml(source), resolve=False)
    changes: list[str] = []
    if count := drop_targets(tree):
        changes.append(targets_notice(count))
    kept: set[str] = set()
    while found := [item for item in find_old(tree, {}) if not kept & item.keys.keys()]:
        for item in found:
            if item.error is not None and not item.new:
                kept |= item.keys.keys()
                changes.append(f"{item.error} It stays in the file.")
                continue
            for key in item.keys:
                remove(tree, key)
            for key, value in item.new.items():
                put(tree, key, value)
            changes.append(f"{_line(item.keys)} → {_line(item.new) or 'removed (changes nothing here)'}")
            changes += item.notes
    return OmegaConf.to_yaml(OmegaConf.create(tree)), changes


def targets_notice(count: int) -> str:
    """Return the line on `_target_` keys that were removed."""
    return f"Ignored {count} `_target_` key{'s' * (count > 1)}: classes are not chosen by name here."


def _line(keys: Tree) -> str:
    import yaml

    def word(value: Any) -> str:
        text = yaml.safe_dump(value, default_flow_style=True, width=10**6, sort_keys=False)
        return text.removesuffix("...\n").strip()

    return ", ".join(f"{key}: {word(value)}" for key, value in keys.items())


def _yaml(keys: Tree) -> str:
    import yaml

    tree: Tree = {}
    for key, value in keys.items():
        put(tree, key, value)
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
