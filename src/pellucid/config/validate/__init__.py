"""Rules that span several keys, checked before a model is touched.

Each rule looks at a converted config and yields the mistakes it finds; `load.py` calls `validate`.
"""

from __future__ import annotations

from pellucid.config.convert import raise_all
from pellucid.config.schema import RunConfig, SftConfig
from pellucid.config.validate import algorithm, batches, correction, effects, precision, profiling, ranks, run, sampling


def validate(config: RunConfig | SftConfig) -> list[str]:
    """Check the rules between keys.

    Returns:
        Lines about settings that are allowed but unusual.

    Raises:
        UserError: a rule is broken; the arithmetic is spelled out (`ConfigError` for several).
    """
    if isinstance(config, SftConfig):
        raise_all([*run.sft_mistakes(config), *effects.mistakes(config, effects.changed_keys(config))])
        return []
    changed = effects.changed_keys(config)
    found = [
        *ranks.mistakes(config),
        *batches.mistakes(config),
        *sampling.mistakes(config),
        *algorithm.mistakes(config),
        *correction.mistakes(config),
        *run.mistakes(config),
        *profiling.mistakes(config, changed),
        *precision.mistakes(config),
    ]
    named = {error.field for error in found}
    others = {key: value for key, value in changed.items() if ".profiler." not in key}  # profiling has rules of its own
    raise_all(found + [error for error in effects.mistakes(config, others) if error.field not in named])
    return [
        *algorithm.unusual(config),
        *correction.unusual(config),
        *ranks.unusual(config, changed),
        *profiling.unusual(config, changed),
        *precision.unusual(config),
    ]
