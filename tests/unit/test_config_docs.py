"""The generated files: fresh, formatted by the rules, and loadable."""

import re
import runpy
from dataclasses import is_dataclass
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from pellucid.config import RunConfig, SftConfig
from pellucid.config.convert import defaults_tree, hints_of
from pellucid.config.describe import annotated_yaml, keys

ROOT = Path(__file__).parents[2]
PAGE = runpy.run_path(str(ROOT / "docs" / "config_page.py"))["page"]()


def test_the_reference_page_is_fresh():
    page = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    assert page == PAGE, "stale: run python docs/config_page.py > docs/config.md"


@pytest.mark.parametrize("root", [RunConfig, SftConfig])
def test_annotated_yaml_keeps_the_format_rules(root):
    lines = annotated_yaml(root).splitlines()
    mapping_indent = None
    for index, line in enumerate(lines):
        if not line.strip() or line.lstrip().startswith("#"):
            mapping_indent = None
            continue
        indent = len(line) - len(line.lstrip())
        if mapping_indent is not None and indent == mapping_indent + 2:
            continue  # an entry of a mapping, which is one value
        mapping_indent = indent if line.endswith(":") else None
        comment = lines[index - 1]
        assert comment.lstrip().startswith("#"), f"no comment above: {line}"
        assert len(comment) - len(comment.lstrip()) == indent, f"comment's indentation: {line}"
        assert " #" not in line, f"comment after a value: {line}"
        first = index - 1
        while lines[first].lstrip().startswith("#"):
            first -= 1
        assert lines[first] == "", f"no blank line before: {line}"
    assert all(len(line) <= 120 for line in lines if "${" not in line)  # links are as long as the keys they name
    assert "\n\n\n" not in "\n".join(lines)


@pytest.mark.parametrize("root", [RunConfig, SftConfig])
def test_annotated_yaml_holds_the_schema_defaults(root):
    assert OmegaConf.to_container(OmegaConf.create(annotated_yaml(root))) == defaults_tree(root)


@pytest.mark.parametrize("root", [RunConfig, SftConfig])
def test_every_key_is_explained(root):
    for key in keys(root):
        assert re.match(r".{8,}[.:]", key.doc), key.name


def test_the_tree_stays_small():
    """A block that several sections share is learnt once."""
    kinds = {key.section for key in keys(RunConfig) if key.section}
    assert sum(not is_dataclass(hint) for kind in kinds for hint in hints_of(kind).values()) <= 290


def test_a_block_that_several_sections_share_is_explained_once():
    assert "### actor_rollout_ref.actor.profiler.schedule\n" in PAGE
    critic = PAGE.partition("### critic.profiler\n")[2].partition("###")[0]
    assert critic.strip() == "Profiling of the value model. Its keys are those of `actor_rollout_ref.actor.profiler`."
    assert "critic.profiler.schedule" not in PAGE
    assert "critic.profiler.schedule.unit" in [key.name for key in keys(RunConfig)]
