"""The agent `endpoint` with the native engine: programs of their own processes, what they leave, and what their trajectories
hold.
"""

import asyncio
import shlex
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from engine_cases import CHAT, STREAM, TOKENIZER, assert_scored_alike, some_prompts, trainer_of
from openai import AsyncOpenAI
from test_rollout_engine import make_engine
from tiny import EOS

from pellucid.agents.chat import Chat
from pellucid.agents.endpoint import Endpoint, Recorder
from pellucid.agents.llm import AgentLoop, sample_rollouts
from pellucid.agents.tools import ToolCall
from pellucid.config.schema.agent import AgentConfig
from pellucid.errors import UserError
from pellucid.rollout.requests import Completion, SamplingParams

pytestmark = pytest.mark.processes

PARAMS = SamplingParams(n=2, max_tokens=60)
ASK = """
import json, os, sys, time, urllib.request
MESSAGES = json.loads(os.environ["PELLUCID_PROMPT"])
def ask(messages=MESSAGES, token=os.environ["OPENAI_API_KEY"]):
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps({"messages": messages}).encode())
    request.add_header("Authorization", "Bearer " + token)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]
"""


@pytest.fixture(scope="module")
def trainer():
    return trainer_of("tied")


@pytest.fixture(scope="module")
def engine(trainer):
    return make_engine(trainer)


def prompts_with_chats(count: int = 2):
    return [replace(one, messages=[{"role": "user", "content": one.text}]) for one in some_prompts(count)]


def rolled_out(engine, folder: Path, program: str, params: SamplingParams = PARAMS, count: int = 1, **settings):
    """The trajectories of a program that imports nothing but the standard library."""
    (folder / "agent.py").write_text(ASK + program)
    return of_command(engine, [sys.executable, "-S", str(folder / "agent.py")], folder, CHAT, params, count, **settings)


def of_command(engine, command: list[str], folder: Path, chat: Chat, params: SamplingParams, count: int, **settings):
    section = AgentConfig(name="endpoint", command=shlex.join(command), **settings)
    agent = Endpoint(section, chat, 200, folder / "logs")
    loop = AgentLoop(agent, "endpoint", chat, max_turns=None, close_agent=agent.close)
    try:
        return sample_rollouts(engine, prompts_with_chats(count), params, stream=STREAM, loop=loop)
    finally:
        loop.close()


def in_this_process(engine, talk, params: SamplingParams = PARAMS, count: int = 4):
    """The trajectories of a coroutine that is given the server's address and a token."""
    section = AgentConfig(name="endpoint", command=sys.executable)
    endpoint = Endpoint(section, CHAT, 200, Path())
    server = endpoint._server

    async def agent(prompt, llm, tools):
        recorder = Recorder(llm, CHAT, 20, 200)
        token = server.admit((recorder.answer, asyncio.get_running_loop()))
        try:
            await talk(server.url, token, list(prompt.messages))
        finally:
            server.dismiss(token)
            await recorder.close()

    loop = AgentLoop(agent, "endpoint", CHAT, max_turns=None, close_agent=endpoint.close)
    try:
        return sample_rollouts(engine, prompts_with_chats(count), params, stream=STREAM, loop=loop)
    finally:
        loop.close()


def test_every_token_of_concurrent_agents_and_their_branches_is_scored_as_the_trainer_scores_it(engine, trainer):
    more = {"role": "user", "content": "+1="}

    async def talk(url, token, messages):
        async with AsyncOpenAI(base_url=url, api_key=token, max_retries=0) as client:

            async def said(messages, **options):
                answer = await client.chat.completions.create(model="any", messages=messages, max_tokens=8, **options)
                return [*messages, answer.choices[0].message, more]

            chat = await said(messages)
            await asyncio.gather(*(said(chat) for _ in range(3)))
            await said([*messages, {"role": "assistant", "content": "7"}, more], stream=False)

    first, again = (in_this_process(engine, talk) for _ in range(2))
    parts = [part for rollout in first for part in rollout.parts]
    assert not any(rollout.outcome.failure for rollout in first)
    assert [len(rollout.parts) for rollout in first] == [4] * 8
    assert sorted(len(part.turns) for part in first[0].parts) == [1, 1, 1, 2]
    assert_scored_alike(trainer, parts)
    assert [list(part.token_ids) for part in parts] == [list(part.token_ids) for one in again for part in one.parts]
    assert engine.stats().kept == 0 and engine.stats().running == 0


def test_a_program_says_what_its_trajectory_was_worth(engine, tmp_path):
    program = """
print(ask(), file=sys.stderr)
print("noise"); print(3)
print(json.dumps({"reward": {"length": 2, "style": 0.5}, "columns": {"uid": os.environ["PELLUCID_UID"]}, "text": "7"}))
print("and more")
"""
    rollouts = rolled_out(engine, tmp_path, program)
    assert [rollout.outcome.rewards for rollout in rollouts] == [{"length": 2.0, "style": 0.5}] * 2
    assert [rollout.outcome.columns for rollout in rollouts] == [{"uid": "p0"}] * 2 and rollouts[0].text == "7"
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["rollout_1_p0_0.log", "rollout_1_p0_1.log"]
    assert "assistant" in (tmp_path / "logs" / "rollout_1_p0_1.log").read_text()
    [rollout] = rolled_out(engine, tmp_path, "ask()", replace(PARAMS, n=1))
    assert rollout.outcome.rewards is None and not rollout.outcome.failure, "a verifier scores it"
    assert not (tmp_path / "logs" / "rollout_1_p0_0.log").exists(), "there was nothing to write"


@pytest.mark.parametrize(
    ("program", "told"),
    [
        ("ask(); sys.exit(3)", "ended with status 3: it wrote nothing"),
        ("ask(); raise KeyError('city')", "status 1: KeyError: 'city'"),
        ("ask(); os.kill(os.getpid(), 11)", "was ended by SIGSEGV"),
        ("pass", "has not asked the policy"),
        ("ask(token='another')", "HTTP Error 401"),
        ("ask('garbage')", "HTTP Error 400"),
        ("ask(); print('{\"reward\": NaN}')", 'said {"reward": NaN}'),
        ("ask(); print('{\"reward\": {\"a\": \"b\"}}')", "and not"),
    ],
)
def test_what_fails_is_masked_and_told(engine, tmp_path, program, told):
    [rollout] = rolled_out(engine, tmp_path, program, replace(PARAMS, n=1))
    assert rollout.finish_reason == "agent_failed" and told in rollout.outcome.failure


def test_a_program_that_never_ends_is_ended_with_all_that_it_started(engine, tmp_path):
    program = f"""
import subprocess
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
open({str(tmp_path / "child")!r}, "w").write(str(child.pid))
ask(); time.sleep(600)
"""
    [rollout] = rolled_out(engine, tmp_path, program, replace(PARAMS, n=1), timeout_s=2.0)
    assert rollout.finish_reason == "timeout" and "longer than 2.0 s" in rollout.outcome.failure
    assert len(rollout.turns) == 1, "what was drawn is there to be looked at"
    assert not is_alive(int((tmp_path / "child").read_text()))


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_limit_of_turns_leaves_time_to_say_a_reward_and_no_more(engine, tmp_path, monkeypatch):
    monkeypatch.setattr("pellucid.agents.endpoint.GRACE_S", 1.0)
    program = """
try:
    while True:
        ask()
except Exception:
    print('{"reward": 0.25}', flush=True)
while os.environ["PELLUCID_SAMPLE"] == "1":
    try:
        ask()
    except Exception:
        pass
"""
    one, other = rolled_out(engine, tmp_path, program, max_turns=3)
    assert (one.finish_reason, one.outcome.rewards, one.outcome.failure) == ("max_turns", {"agent": 0.25}, "")
    assert (other.finish_reason, other.outcome.rewards) == ("max_turns", {"agent": 0.25}), "though it never ends"
    assert sum(len(part.turns) for part in one.parts) == 3


def test_so_many_programs_run_at_once_and_waiting_for_a_place_is_no_time_of_the_trajectory(engine, tmp_path):
    (tmp_path / "running").mkdir()
    program = f"""
def count(): return len(os.listdir({str(tmp_path / "running")!r}))
mine, met = {str(tmp_path / "running")!r} + f"/{{os.getpid()}}", {str(tmp_path / "met")!r}
open(mine, "w"); ask()
while count() < 2 and not os.path.exists(met): time.sleep(0.01)
open(met, "w"); time.sleep(0.2)
print(json.dumps({{"columns": {{"count": count()}}}})); os.remove(mine)
"""
    rollouts = rolled_out(engine, tmp_path, program, replace(PARAMS, n=6), max_programs=2, timeout_s=20.0)
    assert not any(rollout.outcome.failure for rollout in rollouts), "two meet"
    assert max(rollout.outcome.columns["count"] for rollout in rollouts) <= 2


def test_two_event_loops_share_the_server_and_their_programs_run_beside_each_other(tmp_path):
    """As those of validation and of the schedule `async` do."""

    class Fixed:
        async def generate(self, request):
            return Completion([4, 1], [-1.0, -1.0], [0, 0], "stop", "0")

        async def release(self, trajectory):
            pass

    section = AgentConfig(name="endpoint", command=shlex.join([sys.executable, "-S", str(tmp_path / "agent.py")]), max_programs=2)
    (tmp_path / "agent.py").write_text(ASK + "ask()")
    agent = Endpoint(section, CHAT, 200, tmp_path / "logs")
    loop = AgentLoop(agent, "endpoint", CHAT, max_turns=None)
    with ThreadPoolExecutor(2) as threads:
        each = [
            threads.submit(sample_rollouts, Fixed(), prompts_with_chats(), replace(PARAMS, n=3), stream=(name,), loop=loop)
            for name in ("rollout", "validate")
        ]
    agent.close()
    assert [[rollout.outcome.failure for rollout in one.result()] for one in each] == [[""] * 6] * 2


OPENAI_AGENT = """
import asyncio, json, os
from agents import Agent, ModelSettings, Runner, function_tool, set_default_openai_api

set_default_openai_api("chat_completions")
added = []

@function_tool
def add(a: int, b: int) -> str:
    "Adds."
    added.append(a + b)
    return f"{a + b}="

async def main():
    settings = ModelSettings(max_tokens=6, temperature=0.3)
    reviewer = Agent(name="Reviewer", instructions="9", model_settings=settings)
    review = reviewer.as_tool("review", "Reviews.")
    agent = Agent(name="Adder", instructions="12", tools=[add, review], model_settings=settings)
    [message] = json.loads(os.environ["PELLUCID_PROMPT"])
    first = await Runner.run(agent, message["content"])
    more = [*first.to_input_list(), {"role": "user", "content": "+1="}]
    second = Runner.run_streamed(agent, more)
    async for _ in second.stream_events():
        pass
    print(json.dumps({"reward": 1, "columns": {"added": added, "said": [first.final_output, second.final_output]}}))

asyncio.run(main())
"""


def test_a_program_of_openai_agents_unchanged(engine, trainer, tmp_path):
    """Its tools, an agent as a tool of another one, and a run that goes on and is streamed."""
    pytest.importorskip("agents", reason="needs openai-agents")

    def calls_of(text, number):  # what a model of three layers would never write
        called = {0: ToolCall("call0", "add", {"a": 3, "b": 4}), 1: ToolCall("call1", "review", {"input": "1+1="})}.get(number)
        return ("", [called]) if called and len(text) else (text, [])

    chat = Chat(TOKENIZER, [EOS], parse_calls=calls_of, templated=False)
    (tmp_path / "agent.py").write_text(OPENAI_AGENT)
    rollouts = of_command(engine, [sys.executable, str(tmp_path / "agent.py")], tmp_path, chat, PARAMS, 1)
    assert [rollout.outcome.failure for rollout in rollouts] == ["", ""]
    for rollout in rollouts:
        main, reviewer = sorted(rollout.parts, key=lambda part: -len(part.turns))
        assert len(main.turns) == 4 and len(reviewer.turns) == 1 and len(rollout.parts) == 2
        assert rollout.outcome.columns["added"] == [7] and rollout.outcome.columns["said"][1] == rollout.text
    assert_scored_alike(trainer, [part for rollout in rollouts for part in rollout.parts])


def test_the_server_ends_with_the_loop(engine, tmp_path):
    rolled_out(engine, tmp_path, "ask()", replace(PARAMS, n=1))
    assert "endpoint" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize(
    ("command", "reason"),
    [(None, "is not set"), ("no_such_program a", "names no program"), ("python 'a", "cannot be taken apart"), ("", "names no program")],
)
def test_a_command_that_cannot_be_run_is_refused_at_once(command, reason, tmp_path):
    with pytest.raises(UserError, match=reason):
        Endpoint(AgentConfig(name="endpoint", command=command), CHAT, 200, tmp_path)


def test_what_is_not_installed_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr("pellucid.agents.openai_server.installed_version", lambda package: None)
    with pytest.raises(UserError, match=r"pellucid\[serve\]"):
        Endpoint(AgentConfig(name="endpoint", command="python a.py"), CHAT, 200, tmp_path)
