"""Tests run side by side on the cores (`make test`): one thread for each process, as the models are tiny, and long files first."""

import os
from collections import Counter

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put files with many slow tests before others, as the last of several workers is not to begin with a long one.

    The workers take whole files in this order: `--dist loadfile --no-loadscope-reorder`.
    """
    if not hasattr(config, "workerinput"):
        return
    num_slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    integration = {item.path for item in items if "integration" in item.path.parts}
    items.sort(key=lambda item: (-num_slow[item.path], item.path not in integration))
