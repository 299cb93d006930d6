"""What the tests of the config share: a small valid run, and loading it with overrides."""

import pytest

from pellucid.config import Loaded, RunConfig, load_config
from pellucid.config.migrate import migrate
from pellucid.errors import UserError

BASE = [
    "data.train_files=x.jsonl",
    "data.train_batch_size=8",
    "actor_rollout_ref.model.path=m",
    "actor_rollout_ref.actor.strategy=fsdp2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.actor.use_dynamic_bsz=true",
    "actor_rollout_ref.rollout.n=4",
]


def load(*overrides, source=None, base=BASE, root=RunConfig) -> Loaded:
    return load_config(source, [*base, *overrides], root)


def error_of(*overrides, **where) -> UserError:
    with pytest.raises(UserError) as caught:
        load(*overrides, **where)
    return caught.value


def migrated(file) -> tuple[str, list[str]]:
    """Return what `config migrate` makes of a file, and a line for each change."""
    done = migrate(str(file))
    dropped = [f"{key} → removed" for key in done.dropped]
    refused = [f"{key}: {reason}" for key, reason in done.unsupported.items()]
    return done.yaml, [*done.renamed, *dropped, *refused, *done.unknown]


def notices(*overrides) -> str:
    return "\n".join(load(*overrides).notices)
