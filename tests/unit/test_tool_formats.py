"""Calls of tools in the text of answers: what was written is read back, and what is malformed is told, never raised."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers.utils.chat_parsing import parse_response

from pellucid.agents.tool_formats import FORMATS, guess_format, parse, parse_with_template
from pellucid.agents.tools import ToolCall
from pellucid.errors import UserError


def dumped(call: ToolCall, key: str = "arguments") -> str:
    return json.dumps({"name": call.name, key: call.arguments}, ensure_ascii=False)


RENDER = {
    "hermes": lambda calls: "\n".join(f"<tool_call>\n{dumped(call)}\n</tool_call>" for call in calls),
    "llama3": lambda calls: "; ".join(dumped(call, "parameters") for call in calls),
    "llama3 tagged": lambda calls: "<|python_tag|>" + ";".join(dumped(call, "parameters") for call in calls),
    "mistral": lambda calls: f"[TOOL_CALLS][{', '.join(map(dumped, calls))}]",
    "mistral named": lambda calls: "".join(f"[TOOL_CALLS]{call.name}[ARGS]{json.dumps(call.arguments)}" for call in calls),
    "mistral with ids": lambda calls: "".join(
        f"[TOOL_CALLS]{call.name}[CALL_ID]{call.id}[ARGS]{json.dumps(call.arguments)}" for call in calls
    ),
}
"""How each family writes calls, as its chat template does."""

numbers = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**70), 2**70)
values = st.recursive(
    st.none() | st.booleans() | numbers | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.-]{0,20}", fullmatch=True)
call_lists = st.lists(st.tuples(names, st.dictionaries(st.text(), values, max_size=4)), min_size=1, max_size=4).map(
    lambda pairs: [ToolCall(f"call{n:05d}", name, arguments) for n, (name, arguments) in enumerate(pairs)]
)
MARKS = ["<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "</think>", '{"name": "a"', '"arguments": {', "}"]
TRICKY = [ToolCall("call00000", "python", {"code": "</tool_call>[TOOL_CALLS]<tool_call>; <|python_tag|>[ARGS]\n\"'}"})]


@pytest.mark.parametrize("style", RENDER)
@settings(max_examples=40, deadline=None)
@given(calls=call_lists)
@example(calls=TRICKY)
def test_calls_are_read_as_they_were_written(style: str, calls: list[ToolCall]) -> None:
    assert parse(style.split()[0], RENDER[style](calls)) == ("", calls)


@pytest.mark.parametrize("name", FORMATS)
@settings(deadline=None)
@given(text=st.lists(st.text(max_size=8) | st.sampled_from(MARKS), max_size=12).map("".join))
@example(text="<tool_call>" + "[" * 100_000)
@example(text='<|python_tag|>{"name": "a", "parameters": {"n": ' + "1" * 5000 + "}}")
@example(text='[TOOL_CALLS][{"name": "a", "arguments": {"x": NaN}}]')
def test_no_text_is_refused(name: str, text: str) -> None:
    content, calls = parse(name, text)
    assert calls or content == text
    assert all(call.arguments == {} if call.error else call.name for call in calls)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": 1,}}\n</tool_call>', "not valid JSON ("),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1', "not valid JSON (Expecting ',' delimiter, at its end)"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {}}}</tool_call>', "goes on after its JSON object, with '}'"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', "has no name of a tool"),
        ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>', "has no name of a tool"),
        ("hermes", '<tool_call>{"name": "add"}</tool_call>', "has no arguments"),
        ("hermes", '<tool_call>{"name": "add", "arguments": "{}"}</tool_call>', "has a string as arguments, not a JSON object"),
        ("hermes", '<tool_call>["add"]</tool_call>', "is a list, not a JSON object"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "NaN is no JSON value"),
        ("llama3", '{"name": "add", "parameters": [1]}', "has a list as arguments"),
        ("llama3", '{"name": "add", "parameters": {"a"}}', "not valid JSON (Expecting ':' delimiter, at '}}')"),
        ("llama3", "<|python_tag|>1 + 1", "is a number, not a JSON object"),
        ("llama3", "<|python_tag|>print(1)", "not valid JSON (Expecting value, at 'print(1)')"),
        ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": null}]', "has no arguments"),
        ("mistral", "[TOOL_CALLS]add[ARGS][1]", "has a list as arguments"),
        ("mistral", "[TOOL_CALLS]add(1)", "not valid JSON"),
    ],
)  # fmt: skip
def test_what_is_malformed_is_said_with_how_a_call_is_written(name: str, text: str, said: str) -> None:
    _, [call] = parse(name, text)
    assert said in call.error and FORMATS[name].example in call.error
    assert not call.arguments


def test_content_stands_beside_calls() -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
    content, calls = parse("hermes", f"First:\n{call}\n{call}\nDone.", first_id=7)
    assert content == "First:\n\n\nDone." and [each.id for each in calls] == ["call00007", "call00008"]
    assert parse("llama3", "Well.<|python_tag|>" + '{"name": "a", "parameters": {}} I called it.')[0] == "Well.I called it."
    assert parse("mistral", 'Well.[TOOL_CALLS] [{"name": "a", "arguments": {}}]')[0] == "Well."


def test_a_broken_call_leaves_its_neighbours_whole() -> None:
    good = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    _, calls = parse("hermes", f'<tool_call>{{"name": </tool_call>{good}<tool_call>nonsense{good}')
    assert [bool(call.error) for call in calls] == [True, False, True, False]


@pytest.mark.parametrize("text", ["", "42", '{"answer": 42}', "I would use add.", '[1, {"name": "add"}]'])
@pytest.mark.parametrize("name", FORMATS)
def test_an_answer_without_call_is_content(name: str, text: str) -> None:
    assert parse(name, text) == (text, [])


def test_reasoning_about_a_call_is_none() -> None:
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    text = f"<think>Should I write {call}? Or <tool_call> alone?</think>"
    assert parse("hermes", text + "No.") == (text + "No.", [])
    assert parse("hermes", text + call) == (text, [ToolCall("call00000", "add", {})])


def test_a_format_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UserError, match="Did you mean 'hermes'"):
        parse("herms", "")


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ('within <tool_call></tool_call> XML tags:\\n<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}', "hermes"),
        ("<tool_call>\\n<function=example_function_name>\\n<parameter=example>", None),
        ("{{- '<tool_call>' + tc.name -}}<arg_key>{{ k }}</arg_key>", None),
        ("""{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{{- '"parameters": ' }}{{- tool_call.arguments | tojson }}""", "llama3"),
        ('{{- "[TOOL_CALLS][" }}{%- for tool_call in message.tool_calls %}', "mistral"),
        ("{% for message in messages %}<|im_start|>{{ message['role'] }}", None),
    ],
)  # fmt: skip
def test_the_chat_template_tells_the_format(template: str, name: str | None) -> None:
    assert guess_format(template) == name


TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>", "content": "text"},
        "content": {"content": "text"},
        "tool_calls": {"open": "<call>", "close": "</call>", "repeats": True, "content": "json",
                       "transform": {"type": "function", "function": "{content}"}},
    },
}  # fmt: skip


def templated(text: str, prefix: str = "") -> tuple[str, list[ToolCall]]:
    tokenizer: Any = SimpleNamespace(parse_response=lambda text, prefix: parse_response(text, TEMPLATE, prefix=prefix))
    return parse_with_template(tokenizer, text, prefix)


def test_a_tokenizers_own_response_template_is_followed() -> None:
    content, calls = templated('Well.<call>{"name": "add", "arguments": {"a": 1}}</call>')
    assert content == "Well." and calls == [ToolCall("call00000", "add", {"a": 1})]
    assert templated("No.", "<|im_start|>assistant\n") == ("No.", [])
    assert "is malformed" in templated('<call>{"name": </call>')[1][0].error
    assert "has no arguments" in templated('<call>{"name": "add"}</call>')[1][0].error
