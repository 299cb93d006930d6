"""Pure tensor functions: advantages, policy losses, KL estimators and loss aggregation. No I/O, no distribution, no config."""
