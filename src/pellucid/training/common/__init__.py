"""What every training backend shares: model loading, packing, log-probabilities, optimizer and schedule."""
