"""Pure tensor functions: advantages, losses, KL, aggregation, correction. `catalog.py` lists the algorithms by name."""
