"""From plain YAML values to the schema's dataclasses, with every mistake named by its full key.

`load.py` hands in the resolved tree; types, choices, ranges and aliases come from the schema's annotations.
"""

from __future__ import annotations

import dataclasses
import types
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from pellucid.config.fields import Alias, OrImportPath, Range, is_import_path, yaml_word
from pellucid.config.trees import Tree, has_link, walk
from pellucid.errors import UserError, did_you_mean, nearest

T = TypeVar("T")


class ConfigError(UserError):
    """Several mistakes of one config, reported together."""

    def __init__(self, errors: list[UserError]) -> None:
        self.errors = errors
        shown = "\n".join(f"  - {error}" for error in errors[:10])
        more = f"\n  … and {len(errors) - 10} more" if len(errors) > 10 else ""
        super().__init__(f"{len(errors)} mistakes in the config", f"\n{shown}{more}")


class NoEffectError(UserError):
    """A key that does nothing in this mode."""


def raise_all(errors: list[UserError]) -> None:
    """Raise the single error, or all of them as one `ConfigError`; do nothing when there is none."""
    if errors:
        raise errors[0] if len(errors) == 1 else ConfigError(errors)


@cache
def hints_of(cls: type) -> dict[str, Any]:
    """Return the annotated types of a section's fields, in the order they are declared."""
    hints = get_type_hints(cls, include_extras=True)
    return {item.name: hints[item.name] for item in dataclasses.fields(cls)}


@cache
def flat_hints(cls: type, prefix: str = "") -> dict[str, Any]:
    """Return dotted key → annotated type of all the schema, a section with its dataclass before what is in it."""
    flat: dict[str, Any] = {}
    for name, hint in hints_of(cls).items():
        flat[prefix + name] = hint
        if dataclasses.is_dataclass(hint):
            flat |= flat_hints(hint, f"{prefix}{name}.")  # pyright: ignore[reportArgumentType]
    return flat


@cache
def defaults_tree(cls: type) -> Tree:
    """Return a section's defaults as a YAML tree, with links and `???` where the schema has them; not to be changed."""
    return _defaults(cls(), None)


def _defaults(section: Any, follows: tuple[str, type] | None) -> Tree:
    leader, shared = (follows[0], hints_of(follows[1])) if follows else ("", {})
    tree: Tree = {}
    for item in dataclasses.fields(section):
        name, value = item.name, vars(section)[item.name]
        if dataclasses.is_dataclass(value):
            inner = (f"{leader}.{name}", type(value)) if name in shared else item.metadata.get("follows")
            tree[name] = _defaults(value, inner)
        else:
            tree[name] = f"${{{leader}.{name}}}" if name in shared else item.metadata.get("link") or value
    return tree


def in_one_spelling(value: Any, hint: Any) -> Any:
    """Return what `value` means where it is an alias in `hint`, else `value`."""
    metas = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    aliases = [meta for meta in metas if isinstance(meta, Alias) and meta.word == value]
    return next((alias.means for alias in aliases if type(alias.word) is type(value)), value)


def type_text(hint: Any) -> str:
    """Return a type as users read it, e.g. `int ≥ 1 or null` or `auto | cpu | cuda`."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        said = [str(meta) for meta in args[1:] if isinstance(meta, Range | OrImportPath)]
        return " ".join(filter(None, [type_text(args[0]), *said]))
    if origin is Literal:
        return " | ".join(yaml_word(arg) for arg in args)
    if origin in (Union, types.UnionType):
        return " or ".join(type_text(arg) for arg in args)
    if origin is list:
        return f"list of {type_text(args[0])}"
    if origin is dict:
        return "mapping" if args[1] is Any else f"mapping to {type_text(args[1])}"
    if dataclasses.is_dataclass(hint):
        return "{" + ", ".join(item.name for item in dataclasses.fields(hint)) + "}"
    return {bool: "true | false", str: "text", type(None): "null"}.get(hint) or hint.__name__


def convert(cls: type[T], tree: Tree) -> T:
    """Build a section from a resolved tree that has every key.

    Args:
        cls: the dataclass.
        tree: plain values, `???` nowhere.

    Raises:
        UserError: a wrong type, choice or range (`ConfigError` for several); a key that follows another one does not
            repeat its mistake.
    """
    try:
        return _section(tree, cls, "")
    except UserError as error:
        errors = error.errors if isinstance(error, ConfigError) else [error]
        links = {key for key, default in walk(defaults_tree(cls)) if has_link(default)}
        own = [error for error in errors if error.field.partition("[")[0] not in links]
        said = {error.reason for error in own}
        raise_all(own + [error for error in errors if error not in own and error.reason not in said])
        raise


def _section(tree: Any, cls: Any, key: str) -> Any:
    """Build a section, or an entry of a list of mappings."""
    if not isinstance(tree, dict):
        raise UserError(key, f"{_shown(tree)} is not allowed; it must be {type_text(cls)}.")
    hints, prefix = hints_of(cls), f"{key}." if key else ""
    errors = [UserError(f"{prefix}{name}", "there is no such key.", did_you_mean(str(name), hints))
              for name in tree if name not in hints]  # fmt: skip
    values: Tree = {}
    for item in dataclasses.fields(cls):
        try:
            if item.name in tree:
                values[item.name] = _value(tree[item.name], hints[item.name], prefix + item.name)
            elif item.default is dataclasses.MISSING:
                raise UserError(f"{prefix}{item.name}", "must be set.", f"It is {type_text(hints[item.name])}.")
        except UserError as error:
            errors += error.errors if isinstance(error, ConfigError) else [error]
    raise_all(errors)
    return cls(**values)


def _value(value: Any, hint: Any, key: str, whole: Any = None) -> Any:
    """Return `value` as `hint` asks for it, or raise the error that says what the `whole` type allows."""
    origin, args, whole = get_origin(hint), get_args(hint), whole or hint
    if origin is Annotated:
        value, may_be_path = in_one_spelling(value, hint), any(isinstance(meta, OrImportPath) for meta in args[1:])
        if may_be_path and isinstance(value, str) and ":" in value:
            if is_import_path(value):
                return value
            remedy = "Write it as 'package.module:name' or 'file.py:name'."
            raise UserError(key, f"'{value}' is not an import path.", remedy)
        made = _value(value, args[0], key, whole)
        if not all(meta.holds(made) for meta in args[1:] if isinstance(meta, Range)):
            raise UserError(key, f"{_shown(value)} is out of range; it must be {type_text(whole)}.")
        return made
    if origin in (Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        arms = [arg for arg in args if arg is not type(None)]
        like = [arm for arm in arms if arm is type(value)]
        like += [arm for arm in arms if (get_origin(arm) is list) == isinstance(value, list)]
        return _value(value, next(iter(like), arms[0]), key, whole)
    if dataclasses.is_dataclass(hint):
        return _section(value, hint, key)
    if origin is Literal:
        if isinstance(value, str | bool) and value in args:
            return value
        means = {"gpu": "cuda"}.get(str(value))
        close = means if means in args else nearest(str(value), [str(arg) for arg in args])
        remedy = f"Did you mean '{close}'?" if close else ""
        raise UserError(key, f"{_shown(value)} is not one of {type_text(whole)}.", remedy)
    if origin is list and isinstance(value, list):
        return [_value(item, args[0], f"{key}[{index}]") for index, item in enumerate(value)]
    if origin is dict and isinstance(value, dict):
        names = {name: _value(name, args[0], f"{key}.{name}") for name in value}
        return {names[name]: v if args[1] is Any else _value(v, args[1], f"{key}.{name}") for name, v in value.items()}
    made = None if origin or value is None else _scalar(value, hint)
    if made is None:
        raise UserError(key, f"{_shown(value)} is not allowed; it must be {type_text(whole)}.")
    return made


def _scalar(value: Any, hint: type) -> Any:
    """Return the scalar, also from its text form (environment variables are text); None when it does not fit."""
    if hint is bool:
        return value if isinstance(value, bool) else {"true": True, "false": False}.get(str(value).lower())
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    if hint is str:
        return str(value)
    if isinstance(value, float) and hint is int:
        return None
    try:
        return hint(value)
    except ValueError:
        return None


def _shown(value: Any) -> str:
    """Return a value as it would be written in YAML, text in quotes."""
    return f"'{value}'" if isinstance(value, str) else yaml_word(value)
