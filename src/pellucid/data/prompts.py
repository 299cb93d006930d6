"""Rows to prompts: chat template, tokens, the length filter. Rows come from `sources`, prompts go to `PromptLoader`.

A prompt column holds text or a chat (`[{"role": ..., "content": ...}]`); verl's prepared files work unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pellucid.data.sources import load_rows
from pellucid.errors import UserError, did_you_mean
from pellucid.plugins import load_object
from pellucid.types import Prompt

if TYPE_CHECKING:
    from pellucid.config.schema.data import DataConfig

_CHUNK = 512


@dataclass(slots=True)
class PromptSet:
    """The prompts of one split, and what became of the rows they came from."""

    prompts: list[Prompt]
    num_rows: int
    """Rows read (after `train_max_samples` or `val_max_samples`)."""
    num_dropped: int
    """Rows that the length filter removed."""
    max_prompt_length: int
    """The limit it applied, in tokens."""
    num_unknown: int = 0
    """Prompts with characters that the tokenizer has no token for."""

    def describe(self) -> str:
        """Return one line such as "7473 rows, 12 dropped: prompt longer than 512 tokens"."""
        rows = f"{self.num_rows} row{'s' * (self.num_rows != 1)}"
        dropped = f", {self.num_dropped} dropped: prompt longer than {self.max_prompt_length} tokens"
        unknown = f", {self.num_unknown} with characters that the tokenizer does not know"
        return rows + (dropped if self.num_dropped else "") + (unknown if self.num_unknown else "")


def build_prompts(
    config: DataConfig,
    tokenizer: Any,
    split: Literal["train", "val"],
    *,
    tools: Sequence[dict[str, Any]] = (),
    keep_messages: bool = False,
    limit_key: str = "data.max_prompt_length",
) -> PromptSet:
    """Read, template, tokenise and filter the rows of `data.train_files` or `data.val_files`.

    A row's columns other than prompt, answer and data source become `Prompt.extra` (the dictionary of an `extra_info`
    column is merged into it). Uids read `<data source>:<split>:<row index>`, so that duplicate rows stay distinct.
    `data.custom_cls` names a class to use in place of the built-in sources: it is called as `cls(files, tokenizer,
    config)` and iterated once for row dictionaries.

    Args:
        config: the `data` section.
        tokenizer: a transformers tokenizer.
        split: which files to read.
        tools: schemas of functions that the chat template tells the model of.
        keep_messages: keep the chat with each prompt, also without `data.return_raw_chat`.
        limit_key: what the limit of tokens is called, for messages.

    Raises:
        UserError: a missing column, a prompt over the limit (with `truncation: error` and the filter off), an empty
            prompt, or no row left after filtering.
    """
    field = f"data.{split}_files"
    rows = _read_rows(config, tokenizer, split, field)
    starts = range(0, len(rows), _CHUNK)

    def encode(start: int) -> list[Prompt]:
        encoded = encode_rows(rows[start : start + _CHUNK], start, config, tokenizer, split, list(tools))
        for prompt in () if keep_messages or config.return_raw_chat else encoded:
            prompt.messages = None
        return encoded

    if config.dataloader_num_workers:
        with ThreadPoolExecutor(config.dataloader_num_workers) as executor:
            encoded = list(executor.map(encode, starts))
    else:
        encoded = [encode(start) for start in starts]
    prompts = [prompt for chunk in encoded for prompt in chunk]
    fitting = [prompt for prompt in prompts if len(prompt.token_ids) <= config.max_prompt_length]
    if not config.filter_overlong_prompts:
        fitting = [_truncate(prompt, config, tokenizer) for prompt in prompts]
    num_unknown = sum(tokenizer.unk_token_id in prompt.token_ids for prompt in fitting)
    result = PromptSet(fitting, len(rows), len(prompts) - len(fitting), config.max_prompt_length, num_unknown)
    if not fitting:
        shortest = min(len(prompt.token_ids) for prompt in prompts)
        reason = f"no prompt is left ({result.describe()}; the shortest has {shortest})."
        raise UserError(field, reason, f"Set {limit_key} to {shortest} or more.")
    return result


def uses_template(tokenizer: Any, chat_template: str) -> bool:
    """Tell whether prompts get the tokenizer's chat template (`auto`: when it has one)."""
    if chat_template == "always" and not tokenizer.chat_template:
        reason = "is 'always', but the tokenizer has no chat template."
        raise UserError("data.chat_template", reason, "Use 'auto' or 'never', or a chat model.")
    return chat_template != "never" and bool(tokenizer.chat_template)


def _render(
    prompt: str | list[dict[str, Any]],
    tokenizer: Any,
    templated: bool,
    system_prompt: str | None,
    tools: list[dict[str, Any]],
) -> tuple[str, list[dict[str, Any]]]:
    """Return the text that the model continues, and the messages behind it.

    With the template, text becomes a user message and the assistant's turn is opened. Without, the messages' contents
    are joined by blank lines. The system prompt goes first, unless the chat has a system message of its own.

    Raises:
        UserError: the prompt is neither text nor a chat, or a system prompt or assistant turns lack a template.
    """
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else _checked_chat(prompt)
    if system_prompt and all(message["role"] != "system" for message in messages):
        messages = [{"role": "system", "content": system_prompt}, *messages]
    if templated:
        text = tokenizer.apply_chat_template(messages, tools=tools or None, add_generation_prompt=True, tokenize=False)
        return text, messages
    if system_prompt:
        reason = "is set, but the prompts go without a chat template."
        raise UserError("data.system_prompt", reason, "Remove it, or use a tokenizer with a chat template.")
    if any(message["role"] not in ("system", "user") for message in messages):
        reason = "a prompt is a chat with assistant turns, which cannot be written without a chat template."
        remedy = "Use a tokenizer with a chat template, or a prompt column of plain text."
        raise UserError("data.chat_template", reason, remedy)
    return "\n\n".join(message["content"] for message in messages), messages


def _checked_chat(prompt: Any) -> list[dict[str, Any]]:
    """Return a chat without empty keys (parquet fills those in)."""
    messages = prompt if isinstance(prompt, list) else [None]
    if not messages or not all(
        isinstance(message, dict) and "role" in message and isinstance(message.get("content"), str)
        for message in messages
    ):
        remedy = 'A chat is a list such as [{"role": "user", "content": "..."}].'
        raise UserError("data.prompt_key", f"a prompt is neither text nor a chat: {str(prompt)[:80]}", remedy)
    return [{key: value for key, value in message.items() if value is not None} for message in prompt]


def _read_rows(config: DataConfig, tokenizer: Any, split: str, field: str) -> list[dict[str, Any]]:
    files, limit = config.train_files, config.train_max_samples
    if split == "val":
        files, limit = config.val_files, config.val_max_samples
    if files is None:
        raise UserError(field, "is not set.", "Name a file, hub id or task.")
    if config.custom_cls.path:
        spec = f"{config.custom_cls.path}:{config.custom_cls.name}"
        source: Iterable[dict[str, Any]] = load_object(spec, "data.custom_cls")(files, tokenizer, config)
        rows = [{"data_source": str(config.custom_cls.name), **row} for row in source]
    else:
        rows = load_rows(files, field, split)
    if not rows:
        raise UserError(field, "holds no rows.")
    return rows[:limit]


def encode_rows(
    rows: list[dict[str, Any]],
    start: int,
    config: DataConfig,
    tokenizer: Any,
    split: str,
    tools: list[dict[str, Any]],
) -> list[Prompt]:
    """Return the prompts of `rows`, the first of which is row `start` of the split."""
    field, templated = f"data.{split}_files", uses_template(tokenizer, config.chat_template)
    prompts: list[Prompt] = []
    for index, row in enumerate(rows, start):
        for key, used in (("prompt_key", config.prompt_key), ("reward_fn_key", config.reward_fn_key)):
            if used not in row:
                raise _missing_column(f"data.{key}", used, row, f"row {index} of {field}")
        columns = dict(row)
        task = str(columns.pop(config.reward_fn_key))
        try:
            prompt = columns.pop(config.prompt_key)
            text, messages = _render(prompt, tokenizer, templated, config.system_prompt, tools)
        except UserError as error:
            raise UserError(error.field, f"row {index} of {field}: {error.reason}", error.remedy) from error
        answer = _take_answer(columns, config.answer_key, f"row {index} of {field}")
        extra_info = columns.pop("extra_info", None) or {}
        uid, extra = f"{task}:{split}:{index}", {**columns, **extra_info}
        prompts.append(Prompt(uid, [], text, task, answer, messages, extra))
    encoded = encode_texts([prompt.text for prompt in prompts], tokenizer, templated=templated)
    for index, (prompt, ids) in enumerate(zip(prompts, encoded), start):
        if not ids:
            raise UserError(field, f"the prompt of row {index} is empty.", "Remove that row.")
        prompt.token_ids = ids
    return prompts


def encode_texts(texts: list[str], tokenizer: Any, *, templated: bool) -> list[list[int]]:
    """Return the token ids of prompts: as they are where a template wrote them, else with the tokenizer's special ones
    but for the one that ends a text, since the model is to continue it.
    """
    encoded = tokenizer(texts, add_special_tokens=not templated).input_ids
    return [
        ids[:-1] if not templated and len(ids) > 1 and ids[-1] == tokenizer.eos_token_id else ids for ids in encoded
    ]


def _take_answer(columns: dict[str, Any], answer_key: str, place: str) -> Any:
    """Remove and return the answer column; verl's `reward_model.ground_truth` stands in when there is none.

    A row may have no answer at all (some rewards need none), but only under the default `answer_key`.
    """
    if answer_key in columns:
        return columns.pop(answer_key)
    verl_column = columns.get("reward_model")
    if isinstance(verl_column, dict) and "ground_truth" in verl_column:
        return verl_column["ground_truth"]
    if answer_key != "answer":
        raise _missing_column("data.answer_key", answer_key, columns, place)
    return None


def _missing_column(field: str, name: str, columns: dict[str, Any], place: str) -> UserError:
    reason = f"{place} has no column '{name}' (it has {', '.join(columns)})."
    return UserError(field, reason, did_you_mean(name, columns))


def _truncate(prompt: Prompt, config: DataConfig, tokenizer: Any) -> Prompt:
    """Cut an overlong prompt as `data.truncation` says (`left` cuts the beginning) or refuse it."""
    ids, limit = prompt.token_ids, config.max_prompt_length
    if len(ids) <= limit:
        return prompt
    if config.truncation == "error":
        reason = f"the prompt of row {prompt.uid} has {len(ids)} tokens; the limit is {limit}."
        remedy = "Raise it, set data.filter_overlong_prompts=true to drop it, or data.truncation=left|right|middle."
        raise UserError("data.max_prompt_length", reason, remedy)
    head = {"left": 0, "right": limit, "middle": limit // 2}[config.truncation]
    prompt.token_ids = ids[:head] + ids[len(ids) - (limit - head) :]
    prompt.text = tokenizer.decode(prompt.token_ids)
    return prompt
