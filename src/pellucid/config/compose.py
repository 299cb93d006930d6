"""What the user wrote, composed by Hydra: a recipe with its `defaults:` list, then the command line's overrides.

The result holds only keys that the user set, with interpolations unresolved; `load.py` merges it over the defaults.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pellucid.config.trees import Tree
from pellucid.errors import UserError, did_you_mean, nearest

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override
    from omegaconf import DictConfig

RECIPE = "_pellucid_recipe"
_BARE_TASK = re.compile(r"^([^=]+)=(task:[^'\"\s]*)$")


def read_yaml(path: Path) -> DictConfig:
    """Read one YAML file without resolving anything.

    Raises:
        UserError: the file is missing, is not text, or has a syntax error (file and line are named).
    """
    import yaml
    from omegaconf import DictConfig, OmegaConf

    if path.is_dir():
        recipes = ", ".join(sorted(entry.name for entry in path.glob("*.y*ml"))[:8])
        raise UserError(str(path), "this is a folder.", f"Name one of its recipes: {recipes}." if recipes else "")
    if not path.is_file():
        close = nearest(path.name, [entry.name for entry in path.parent.glob("*.y*ml")])
        remedy = f"Did you mean '{path.parent / close}'?" if close else ""
        raise UserError(str(path), "this file does not exist.", remedy)
    try:
        tree = OmegaConf.load(path)
    except yaml.YAMLError as error:
        raise _syntax_error(error, str(path)) from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(str(path), f"this is not a YAML mapping of keys to values ({error}).") from error
    if not isinstance(tree, DictConfig) or isinstance(yaml.load(path.read_bytes(), yaml.BaseLoader), str):
        kind = "text" if isinstance(tree, DictConfig) else "a list"
        raise UserError(str(path), f"this is {kind}; a config is a mapping of keys to values.")
    return tree


def compose_user_tree(source: str | Path | Mapping[str, Any] | None, overrides: list[str]) -> Tree:
    """Compose a recipe and overrides into the tree of keys that the user set.

    Args:
        source: the recipe's path, whose folder is the search path of its `defaults:` list, or its keys, with the
            working directory as that. None starts empty.
        overrides: Hydra's grammar: `key=value`, `+key=value`, `++key=value`, `~key`, `group@package=option`.

    Raises:
        UserError: anything that Hydra or YAML cannot read.
    """
    import yaml
    from hydra import compose, initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from hydra.errors import HydraException
    from omegaconf import ListConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    named = source if isinstance(source, str | Path) else None
    folder = Path(named).resolve().parent if named else Path.cwd()
    recipe = read_yaml(Path(named)) if named else OmegaConf.create(dict(source) if isinstance(source, Mapping) else {})
    if not isinstance(recipe.get("defaults", OmegaConf.create([])), ListConfig):
        raise UserError(f"{named}: defaults", "is no list.", "Write it as defaults: [recipe, _self_]")
    words = [_BARE_TASK.sub(r'\1="\2"', word) for word in overrides]
    parsed = [parse_override(word) for word in words]
    # Others set a key, also one that the recipe does not mention.
    choose = [each.package or each.is_delete() or (folder / each.key_or_group).is_dir() for each in parsed]
    try:
        if "defaults" in recipe or any(choose):
            if "defaults" in recipe:
                recipe["defaults"] = [_stored(entry, folder) for entry in recipe["defaults"]]
            ConfigStore.instance().store(name=RECIPE, node=recipe)
            with initialize_config_dir(config_dir=str(folder), version_base="1.3"):
                forced = [word if chooses else f"++{word.lstrip('+')}" for word, chooses in zip(words, choose)]
                tree = compose(config_name=RECIPE, overrides=forced)
        else:  # there is nothing to look up, and Hydra would take ten times as long to set the same keys
            tree = recipe
            for each in parsed:
                put_override(tree, each)
    except yaml.YAMLError as error:
        raise _syntax_error(error, str(named)) from error
    except (HydraException, OmegaConfBaseException) as error:
        if missing := re.search(r"Could not load '([^']+)'", str(error)):
            remedy = did_you_mean(missing[1], [entry.stem for entry in folder.glob("*.y*ml")])
            reason = f"names '{missing[1]}', and there is no such file in '{folder}'."
            raise UserError(f"{named}: defaults", reason, remedy) from error
        reason = str(error).split("\nfull_key")[0].replace(RECIPE, str(named or "the config"))
        raise UserError(str(named or "overrides"), f"cannot be composed: {reason.strip()}") from error
    plain: Any = OmegaConf.to_container(tree, resolve=False)
    # What begins with x- is a place for anchors, as elsewhere in YAML.
    return {name: value for name, value in plain.items() if not str(name).startswith("x-")}


def _stored(entry: Any, folder: Path) -> Any:
    """Return an entry of a `defaults:` list; of a recipe in another folder, which Hydra does not look for, its keys as
    they are there, under a name of their own.
    """
    from hydra.core.config_store import ConfigStore

    if not isinstance(entry, str) or not entry.startswith("../"):
        return entry
    path = folder / (entry if entry.endswith((".yaml", ".yml")) else f"{entry}.yaml")
    name = f"{RECIPE}{re.sub(r'[^a-z0-9]', '_', str(path.resolve()).lower())}"
    ConfigStore.instance().store(name=name, node=compose_user_tree(path, []))
    return name


@cache
def parse_override(word: str) -> Override:
    """Read one override.

    Raises:
        UserError: it is none, or it gives several values.
    """
    override = _parsed(word)
    if not override.key_or_group:
        raise UserError(word, "no key is named.", "Write key=value.")
    if override.is_sweep_override():
        raise UserError(word, "several values for one key.", "A list is written with brackets: 'key=[a,b]'.")
    return override


def each_of(word: str) -> list[str]:
    """Return the overrides that one of several values stands for: of `key=a,b` both `key=a` and `key=b`.

    Raises:
        UserError: it is none, or its values cannot be counted.
    """
    from hydra.errors import HydraException

    key, _, bare = word.partition("=")
    if _BARE_TASK.match(word):
        return [f'{key}="{task}"' for task in re.split(",(?=task:)", bare)]
    override = _parsed(word)
    if not override.is_sweep_override():
        return [word]
    try:
        return [f"{key}={value}" for value in override.sweep_string_iterator()]
    except HydraException as error:
        reason = "an interval has no end of values." if override.is_interval_sweep() else "has values without number."
        raise UserError(word, reason, "Write the values with commas: key=a,b,c.") from error


def _parsed(word: str) -> Override:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return OverridesParser.create().parse_override(word)
    except HydraException as error:
        reason = str(error).split("\n")[0]
        remedy = "Write key=value; put a value with special characters in quotes: 'key=\"value\"'."
        raise UserError(word, f"this override cannot be read ({reason}).", remedy) from error


def put_override(tree: DictConfig, override: Override) -> None:
    """Set the key of an override, or remove it."""
    from omegaconf import OmegaConf

    if not override.is_delete():
        OmegaConf.update(tree, override.key_or_group, override.value(), merge=True, force_add=True)
    elif OmegaConf.select(tree, override.key_or_group) is not None:
        parent, _, name = override.key_or_group.rpartition(".")
        section: Any = OmegaConf.select(tree, parent) if parent else tree
        del section[name]


def _syntax_error(error: Exception, name: str) -> UserError:
    """Turn a YAML error into one line with file, line and column."""
    from yaml import MarkedYAMLError

    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        where = mark.name if mark.name.endswith((".yaml", ".yml")) else name
        return UserError(f"{where}:{mark.line + 1}", f"YAML syntax error at column {mark.column + 1}: {error.problem}.")
    return UserError(name, f"YAML syntax error: {error}")
