"""The native rollout engine: continuous batching on the actor's own weights, in process."""

from pellucid.rollout.native.engine import NativeRolloutEngine

__all__ = ["NativeRolloutEngine"]
