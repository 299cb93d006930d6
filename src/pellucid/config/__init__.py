"""The configuration: one typed tree, composed from YAML and overrides, checked before anything heavy is imported.

No torch here: a mistake in a config is reported in a fraction of a second.
"""

from pellucid.config.convert import ConfigError
from pellucid.config.load import Loaded, load_config
from pellucid.config.model_facts import ModelFacts, read_model_facts
from pellucid.config.plan import Plan, build_plan
from pellucid.config.schema import RunConfig, SftConfig
from pellucid.config.validate import validate

__all__ = [
    "ConfigError",
    "Loaded",
    "ModelFacts",
    "Plan",
    "RunConfig",
    "SftConfig",
    "build_plan",
    "load_config",
    "read_model_facts",
    "validate",
]
