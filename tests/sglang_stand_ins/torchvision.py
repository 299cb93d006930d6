"""Stands in for torchvision, whose wheels are for other builds of torch; SGLang imports it for images alone."""

import sys

from absent import make_absent

__version__ = "0"  # which transformers compares
make_absent(sys.modules[__name__])
