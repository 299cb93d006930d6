"""Where time goes: the stage names and the one span primitive that feeds timing metrics and the timeline."""
