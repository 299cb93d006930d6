"""Keys that users of verl and of earlier guides have: one table for runs and for `pellucid config migrate`.

A row translates a key, drops it where it asks for nothing, or refuses it. `load.py` applies the table before the schema
sees the user's tree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from pellucid.config.convert import flat_hints, in_one_spelling, raise_all
from pellucid.config.fields import yaml_word
from pellucid.config.schema import RunConfig
from pellucid.config.schema.msprobe_json import SECTION as PRECISION
from pellucid.config.schema.profiler import ACTOR_FOLLOWERS, PROFILED_SECTIONS
from pellucid.config.trees import Tree, get, merged, put, remove, resolve, walk
from pellucid.config.verl_keys import KEYS, MOVED
from pellucid.errors import UserError, did_you_mean

_STEPS = "trainer.profile_steps"
_PROFILING = (_STEPS, "*.profile_ranks", "*.profile_ranks_all", "*.profile_discrete")
_OLD_SECTIONS = {"actor_rollout_ref.critic": "critic", "actor_rollout_ref.rm": "reward_model"}
_RULES = [f"{level}_{name}" for level in ("token", "seq_sum", "seq_mean", "seq_max") for name in ("k1", "k2", "k3")]
_MIGRATE = "`pellucid config migrate` rewrites the file."


def _section(key: str, block: Any, known: tuple[str, ...]) -> Tree:
    """Return the keys of a block that ask for something, or raise where it is no section or has an unknown key."""
    if not isinstance(block, dict):
        raise UserError(key, "this is a section of keys, not a value.", f"Keys: {', '.join(known)}.")
    for name in block:
        if name not in known:
            raise UserError(f"{key}.{name}", "there is no such key.", did_you_mean(str(name), known))
    return {name: value for name, value in block.items() if value not in (None, False, "", "null", "none")}


def _correction(key: str, block: Any) -> Tree:
    """Read `algorithm.rollout_correction`, where one string holds a level, bounds or a list of rules (`0.5_5.0`).

    Raises:
        UserError: an unknown key or word, or a bound that is not a number.
    """
    weights = ("rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize")
    block = _section(key, block, (*weights, "rollout_rs", "rollout_rs_threshold", "bypass_mode", "loss_type"))
    new: Tree = {}
    reinforce = block.get("loss_type") == "reinforce"
    if level := block.get("rollout_is"):
        if level not in ("token", "sequence"):
            raise UserError(f"{key}.rollout_is", f"'{level}' is no level.", "Set it to token or sequence.")
        lower, upper = _bounds(f"{key}.rollout_is_threshold", block.get("rollout_is_threshold", 2.0))
        # With a clipped loss in bypass mode verl computes the weights and applies none; it has no veto.
        applied = reinforce or "bypass_mode" not in block
        new = {"rollout_is_threshold": upper, "rollout_is": applied, "rollout_is_level": level}
        new["rollout_is_veto_threshold"] = None
        if lower is not None:
            new |= {"rollout_is_mode": "clip", "rollout_is_threshold_lower": lower}
        if "rollout_is_batch_normalize" in block:
            new["rollout_is_batch_normalize"] = True
    if rules := block.get("rollout_rs"):
        new["rollout_rs"] = _rejections(key, str(rules), str(block.get("rollout_rs_threshold")))
    if "bypass_mode" in block:
        new |= {"bypass_mode": True} | ({"loss_type": "reinforce"} if reinforce else {})
    return {f"algorithm.{name}": value for name, value in new.items()}


def _rejections(key: str, words: str, thresholds: str) -> list[Tree]:
    """Return the rejection rules, each with its own bounds."""
    names, bounds = ([part.strip() for part in text.split(",")] for text in (words, thresholds))
    if len(bounds) not in (1, len(names)):
        reason = f"{len(bounds)} bounds for {len(names)} rules."
        raise UserError(f"{key}.rollout_rs_threshold", reason, "Give one bound for all rules, or one for each.")
    rules = []
    for name, bound in zip(names, bounds * len(names)):
        if name not in _RULES:
            raise UserError(f"{key}.rollout_rs", f"'{name}' is no rule.", did_you_mean(name, _RULES))
        level, _, statistic = name.rpartition("_")
        lower, upper = _bounds(f"{key}.rollout_rs_threshold", bound)
        rule: Tree = {"statistic": statistic, "level": level, "upper": upper}
        if statistic == "k1" and lower is not None:
            if not math.isclose(lower * upper, 1, rel_tol=1e-5):
                # verl holds the inverse ratio (rollout ÷ training) within the bounds of k1.
                lower, rule["upper"] = float(f"{1 / upper:.7g}"), float(f"{1 / lower:.7g}")
            rule["lower"] = lower
        rules.append(rule)
    return rules


def _bounds(key: str, value: Any) -> tuple[float | None, float]:
    """Return (lower or None, upper) of `2.0` or `"0.5_5.0"`."""
    try:
        lower, upper = [None, *map(float, str(value).split("_"))][-2:]
    except ValueError:
        upper = lower = None
    if upper is None:
        raise UserError(key, f"'{value}' is no bound.", "Write an upper bound, or lower_upper such as 0.5_5.0.")
    return lower, upper


def _mixed_precision(key: str, block: Any) -> Tree:
    """Read a role's `mixed_precision`; here a run computes in one number format, and buffers are kept in float32."""
    parent, formats = key.rpartition(".")[0], _section(key, block, ("param_dtype", "reduce_dtype", "buffer_dtype"))
    if formats.get("buffer_dtype") not in (None, "fp32", "float32"):
        raise UserError(f"{key}.buffer_dtype", "buffers are kept in float32 here.", "Set it to fp32, or remove it.")
    new = {"actor_rollout_ref.model.dtype": formats.get("param_dtype")}
    if not parent.startswith("actor_rollout_ref.ref."):  # a frozen model has no gradients to add up
        new[f"{parent}.reduce_dtype"] = formats.get("reduce_dtype")
    return {name: value for name, value in new.items() if value is not None}


def _profiling(old: Tree, tool: str) -> Tree:
    """Read the keys of verl's first Nsight guide: `trainer.profile_steps` and each role's `profile_*`.

    There a role without ranks is not profiled, and no role follows another.

    Raises:
        UserError: a key belongs to no role.
    """
    roles: dict[str, Tree] = {section: {} for section in PROFILED_SECTIONS.values()}
    for key, value in old.items():
        parent, _, name = key.rpartition(".")
        section = _OLD_SECTIONS.get(parent, parent)
        if section in roles:
            roles[section][name] = value
        elif key != _STEPS:
            raise UserError(key, f"{parent} is no role that can be profiled.", f"Roles: {', '.join(roles)}.")
    if not any(old.values()):
        return {}
    new: Tree = {"global_profiler.tool": tool, "global_profiler.steps": old[_STEPS] or None} if _STEPS in old else {}
    for role, section in PROFILED_SECTIONS.items():
        keys, block = roles[section], f"{section}.profiler"
        ranks = {"all_ranks": True} if keys.get("profile_ranks_all") else {"ranks": keys.get("profile_ranks")}
        if any(ranks.values()):
            new |= {f"{block}.enable": True} | {f"{block}.{name}": value for name, value in ranks.items()}
        elif keys or (role in ACTOR_FOLLOWERS and roles[PROFILED_SECTIONS["actor"]]):
            new[f"{block}.enable"] = False
        if keys.get("profile_discrete") or (any(ranks.values()) and "profile_discrete" in keys):
            new[f"{block}.tool_config.{tool}.discrete"] = bool(keys["profile_discrete"])
    return new


def _multi_turn(key: str, block: Any) -> Tree:
    """Read `rollout.multi_turn`: a loop that calls tools, or nothing where it is not enabled.

    Raises:
        UserError: an unknown key, or one that asks for what is done otherwise here.
    """
    block = _section(key, block, (*_MULTI_TURN, *_MULTI_TURN_ELSEWHERE)) if block.get("enable") else {}
    for name, (same, remedy) in _MULTI_TURN_ELSEWHERE.items():
        if block.get(name, same) != same:
            reason = f"the value {yaml_word(block[name])} asks for what is done otherwise here."
            raise UserError(f"{key}.{name}", reason, remedy)
    # The model answers once more after the last user's turn.
    turns = [block[name] + (name == "max_user_turns") for name in _MULTI_TURN if "turns" in name and name in block]
    new = {
        "name": block and "tools",
        "max_turns": turns and min(turns),
        "format": {"llama3_json": "llama3"}.get(block.get("format", ""), block.get("format")),
        "max_tool_output": block.get("max_tool_response_length"),
    }
    return {f"{_AGENT}.{name}": value for name, value in new.items() if value}


def _agent_loop(key: str, value: Any) -> Tree:
    """Read the name of verl's agent loop.

    Raises:
        UserError: it is none of verl's own.
    """
    if value != "tool_agent":
        raise UserError(key, f"there is no agent '{value}'.", _OWN_AGENT)
    return {f"{_AGENT}.name": "tools"}


def _beside(*names: str) -> Callable[[str, Any], Tree]:
    """Return a function that says a key's value by other keys of its section."""
    return lambda key, value: {f"{key.rpartition('.')[0]}.{name}": value for name in names}


def _tis(key: str, value: Any) -> Tree:
    level = {"algorithm.rollout_is_level": "token", "algorithm.rollout_is_mode": "truncate"}
    weights = {"algorithm.rollout_is_threshold": value, "algorithm.rollout_is": True}
    return weights | level | {"actor_rollout_ref.rollout.calculate_log_probs": True}


def _same(key: str, value: Any) -> Tree:
    return {key: value}


def _inner(key: str, block: Tree) -> Tree:
    """Say the keys of a section by keys of the section around it."""
    return {f"{key.rpartition('.')[0]}.{name}": value for name, value in block.items()}


def _optimizer(key: str, block: Any) -> Tree:
    """Read `override_optimizer_config`, fields of megatron-core's `OptimizerConfig`: where the optimizer's state is.

    Raises:
        UserError: any other field.
    """
    same = ("optimizer_offload_fraction", "overlap_cpu_optimizer_d2h_h2d", "use_precision_aware_optimizer")
    block = _section(key, block, ("optimizer_cpu_offload", *same))
    role = key.removesuffix(".optim.override_optimizer_config")
    return {f"{role}.megatron.optimizer_offload": True} if "optimizer_cpu_offload" in block else {}


def _loggers(key: str, value: Any) -> Tree:
    """Read the trackers, one or several; a file with the metrics is always written."""
    return {key: [name for name in (value if isinstance(value, list) else [value]) if name != "file"]}


def _dtype(key: str, value: Any) -> Tree:
    return {"actor_rollout_ref.model.dtype": value}


def _reward_manager(key: str, value: Any) -> Tree:
    """Read which of verl's reward managers scores; those of its own that differ only in speed ask for nothing.

    Raises:
        UserError: it is another one.
    """
    block = value if isinstance(value, dict) else {"name": value}
    if (name := block.get("name")) not in (None, *_MANAGERS) or block.get("source") not in (None, "register"):
        remedy = "Set reward_model.custom_reward_function.{path,name} to a function that scores a response."
        raise UserError(key, f"there is no reward manager '{name}'.", remedy)
    return {}


def _reward_kwargs(key: str, block: Any) -> Tree:
    """Read the arguments of the reward manager `dapo`."""
    block = _section(key, block, ("overlong_buffer_cfg", "max_resp_len"))
    names = ("enable", "len", "penalty_factor", "log")
    buffer = _section(f"{key}.overlong_buffer_cfg", block.get("overlong_buffer_cfg", {}), names)
    if not buffer.get("enable"):
        return {}
    new = {f"reward_model.overlong_buffer.{name}": buffer[name] for name in names[:3] if name in buffer}
    return new | ({"data.max_response_length": block["max_resp_len"]} if "max_resp_len" in block else {})


@dataclass(frozen=True)
class Row:
    """One old key, or several by a pattern."""

    pattern: str
    """Dotted key; `*` stands for any text."""
    off: tuple[Any, ...] = ()
    """Values beside null that ask for nothing, with which the key is dropped with a notice; `...` is any."""
    new: Callable[[str, Any], Tree] | None = None
    """From the key and its value to the dotted keys and values that mean the same; none: the key is refused."""
    remedy: str = ""
    """For a refused key: what to do about it."""
    stops: bool = False
    """Whether a run stops and shows the new keys, where otherwise it reads the old key as these and says so."""
    only_with: str = ""
    """The profiling tool without which the key asks for nothing."""
    why: str = ""
    """Why it is safe to drop the key, where it is dropped."""

    def is_off(self, value: Any, tool: Any) -> bool:
        """Tell whether a value asks for nothing where `tool` profiles."""
        if value is None or ... in self.off or (self.only_with and self.only_with != tool):
            return True
        return any(value == off and isinstance(value, bool) == isinstance(off, bool) for off in self.off)


_ROLLOUT, _ACTOR, _AGENT = "actor_rollout_ref.rollout", "actor_rollout_ref.actor", "actor_rollout_ref.rollout.agent"
_GDPO = "algorithm.gdpo_reward_weights"
_MANAGERS = ("naive", "dapo", "prime", "gdpo")
"""Reward managers of verl that ask a function for each response's score, as is done here."""
_OWN_AGENT = f"Name an agent of your own by import path, {_AGENT}.name: file.py:function."
_MULTI_TURN = (
    *("enable", "max_turns", "max_assistant_turns", "max_user_turns", "format", "max_tool_response_length"),
    # A context only ever grows by tokens, so that no template is asked and nothing needs to be compared.
    *("use_inference_chat_template", "tokenization_sanity_check_mode"),
)
"""Keys of verl's `multi_turn` that say what a loop here does, too."""
_MULTI_TURN_ELSEWHERE = {
    "tool_config_path": (
        None,
        f"Name functions in {_AGENT}.tools: [file.py:function], servers in {_AGENT}.mcp_servers.",
    ),
    "interaction_config_path": (None, f"Set {_AGENT}.name: env and {_AGENT}.environment: file.py:Class."),
    "completion_callback": (None, _OWN_AGENT),
    "max_parallel_calls": (None, f"Remove it: all calls of a turn are made; {_AGENT}.max_tool_calls limits them."),
    "tool_response_truncate_side": ("middle", "Set it to middle: of what is too long, both ends are kept."),
    "num_repeat_rollouts": (None, f"Set {_ROLLOUT}.n."),
}
"""Its other keys → the value at which they ask for what is done here, and what to do about any other."""
_FOLDER = "The run decides where captures go; set global_profiler.save_path for another folder."
_MOVED = {
    "*.profiler.tool_config.precision_debugger": f"Set {PRECISION}, which is for all roles.",
    f"{PRECISION}.enable": "Set global_profiler.tool: precision_debugger, or null for none.",
    f"{PRECISION}.data_dir": _FOLDER,
    f"{PRECISION}.dump_path": _FOLDER,
    f"{PRECISION}.steps": "Set global_profiler.steps.",
    f"{PRECISION}.ranks": "Set the role's profiler.ranks.",
}
"""Keys of verl's precision debugger → what to do here."""
_MOVED_ROW = Row("", (), lambda key, value: {key: value})
"""Of a key that only has another place here."""
TABLE: tuple[Row, ...] = (
    Row(f"{_ACTOR}.tis_imp_ratio_cap", (-1, 0), _tis, stops=True),
    Row("*.ppo_micro_batch_size", (), _beside("ppo_micro_batch_size_per_gpu"), stops=True),
    Row("algorithm.rollout_correction", ({},), _correction),
    Row("*model_engine", ("dp", "fsdp", "fsdp2"), lambda _, value: {f"{_ACTOR}.strategy": value}),
    Row("actor_rollout_ref.hybrid_engine", (True,), lambda *_: {f"{_ROLLOUT}.mode": "separate"}),
    Row(f"{_ROLLOUT}.multi_turn", ({},), _multi_turn),
    Row(f"{_AGENT}.default_agent_loop", ("single_turn_agent",), _agent_loop),
    Row(f"{_AGENT}.agent_loop_config_path", (), remedy=_OWN_AGENT),
    Row("rollout.nnodes", (), lambda _, value: {f"{_ROLLOUT}.nnodes": value}),
    Row("rollout.n_gpus_per_node", (), lambda _, value: {f"{_ROLLOUT}.n_gpus_per_node": value}),
    Row("*.fsdp_config.mixed_precision", ({},), _mixed_precision),
    Row("actor_rollout_ref.ref.fsdp_config.offload_policy", (False,), _beside("param_offload")),
    Row("*.fsdp_config.offload_policy", (False,), _beside("param_offload", "optimizer_offload")),
    *(Row(key, (), remedy=remedy, only_with="precision_debugger") for key, remedy in _MOVED.items()),
    Row(f"{_ROLLOUT}.cudagraph_capture_sizes", (), _beside("engine_kwargs.vllm.cudagraph_capture_sizes")),
    Row(f"{_ROLLOUT}.nnodes", (0,), _same),
    Row("actor_rollout_ref.model.use_remove_padding", (), lambda key, _: {key: True}),
    Row("data.*_max_samples", (-1,), _same),
    Row("data.trust_remote_code", (False,), lambda _, value: {"actor_rollout_ref.model.trust_remote_code": value}),
    Row(f"{_ACTOR}.policy_loss.dro_beta", (), _same),
    Row("*.fsdp_config.model_dtype", ("fp32", "float32"), _dtype),
    Row("*.fsdp_config.dtype", (), _dtype),
    Row("*.megatron.dtype", (), _dtype),
    Row("*.use_dist_checkpointing", (False,), remedy="Set it to false, and model.path to a Hugging Face folder."),
    Row("*.override_config.model_config", ({},), _inner),
    Row("*.model.torch_dtype", (), _dtype),
    Row("trainer.logger", (), _loggers),
    Row("*.optim.warmup_style", (), _beside("lr_scheduler_type")),
    Row("*.optim.lr_decay_style", (), _beside("lr_scheduler_type")),
    Row("*.optim.lr_decay_steps", (), remedy="Set total_training_steps, over which warm-up and decay are laid out."),
    Row("*.optim.min_lr", (0,), remedy="Set min_lr_ratio to min_lr ÷ lr, with lr_scheduler_type cosine or linear."),
    Row("*.optim.override_optimizer_config", ({},), _optimizer),
    Row("*.optim.clip_grad", (), lambda key, value: {key.replace("optim.clip_grad", "grad_clip"): value}),
    Row("reward_model.reward_manager", (), _reward_manager),
    Row("reward_model.reward_kwargs", ({},), _reward_kwargs),
    Row("algorithm.gdpo_reward_keys", (), lambda _, names: {_GDPO: dict.fromkeys(names, 1.0)}),
    *(Row(pattern, off, why=why) for pattern, off, why in KEYS),
)


@dataclass(frozen=True)
class Found:
    """An old key that a tree holds, or all those of profiling."""

    old: Tree
    """The key, or keys, with their values."""
    new: Tree
    """The keys that take their place; none: they are dropped, or refused."""
    error: UserError | None = None
    """What stops a run."""
    why: str = ""
    """Why it is safe to drop the key."""


def _place(key: str) -> str:
    """Return where a key of verl is here, so that a row or the schema may know it."""
    old = next((old for old in MOVED if key == old or key.startswith(f"{old}.")), None)
    return key if old is None else MOVED[old] + key[len(old) :]


def _old_keys(node: Tree, prefix: str = "") -> Iterator[tuple[str, Any, Row | None]]:
    """Yield the old keys of a tree with value and row, None for keys of profiling; what is inside one belongs to it."""
    for name, value in node.items():
        key = f"{prefix}{name}"
        place = _place(key)
        row = next((row for row in TABLE if fnmatchcase(place, row.pattern)), None)
        if row is not None or any(fnmatchcase(key, pattern) for pattern in _PROFILING):
            yield key, value, row
        elif isinstance(value, dict) and value:
            yield from _old_keys(value, f"{key}.")
        elif place != key:
            yield key, value, _MOVED_ROW


def find_old(user: Tree, defaults: Tree) -> list[Found]:
    """Return the old keys that a tree holds, in file order; those of profiling come last and are one entry.

    Args:
        user: the keys that are set.
        defaults: what other keys are where they are not set; empty for a file that is part of a config.
    """
    tree = merged(defaults, user)
    tool = get(tree, "global_profiler.tool")
    found: list[Found] = []
    profiling: Tree = {}
    for key, value, row in _old_keys(user):
        if row is None:
            profiling[key] = resolve(tree, key)
            continue
        try:
            if not row.stops and ... not in row.off:
                value = resolve(tree, key)
            if value is None and key in flat_hints(RunConfig):
                continue
            if row.is_off(value, tool):
                found.append(Found({key: value}, {}, None, row.why or "it asks for nothing"))
            elif row.new is None:
                shown = "this section" if isinstance(value, dict) else f"the value {yaml_word(value)[:80]}"
                off = f" or set it to {yaml_word(row.off[0])}" if row.off else ""
                reason = f"{shown} asks for what this version does not have."
                reason = reason if row.off or not row.why else f"{row.why}."
                raise UserError(key, reason, row.remedy or f"Remove it{off}.")
            elif (new := row.new(_place(key), value)) != {key: value}:
                reason = f"this spelling is replaced by\n{_yaml(new)}"
                error = UserError(key, reason, _MIGRATE) if row.stops else None
                found.append(Found({key: value}, new, error, "it asks for no more than is done here"))
        except UserError as error:
            found.append(Found({key: value}, {}, error))
    if profiling:
        try:
            found.append(Found(profiling, _profiling(profiling, tool or "nsys")))
        except UserError as error:
            found.append(Found(profiling, {}, error))
    return found


def translate(user: Tree, defaults: Tree, notices: list[str]) -> None:
    """Take old keys out of the user's tree and put in what they mean; what changes nothing is dropped with a notice.

    Raises:
        UserError: an old key is refused, or a key is set both in the old and the new spelling, to different values
            (`ConfigError` for several).
    """
    hints, found = flat_hints(RunConfig), find_old(user, defaults)
    raise_all([each.error for each in found if each.error is not None])
    for old, new in ((each.old, each.new) for each in found):
        names = ", ".join(old)
        for key in old:
            remove(user, key)
        for key, value in new.items():
            wanted = in_one_spelling(value, hints.get(key))
            if (own := get(user, key)) is not None and in_one_spelling(own, hints.get(key)) != wanted:
                raise UserError(key, f"is also set, to another value, by {names}.", "Keep one of the two.")
            put(user, key, wanted)
        if new:
            no_ranks = "profile_ranks of null or [] is no ranks. " if "profile_" in names else ""
            notices.append(f"{names} {'is' if len(old) == 1 else 'are'} read as\n{_yaml(new)}{no_ranks}{_MIGRATE}")
    if dropped := [key for each in found if not each.new for key in each.old]:
        notices.append(f"Keys that change no result here, dropped: {', '.join(dropped)}")


def drop_targets(tree: Tree, notices: list[str]) -> None:
    """Remove the `_target_` keys of Hydra's instantiation, with one line for all."""
    if keys := [key for key, _ in walk(tree) if key.rpartition(".")[2] == "_target_"]:
        ignored = f"{len(keys)} `_target_` key{'s' * (len(keys) > 1)}"
        notices.append(f"Ignored {ignored}: classes are not chosen by name here.")
    for key in keys:
        remove(tree, key)


def _yaml(keys: Tree) -> str:
    import yaml

    tree: Tree = {}
    for key, value in keys.items():
        put(tree, key, value)
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
