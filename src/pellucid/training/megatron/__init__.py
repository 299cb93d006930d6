"""The third training engine: a model spread by megatron-core over tensor, pipeline, context, expert and data ranks."""
