"""The real vLLM as a server of `pellucid serve`: the cases that all engines share, over HTTP, and what can go wrong between.

It needs an environment with vLLM, like test_vllm.py. One server serves all tests.
"""

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

pytest.importorskip("vllm")

from engine_cases import *  # noqa: F403
from engine_cases import SAMPLED, STREAM, folder_of, some_prompts, trainer_of
from server_cases import *  # noqa: F403
from server_cases import Server, assert_another_run_and_a_death_are_said

from pellucid.agents.llm import sample_rollouts
from pellucid.errors import UserError
from pellucid.rollout import inference
from pellucid.rollout.vllm_processes.joined_vllm import VLLM_SERVERS
from pellucid.rollout.vllm_processes.weight_receiver import Difference, WeightReceiver

pytestmark = [pytest.mark.processes, pytest.mark.slow]

OPTIONS = "kv_cache_memory_bytes: 67108864, worker_extension_cls: test_vllm_server.SlowReceiver"
ASKED = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 32}


class SlowReceiver(WeightReceiver):
    """Takes 30 ms more for each step, so that there is time to speak of a request that runs."""

    is_slow = False

    def take_weights(self, handle: str, verify: bool) -> Difference | None:
        if not self.is_slow:
            self.model_runner.get_model().register_forward_pre_hook(lambda *_: time.sleep(0.03))
            self.is_slow = True
        return super().take_weights(handle, verify)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inference, "WATCH_EVERY_S", 0.005)  # the cases ask what the engine does at this moment
        server = Server(VLLM_SERVERS, folder_of(trainer_of("untied"), folder / "model"), folder, OPTIONS, ASKED)
        yield server.wait()
        server.kill()


def test_progress_and_stats(pair):
    """Unlike engines of the run's own, a server is asked for its numbers, and tells them late."""
    seen: list[int] = []
    time.sleep(0.2)  # the token that the update has asked for is counted
    before = pair.engine.stats()
    sample_rollouts(pair.engine, some_prompts(), replace(SAMPLED, ignore_eos=True), stream=STREAM, on_done=seen.append)
    time.sleep(0.2)
    stats = pair.engine.stats()
    assert sum(seen) == 20 and 0 in seen
    assert (stats.running, stats.waiting, stats.version) == (0, 0, 1)
    assert stats.sampled_tokens - before.sampled_tokens == 400 and stats.answered - before.answered == 20
    assert stats.computed_tokens > before.computed_tokens and stats.prefill_s > before.prefill_s


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"max_num_seqs": 64}, "was started with max_num_seqs: 32, and the run asks for 64"),
        ({"dtype": "bfloat16"}, "dtype: torch.float32, and the run asks for bfloat16"),
        ({"max_model_len": 512}, "max_model_len: 256, and the run asks for at least 512"),
        ({"logprobs_mode": "raw_logprobs"}, "logprobs_mode: processed_logprobs"),
    ],
)
def test_a_server_that_was_started_otherwise_is_not_joined(server, asked, words):
    with pytest.raises(UserError, match=words):
        server.check(asked)


def test_weights_of_another_run_are_not_sampled_from_and_a_server_that_dies_is_said_with_its_address(pair, server):
    """The last test, for it ends the server."""
    assert_another_run_and_a_death_are_said(pair, server)
