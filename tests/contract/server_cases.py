"""A process of `pellucid serve` and what all servers promise, whatever engine samples there.

A file for an engine takes the cases over with `from server_cases import *` and has a fixture `server`, beside the cases of
`engine_cases` and their fixture `served`.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from engine_cases import (
    GREEDY,
    LONG,
    STREAM,
    TOKENIZER,
    Head,
    Pair,
    drawn,
    each_served_once,
    keep_old_cache,
    replicated,
    request_of,
    some_prompts,
)
from tiny import EOS

from pellucid.agents.llm import sample_rollouts
from pellucid.config.schema.rollout import RolloutConfig
from pellucid.errors import RunFailedError, UserError
from pellucid.rollout.inference import InferenceRolloutEngine
from pellucid.rollout.joining import ServerKind, check_servers, read_token
from pellucid.rollout.requests import run_sync
from pellucid.rollout.server_connection import authorization
from pellucid.rollout.transports import WeightsDifferError, WeightStore

DEMO = Path(__file__).parents[2] / "recipes" / "demo.yaml"
SHAPE = {"vocab_size": 25, "hidden_size": 128, "num_layers": 4}


class Server:
    """A process of `pellucid serve`.

    Args:
        kind: of server.
        model: folder of the model that it serves.
        folder: where it writes its token.
        options: arguments of the engine.
        asked: what a run asks for that it serves.
    """

    def __init__(self, kind: ServerKind, model: Path, folder: Path, options: str, asked: dict[str, Any]) -> None:
        with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as free:
            port = free.server_port
        self.kind, self.asked = kind, asked
        self.address, self.token_file = f"http://127.0.0.1:{port}", str(folder / "secret" / "token")
        name = kind.engine.lower()
        rollout = {
            "name": name,
            "max_num_seqs": 32,
            "server_token_file": self.token_file,
            f"engine_kwargs.{name}": f"{{{options}}}",
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

    def wait(self) -> "Server":
        """Return once it answers."""
        while self.process.poll() is None:
            try:
                httpx.get(f"{self.address}/health")
                return self
            except httpx.TransportError:
                time.sleep(0.2)
        pytest.fail("the server has ended")

    def check(self, asked: dict[str, Any], shape: dict[str, int] = SHAPE, token_file: str | None = None) -> None:
        """Ask whether a run may join it."""
        token_file = token_file or self.token_file
        section = RolloutConfig(server_addresses=[self.address], server_token_file=token_file)
        check_servers(self.kind, section, self.asked | asked, shape, WeightStore())

    def engine(self) -> InferenceRolloutEngine:
        join = partial(self.kind.join, self.address, read_token(self.token_file))
        return InferenceRolloutEngine(join, TOKENIZER, [EOS], seed=0)

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def served(server: Server) -> Iterator[Callable[[Head], Pair]]:
    """A tied head differs within the engine alone, which test_vllm.py and test_sglang.py look at: one untied server does."""
    one = each_served_once(lambda actor: replicated(actor, server.engine()))
    get = next(one)
    yield lambda _: get("untied")
    next(one, WeightStore())


@pytest.fixture
def each_pair(pair: Pair) -> Pair:
    return pair


def test_its_token_is_the_owners_alone_and_nothing_is_answered_without(server):
    assert Path(server.token_file).stat().st_mode & 0o777 == 0o600
    for path in ("/metrics", "/health", "/v1/models", "/collective_rpc"):
        assert httpx.get(server.address + path).status_code == 401
        assert httpx.get(server.address + path, headers=authorization("guess")).status_code == 401


def test_a_wrong_or_missing_token_is_said(server, tmp_path):
    (tmp_path / "token").write_text("guess")
    with pytest.raises(UserError, match=r"server_token_file: .* refuses the token"):
        server.check({}, token_file=str(tmp_path / "token"))
    with pytest.raises(UserError, match=r"server_token_file: .*cannot be read"):
        server.check({}, token_file=str(tmp_path / "none"))


def test_a_server_of_another_model_is_not_joined(server):
    server.check({})
    with pytest.raises(UserError, match=r"serves another model than the run's: vocab_size 25.*vocab_size 30"):
        server.check({}, SHAPE | {"vocab_size": 30})


def test_a_stale_prefix_cache_is_found_over_http_too(pair, monkeypatch):
    keep_old_cache(pair, monkeypatch)
    with pytest.raises(WeightsDifferError, match="replica 0's 'prefix cache'"):
        pair.update(2)


@pytest.mark.parametrize("mode", ["abort", "finish"])
def test_requests_that_are_on_their_way_when_a_pause_begins_are_answered(pair, mode):
    async def pause_at_once():
        tasks = [
            asyncio.create_task(pair.engine.generate(request_of(prompt, LONG, s)))
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


def assert_another_run_and_a_death_are_said(pair: Pair, server: Server) -> None:
    """Weights of another run are not sampled from, and a server that dies, here, is said with its address."""
    other = replicated(pair.actor, server.engine())
    with pytest.raises(RunFailedError, match=r"http://127.* samples from weights unknown here: .*another run"):
        sample_rollouts(pair.engine, some_prompts(1), GREEDY, stream=STREAM)

    async def kill_on_the_way():
        running = asyncio.create_task(other.engine.generate(request_of(some_prompts(1)[0])))
        await drawn(other.engine, 5)
        server.kill()
        await running

    with pytest.raises(RunFailedError, match=f"the {server.kind.engine} server at {server.address} is gone"):
        run_sync(kill_on_the_way())
    with pytest.raises(RunFailedError, match="is gone"):
        sample_rollouts(other.engine, some_prompts(1), GREEDY, stream=STREAM)
    other.engine.close()


__all__ = [name for name in list(globals()) if name.startswith("test_") or name in ("served", "each_pair")]
