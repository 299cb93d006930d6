"""What every number means (`table`), where numbers go (`trackers`), and how they are shown (`console`, `plots`).

Names and values come from the training loop, once a step, as one flat dictionary.
"""
