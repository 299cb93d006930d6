"""How many of verl's launch scripts `pellucid config migrate` translates whole, and which keys are missing for the others.

    python benchmarks/migrate_verl.py CHECKOUT [--list]

Every shell script under CHECKOUT/examples is read, none is run. Whole: each key is taken, renamed, or dropped without effect on the
result. Each is also written with --drop-unsupported and loaded. Environment variables that a script leaves open are set to 8.
"""

import argparse
import os
import re
import tempfile
from collections import Counter
from pathlib import Path

from pellucid.config import load_config
from pellucid.config.migrate import Migration, migrate
from pellucid.config.trees import get
from pellucid.console import console
from pellucid.errors import UserError

KINDS = {
    "distillation.enabled": "distillation", "data.image_key": "images", "data.video_key": "images",
    "actor_rollout_ref.actor.freeze_vision_tower": "images", "actor_rollout_ref.model.exclude_modules": "images",
    "actor_rollout_ref.rollout.multi_turn.tool_config_path": "tools",
    "actor_rollout_ref.rollout.multi_turn.interaction_config_path": "tools",
}  # fmt: skip


def say(line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def kind_of(done: Migration) -> str:
    """Return what a script trains, by what decides first; geo3k is a set of images, also where no key says so."""
    if "engine" in done.unsupported:
        return f"engine {done.unsupported['engine'].partition(' is not')[0]}"
    trains = "Megatron" if get(done.tree, "actor_rollout_ref.actor.strategy") == "megatron" else "FSDP"
    shows = "images" if "geo3k" in str(get(done.tree, "data.train_files")) else f"{trains}, text"
    return next((kind for key, kind in KINDS.items() if key in done.unsupported), shows)


def loads(script: Path) -> str:
    """Return why the config without what is not supported does not load, empty where it does."""
    text = migrate(str(script), drops_unsupported=True).yaml
    os.environ |= {name: os.environ.get(name, "8") for name in re.findall(r"oc\.env:(\w+)", text)}
    text = re.sub(r"<[^>]*>", "8", text)
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(text)
        file.flush()
        try:
            load_config(file.name, [])
        except UserError as error:
            return str(error)
    return ""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("checkout", type=Path)
    options.add_argument("--list", action="store_true", help="name what each script lacks")
    asked = options.parse_args()
    table: dict[str, Counter[str]] = {}
    missing: Counter[str] = Counter()
    for script in sorted((asked.checkout / "examples").rglob("*.sh")):
        name = str(script.relative_to(asked.checkout / "examples"))
        try:
            done = migrate(str(script))
        except UserError as error:
            kind = "SFT" if "sft_trainer" in str(error) else "another program"
            table.setdefault(kind, Counter())["not"] += 1
            continue
        kind, fault = kind_of(done), loads(script)
        table.setdefault(kind, Counter()).update(["part" if done.unsupported else "whole"] + ["loads"] * (not fault))
        if "engine" not in done.unsupported:
            missing.update(list(done.unsupported))
        if asked.list and (done.unsupported or fault):
            say(f"{name} ({kind}): {', '.join(done.unsupported)} {fault}")
    say(
        "| what | scripts | whole | in part | not read | loads without what is missing |\n| --- | --- | --- | --- | --- | --- |"
    )
    for kind, counts in sorted(table.items(), key=lambda item: -item[1].total()):
        scripts = sum(counts[word] for word in ("whole", "part", "not"))
        say(f"| {kind} | {scripts} | {counts['whole']} | {counts['part']} | {counts['not']} | {counts['loads']} |")
    say("\nMissing, in how many scripts:")
    for key, number in missing.most_common(30):
        say(f"{number:4} {key}")


if __name__ == "__main__":
    main()
