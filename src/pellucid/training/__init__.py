"""The training engine: packed forward and backward, log-probabilities, optimizer, checkpoints."""
