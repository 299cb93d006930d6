"""The way from verl: a launch script, a command or a YAML file becomes a config, with one list of what became of it.

`launch.py` reads the script, `compat.py` knows verl's keys, and `load.py` says whether the result is a config.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pellucid.algo.catalog import POLICY_LOSSES
from pellucid.config.compat import drop_targets, find_old
from pellucid.config.compose import parse_override, put_override, read_yaml
from pellucid.config.convert import ConfigError, NoEffectError
from pellucid.config.launch import Script
from pellucid.config.load import load_config
from pellucid.config.trees import Tree, get, has_link, put, remove, walk
from pellucid.config.validate.megatron import SIZES
from pellucid.config.verl_keys import DEFAULTS, UNDER_MEGATRON
from pellucid.errors import UserError

_TRAINER = re.compile(r"(verl\.trainer|recipe\.\w+)\.main_(ppo|ppo_sync|dapo)")
_ENGINES = {"veomni": "VeOmni", "fsdp_turbo": "FSDP Turbo", "mlite": "Megatron Lite"}
_STRATEGY = "actor_rollout_ref.actor.strategy"
_INSTEAD = {
    _STRATEGY: "fsdp2",
    "actor_rollout_ref.rollout.name": "vllm",
    "actor_rollout_ref.rollout.n": 2,
}
"""Keys that a config that runs must have, beside what is not supported → their value in its place."""


_BATCH_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
"""Ranks that run one batch between them are the product of these."""
_ENGINE_PROFILER = "actor_rollout_ref.rollout.profiler"


@dataclass
class Migration:
    """What became of each key."""

    tree: Tree
    """The config."""
    taken: list[str] = field(default_factory=list)
    """Keys that are as they were."""
    renamed: list[str] = field(default_factory=list)
    """`old → new`."""
    dropped: dict[str, str] = field(default_factory=dict)
    """Keys without effect on a result here → why that is safe."""
    unsupported: dict[str, str] = field(default_factory=dict)
    """What this version has not → reason and remedy; what decides first comes first."""
    added: dict[str, Any] = field(default_factory=dict)
    """What verl does where nothing is set, and Pellucid would do otherwise."""
    unknown: list[str] = field(default_factory=list)
    """What only the shell, or the user, can know."""
    placeholders: dict[str, str] = field(default_factory=dict)
    """Words in values that stand for what only the shell can know → how they are shown."""

    @property
    def yaml(self) -> str:
        """The config as YAML; links are kept."""
        from omegaconf import OmegaConf

        return self._shown(OmegaConf.to_yaml(OmegaConf.create(self.tree)))

    def lines(self) -> Iterator[str]:
        """Yield the list, by groups."""
        groups = {
            "Not supported, what decides first": [f"{key}: {why}" for key, why in self.unsupported.items()],
            "Renamed": self.renamed,
            "No effect on the result here, dropped": [f"{key}: {why}" for key, why in self.dropped.items()],
            "Taken as is": self.taken,
            "Added, as verl does it where nothing is set": [_pairs({key: self.added[key]}) for key in self.added],
            "To look at": self.unknown,
        }
        for title, entries in groups.items():
            if entries:
                yield f"{title} ({len(entries)}):"
                yield from (self._shown(f"  {entry}") for entry in entries)

    def _shown(self, text: str) -> str:
        for word, shown in self.placeholders.items():
            text = text.replace(word, shown)
        return text


def migrate(source: str, drops_unsupported: bool = False, variables: tuple[str, ...] = (), call: int = 1) -> Migration:
    """Turn what starts a training with verl, or an old config, into a config.

    Args:
        source: path of a YAML file or of a shell script, or the command itself.
        drops_unsupported: leave out what this version has not; else it stays, and a run names it.
        variables: `NAME=value`, variables of the script.
        call: which of the script's trainings is read.

    Raises:
        UserError: there is no such file, or it starts no training with verl.
    """
    path, is_command = Path(source), " " in source and "=" in source
    if is_launch := is_command or path.suffix not in (".yaml", ".yml"):
        (done, base), is_verl = _read_launch(source, None if is_command else path, variables, call), True
    else:
        done = Migration(_yaml_tree(path))
        base = str(done.tree.get("defaults", ""))
        if is_verl := "ppo_" in base or any("verl." in str(value) for _, value in walk(done.tree)):
            done.tree.pop("defaults", None)
    drop_targets(done.tree, done.unknown)
    written = {key for key, value in walk(done.tree) if not isinstance(value, dict)}
    for found in find_old(done.tree, {}):
        names = ", ".join(found.old)
        if found.error is not None and not found.new:
            done.unsupported[found.error.field] = f"{found.error.reason} {found.error.remedy}".strip()
            continue
        for key in found.old:
            remove(done.tree, key)
        if found.new:
            done.renamed.append(f"{_pairs(found.old)} → {_pairs(found.new)}")
        else:
            done.dropped[names] = found.why
        for key, value in found.new.items():
            if (own := get(done.tree, key)) not in (None, value):
                done.unsupported[key] = f"{json.dumps(own)} here, but {names} asks for {json.dumps(value)}. Keep one."
            put(done.tree, key, value)
    _decide_engine(done, base)
    if is_launch or "ppo_" in base:
        _add_defaults(done)
    if is_verl:
        _adjust(done)
        _check(done)
    if drops_unsupported:
        _drop(done.tree, done.unsupported)
        for key in _INSTEAD.keys() & done.unsupported:
            done.unsupported[key] += f" In its place: {_INSTEAD[key]}."
    leaves = [(key, value) for key, value in walk(done.tree) if not isinstance(value, dict)]
    refused = tuple(done.unsupported)
    done.taken = [
        key for key, _ in leaves if key in written and not f"{key}.".startswith(tuple(f"{name}." for name in refused))
    ]
    for word, shown in done.placeholders.items():
        if keys := [key for key, value in leaves if word in str(value)]:
            done.unknown.append(f"{shown} is not known here: {', '.join(keys)}")
    return done


def _yaml_tree(path: Path) -> Tree:
    from omegaconf import OmegaConf

    tree: Any = OmegaConf.to_container(read_yaml(path), resolve=False)
    return tree


def _read_launch(source: str, path: Path | None, variables: tuple[str, ...], call: int) -> tuple[Migration, str]:
    """Read a script or a command; also return the name of verl's file that it begins from."""
    from omegaconf import OmegaConf

    if path and not path.is_file():
        raise UserError(source, "this file does not exist.", "Give a script, a YAML file, or a command in quotes.")
    script = Script(
        path.read_text("utf-8") if path else source,
        {name: [value] for name, _, value in (word.partition("=") for word in variables)},
    )
    calls = script.calls()
    trainings = [each for each in calls if _TRAINER.fullmatch(each.program)]
    if not 0 < call <= len(trainings):
        others = ", ".join(each.program for each in calls) or "none"
        reason = f"{len(trainings)} calls of verl.trainer.main_ppo are in it; programs that it runs: {others}."
        raise UserError(source.partition("\n")[0], reason, "Only the keys of that trainer are known.")
    chosen = trainings[call - 1]
    name = chosen.option("--config-name").removesuffix(".yaml") or "ppo_trainer"
    done = Migration({}, placeholders=script.placeholders)
    if name not in ("ppo_trainer", "ppo_megatron_trainer"):
        folder = re.sub(r"__shell\d+__", "", chosen.option("--config-path")).lstrip("/.")
        places = [parent / folder / f"{name}.yaml" for parent in (path.resolve().parents if path else [Path.cwd()])]
        if (file := next((place for place in places if place.is_file()), None)) is None:
            done.unsupported["--config-name"] = f"{name}.yaml, from which the run begins, is not found."
        else:
            done.tree = _yaml_tree(file)
            name = f"{done.tree.pop('defaults', '')}"
    tree = OmegaConf.create(done.tree)
    for word in chosen.overrides:
        try:
            override = parse_override(word)
        except UserError as error:
            done.unsupported[word] = error.reason
            continue
        if override.is_delete():
            done.dropped[word] = "what is not set has Pellucid's default"
        put_override(tree, override)
    plain: Any = OmegaConf.to_container(tree, resolve=False)
    done.tree = plain
    if len(trainings) > 1:
        done.unknown.append(f"{len(trainings)} trainings are in it; this is number {call} (--call)")
    for word, guess in script.guesses.items():
        variable = next((name for name, value in script.variables.items() if value == [word]), "")
        how = f"--set {variable}=… says otherwise" if variable else "it decides which lines run"
        done.unknown.append(f"{variable or word} is not known here, and read as {guess}; {how}")
    return done, name


def _decide_engine(done: Migration, base: str) -> None:
    """Add Megatron where verl's config begins from it; name first an engine that is none of this version."""
    actor = get(done.tree, "actor_rollout_ref.actor", {})
    chosen = f"{base} {get(done.tree, 'actor')} {actor.get('strategy')} {list(actor)}"
    if engine := next((name for word, name in _ENGINES.items() if word in chosen), None):
        done.unsupported = {
            "engine": f"{engine} is not in this version; its keys have no meaning with FSDP2."
        } | done.unsupported
    elif "megatron" in chosen and "strategy" not in actor:
        done.added[_STRATEGY] = "megatron"
        put(done.tree, _STRATEGY, "megatron")


def _add_defaults(done: Migration) -> None:
    for key, value in (DEFAULTS | (UNDER_MEGATRON if _is_megatron(done) else {})).items():
        if value is not None and get(done.tree, key) is None:
            done.added[key] = value
            put(done.tree, key, value)
    devices, machines = (get(done.tree, f"trainer.{name}", 1) for name in ("n_gpus_per_node", "nnodes"))
    for key in ("trainer.ray_address",) * (machines == 1) + ("trainer.placement",) * (devices == machines == 1):
        if done.added.pop(key, None) is not None:
            remove(done.tree, key)


def _adjust(done: Migration) -> None:
    """Write out what verl makes of values that are mistakes here."""
    tree, actor = done.tree, "actor_rollout_ref.actor"
    wanted: Tree = {}
    loss = get(tree, f"{actor}.policy_loss.loss_mode", "vanilla")
    if loss in POLICY_LOSSES and POLICY_LOSSES[loss].sequence_mean and get(tree, f"{actor}.loss_agg_mode"):
        wanted[f"{actor}.loss_agg_mode"] = "seq-mean-token-mean"  # whatever the key says
    low = get(tree, f"{actor}.clip_ratio_low")
    if loss != "geo_mean" and isinstance(low, float | int) and low > 1:
        wanted[f"{actor}.clip_ratio_low"] = 1.0  # no ratio is below 0
    prompt, response, devices, machines, n = (
        get(tree, key, default) for key, default in (
            ("data.max_prompt_length", 512), ("data.max_response_length", 512), ("trainer.n_gpus_per_node", 1),
            ("trainer.nnodes", 1), ("actor_rollout_ref.rollout.n", 1))
    )  # fmt: skip
    sizes = {name: get(tree, f"{actor}.megatron.{name}") for name in SIZES} if _is_megatron(done) else {}
    batch_ranks = [sizes[name] or 1 for name in _BATCH_SIZES if sizes]
    for section in (actor, "actor_rollout_ref.ref", "critic"):
        for name in ("ppo_max_token_len_per_gpu", "log_prob_max_token_len_per_gpu"):
            key = f"{section}.{name}"
            budget = get(tree, key, 16384 if key == f"{actor}.ppo_max_token_len_per_gpu" else None)
            if _are_numbers(budget, prompt, response) and budget < prompt + response:
                # Where a sequence is divided among ranks, the budget is each one's part; here a rank holds it whole.
                wanted[key] = prompt + response
        mini = get(tree, f"{section}.ppo_mini_batch_size", get(tree, f"{actor}.ppo_mini_batch_size", 256))
        size = get(tree, key := f"{section}.ppo_micro_batch_size_per_gpu")
        numbers = (size, mini, devices, machines, n, *batch_ranks)
        if _are_numbers(*numbers) and (share := mini * n * math.prod(batch_ranks) // (devices * machines)):
            wanted[key] = max(number for number in range(1, size + 1) if share % number == 0)  # no gradient changes
        for name in sizes if section != actor else ():
            if get(tree, key := f"{section}.megatron.{name}", tree) is not tree:
                remove(tree, key)
                done.dropped[key] = "a role is spread as the actor is, on whose ranks it runs"
    for key, value in wanted.items():
        if (old := get(tree, key)) is None:
            done.added[key] = value
        elif old != value:
            done.renamed.append(f"{_pairs({key: old})} → {json.dumps(value)}")
        put(tree, key, value)


def _check(done: Migration) -> None:
    """Load the config, and sort each of its mistakes; what is not known is left out of what is loaded."""
    tree = deepcopy(done.tree)
    _drop(tree, done.unsupported)
    for _ in range(10):
        try:
            load_config(deepcopy(tree), [])
            return
        except UserError as error:
            errors = error.errors if isinstance(error, ConfigError) else [error]
        for error in errors:
            keys = [key.partition("[")[0] for key in error.field.split(", ")]
            present = [key for key in keys if get(tree, key, tree) is not tree]
            if error.reason == "must be set.":
                done.unknown.append(f"{error}")
                for key in keys:
                    put(tree, key, _INSTEAD.get(key, "builtin"))
            elif not present and error.field.startswith(f"{_ENGINE_PROFILER}."):
                done.dropped[_ENGINE_PROFILER] = f"it follows the actor's, but {error.reason.removesuffix('.')}"
                for each in (tree, done.tree):
                    put(each, f"{_ENGINE_PROFILER}.enable", False)
            elif not present:
                done.unsupported.setdefault(error.field, f"{error.reason} {error.remedy}".strip())
            elif isinstance(error, NoEffectError):
                [key] = present
                if done.added.pop(key, None) is None:
                    done.dropped[key] = error.reason.removesuffix(".")
                remove(done.tree, key)
            elif not any(_is_open(done, get(tree, key)) for key in present):
                done.unsupported[error.field] = f"{error.reason} {error.remedy}".strip()
            _drop(tree, present, DEFAULTS | _INSTEAD)


def _is_megatron(done: Migration) -> bool:
    return get(done.tree, _STRATEGY) == "megatron"


def _are_numbers(*values: Any) -> bool:
    return all(type(value) is int for value in values)


def _is_open(done: Migration, value: Any) -> bool:
    return has_link(value) or any(word in str(value) for word in done.placeholders)


def _drop(tree: Tree, names: Iterable[str], instead: Tree = _INSTEAD) -> None:
    """Remove keys; those that a config needs get a value with which it runs."""
    for key in (key.partition("[")[0] for name in names for key in name.split(", ")):
        if get(tree, key, tree) is not tree:
            remove(tree, key)
        if key in instead:
            put(tree, key, instead[key])


def _pairs(keys: Tree) -> str:
    return ", ".join(f"{key}: {json.dumps(value)}" for key, value in keys.items())
