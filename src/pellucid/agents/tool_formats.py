"""How the families of models write calls of tools: from the text of an answer to its calls.

Text comes decoded with its special tokens. Nothing here raises: what is malformed becomes a `ToolCall` whose `error`
tells the policy what was wrong and how a call is written.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from pellucid.agents.tools import ToolCall
from pellucid.errors import UserError, did_you_mean

_Found = Iterator[tuple[int, int, Any]]
"""Where each call begins and ends, and its JSON value or a `_Malformed`."""
_SPACE = re.compile(r"[\s;]*")
_REASONING = re.compile(r".*?(</think>|\[/THINK\])", re.DOTALL)
_MISTRAL_ID = re.compile(r"[A-Za-z0-9]{9}")


@dataclass(frozen=True, slots=True)
class _Malformed:
    reason: str


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How one family of models writes calls."""

    find: Callable[[str], _Found]
    example: str
    """A call, for those who write it wrong."""
    marks: tuple[str, ...]
    """What is all in a chat template that asks for this format."""
    foreign: tuple[str, ...] = ()
    """What is not in one."""


def parse(name: str, text: str, first_id: int = 0) -> tuple[str, list[ToolCall]]:
    """Return what an answer says beside its calls, and the calls in order.

    Args:
        name: one of `FORMATS`.
        text: the answer. What stands before the end of its reasoning, if it reasons, is never a call.
        first_id: how many calls the trajectory had before; ids count on from there.

    Raises:
        UserError: there is no such format.
    """
    if name not in FORMATS:
        raise UserError("tool_format", f"there is no format '{name}'.", did_you_mean(name, FORMATS))
    reasoning = _REASONING.match(text)
    start = reasoning.end() if reasoning else 0
    content, calls = [text[:start]], []
    text = text[start:]
    end = 0
    for begin, stop, value in FORMATS[name].find(text):
        content.append(text[end:begin])
        calls.append(_call(value, f"call{first_id + len(calls):05d}", FORMATS[name].example))
        end = stop
    return "".join([*content, text[end:]]).strip() if calls else content[0] + text, calls


def guess_format(chat_template: str) -> str | None:
    """Return the format that a chat template asks for, None where it asks for none of `FORMATS`."""
    for name, style in FORMATS.items():
        if all(mark in chat_template for mark in style.marks) and not any(m in chat_template for m in style.foreign):
            return name
    return None


def parse_with_template(
    tokenizer: PreTrainedTokenizerBase, text: str, prefix: str = "", first_id: int = 0
) -> tuple[str, list[ToolCall]]:
    """Return content and calls as `parse` does, by the response template that comes with a tokenizer.

    Args:
        tokenizer: one whose `response_template` is set.
        text: the answer.
        prefix: the context before it, where the answer's reasoning may have been opened.
        first_id: as of `parse`.
    """
    try:
        message: Any = tokenizer.parse_response(text, prefix=prefix)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        return text, [_call(_Malformed(f"is malformed ({error})"), f"call{first_id:05d}", "the system prompt says")]
    values = [call.get("function", call) for call in message.get("tool_calls") or []]
    calls = [_call(value, f"call{first_id + n:05d}", "the system prompt says") for n, value in enumerate(values)]
    return message.get("content") or "", calls


def _call(value: Any, call_id: str, example: str) -> ToolCall:
    name, arguments, reason = "", None, ""
    if isinstance(value, _Malformed):
        reason = value.reason
    elif not isinstance(value, dict):
        reason = f"is {_kind(value)}, not a JSON object"
    else:
        arguments = value.get("arguments", value.get("parameters"))
        name = value.get("name", "")
        if _MISTRAL_ID.fullmatch(str(value.get("id"))):
            call_id = value["id"]
        if not isinstance(name, str) or not name:
            name, reason = "", "has no name of a tool"
        elif not isinstance(arguments, dict):
            missing = arguments is None
            reason = "has no arguments" if missing else f"has {_kind(arguments)} as arguments, not a JSON object"
    if reason:
        return ToolCall(call_id, name, {}, f"This call {reason}. Write a call as {example}")
    return ToolCall(call_id, name, arguments or {})


def _kind(value: Any) -> str:
    names = {str: "a string", list: "a list", dict: "an object", bool: "a truth value", type(None): "null"}
    return names.get(type(value), "a number")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON value")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def _decode(text: str, begin: int) -> tuple[Any, int]:
    """Return the JSON value that begins at or after `begin` and where it ends, or a `_Malformed` and −1."""
    space = _SPACE.match(text, begin)
    begin = space.end() if space else begin
    try:
        return _DECODER.raw_decode(text, begin)
    except json.JSONDecodeError as error:
        found = f"at '{text[error.pos : error.pos + 20]}'" if error.pos < len(text) else "at its end"
        return _Malformed(f"is not valid JSON ({error.msg}, {found})"), -1
    except (ValueError, RecursionError) as error:
        return _Malformed(f"is not valid JSON ({error})"), -1


def _find_hermes(text: str) -> _Found:
    opening, closing = "<tool_call>", "</tool_call>"
    end = 0
    while (begin := text.find(opening, end)) >= 0:
        value, after = _decode(text, begin + len(opening))
        rest_from = max(after, begin + len(opening))
        marks = [(at, mark) for mark in (opening, closing) if (at := text.find(mark, rest_from)) >= 0]
        at, mark = min(marks, default=(len(text), ""))
        if after >= 0 and (rest := text[after:at].strip()):
            value = _Malformed(f"goes on after its JSON object, with '{rest[:20]}'")
        end = at + len(closing) if mark == closing else at
        yield begin, end, value


_LLAMA_BARE = re.compile(r'\s*(?=\{\s*("type"\s*:\s*"function"\s*,\s*)?"name"\s*:)')


def _find_llama3(text: str) -> _Found:
    tag = "<|python_tag|>"
    begin = 0 if (bare := _LLAMA_BARE.match(text)) else text.find(tag)
    end = 0 if bare else begin + len(tag)
    while begin >= 0 and end >= 0:
        value, end = _decode(text, end)
        space = _SPACE.match(text, end) if end >= 0 else None
        stop = space.end() if space else len(text)
        yield begin, stop, value
        begin, end = stop, end if text.startswith("{", stop) else -1


_MISTRAL = re.compile(r"\[TOOL_CALLS\]\s*(?:([^\[\]{}\s]+)\s*(?:\[CALL_ID\](\w+))?\s*(?:\[ARGS\])?)?")


def _find_mistral(text: str) -> _Found:
    end = 0
    while (call := _MISTRAL.search(text, end)) is not None:
        value, end = _decode(text, call.end())
        if end < 0:
            end = text.find("[TOOL_CALLS]", call.end())
            end = len(text) if end < 0 else end
        elif call[1]:
            value = {"name": call[1], "arguments": value, "id": call[2]}
        for item in value if isinstance(value, list) else [value]:
            yield call.start(), end, item


FORMATS = {
    "hermes": ToolFormat(
        _find_hermes,
        '<tool_call>\n{"name": "…", "arguments": {…}}\n</tool_call>',
        marks=("<tool_call>",),
        foreign=("<function=", "<arg_key>"),  # of Qwen3-Coder and of GLM: between the same marks there is no JSON
    ),
    "llama3": ToolFormat(
        _find_llama3, '{"name": "…", "parameters": {…}}', marks=("<|start_header_id|>", '"parameters": ')
    ),
    "mistral": ToolFormat(_find_mistral, '[TOOL_CALLS][{"name": "…", "arguments": {…}}]', marks=("[TOOL_CALLS]",)),
}
