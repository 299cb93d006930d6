"""OpenAI's API as its own client, an agent framework and bad requests meet it; an engine that says what it is told to."""

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx
import pytest
from openai import APIStatusError, BadRequestError, NotFoundError, OpenAI
from test_chat import FAMILIES, chat_of

from pellucid.agents.chat import Chat
from pellucid.agents.endpoint import Recorder
from pellucid.agents.llm import AgentLoop, Sample
from pellucid.agents.openai_server import OpenAIServer
from pellucid.agents.tool_formats import parse
from pellucid.rollout.requests import Completion, SamplingParams, run_sync
from pellucid.types import Outcome, Prompt

QWEN, TOKENIZER = chat_of(FAMILIES["qwen2.5"])
QWEN.parse_calls = partial(parse, "hermes")
HELLO = [{"role": "user", "content": "Hello"}]
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


class Scripted:
    """Says one text after the other, each ended by the end of a turn."""

    def __init__(self, *texts: str) -> None:
        self.texts, self.asked = list(texts), []

    async def generate(self, request):
        self.asked.append(TOKENIZER.decode(request.token_ids))
        text = self.texts.pop(0)
        drawn = TOKENIZER.encode(text + "<|im_end|>")[: request.params.max_tokens]
        reason = "stop" if drawn[-1] == TOKENIZER.eos_token_id else "length"
        return Completion(drawn, [-1.0] * len(drawn), [0] * len(drawn), reason, text)

    async def release(self, trajectory):
        pass


@pytest.fixture(scope="module")
def server():
    server = OpenAIServer()
    yield server
    server.close()


def rolled_out(server: OpenAIServer, engine, talk: Callable[[str, str], object], chat: Chat = QWEN, **limits):
    """The trajectory of a program that is a function of the server's address and its own token."""
    limits = {"max_turns": 20, "longest": 4000} | limits

    async def agent(prompt, llm, tools):
        recorder = Recorder(llm, chat, **limits)
        token = server.admit((recorder.answer, asyncio.get_running_loop()))
        try:
            said = await asyncio.to_thread(talk, server.url, token)
        finally:
            server.dismiss(token)
            await recorder.close()
        return Outcome(columns={"said": said, "limit": recorder.limit})

    prompt = Prompt("p", chat.start(HELLO), "…", "t", messages=HELLO)
    loop = AgentLoop(agent, "endpoint", chat, max_turns=None)
    rollout = run_sync(loop.roll_out(engine, Sample(prompt, 0, ("rollout", 1)), SamplingParams(max_tokens=2000)))
    assert not rollout.outcome.failure
    return rollout


def client_of(url: str, token: str) -> OpenAI:
    return OpenAI(base_url=url, api_key=token, max_retries=0)


def text_of(rollout) -> str:
    return TOKENIZER.decode([*rollout.prompt.token_ids, *rollout.token_ids])


def test_a_chat_goes_on_from_the_tokens_that_were_drawn(server):
    def talk(url, token):
        client, messages = client_of(url, token), list(HELLO)
        for _ in range(3):
            answer = client.chat.completions.create(model="any", messages=messages, temperature=0.0)
            messages += [answer.choices[0].message, {"role": "user", "content": [{"type": "text", "text": "Go on."}]}]
        return answer.model_dump()

    rollout = rolled_out(server, Scripted(" one ", "two", "three"), talk)
    said = rollout.outcome.columns["said"]
    assert said["choices"][0]["message"]["content"] == "three" and said["choices"][0]["finish_reason"] == "stop"
    assert said["usage"]["completion_tokens"] == 6 and said["usage"]["prompt_tokens"] == len(rollout.prompt.token_ids) + len(rollout.token_ids) - 6
    between = "<|im_end|>\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n"
    assert text_of(rollout) == TOKENIZER.decode(QWEN.start(HELLO)) + f" one {between}two{between}three<|im_end|>"
    assert rollout.prompt.context == "" and not rollout.branches and rollout.text == "three"


def test_a_response_is_streamed(server):
    def talk(url, token):
        client = client_of(url, token)
        with client.chat.completions.stream(model="any", messages=HELLO, tools=[ADD], stream_options={"include_usage": True}) as stream:
            whole = stream.get_final_completion()
        texts = [chunk.choices[0].text for chunk in client.completions.create(model="any", prompt="1, 2, ", stream=True, stop=["4"])]
        return whole.choices[0].message.tool_calls[0].function.arguments, whole.usage.completion_tokens, texts

    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    arguments, num_tokens, texts = rolled_out(server, Scripted(call, "3"), talk).outcome.columns["said"]
    assert json.loads(arguments) == {"a": 1, "b": 2} and num_tokens > 10 and texts == ["3"]


def test_calls_of_tools_come_and_go_in_the_clients_words(server):
    def talk(url, token):
        client, messages = client_of(url, token), list(HELLO)
        first = client.chat.completions.create(model="any", messages=messages, tools=[ADD]).choices[0]
        results = [{"role": "tool", "tool_call_id": call.id, "content": "3"} for call in first.message.tool_calls]
        spaced = json.loads(first.message.model_dump_json())
        spaced["tool_calls"][0]["function"]["arguments"] = '{ "b":2,   "a":1 }'
        messages += [spaced, *results]
        second = client.chat.completions.create(model="any", messages=messages, tools=[ADD]).choices[0]
        messages += [second.message, {"role": "user", "content": "again"}]
        third = client.chat.completions.create(model="any", messages=messages, tools=[ADD]).choices[0]
        return first.finish_reason, first.message.content, second.message.content, third.message.content, third.message.tool_calls

    call = '<tool_call>\n{"arguments": {"a": 1, "b": 2}, "name": "add"}\n</tool_call>'
    engine = Scripted(f"Well.\n{call}{call}", "It is 3.", "<tool_call>\nadd 1 and 2</tool_call>")
    rollout = rolled_out(server, engine, talk)
    reason, *words, calls = rollout.outcome.columns["said"]
    assert (reason, words, calls) == ("tool_calls", ["Well.", "It is 3.", "<tool_call>\nadd 1 and 2</tool_call>"], None)
    assert len(rollout.turns) == 3 and not rollout.branches
    assert f"Well.\n{call}{call}<|im_end|>" in text_of(rollout), "as the policy wrote it, and not as the template would"
    assert '"name": "add"' in TOKENIZER.decode(rollout.prompt.token_ids) and engine.asked[1].startswith(engine.asked[0])


def test_another_past_is_another_sequence(server):
    def talk(url, token):
        client = client_of(url, token)

        def said(messages):
            return {"role": "assistant", "content": client.chat.completions.create(model="any", messages=messages).choices[0].message.content}

        more = {"role": "user", "content": "more"}
        first = [*HELLO, said(HELLO), more]
        second = [*first, said(first), more]
        said(second)
        said(second)  # again: a branch, from the same tokens
        said([*first[:1], {"role": "assistant", "content": "edited"}, *second[2:]])
        said([{"role": "system", "content": "You help."}, *HELLO])

    rollout = rolled_out(server, Scripted(*"abcdef"), talk)
    texts = sorted(text_of(part) for part in rollout.parts)
    drawn = ["".join(TOKENIZER.decode([token]) for token, is_drawn in zip(part.token_ids, part.sampled) if is_drawn) for part in rollout.parts]
    assert sorted(drawn) == ["a<|im_end|>b<|im_end|>c<|im_end|>", *(f"{one}<|im_end|>" for one in "def")], "no token twice"
    assert [part.num_sequences for part in rollout.parts] == [4] * 4 and rollout.text == "f"
    assert any("edited" in text and text.endswith("e<|im_end|>") for text in texts)
    branch = next(text for text in texts if text.endswith("d<|im_end|>"))
    assert branch[: -len("d<|im_end|>")] + "c<|im_end|>" in texts


def test_branches_that_are_asked_at_once(server):
    class Waiting(Scripted):
        async def generate(self, request):
            answer = await super().generate(request)
            while len(self.asked) < 5:
                await asyncio.sleep(0.01)
            return answer

    def talk(url, token):
        client = client_of(url, token)
        with ThreadPoolExecutor(5) as threads:
            asked = [threads.submit(client.chat.completions.create, model="any", messages=HELLO) for _ in range(5)]
            return sorted(one.result().choices[0].message.content for one in asked)

    rollout = rolled_out(server, Waiting(*"abcde"), talk)
    assert rollout.outcome.columns["said"] == list("abcde") and len(rollout.parts) == 5


def test_a_limit_ends_the_trajectory_for_its_program(server):
    def talk(url, token):
        client, messages, codes = client_of(url, token), list(HELLO), []
        for _ in range(4):
            try:
                answer = client.chat.completions.create(model="any", messages=messages).choices[0].message
                messages += [answer, {"role": "user", "content": "more"}]
            except APIStatusError as error:
                codes.append((error.status_code, error.code))
        return codes

    rollout = rolled_out(server, Scripted(*"abcd"), talk, max_turns=2)
    assert rollout.outcome.columns == {"said": [(400, "max_turns"), (410, "trajectory_ended")], "limit": "max_turns"}
    rollout = rolled_out(server, Scripted(*"abcd"), talk, longest=len(QWEN.start(HELLO)) + 20)
    assert rollout.outcome.columns["limit"] == "length" and len(rollout.turns) == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", b"garbage"),
        ("chat/completions", b"[" * 100_000),
        ("chat/completions", b"[]"),
        ("chat/completions", {}),
        ("chat/completions", {"messages": []}),
        ("chat/completions", {"messages": ["a"]}),
        ("chat/completions", {"messages": [{"role": "user", "content": 3}]}),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        ("chat/completions", {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "{"}}]}]}),
        ("chat/completions", {"messages": HELLO, "tools": "add"}),
        ("chat/completions", {"messages": HELLO, "max_tokens": -1}),
        ("chat/completions", {"messages": HELLO, "stop": [3]}),
        ("completions", {"prompt": ["a", "b"]}),
        ("completions", {"prompt": [1, 2]}),
    ],
    ids=str,
)
def test_garbage_is_refused_in_openais_form(server, path, body):
    def talk(url, token):
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = httpx.post(f"{url}/{path}", content=content, headers={"Authorization": f"Bearer {token}"}, trust_env=False)
        return answer.status_code, sorted(answer.json()["error"])

    said = rolled_out(server, Scripted(), talk).outcome.columns["said"]
    assert said == (400, ["code", "message", "param", "type"])


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"n": 2}, "make a request for each answer"),
        ({"logprobs": True, "top_logprobs": 2}, "leave it out"),
        ({"logit_bias": {"7": 100}}, "leave it out"),
        ({"response_format": {"type": "json_object"}}, "say in the messages what form"),
        ({"tool_choice": "required", "tools": [ADD]}, "take 'auto'"),
        ({"tool_choice": {"type": "function", "function": {"name": "add"}}, "tools": [ADD]}, "take 'auto'"),
        ({"parallel_tool_calls": False, "tools": [ADD]}, "answer each call"),
    ],
    ids=str,
)
def test_what_would_need_another_answer_than_a_turn_is_refused(server, asked, told):
    def talk(url, token):
        with pytest.raises(BadRequestError) as refused:
            client_of(url, token).chat.completions.create(model="any", messages=HELLO, **asked)
        return str(refused.value)

    said = rolled_out(server, Scripted(), talk).outcome.columns["said"]
    assert f"'{next(iter(asked))}' cannot be" in said and told in said


def test_what_changes_nothing_is_told_once_where_it_differs_from_the_run(server, monkeypatch):
    told = {}
    monkeypatch.setattr("pellucid.agents.endpoint.notice", lambda message, about: told.setdefault(about, message))
    same = {"temperature": 1, "top_p": 1.0, "presence_penalty": 0.0, "logit_bias": {}, "response_format": {"type": "text"}}
    other = {"temperature": 0.2, "frequency_penalty": 0.5, "seed": 3}

    def talk(url, token):
        client = client_of(url, token)
        client.chat.completions.create(model="any", messages=HELLO, user="me", n=1, stop="x", logprobs=False, **same)
        said = list(told)
        client.chat.completions.create(model="any", messages=HELLO, extra_body={"new": None, "guided_json": {}}, **other)
        client.completions.create(model="any", prompt="1", temperature=0.3)
        return said

    assert rolled_out(server, Scripted(*"abc"), talk).outcome.columns["said"] == []
    assert {about.split()[-1] for about in told} == {*other, "guided_json"}
    [line] = [line for line in told.values() if "temperature to" in line]
    assert "temperature to 0.2, which changes nothing: rollout.temperature" in line


def test_no_calls_are_looked_for_where_none_are_wanted(server):
    def talk(url, token):
        client, messages = client_of(url, token), list(HELLO)
        answer = client.chat.completions.create(model="any", messages=messages, tools=[ADD], tool_choice="none").choices[0]
        messages += [answer.message, {"role": "user", "content": "Do."}]
        again = client.chat.completions.create(model="any", messages=messages, tools=[ADD], tool_choice="auto").choices[0]
        return answer.message.tool_calls, answer.message.content, answer.finish_reason, again.finish_reason

    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    rollout = rolled_out(server, Scripted(call, call), talk)
    assert rollout.outcome.columns["said"] == (None, call, "stop", "tool_calls")
    assert not rollout.branches and '"name": "add"' in TOKENIZER.decode(rollout.prompt.token_ids)


def test_another_part_of_the_api_is_told_from_a_fault(server):
    def talk(url, token):
        with pytest.raises(NotFoundError) as refused:
            client_of(url, token).responses.create(model="any", input="Hello")
        return str(refused.value)

    assert "/v1/responses is not answered: chat/completions" in rolled_out(server, Scripted(), talk).outcome.columns["said"]


def test_a_token_is_good_for_its_trajectory_alone(server):
    def status(url, token):
        try:
            client_of(url, token).chat.completions.create(model="any", messages=HELLO)
        except APIStatusError as error:
            return error.status_code, error.code
        return 200

    tokens = []
    rolled_out(server, Scripted("a"), lambda url, token: tokens.append(token))
    of_own_and_others = lambda url, token: [status(url, one) for one in ("guessed", tokens[0], token)]  # noqa: E731
    said = rolled_out(server, Scripted("b"), of_own_and_others).outcome.columns["said"]
    assert said == [(401, "invalid_api_key"), (401, "invalid_api_key"), 200]


def test_a_request_whose_client_leaves_is_given_up(server):
    class Slow(Scripted):
        async def generate(self, request):
            if len(self.texts) == 2:
                self.texts.pop()
                try:
                    await asyncio.sleep(60)
                finally:
                    self.asked.append("given up")
            return await super().generate(request)

    engine = Slow("a", "b")

    def talk(url, token):
        with pytest.raises(httpx.TimeoutException):
            httpx.post(f"{url}/completions", json={"prompt": "1"}, headers={"Authorization": f"Bearer {token}"}, timeout=0.3)
        return client_of(url, token).completions.create(model="any", prompt="1").choices[0].text

    rollout = rolled_out(server, engine, talk)
    assert rollout.outcome.columns["said"] == "a" and len(rollout.parts) == 1 and len(rollout.turns) == 1
    assert "given up" in engine.asked


def test_an_agent_of_pydantic_ai_unchanged(server):
    framework = pytest.importorskip("pydantic_ai")
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    def talk(url, token):
        agent = framework.Agent(OpenAIChatModel("any", provider=OpenAIProvider(base_url=url, api_key=token)), system_prompt="Add.")

        @agent.tool_plain
        def add(a: int, b: int) -> int:
            """Adds."""
            return a + b

        first = agent.run_sync("What is 19 and 23?")
        return first.output, agent.run_sync("And why?", message_history=first.all_messages()).output

    call = '<tool_call>\n{"name": "add", "arguments": {"a": 19, "b": 23}}\n</tool_call>'
    rollout = rolled_out(server, Scripted(call, "It is 42.", "Because."), talk)
    assert rollout.outcome.columns["said"] == ("It is 42.", "Because.")
    assert len(rollout.turns) == 3 and not rollout.branches and "<tool_response>\n42\n" in text_of(rollout)
