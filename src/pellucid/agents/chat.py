"""Chats as tokens: what an agent adds to one is rendered alone, and nothing that is there is ever rendered again.

A chat template writes whole conversations. What it writes for new messages is the difference of two renderings of a
short chat, with them and without; so a template that drops reasoning from older turns, or writes a call of a tool in
other words than the policy, changes no token of the past. `check` refuses templates for which that difference is none.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from pellucid.errors import UserError

Message = dict[str, Any]
"""As of OpenAI's API: `role`, `content`, and where tools are called `tool_calls` or `tool_call_id`."""
FIELD = "actor_rollout_ref.rollout.agent"
_ASKED: Message = {"role": "user", "content": "a"}
_ANSWERED: Message = {"role": "assistant", "content": "b"}
SHOWN_CHARS = 400


class Chat:
    """Renders what is added to a chat with a model.

    Args:
        tokenizer: the model's; one without chat template gets the messages' contents as they are.
        eos_token_ids: ids that end a turn.
        tools: the schemas of the tools that are named to the model.
        parse_calls: takes a turn's text, special tokens among it, apart into its content and the calls of tools; None
            where no tools are called.
        templated: whether prompts are rendered by the tokenizer's chat template.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        eos_token_ids: Sequence[int],
        tools: list[dict[str, Any]] | None = None,
        parse_calls: Callable[[str], tuple[str, list[Any]]] | None = None,
        *,
        templated: bool,
    ) -> None:
        self._tokenizer, self._eos, self._tools = tokenizer, set(eos_token_ids), tools or []
        self.parse_calls, self._templated = parse_calls, templated

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
        return self.encode(self._render(messages, opens_turn=True))

    def assistant(self, content: str, calls: Sequence[Any]) -> Message:
        """Return the message of a turn."""
        message: Message = {"role": "assistant", "content": content}
        called = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
        return message | ({"tool_calls": called} if called else {})

    def tool(self, call: Any, content: str) -> Message:
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
            UserError: the template changes what is before the new messages.
        """
        if not self._templated:
            return self._written(messages)
        spoken = answer | {"content": _ANSWERED["content"]} if answer.get("tool_calls") else _ANSWERED
        shown = self._end_of_turn([_ASKED, spoken], messages)
        return shown[1:] if ended_by in self._eos else shown

    def _end_of_turn(self, before: Sequence[Message], messages: Sequence[Message]) -> list[int]:
        """Return the token ids from the one that ends the last turn of `before` to where the next one begins."""
        old, new = self._render(before, opens_turn=False), self._render([*before, *messages], opens_turn=True)
        if not new.startswith(old):
            raise self._refusal("it writes the messages before anew when one is added", old, new)
        old_ids, new_ids = self.encode(old), self.encode(new)
        ends = [index for index, token in enumerate(old_ids) if token in self._eos]
        opened = len(self.encode(self._render(before[:-1], opens_turn=True)))
        if not ends or ends[-1] < opened or old_ids[: ends[-1] + 1] != new_ids[: ends[-1] + 1]:
            raise self._refusal("it ends the model's turns by none of the tokens at which sampling stops", old, new)
        return new_ids[ends[-1] :]

    def check(self, roles: Sequence[str]) -> None:
        """Check that the template can go on from turns of the model with messages of some roles.

        Args:
            roles: `user`, where an agent speaks to the model, and `tool`, where tools answer it.

        Raises:
            UserError: it cannot; both texts are shown.
        """
        if not self._templated:
            return
        call = {"id": "a00000001", "type": "function", "function": {"name": "a", "arguments": {"b": 1}}}
        calls = _ANSWERED | {"tool_calls": [call]}
        result: Message = {"role": "tool", "tool_call_id": call["id"], "name": "a", "content": "c"}
        answers = {"user": (_ANSWERED, _ASKED), "tool": (calls, result)}
        for role in roles:
            spoken, said = answers[role]
            once = [_ASKED, spoken, said]
            opened = self._render([_ASKED], opens_turn=True)
            old, new = self._render(once, opens_turn=True), self._render([*once, spoken, said], opens_turn=True)
            first = self._end_of_turn([_ASKED, spoken], [said])
            second = self._end_of_turn([*once, spoken], [said])
            if not old.startswith(opened) or not new.startswith(old) or first != second:
                raise self._refusal("it writes the messages before anew when one is added", old, new)

    def _render(self, messages: Sequence[Message], *, opens_turn: bool) -> str:
        try:
            tools: list[Any] | None = self._tools or None
            rendered = self._tokenizer.apply_chat_template(
                list(messages), tools=tools, add_generation_prompt=opens_turn, tokenize=False
            )
        except (TemplateError, TypeError, KeyError) as error:
            roles = ", ".join(message["role"] for message in messages)
            reason = f"the model's chat template refuses messages of {roles}: {error}."
            raise UserError(
                FIELD, reason, "Take an agent that does without, or a model with another template."
            ) from error
        return str(rendered)

    def _refusal(self, why: str, old: str, new: str) -> UserError:
        same = next((index for index, (a, b) in enumerate(zip(old, new)) if a != b), min(len(old), len(new)))
        start = max(0, same - SHOWN_CHARS // 2)
        texts = " and then ".join(
            json.dumps(text[start : start + SHOWN_CHARS], ensure_ascii=False) for text in (old, new)
        )
        reason = f"the chat template cannot go on from a turn of the model: {why}. From character {start} on: {texts}."
        return UserError(FIELD, reason, "Take agent.name: single_turn, or a model whose template only ever adds.")
