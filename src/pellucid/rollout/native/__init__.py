"""The native rollout engine: continuous batching on the actor's own weights, in process."""

from pellucid.rollout.native.engine import NativeRolloutEngine
from pellucid.rollout.native.laboratory import MismatchedPolicy

__all__ = ["MismatchedPolicy", "NativeRolloutEngine"]
