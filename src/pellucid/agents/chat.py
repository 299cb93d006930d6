"""Chats as tokens: what an agent adds to one is rendered alone, and nothing that is there is ever rendered again.

A chat template writes whole conversations. What it writes for new messages is read off a short chat, in which the model
has said no more than a mark: all that comes after it. So a template that drops reasoning from older turns, or writes a
call of a tool in other words than the policy, changes no token of the past. `check` refuses templates that write more
than that anew.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from typing import Any
from uuid import uuid4

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from pellucid.agents.tools import ToolCall
from pellucid.errors import UserError

Message = dict[str, Any]
"""As of OpenAI's API: `role`, `content`, and where tools are called `tool_calls` or `tool_call_id`."""
FIELD = "actor_rollout_ref.rollout.agent"
_ASKED: Message = {"role": "user", "content": "What is asked."}
_MODEL, _SAID = "What the model says.", "What is said to it."
_CALL = {"id": "a00000001", "type": "function", "function": {"name": "tool", "arguments": {}}}
SHOWN_CHARS = 400
ParseCalls = Callable[[str, int], tuple[str, list[ToolCall]]]
"""Takes a turn's text, special tokens among it, and how many calls were made before it; gives its content and calls."""


class Chat:
    """Renders what is added to a chat with a model.

    Args:
        tokenizer: the model's; one without chat template gets the messages' contents as they are.
        eos_token_ids: ids that end a turn.
        tools: the schemas of the tools that are named to the model.
        parse_calls: finds the calls of tools in turns; None where none are called.
        templated: whether prompts are rendered by the tokenizer's chat template.
        system_prompt: what chats begin with, if anything.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        eos_token_ids: Sequence[int],
        tools: list[dict[str, Any]] | None = None,
        parse_calls: ParseCalls | None = None,
        *,
        templated: bool,
        system_prompt: str | None = None,
    ) -> None:
        self._tokenizer, self._eos, self._tools = tokenizer, set(eos_token_ids), tools or []
        self.parse_calls, self._templated = parse_calls, templated
        self._asked = [*([{"role": "system", "content": system_prompt}] if system_prompt else []), _ASKED]
        self._checked: set[str] = set()
        self._with_tools: dict[str, Chat] = {}

    def with_tools(self, tools: list[dict[str, Any]]) -> "Chat":
        """Return what renders chats in which other tools are named to the model."""
        key = json.dumps(tools)
        if key not in self._with_tools:
            self._with_tools[key] = other = copy(self)
            other._tools, other._checked = tools, set()
        return self._with_tools[key]

    @property
    def names_tools(self) -> bool:
        """Whether the template tells the model of the tools."""
        if not self._templated:
            return False
        told = self._render([_ASKED])
        return told != self._tokenizer.apply_chat_template([_ASKED], add_generation_prompt=True, tokenize=False)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of text as it stands."""
        return self._tokenizer(text, add_special_tokens=False).input_ids

    def decode(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        """Return the text of token ids, with special tokens or without; the one that ended the turn is never in it."""
        ids = list(token_ids)
        if ids and ids[-1] in self._eos:
            ids.pop()
        return str(self._tokenizer.decode(ids, skip_special_tokens=not special, clean_up_tokenization_spaces=False))

    def start(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids of a chat up to where the policy's turn begins."""
        if not self._templated:
            return self._written(messages)
        return self.encode(self._render(messages))

    def assistant(self, content: str, calls: Sequence[ToolCall]) -> Message:
        """Return the message of a turn."""
        message: Message = {"role": "assistant", "content": content}
        called = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
        return message | ({"tool_calls": called} if called else {})

    def tool(self, call: ToolCall, content: str) -> Message:
        """Return the message with which a tool answers a call."""
        return {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": content}

    def said_first(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids of what is said after the prompt, before the first turn.

        Raises:
            UserError: the prompt has opened that turn already.
        """
        if self._templated:
            reason = "an agent that begins with words of its own needs prompts without chat template."
            raise UserError(FIELD, reason, "Put them into the prompts, or set data.chat_template: never.")
        return self._written(messages)

    def _written(self, messages: Sequence[Message]) -> list[int]:
        return self.encode("\n\n".join(message["content"] for message in messages))

    def added(self, answer: Message, messages: Sequence[Message], ended_by: int) -> list[int]:
        """Return the token ids between the policy's last turn and its next one.

        Args:
            answer: the message of the last turn.
            messages: what is said to it.
            ended_by: the last token of that turn, where it is none that ends one the end is written, too.

        Raises:
            UserError: the template cannot go on with such messages.
        """
        if not self._templated:
            return self._written(messages)
        self.check({message["role"] for message in messages} - self._checked)
        mark, calls = uuid4().hex, answer.get("tool_calls", [])
        try:
            text = self._render([*self._asked, _turn(mark, calls), *messages])
        except UserError:
            if len(calls) < 2:
                raise
            # Llama 3's refuses several calls in a turn, and the model may write them all the same.
            text = self._render([*self._asked, _turn(mark, calls[-1:]), *messages])
        shown = self.encode(text.rpartition(mark)[2])
        end = next(index for index, token in enumerate(shown) if token in self._eos)
        return shown[end + (ended_by in self._eos) :]

    def check(self, roles: Iterable[str]) -> None:
        """Check that the template can go on from turns of the model with messages of some roles.

        Args:
            roles: `user`, where an agent speaks to the model, and `tool`, where tools answer it.

        Raises:
            UserError: it cannot; both texts are shown.
        """
        for role in roles if self._templated else ():
            spoken, said = _turn(_MODEL, [_CALL] if role == "tool" else []), {"role": role, "content": _SAID}
            if role == "tool":
                said |= {"tool_call_id": _CALL["id"], "name": _CALL["function"]["name"]}
            opened = self._render(self._asked)
            once = self._render([*self._asked, spoken, said]).split(_MODEL)
            twice = self._render([*self._asked, spoken, said, spoken, said])
            parts, after, marks = twice.split(_MODEL), once[-1], len(once) - 1
            grown, header = opened + _MODEL + after + _MODEL + after, _apart(opened, parts[0])
            if not marks or _SAID not in after or len(parts) != 2 * marks + 1:
                raise self._refusal(f"it leaves messages of {role} or the turns before them out", grown, twice)
            if self._eos.isdisjoint(self.encode(after.partition(_SAID)[0])):
                why = "it ends the model's turns by none of the tokens at which sampling stops"
                raise self._refusal(why, grown, twice)
            # Turns may begin otherwise once they are past, by what opens or holds their reasoning, if all do alike.
            if "" not in header or header != _apart(after, parts[marks]) or after != parts[-1]:
                raise self._refusal("it writes the messages before anew when one is added", grown, twice)
            self._checked.add(role)

    def _render(self, messages: Sequence[Message]) -> str:
        try:
            tools: list[Any] | None = self._tools or None
            rendered = self._tokenizer.apply_chat_template(
                list(messages), tools=tools, add_generation_prompt=True, tokenize=False
            )
        except (TemplateError, TypeError, KeyError) as error:
            roles = ", ".join(message["role"] for message in messages)
            reason = f"the model's chat template refuses messages of {roles}: {error}."
            raise UserError(
                FIELD, reason, "Take an agent that does without, or a model with another template."
            ) from error
        return str(rendered)

    def _refusal(self, why: str, grown: str, whole: str) -> UserError:
        start = max(0, len(grown) - len(_apart(grown, whole)[0]) - SHOWN_CHARS // 2)
        texts = ", and the whole chat at once: ".join(
            json.dumps(text[start : start + SHOWN_CHARS], ensure_ascii=False) for text in (grown, whole)
        )
        reason = (
            f"the chat template cannot go on from a turn of the model: {why}. From character {start} on, as it writes "
            f"the chat turn by turn: {texts}."
        )
        return UserError(FIELD, reason, "Take agent.name: single_turn, or a model whose template only ever adds.")


def _turn(mark: str, calls: Sequence[dict[str, Any]]) -> Message:
    """Return a turn of the model whose words, and the arguments of whose calls, are a mark."""
    marked = [call | {"function": call["function"] | {"arguments": {"text": mark}}} for call in calls]
    return {"role": "assistant", "content": mark} | ({"tool_calls": marked} if marked else {})


def _apart(one: str, other: str) -> tuple[str, str]:
    """Return what is left of two texts after all with which both begin."""
    same = next((index for index, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))
    return one[same:], other[same:]
