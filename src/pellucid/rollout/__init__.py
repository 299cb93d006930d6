"""Rollout engines: prompts in, sampled responses with their log-probabilities and policy versions out."""
