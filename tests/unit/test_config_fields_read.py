"""No config key is ignored: something outside the config room acts on each field of the schema."""

import ast
import dataclasses
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import pellucid
from pellucid.config import RunConfig, SftConfig
from pellucid.config.convert import defaults_tree, hints_of
from pellucid.config.trees import has_link, walk

SOURCE = Path(pellucid.__file__).parent
ONLY_TALKS = ("config", "doctor", "cli/config.py")
"""Where keys are checked, planned and shown; what is read there alone does nothing in a run."""
TALK = ("notice", "warning", "info", "debug", "print", "append_notice")
"""Functions that tell the user something; a key that decides or fills their words alone does nothing."""
ACTS_IN_THE_CONFIG = {
    "rollout_correction_preset": "load.py puts in the keys that it stands for",
    "use_remove_padding": "it may only say what is done anyhow",
    "prompt_length": "it may only repeat data.max_prompt_length, which acts",
}


def sections(part) -> Iterator[type]:
    yield part
    for hint in hints_of(part).values():
        if dataclasses.is_dataclass(hint):
            yield from sections(hint)


SECTIONS = list(dict.fromkeys([*sections(RunConfig), *sections(SftConfig)]))


def is_talk(statement: ast.stmt) -> bool:
    """Tell whether a statement is one call that tells the user something."""
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return False
    function = statement.value.func
    return (function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")) in TALK


def reads(node: ast.AST) -> Iterator[str]:
    """Yield the names that appear as `something.name` being read, but for what only words depend on."""
    if isinstance(node, ast.stmt) and is_talk(node):
        return
    if isinstance(node, ast.If) and all(map(is_talk, [*node.body, *node.orelse])):
        return
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
        yield node.attr
    for child in ast.iter_child_nodes(node):
        yield from reads(child)


def attributes_read() -> set[str]:
    names: set[str] = set()
    for file in SOURCE.rglob("*.py"):
        place = file.relative_to(SOURCE).as_posix()
        if not place.startswith(ONLY_TALKS):
            names |= set(reads(ast.parse(file.read_text(encoding="utf-8"))))
    return names


def linked_to() -> set[str]:
    """Names of fields that another field takes its value from."""
    links = [value for root in (RunConfig, SftConfig) for _, value in walk(defaults_tree(root)) if isinstance(value, str) and has_link(value)]
    return {name for link in links for name in re.findall(r"(\w+)}", link)}


def of_properties() -> set[str]:
    """Names that a section's own properties read, of those properties that something outside the config reads."""
    names: set[str] = set()
    for file in (SOURCE / "config" / "schema").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                names |= set(reads(node))
    return names


@cache
def names_read() -> set[str]:
    return attributes_read() | linked_to() | of_properties() | ACTS_IN_THE_CONFIG.keys()


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_every_field_is_read(section):
    own = [field.name for field in dataclasses.fields(section)]
    assert [name for name in own if name not in names_read()] == []


def test_the_search_can_fail():
    assert "a_field_that_nobody_reads" not in names_read()
    assert "train_batch_size" in names_read()


def test_a_notice_alone_is_no_reader():
    source = 'if a.left_off:\n    notice("off")\nif a.used:\n    notice(f"{a.told}")\n    work(a.given)\nlog.info(a.logged)\n'
    assert set(reads(ast.parse(source))) == {"used", "given"}
