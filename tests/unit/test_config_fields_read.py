"""No config key is ignored: each field of the schema is read somewhere outside the schema."""

import ast
import dataclasses
import re
from pathlib import Path

import pytest

from pellucid.config import schema
from pellucid.config.fields import link_of

SOURCE = Path(schema.__file__).parents[2]
SCHEMA = Path(schema.__file__).parent
RULES = SCHEMA.parent / "validate"
SECTIONS = [value for value in vars(schema).values() if dataclasses.is_dataclass(value)]


def attributes_read() -> set[str]:
    """Names that appear as `something.name` being read in the package, outside the schema and its own rules."""
    names: set[str] = set()
    for file in SOURCE.rglob("*.py"):
        if SCHEMA not in file.parents and RULES not in file.parents:
            tree = ast.parse(file.read_text(encoding="utf-8"))
            names |= {
                node.attr
                for node in ast.walk(tree)
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
            }
    return names


def linked_to() -> set[str]:
    """Names of fields that another field takes its value from."""
    links = [link_of(field) for section in SECTIONS for field in dataclasses.fields(section)]
    return {name for link in links if link for name in re.findall(r"(\w+)}", link)}


READ = attributes_read() | linked_to()


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_every_field_is_read(section):
    own = [field.name for field in dataclasses.fields(section)]
    assert [name for name in own if name not in READ] == []


def test_the_search_can_fail():
    assert "a_field_that_nobody_reads" not in READ
    assert "train_batch_size" in READ
