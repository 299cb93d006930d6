"""The schema as people read it: annotated YAML, the list of keys, and the Markdown reference.

Everything is derived from the dataclasses and their field docstrings; `python -m pellucid.config.describe` rewrites
`docs/config.md`, and a test fails when it is stale.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pellucid.config.convert import defaults_tree, hints_of, type_text
from pellucid.config.fields import default_of
from pellucid.config.schema import RunConfig, SftConfig
from pellucid.config.trees import get

_HEAD = """# Made from the schema by `pellucid config show --annotated`.
# Each field has its comment above it, and one blank line separates fields.
"""


@dataclass(frozen=True)
class Key:
    """One key of the schema."""

    name: str
    """Full dotted name."""
    type: str
    default: str
    """As YAML."""
    doc: str
    """The field's docstring on one line."""
    is_section: bool
    of: type
    """The dataclass that has the key as a field."""


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


def keys(root: type, prefix: str = "") -> Iterator[Key]:
    """Yield each key of the schema, a section before its fields."""
    hints, docs = hints_of(root), field_docs(root)
    for item in dataclasses.fields(root):
        hint, name = hints[item.name], prefix + item.name
        if dataclasses.is_dataclass(hint):
            yield Key(name, "section", "", docs[item.name], True, root)
            yield from keys(hint, f"{name}.")  # pyright: ignore[reportArgumentType]
        else:
            yield Key(name, type_text(hint), yaml_value(default_of(item)), docs[item.name], False, root)


def annotated_yaml(root: type, values: dict[str, Any] | None = None) -> str:
    """Return the whole tree as YAML with each field's docstring as the comment above it.

    Args:
        root: `RunConfig` or `SftConfig`.
        values: a resolved tree; None shows the defaults with their links.
    """
    parts = [_HEAD.strip()]
    for key in keys(root):
        indent, value = "  " * key.name.count("."), get(values or defaults_tree(root), key.name)
        has_bounds = key.type != "true | false" and any(sign in key.type for sign in "|≥≤<>")
        about = f"{key.doc} Allowed: {key.type}." if has_bounds else key.doc
        comment = textwrap.wrap(about, 116 - len(indent), break_on_hyphens=False)
        if key.is_section:
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


def markdown() -> str:
    """Return the reference page of all keys."""
    lines = [
        "# Configuration reference",
        "",
        "Generated from the schema in `src/pellucid/config/schema/`; do not edit. `pellucid config keys` prints it.",
        "",
        "`???` must be set. A default such as `${trainer.seed}` follows that key until it is set to a value; ",
        "`null` follows it too.",
    ]
    for root, title in ((RunConfig, "`pellucid train` and `pellucid eval`"), (SftConfig, "`pellucid sft`")):
        lines += ["", f"## {title}"]
        for section in _sections(root):
            lines += section
    return "\n".join(lines) + "\n"


def _sections(root: type) -> Iterator[list[str]]:
    """Yield the Markdown lines of each section: a heading, and a table of the keys directly in it.

    A section of a kind that was described before refers to that one.
    """
    described: dict[type, str] = {}
    skipped: tuple[str, ...] = ()
    for section in (key for key in keys(root) if key.is_section and not key.name.startswith(skipped)):
        kind = hints_of(section.of)[section.name.rpartition(".")[2]]
        yield ["", f"### {section.name}", ""]
        if described.setdefault(kind, section.name) != section.name:
            skipped += (f"{section.name}.",)
            yield [f"{section.doc} Its keys are those of `{described[kind]}`."]
            continue
        yield [section.doc]
        inside = [key for key in keys(kind, f"{section.name}.") if key.of is kind and not key.is_section]
        if inside:
            yield ["", "| key | type | default | meaning |", "| --- | --- | --- | --- |"]
        for key in inside:
            cells = (f"`{key.name}`", key.type, f"`{key.default}`", key.doc)
            yield ["| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"]


if __name__ == "__main__":
    Path("docs/config.md").write_text(markdown(), encoding="utf-8")
