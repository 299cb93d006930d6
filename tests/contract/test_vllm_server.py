"""The real vLLM as a server of `pellucid serve`: the cases that all engines share, over HTTP, and what can go wrong between.

It needs an environment with vLLM, like test_vllm.py. One server serves all tests.
"""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

pytest.importorskip("vllm")

import httpx
from engine_cases import *  # noqa: F403
from engine_cases import (
    GREEDY,
    SAMPLED,
    STREAM,
    TOKENIZER,
    Head,
    Pair,
    drawn,
    each_served_once,
    folder_of,
    keep_old_cache,
    replicated,
    request_of,
    some_prompts,
    trainer_of,
)
from tiny import EOS

from pellucid.agents.llm import sample_rollouts
from pellucid.config.schema.rollout import RolloutConfig
from pellucid.errors import RunFailedError, UserError
from pellucid.rollout import inference
from pellucid.rollout.inference import InferenceRolloutEngine
from pellucid.rollout.requests import SamplingParams, run_sync
from pellucid.rollout.transports import WeightsDifferError, WeightStore
from pellucid.rollout.vllm_processes.joined_vllm import JoinedVllm
from pellucid.rollout.vllm_processes.joining import NEEDED, authorization, check_servers, read_token
from pellucid.rollout.vllm_processes.weight_receiver import Difference, WeightReceiver

pytestmark = [pytest.mark.processes, pytest.mark.slow]

DEMO = Path(__file__).parents[2] / "recipes" / "demo.yaml"
SHORT = SamplingParams(max_tokens=20, ignore_eos=True)
SHAPE = {"vocab_size": 25, "hidden_size": 128, "num_layers": 4}
ASKED = NEEDED | {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 32}


class SlowReceiver(WeightReceiver):
    """Takes 30 ms more for each step, so that there is time to speak of a request that runs."""

    is_slow = False

    def take_weights(self, handle: str, verify: bool) -> Difference | None:
        if not self.is_slow:
            self.model_runner.get_model().register_forward_pre_hook(lambda *_: time.sleep(0.03))
            self.is_slow = True
        return super().take_weights(handle, verify)


class Server:
    """A process of `pellucid serve`."""

    def __init__(self, model: Path, folder: Path) -> None:
        with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as free:
            port = free.server_port
        self.address, self.token_file = f"http://127.0.0.1:{port}", str(folder / "secret" / "token")
        rollout = {
            "name": "vllm",
            "max_num_seqs": 32,
            "server_token_file": self.token_file,
            "engine_kwargs.vllm": "{kv_cache_memory_bytes: 67108864, worker_extension_cls: test_vllm_server.SlowReceiver}",
        }
        overrides = [f"++actor_rollout_ref.rollout.{name}={value}" for name, value in rollout.items()]
        overrides += [
            f"actor_rollout_ref.model.path={model}",
            "data.max_prompt_length=128",
            "data.max_response_length=128",
        ]
        serve = [sys.executable, "-c", "from pellucid.cli.main import main; main()", "serve", str(DEMO), *overrides]
        command = [*serve, "--port", str(port)]
        self.process = subprocess.Popen(command, start_new_session=True)

    def wait(self) -> None:
        """Return once it answers."""
        while self.process.poll() is None:
            try:
                httpx.get(f"{self.address}/health")
                return
            except httpx.TransportError:
                time.sleep(0.2)
        pytest.fail("the server has ended")

    def section(self, **changed: object) -> RolloutConfig:
        return RolloutConfig(
            name="vllm", **{"server_addresses": [self.address], "server_token_file": self.token_file} | changed
        )

    def engine(self) -> InferenceRolloutEngine:
        return InferenceRolloutEngine(
            partial(JoinedVllm.join, self.address, read_token(self.token_file)), TOKENIZER, [EOS], seed=0
        )

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inference, "WATCH_EVERY_S", 0.005)  # the cases ask what the engine does at this moment
        server = Server(folder_of(trainer_of("untied"), folder / "model"), folder)
        server.wait()
        yield server
        server.kill()


@pytest.fixture(scope="module")
def served(server: Server) -> Iterator[Callable[[Head], Pair]]:
    """A tied head differs within vLLM's workers alone, which test_vllm.py looks at: one server, with an untied one, does."""
    one = each_served_once(lambda actor: replicated(actor, server.engine()))
    get = next(one)
    yield lambda _: get("untied")
    next(one, WeightStore())


@pytest.fixture
def each_pair(pair: Pair) -> Pair:
    return pair


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


def test_its_token_is_the_owners_alone_and_nothing_is_answered_without(server):
    assert Path(server.token_file).stat().st_mode & 0o777 == 0o600
    for path in ("/metrics", "/health", "/v1/models", "/collective_rpc"):
        assert httpx.get(server.address + path).status_code == 401
        assert httpx.get(server.address + path, headers=authorization("guess")).status_code == 401


@pytest.mark.parametrize(
    ("asked", "shape", "words"),
    [
        ({"max_num_seqs": 64}, SHAPE, "was started with max_num_seqs: 32, and the run asks for 64"),
        ({"dtype": "bfloat16"}, SHAPE, "dtype: torch.float32, and the run asks for bfloat16"),
        ({"max_model_len": 512}, SHAPE, "max_model_len: 256, and the run asks for at least 512"),
        ({"logprobs_mode": "raw_logprobs"}, SHAPE, "logprobs_mode: processed_logprobs"),
        ({}, SHAPE | {"vocab_size": 30}, "serves another model than the run's: vocab_size 25.*vocab_size 30"),
    ],
)
def test_a_server_that_was_started_otherwise_is_not_joined(server, asked, shape, words):
    check_servers(server.section(), ASKED, SHAPE, WeightStore())
    with pytest.raises(UserError, match=words):
        check_servers(server.section(), ASKED | asked, shape, WeightStore())


def test_a_wrong_or_missing_token_is_said(server, tmp_path):
    (tmp_path / "token").write_text("guess")
    with pytest.raises(UserError, match=r"server_token_file: .* refuses the token"):
        check_servers(server.section(server_token_file=str(tmp_path / "token")), ASKED, SHAPE, WeightStore())
    with pytest.raises(UserError, match=r"server_token_file: .*cannot be read"):
        check_servers(server.section(server_token_file=str(tmp_path / "none")), ASKED, SHAPE, WeightStore())


class OtherServer(BaseHTTPRequestHandler):
    """Answers as vLLM 0.32 does without what `pellucid serve` adds; a path that has no answer is not found."""

    answers: ClassVar[dict[str, tuple[int, str]]]

    def do_GET(self) -> None:
        status, text = self.answers.get(self.path, (404, '{"detail":"Not Found"}'))
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def do_POST(self) -> None:
        self.do_GET()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


VERSION = {"/version": (200, '{"version":"0.32.0"}'), "/v1/models": (200, "{}")}
NO_METHOD = (500, "Worker failed with error ''CPUWorker' object has no attribute 'describe''")
BLIND = '{"results":[{"model":{"vocab_size":25},"arguments":{},"sees":false}]}'
DESCRIBED = {"/collective_rpc": (200, BLIND)}


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ({}, "no vLLM server"),
        (
            {"/version": (200, '{"version":"0.33.1"}'), "/v1/models": (200, "{}")},
            "runs vLLM 0.33.1, and <0.33,>=0.32 is needed",
        ),
        (VERSION | {"/v1/models": (401, '{"error":"Unauthorized"}')}, "refuses the token"),
        (VERSION, "VLLM_SERVER_DEV_MODE=1"),
        (VERSION | {"/collective_rpc": NO_METHOD}, "no extension that takes weights.*no attribute 'describe'"),
        (VERSION | DESCRIBED | {"/inference/v1/generate": (403, "")}, "--enable-scale-out"),
        (VERSION | DESCRIBED, "does not reach the memory of this process"),
    ],
)
def test_what_no_pellucid_serve_has_started_is_not_joined(answers, words):
    handler = type("Answers", (OtherServer,), {"answers": answers})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        section = RolloutConfig(server_addresses=[f"http://127.0.0.1:{server.server_port}"], server_token_file=None)
        with pytest.raises(UserError, match=words):
            check_servers(section, {}, {"vocab_size": 25}, WeightStore())
        server.shutdown()
    with pytest.raises(UserError, match=r"nothing answers at http.*ConnectError"):
        check_servers(section, {}, {}, WeightStore())


def test_a_stale_prefix_cache_is_found_over_http_too(pair, monkeypatch):
    keep_old_cache(pair, monkeypatch)
    with pytest.raises(WeightsDifferError, match="replica 0's 'prefix cache'"):
        pair.update(2)


@pytest.mark.parametrize("mode", ["abort", "finish"])
def test_requests_that_are_on_their_way_when_a_pause_begins_are_answered(pair, mode):
    async def pause_at_once():
        tasks = [
            asyncio.create_task(pair.engine.generate(request_of(prompt, SHORT, s)))
            for prompt in some_prompts()
            for s in range(8)
        ]
        await asyncio.sleep(0.01)
        await pair.engine.pause(mode)
        answers = await asyncio.gather(*tasks)
        await pair.engine.resume()
        return answers

    reasons = {answer.finish_reason for answer in run_sync(pause_at_once())}
    assert reasons == {"aborted" if mode == "abort" else "length"}


def test_weights_of_another_run_are_not_sampled_from_and_a_server_that_dies_is_said_with_its_address(pair, server):
    """The last test, for it ends the server."""
    other = replicated(pair.actor, server.engine())
    with pytest.raises(RunFailedError, match=r"http://127.* samples from weights unknown here: .*another run"):
        sample_rollouts(pair.engine, some_prompts(1), GREEDY, stream=STREAM)

    async def kill_on_the_way():
        running = asyncio.create_task(other.engine.generate(request_of(some_prompts(1)[0])))
        await drawn(other.engine, 5)
        server.kill()
        await running

    with pytest.raises(RunFailedError, match=f"the vLLM server at {server.address} is gone"):
        run_sync(kill_on_the_way())
    with pytest.raises(RunFailedError, match="is gone"):
        sample_rollouts(other.engine, some_prompts(1), GREEDY, stream=STREAM)
    other.engine.close()
