"""The run: how its parts are built from the config, the loop that trains, validation, checkpoints."""
