"""Agents turn prompts into trajectories by making requests to a rollout engine."""
