"""The agent `tools` and `pellucid chat`, with an engine that says what it is told to and a tool that is called for real."""

import io
from contextlib import closing

import pytest
from rich.console import Console
from test_openai_api import QWEN, TOKENIZER, Scripted

from pellucid.agents.llm import AgentLoop, Sample
from pellucid.agents.loops import tools
from pellucid.agents.tools import Toolbox, load_tools
from pellucid.cli import chat as command
from pellucid.config import RunConfig
from pellucid.rollout.requests import SamplingParams, run_sync
from pellucid.trained import Asked
from pellucid.types import Prompt

CALL = '<tool_call>\n{"name": "multiply", "arguments": {"a": %d, "b": %d}}\n</tool_call>'
FUNCTION = '''
async def multiply(a: int, b: int) -> int:
    """Multiplies.

    Args:
        a: one factor.
        b: the other one.
    """
    return a * b
'''
ASKED = [{"role": "user", "content": "What are 6 times 7 and 2 times 3?"}]


class Talking(Scripted):
    """With what `pellucid chat` looks at while an answer is drawn."""

    class decoder:  # noqa: N801
        rows = ()


@pytest.fixture
def loop(tmp_path):
    (tmp_path / "tool.py").write_text(FUNCTION)
    found = load_tools([f"{tmp_path / 'tool.py'}:multiply"], [], max_output_chars=500)
    box = Toolbox(found, timeout_s=30, max_output_chars=500)
    with closing(AgentLoop(tools, "tools", QWEN.with_tools(box.schemas), box, max_turns=4)) as loop:
        yield loop


def test_calls_are_answered_until_there_is_none(loop):
    engine = Talking("Let me see." + CALL % (6, 7) + "\n" + CALL % (2, 3), CALL % (42, 6), "252")
    prompt = Prompt("p", loop.chat.start(ASKED), "", "", messages=ASKED)
    rollout = run_sync(loop.roll_out(engine, Sample(prompt, 0, ("s",)), SamplingParams(max_tokens=5000)))
    assert not rollout.outcome.failure and rollout.text == "252" and rollout.finish_reason == "stop"
    uses = [[(use.name, use.result) for use in turn.tool_calls] for turn in rollout.turns]
    assert uses == [[("multiply", "42"), ("multiply", "6")], [("multiply", "252")], []]
    whole = TOKENIZER.decode(rollout.token_ids)
    assert "<tool_response>\n42\n</tool_response>\n<tool_response>\n6\n</tool_response><|im_end|>" in whole
    assert engine.asked[-1] == TOKENIZER.decode([*prompt.token_ids, *rollout.token_ids[: rollout.turns[-1].start]])


def test_a_person_talks_to_a_model_that_calls_its_tools(loop, monkeypatch):
    said, shown = iter(["What is 6 times 7?", "Thanks!", "/new", "Hello"]), Console(file=io.StringIO(), width=200)
    monkeypatch.setattr(command, "console", shown)
    monkeypatch.setattr(shown, "input", lambda _: next(said, "/end"))
    engine = Talking(CALL % (6, 7), "It is 42.", "You are welcome.", "Hello you.")
    asked = Asked(engine, TOKENIZER, [TOKENIZER.eos_token_id], RunConfig(), knows_more=False, max_tokens=4000)
    with command.asyncio.Runner() as runner:
        assert runner.run(command._talk(asked, loop, SamplingParams(max_tokens=500)))
        assert not runner.run(command._talk(asked, loop, SamplingParams(max_tokens=500)))
    lines = [line.strip() for line in shown.file.getvalue().splitlines()]
    assert [line for line in lines if line[:3] in ("It ", "You", "Hel")] == ["It is 42.", "You are welcome.", "Hello you."]
    assert any(line.startswith('multiply({"a": 6, "b": 7})') and line.endswith("→ 42") for line in lines)
    assert "Thanks!" in engine.asked[2] and "It is 42." in engine.asked[2] and "Thanks!" not in engine.asked[3]
