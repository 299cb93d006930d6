"""The real SGLang as a server of `pellucid serve`: the cases that all engines and all servers share.

It needs an environment with SGLang, like test_sglang.py. One server serves all tests.
"""

import importlib.util
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not installed", allow_module_level=True)
if importlib.util.find_spec("sgl_kernel") is None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "sglang_stand_ins"))

from engine_cases import *  # noqa: F403
from engine_cases import Pair, folder_of, trainer_of
from server_cases import *  # noqa: F403
from server_cases import Server, assert_another_run_and_a_death_are_said

from pellucid.errors import RunFailedError, UserError
from pellucid.rollout.requests import WeightUpdate, run_sync
from pellucid.rollout.sglang_processes import SPARE_TOKENS
from pellucid.rollout.sglang_processes.sglang_over_http import SGLANG_SERVERS
from pellucid.rollout.transports import StoredWeights

pytestmark = [pytest.mark.processes, pytest.mark.slow]

OPTIONS = "max_total_tokens: 8192, attention_backend: torch_native, disable_overlap_schedule: true, grammar_backend: none"
ASKED = {"dtype": "float32", "context_length": 256 + SPARE_TOKENS, "max_running_requests": 32, "max_total_tokens": 8192}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # with the stand-ins, for the server's processes
        server = Server(SGLANG_SERVERS, folder_of(trainer_of("untied"), folder / "model"), folder, OPTIONS, ASKED)
        yield server.wait()
        server.kill()


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"max_running_requests": 64}, "was started with max_running_requests: 32, and the run asks for 64"),
        ({"dtype": "bfloat16"}, "dtype: float32, and the run asks for bfloat16"),
        ({"context_length": 518}, "context_length: 262, and the run asks for at least 518"),
        ({"tp_size": 2}, "tp_size: 1, and the run asks for 2"),
        ({"mem_fraction_static": 0.3}, "mem_fraction_static: None, and the run asks for 0.3"),
    ],
)
def test_a_server_that_was_started_otherwise_is_not_joined(server, asked, words):
    with pytest.raises(UserError, match=words):
        server.check(asked)


def test_weights_that_cannot_be_read_end_the_run_and_not_the_server(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    """As those of a run that dies on the way."""
    written = StoredWeights.to_json
    with monkeypatch.context() as patch:
        patch.setattr(StoredWeights, "to_json", lambda handle: written(replace(handle, files=["/gone"] * len(handle.files))))
        with pytest.raises(RunFailedError, match="has not loaded the weights: FileNotFoundError"):
            run_sync(pair.engine.load_weights(WeightUpdate(2)))
    pair.update(3)


def test_weights_of_another_run_are_not_sampled_from_and_a_server_that_dies_is_said_with_its_address(pair, server):
    """The last test, for it ends the server."""
    assert_another_run_and_a_death_are_said(pair, server)
