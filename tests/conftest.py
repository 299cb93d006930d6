"""Tests run side by side on the cores (`make test`): one thread for each process, as the models are tiny, and long files first."""

import gc
import multiprocessing.process
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
pytest.register_assert_rewrite("engine_cases", "server_cases")
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it, and so would all that it starts
gc.disable()  # until everything is imported: nothing of the libraries is ever given back, and looking for it takes seconds

FAST_FOLDERS = {"unit", "contract"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tell the workers what belongs together (`--dist loadgroup`), the longest first: a file; all tests that join the session's
    Ray cluster; all that start a cluster of their own, for Ray gives up when several start at once.
    """
    if not hasattr(config, "workerinput"):
        return
    num_slow: Counter[str] = Counter()
    groups: dict[pytest.Item, str] = {}
    for item in items:
        groups[item] = str(item.path.relative_to(config.rootpath))
        if item.get_closest_marker("ray"):
            joins = isinstance(item, pytest.Function) and "cluster" in item.fixturenames
            groups[item] = "ray" if joins else "ray of its own"
        item.add_marker(pytest.mark.xdist_group(groups[item]))
        num_slow[groups[item]] += item.get_closest_marker("slow") is not None
    # Long ones first, as the last of the workers is not to begin with one.
    items.sort(key=lambda item: (not groups[item].startswith("ray"), -num_slow[groups[item]], "integration" not in item.path.parts))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Collect garbage again, outside the libraries, and check that the workers are told what belongs together.

    Without groups every worker starts Ray, and the suite takes twice as long.
    """
    gc.freeze()
    gc.enable()
    spread = [item.nodeid for item in session.items if not item.nodeid.partition("::")[2].count("@")]
    if hasattr(session.config, "workerinput") and session.config.option.loadgroup and spread:
        raise pytest.UsageError(f"pytest-xdist does not see that {spread[0]} belongs to a group")


class ProcessGuard:
    """Fails a test of the fast folders that starts a Python process or forks and is not marked so.

    `make test-fast` would not stay fast otherwise. Small programs such as git do no harm.
    """

    def __init__(self) -> None:
        self.item: pytest.Item | None = None
        """The test under way, where it may start none."""
        sys.addaudithook(self._hear)
        plain = multiprocessing.process.BaseProcess.start

        def start(process: Any) -> None:
            self._refuse()
            plain(process)

        multiprocessing.process.BaseProcess.start = start

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        python = event == "subprocess.Popen" and "python" in Path(str(arguments[0])).name
        if python or event == "os.fork":
            self._refuse()

    def _refuse(self) -> None:
        if self.item is not None:
            item, self.item = self.item, None
            pytest.fail(f"{item.nodeid} starts a process: mark it with pytest.mark.processes")


def pytest_configure(config: pytest.Config) -> None:
    """Guard the fast folders where only they are run."""
    if "not processes" in config.option.markexpr:
        config.stash[GUARD] = ProcessGuard()


GUARD = pytest.StashKey[ProcessGuard]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    """Let the guard know which test runs."""
    guard = item.config.stash.get(GUARD, None)
    if guard is not None and FAST_FOLDERS & set(item.path.parts):
        guard.item = item
    try:
        return (yield)
    finally:
        if guard is not None:
            guard.item = None
