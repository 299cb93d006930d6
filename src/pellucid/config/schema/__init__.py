"""The schema: one dataclass file a section; each field has a type, a range or choices, a default and a docstring."""

from pellucid.config.schema.root import RunConfig, SftConfig

__all__ = ["RunConfig", "SftConfig"]
