"""Writes the page `docs/config.md` from the schema: `python docs/config_page.py > docs/config.md`."""

import sys
from collections.abc import Iterator

from pellucid.config.describe import keys, yaml_value
from pellucid.config.schema import RunConfig, SftConfig


def page() -> str:
    """Return the page `docs/config.md`: a table for each section of keys."""
    lines = [
        "# Configuration reference",
        "",
        "Generated from the schema in `src/pellucid/config/schema/`; do not edit. `pellucid config keys` prints it.",
        "",
        "`???` must be set. A default such as `${trainer.seed}` follows that key until it is set to a value; ",
        "`null` follows it too.",
    ]
    for root, title in ((RunConfig, "`pellucid train` and `pellucid eval`"), (SftConfig, "`pellucid sft`")):
        lines += ["", f"## {title}", *_sections(root)]
    return "\n".join(lines) + "\n"


def _sections(root: type) -> Iterator[str]:
    """Yield the Markdown lines of each section: a heading, and a table of the keys directly in it.

    A section of a kind that was described before refers to that one.
    """
    described: dict[type, str] = {}
    skipped: list[str] = []
    every = list(keys(root))
    for section in every:
        if section.section is None or any(section.name.startswith(f"{name}.") for name in skipped):
            continue
        yield from ("", f"### {section.name}", "")
        if described.setdefault(section.section, section.name) != section.name:
            skipped.append(section.name)
            yield f"{section.doc} Its keys are those of `{described[section.section]}`."
            continue
        yield section.doc
        inside = [key for key in every if key.name.rpartition(".")[0] == section.name and not key.section]
        if inside:
            yield from ("", "| key | type | default | meaning |", "| --- | --- | --- | --- |")
        for key in inside:
            cells = (f"`{key.name}`", key.type, f"`{yaml_value(key.default)}`", key.doc)
            yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    sys.stdout.write(page())
