"""Tests run side by side on the cores (`make test`): one thread for each process, as the models are tiny, and long files first."""

import os
from collections import Counter

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tell the workers what belongs together (`--dist loadgroup`): a file, and all tests that start Ray; the longest come first."""
    if not hasattr(config, "workerinput"):
        return
    num_slow: Counter[str] = Counter()
    groups: dict[pytest.Item, str] = {}
    for item in items:
        groups[item] = "ray" if item.get_closest_marker("ray") else str(item.path.relative_to(config.rootpath))
        item.add_marker(pytest.mark.xdist_group(groups[item]))
        num_slow[groups[item]] += item.get_closest_marker("slow") is not None
    # Long ones first, as the last of the workers is not to begin with one.
    items.sort(key=lambda item: (groups[item] != "ray", -num_slow[groups[item]], "integration" not in item.path.parts))
