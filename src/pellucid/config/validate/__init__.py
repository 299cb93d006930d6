"""Rules that span several keys, checked before a model is touched.

Each rule looks at a converted config and yields the mistakes it finds; `load.py` calls `validate`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pellucid.config.convert import raise_all
from pellucid.config.schema import RunConfig, SftConfig
from pellucid.config.validate import correction, effects, precision, profiling, ranks, steps
from pellucid.errors import UserError


def validate(config: RunConfig | SftConfig) -> list[str]:
    """Check the rules between keys.

    Returns:
        Lines about settings that are allowed but unusual.

    Raises:
        UserError: a rule is broken; the arithmetic is spelled out (`ConfigError` for several).
    """
    changed = effects.changed_keys(config)
    if isinstance(config, SftConfig):
        raise_all([*steps.sft_mistakes(config), *effects.mistakes(config, changed)])
        return []
    found = [
        *ranks.mistakes(config),
        *steps.mistakes(config),
        *correction.mistakes(config),
        *profiling.mistakes(config),
        *precision.mistakes(config),
        *effects.mistakes(config, profiling.acting(config, changed)),
    ]
    raise_all(list(_distinct(found)))
    return [
        *steps.unusual(config),
        *correction.unusual(config),
        *ranks.unusual(config, changed),
        *profiling.unusual(config, changed),
        *precision.unusual(config),
    ]


def _distinct(errors: Iterable[UserError]) -> Iterator[UserError]:
    """Yield the first error of each key, and the first of each reason: keys that follow another one repeat it."""
    said: set[str] = set()
    for error in errors:
        if not said & {error.field, error.reason}:
            yield error
        said |= {error.field, error.reason}
