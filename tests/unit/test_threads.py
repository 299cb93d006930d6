"""How compute threads wait is settled before torch is loaded, and left to the user who has settled it."""

import os
import subprocess
import sys

import pytest

from pellucid.threads import SPINS, waiting_settings, yield_while_waiting

NAMES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME")


@pytest.fixture(autouse=True)
def _unset(monkeypatch):
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that it is put back as it was
        monkeypatch.delenv(name)


def test_threads_that_wait_give_their_core_away_soon():
    assert waiting_settings() == {}
    yield_while_waiting()
    assert waiting_settings() == {"GOMP_SPINCOUNT": str(SPINS)}


@pytest.mark.parametrize("name", NAMES)
def test_what_the_user_has_settled_stays(name, monkeypatch):
    monkeypatch.setenv(name, "1")
    yield_while_waiting()
    assert waiting_settings() == {name: "1"}


COMMAND = """
import sys
from pellucid.cli import main
def app():
    assert "torch" not in sys.modules
    import torch
main.app = app
main.main()
"""


@pytest.mark.processes
def test_a_command_settles_it_before_libgomp_reads_it():
    shown = os.environ | {"OMP_DISPLAY_ENV": "verbose"}
    done = subprocess.run([sys.executable, "-c", COMMAND], env=shown, capture_output=True, text=True, check=True)
    if "GOMP_SPINCOUNT" not in done.stderr:
        pytest.skip("this torch does not use libgomp")
    assert f"GOMP_SPINCOUNT = '{SPINS}'" in done.stderr
