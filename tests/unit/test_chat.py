"""Chats as tokens, with the chat templates of models that people train: which of them go on turn by turn, and that what
an agent adds is what they write.

The templates are written down as short as they write the same text for the messages that agents add; special tokens are
as published.
"""

import re
from dataclasses import dataclass

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pellucid.agents.chat import Chat
from pellucid.errors import UserError

TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}]

SMOLLM2 = """{% for m in messages %}{% if loop.first and m.role != 'system' %}{{ '<|im_start|>system\\nYou are SmolLM'
 + '<|im_end|>\\n' }}{% endif %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

_QWEN_SYSTEM = """{%- set given = messages[0].content if messages[0].role == 'system' else DEFAULT %}
{%- if tools %}{{ '<|im_start|>system\\n' + given + '\\n\\n# Tools\\n\\n<tools>' }}
{%- for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}{{ '\\n</tools><|im_end|>\\n' }}
{%- elif given %}{{ '<|im_start|>system\\n' + given + '<|im_end|>\\n' }}{% endif %}"""
_QWEN_CALLS = """{%- for call in m.tool_calls %}{% if m.content or not loop.first %}{{ '\\n' }}{% endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson + '}\\n</tool_call>' }}{% endfor %}"""
_QWEN_TOOL = """{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}"""
QWEN25 = (
    _QWEN_SYSTEM.replace("DEFAULT", "'You are Qwen.'")
    + "{% for m in messages %}{% if m.role == 'tool' %}"
    + _QWEN_TOOL
    + """{% elif m.role != 'system' or not loop.first %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}"""
    + _QWEN_CALLS
    + """{{ '<|im_end|>\\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
)
# Reasoning is written with the turns since the last question alone.
QWEN3 = (
    _QWEN_SYSTEM.replace("DEFAULT", "''")
    + """{%- set ns = namespace(asked=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.asked = loop.index0 %}
{%- endif %}{% endfor %}{% for m in messages %}{% if m.role == 'tool' %}"""
    + _QWEN_TOOL
    + """{% elif m.role == 'assistant' %}{% set said = m.content.split('</think>')[-1].lstrip('\\n') %}
{%- set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\\n') if '</think>' in m.content else '' %}
{{- '<|im_start|>assistant\\n' }}{% if loop.index0 > ns.asked and (loop.last or thought) %}
{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}{% endif %}{{ said }}"""
    + _QWEN_CALLS
    + """{{ '<|im_end|>\\n' }}{% elif m.role == 'user' %}{{ '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
)

LLAMA31 = """{{ bos_token }}{% if messages[0].role == 'system' %}{% set system = messages[0].content | trim %}
{%- set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}{% if tools %}{{ 'Environment: ipython\\n' }}{% endif %}
{{- 'Cutting Knowledge Date: December 2023\\nToday Date: 26 Jul 2024\\n\\n' + system + '<|eot_id|>' }}
{%- if tools %}{{ '<|start_header_id|>user<|end_header_id|>\\n\\nGiven the following functions, ...\\n\\n' }}
{%- for tool in tools %}{{ tool | tojson(indent=4) + '\\n\\n' }}{% endfor %}{{ messages[0].content | trim + '<|eot_id|>' }}
{%- set messages = messages[1:] %}{% endif %}
{%- for m in messages %}{% if m.role not in ('tool', 'ipython') and 'tool_calls' not in m %}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}
{%- elif 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}
{{- raise_exception('This model only supports single tool-calls at once!') }}{% endif %}
{%- set call = m.tool_calls[0].function %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{{- '{"name": "' + call.name + '", "parameters": ' }}{{ call.arguments | tojson + '}' + '<|eot_id|>' }}
{%- else %}{{ '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + m.content | tojson + '<|eot_id|>' }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

# Tools stand before the last question, and the system's message in it while it is last of all.
MISTRAL = """{{ bos_token }}{% if messages[0].role == 'system' %}{% set system = messages[0].content %}
{%- set messages = messages[1:] %}{% endif %}{% set asked = messages | selectattr('role', 'equalto', 'user') | list %}
{%- for m in messages %}{% if m.role == 'user' %}
{%- if tools and m == asked[-1] %}{{ '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST] ' }}{% if loop.last and system is defined %}{{ system + '\\n\\n' }}{% endif %}{{ m.content + '[/INST]' }}
{%- elif m.tool_calls %}{{ '[TOOL_CALLS] [' }}{% for call in m.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}
{{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}{% if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}
{{- ']' + eos_token }}{% elif m.role == 'assistant' %}{{ ' ' + m.content | trim + eos_token }}
{%- elif m.role == 'tool' %}{{ '[TOOL_RESULTS] {"content": ' + m.content | string + ', "call_id": "' }}
{{- m.tool_call_id + '"}[/TOOL_RESULTS]' }}{% else %}
{{- raise_exception('Only user and assistant roles are supported') }}{% endif %}{% endfor %}"""

_GEMMA = """{{ bos_token }}SYSTEM{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}{% if loop.first %}{{ first }}{% endif %}
{{- m.content | trim + '<end_of_turn>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""
GEMMA2 = _GEMMA.replace(
    "SYSTEM",
    "{% set first = '' %}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}",
)
GEMMA3 = _GEMMA.replace(
    "SYSTEM",
    "{% set first = '' %}{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\\n\\n' %}"
    "{% set messages = messages[1:] %}{% endif %}",
)

PHI3 = """{% for m in messages %}{% if m.role in ('system', 'user', 'assistant') %}
{{- '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"""
PHI4 = """{% for m in messages %}{% if m.role in ('system', 'user', 'assistant') %}
{{- '<|im_start|>' + m.role + '<|im_sep|>' + m.content + '<|im_end|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"""
ZEPHYR = """{% for m in messages %}{% if m.role in ('system', 'user', 'assistant') %}
{{- '<|' + m.role + '|>\\n' + m.content + eos_token + '\\n' }}{% endif %}
{%- if loop.last and add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}{% endfor %}"""
# Reasoning is opened for the model, and left out of all turns that are past; calls are written beside no words alone.
DEEPSEEK_R1 = """{{ bos_token }}{% set ns = namespace(tool=false) %}{% for m in messages %}
{%- if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user' %}{% set ns.tool = false %}{{ '<｜User｜>' + m.content }}
{%- elif m.role == 'assistant' %}{% if ns.tool %}{{ '<｜tool▁outputs▁end｜>' }}{% set ns.tool = false %}{% else %}
{{- '<｜Assistant｜>' }}{% endif %}{{ m.content.split('</think>')[-1] + eos_token }}
{%- elif m.role == 'tool' %}{% if not ns.tool %}{{ '<｜tool▁outputs▁begin｜>' }}{% set ns.tool = true %}{% endif %}
{{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt and not ns.tool %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}"""
# What is said last ends otherwise than what was said before.
GPT_OSS = """{% for m in messages %}{% if m.role == 'assistant' %}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + ('<|return|>' if loop.last else '<|end|>') }}{% else %}
{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""
COUNTED = """{% for m in messages %}{{ '[' + loop.index | string + '/' + loop.length | string + '] ' + m.role + ': ' }}
{{- m.content + '</s>' }}{% endfor %}{% if add_generation_prompt %}{{ '> ' }}{% endif %}"""
NUMBERED = """{% for m in messages %}{{ loop.index | string + '. ' + m.role + ': ' + m.content + '</s>' }}{% endfor %}
{%- if add_generation_prompt %}{{ messages | length + 1 }}. assistant: {% endif %}"""


@dataclass(frozen=True)
class Family:
    template: str
    ends: tuple[str, ...]
    """Tokens at which sampling stops."""
    user: str | None = None
    """What its refusal says, None where it goes on."""
    tool: str | None = None
    tools: bool = False
    """Whether it tells the model of tools."""
    system: str | None = None


REFUSED_ROLES, LEFT_OUT, ANEW = "template refuses messages of", "leaves messages of tool", "messages before anew"
FAMILIES = {
    "smollm2": Family(SMOLLM2, ("<|im_end|>",)),
    "smollm2, system": Family(SMOLLM2, ("<|im_end|>",), system="Be brief."),
    "qwen2.5": Family(QWEN25, ("<|im_end|>", "<|endoftext|>"), tools=True),
    "qwen3": Family(QWEN3, ("<|im_end|>", "<|endoftext|>"), tools=True),
    "qwen3, no tools": Family(QWEN3, ("<|im_end|>",), system="Be brief."),
    "llama3.1": Family(LLAMA31, ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"), tools=True),
    "llama3.2": Family(LLAMA31, ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"), system="Be brief."),
    "mistral": Family(MISTRAL, ("</s>",)),
    "mistral, tools": Family(MISTRAL, ("</s>",), user=ANEW, tools=True),
    "mistral, system": Family(MISTRAL, ("</s>",), user=ANEW, tool=ANEW, system="Be brief."),
    "gemma2": Family(GEMMA2, ("<eos>", "<end_of_turn>"), tool=REFUSED_ROLES),
    "gemma2, system": Family(GEMMA2, ("<eos>",), user="System role", tool="System role", system="Be brief."),
    "gemma3": Family(GEMMA3, ("<eos>", "<end_of_turn>"), tool=REFUSED_ROLES, system="Be brief."),
    "phi3": Family(PHI3, ("<|endoftext|>", "<|end|>"), tool=LEFT_OUT),
    "phi3, other ends": Family(PHI3, ("<|endoftext|>",), user="none of the tokens", tool=LEFT_OUT),
    "phi4": Family(PHI4, ("<|endoftext|>", "<|im_end|>"), tool=LEFT_OUT),
    "zephyr": Family(ZEPHYR, ("</s>",), tool=LEFT_OUT, system="Be brief."),
    "deepseek-r1": Family(DEEPSEEK_R1, ("<｜end▁of▁sentence｜>",), tool=ANEW),
    "gpt-oss": Family(GPT_OSS, ("<|return|>", "<|call|>"), user="none of the tokens", tool="none of the tokens"),
    "counted": Family(COUNTED, ("</s>",), user=ANEW, tool=ANEW),
    "numbered": Family(NUMBERED, ("</s>",), user=ANEW, tool=ANEW),
}
SPECIAL = re.compile(r"<[|｜][^<>|｜\n' ]+[|｜]>|<(?:start|end)_of_turn>|<eos>|\[/?[A-Z_]+\]|</?s>|</?think>|</?tool_call>")


def chat_of(family: Family) -> tuple[Chat, PreTrainedTokenizerFast]:
    """A chat over a byte-level tokenizer, one id a character beside the special tokens."""
    vocab = {token: index for index, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token=family.ends[0])
    tokenizer.add_tokens(sorted({*SPECIAL.findall(family.template), *family.ends}), special_tokens=True)
    tokenizer.chat_template = family.template
    ends = tokenizer.convert_tokens_to_ids(list(family.ends))
    tools = TOOLS if family.tools else None
    return Chat(tokenizer, ends, tools, templated=True, system_prompt=family.system), tokenizer


def refusal(family: Family, role: str) -> str | None:
    return {"user": family.user, "tool": family.tool}[role]


@pytest.mark.parametrize("role", ["user", "tool"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_template_is_taken_or_refused(name, role):
    family = FAMILIES[name]
    chat, _ = chat_of(family)
    if (reason := refusal(family, role)) is None:
        chat.check((role,))
        return
    with pytest.raises(UserError, match=reason) as caught:
        chat.check((role,))
    if reason not in (REFUSED_ROLES, "System role"):
        assert re.search(r'turn by turn: ".+", and the whole chat at once: ".+"\.', caught.value.reason)
    said = {"user": {"role": "user", "content": "3"}, "tool": {"role": "tool", "tool_call_id": "a", "name": "b", "content": "c"}}
    with pytest.raises(UserError, match=reason):
        chat.added({"role": "assistant", "content": "b"}, [said[role]], 0)


def calls_of(chat: Chat, *numbers: int) -> dict:
    calls = [{"id": f"call{n:05d}", "type": "function", "function": {"name": "add", "arguments": {"a": n}}} for n in numbers]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def results_of(message: dict) -> list[dict]:
    return [
        {"role": "tool", "tool_call_id": call["id"], "name": "add", "content": f"it is {call['function']['arguments']['a']}"}
        for call in message["tool_calls"]
    ]


def conversation(chat: Chat, role: str) -> list[tuple[dict, list[dict]]]:
    """Turns of the model, and what is said to each."""
    if role == "user":
        return [
            ({"role": "assistant", "content": text}, [{"role": "user", "content": said}])
            for text, said in (("Five.", "And 2+4?"), ("6, I think", "Yes. And 1+1?"), ("2", "Thank you."))
        ]
    return [(message, results_of(message)) for message in (calls_of(chat, 1), calls_of(chat, 2), calls_of(chat, 34567))]


TAKEN = [(name, role) for name, family in FAMILIES.items() for role in ("user", "tool") if refusal(family, role) is None]


@pytest.mark.parametrize(("name", "role"), [case for case in TAKEN if case != ("deepseek-r1", "user")])
def test_what_is_added_is_what_the_whole_rendering_holds(name, role):
    """The model answers in the words with which the template writes its answer."""
    family = FAMILIES[name]
    chat, tokenizer = chat_of(family)
    asked = [*([{"role": "system", "content": family.system}] if family.system else []), {"role": "user", "content": "2+3?"}]
    turns = conversation(chat, role)
    messages = [*asked, *(message for answer, said in turns for message in (answer, *said))]
    kwargs = {"tools": TOOLS if family.tools else None, "add_generation_prompt": True, "tokenize": False}
    whole = tokenizer(tokenizer.apply_chat_template(messages, **kwargs), add_special_tokens=False).input_ids
    grown = chat.start(asked)
    ends = set(tokenizer.convert_tokens_to_ids(list(family.ends)))
    for answer, said in turns:
        assert whole[: len(grown)] == grown
        sampled = whole[len(grown) : 1 + next(place for place in range(len(grown), len(whole)) if whole[place] in ends)]
        grown += [*sampled, *chat.added(answer, said, sampled[-1])]
    assert grown == whole


def test_a_turn_that_was_cut_is_ended():
    chat, tokenizer = chat_of(FAMILIES["qwen2.5"])
    said = [{"role": "user", "content": "On?"}]
    text = "<|im_end|>\n<|im_start|>user\nOn?<|im_end|>\n<|im_start|>assistant\n"
    ended, cut = (chat.added({"role": "assistant", "content": "b"}, said, tokenizer.encode(last)[0]) for last in ("<|im_end|>", "b"))
    assert tokenizer.decode(cut) == text and cut[1:] == ended


@pytest.mark.parametrize("name", ["qwen3", "deepseek-r1"])
def test_reasoning_that_the_template_drops_stays_where_it_was_said(name):
    chat, tokenizer = chat_of(FAMILIES[name])
    answer, asked = "<think>\nLet me see.\n</think>\n\n5", [{"role": "user", "content": "2+3?"}]
    said = [{"role": "user", "content": "Sure?"}]
    message = {"role": "assistant", "content": answer}
    added = tokenizer.decode(chat.added(message, said, tokenizer.eos_token_id))
    begun = tokenizer.decode(chat.start([*asked, message, *said]))
    assert "Let me see" not in begun and begun.replace("<think>\n", "").endswith(added.replace("<think>\n", ""))
    assert added.endswith("<think>\n" if name == "deepseek-r1" else "assistant\n")


def test_several_calls_where_the_template_writes_one():
    """Llama 3's raises on several calls, which the model may write nevertheless."""
    chat, tokenizer = chat_of(FAMILIES["llama3.1"])
    message = calls_of(chat, 1, 2)
    header = "<|start_header_id|>{}<|end_header_id|>\n\n"
    shown = [header.format("ipython") + f'"it is {number}"<|eot_id|>' for number in (1, 2)]
    end = tokenizer.convert_tokens_to_ids("<|eot_id|>")
    assert tokenizer.decode(chat.added(message, results_of(message), end)) == "".join(shown) + header.format("assistant")


def test_a_message_that_repeats_the_chat_is_no_part_of_a_turn():
    chat, tokenizer = chat_of(FAMILIES["qwen2.5"])
    text = "What the model says. What is said to it. <|im_end|>"
    added = chat.added({"role": "assistant", "content": text}, [{"role": "user", "content": text}], tokenizer.eos_token_id)
    assert tokenizer.decode(added) == f"\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
