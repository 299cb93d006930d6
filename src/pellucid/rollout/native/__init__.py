"""The native rollout engine: continuous batching on the actor's own weights, in process."""

from pellucid.rollout.native.engine import NativeRolloutEngine
from pellucid.rollout.native.mismatch import MismatchedEngine, MismatchSettings

__all__ = ["MismatchSettings", "MismatchedEngine", "NativeRolloutEngine"]
