"""The schema as people read it: annotated YAML and the list of keys.

Everything is derived from the dataclasses and their field docstrings, as is `docs/config.md` by `docs/config_page.py`.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from pellucid.config.convert import defaults_tree, flat_hints, type_text
from pellucid.config.trees import get

_HEAD = """# Made from the schema by `pellucid config show --annotated`.
# Each field has its comment above it, and one blank line separates fields.
"""


class Key(NamedTuple):
    """One key of the schema."""

    name: str
    """Full dotted name."""
    type: str
    """As users read it."""
    default: Any
    """As YAML has it: with links, and `???` where it must be set; of a section a mapping."""
    doc: str
    """The field's docstring on one line."""
    section: type | None
    """The dataclass of a section of keys."""


@cache
def field_docs(cls: type) -> dict[str, str]:
    """Return field name → docstring (one line) of a dataclass, inherited fields included."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for statement, follower in zip(body.body, body.body[1:]):
            match statement, follower:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    docs[name] = " ".join(text.split())
    return docs


def keys(root: type) -> Iterator[Key]:
    """Yield the keys of the schema, a section before its fields."""
    hints = flat_hints(root)
    for name, hint in hints.items():
        parent, _, field = name.rpartition(".")
        section = hint if dataclasses.is_dataclass(hint) else None
        default, doc = get(defaults_tree(root), name), field_docs(hints.get(parent, root))[field]
        yield Key(name, type_text(hint), default, doc, section)  # pyright: ignore[reportArgumentType]


def annotated_yaml(root: type, values: dict[str, Any] | None = None) -> str:
    """Return the whole tree as YAML with each field's docstring as the comment above it.

    Args:
        root: `RunConfig` or `SftConfig`.
        values: a resolved tree; None shows the defaults with their links.
    """
    parts = [_HEAD.strip()]
    for key in keys(root):
        indent, value = "  " * key.name.count("."), get(values, key.name) if values else key.default
        has_bounds = not key.section and key.type != "true | false" and any(sign in key.type for sign in "|≥≤<>")
        about = f"{key.doc} Allowed: {key.type}." if has_bounds else key.doc
        comment = textwrap.wrap(about, 116 - len(indent), break_on_hyphens=False)
        if key.section:
            shown = ""
        elif isinstance(value, dict) and value:
            shown = "".join(f"\n{indent}  {name}: {yaml_value(entry)}" for name, entry in value.items())
        else:
            shown = f" {yaml_value(value)}"
        lines = [*(f"{indent}# {line}" for line in comment), f"{indent}{key.name.rpartition('.')[2]}:{shown}"]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def yaml_value(value: Any) -> str:
    """Return a value as it is written in YAML on one line."""
    import yaml

    if isinstance(value, str) and (value == "???" or "${" in value):
        return value
    return yaml.safe_dump([value], default_flow_style=True, width=10**6, allow_unicode=True).strip()[1:-1]
