"""What the server imports that ranks are forked from."""

import gc

gc.disable()  # nothing of the libraries is ever given back: looking for it takes seconds here, and copies them in each rank

import sharded  # noqa: E402, F401

gc.freeze()
gc.enable()
