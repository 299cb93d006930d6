"""Sources, templating, the length filter, and a loader whose position survives any number of stops."""

import json
from dataclasses import replace

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from pellucid.config.schema.data import CustomClassConfig, DataConfig
from pellucid.data import PromptLoader, build_prompts, load_rows
from pellucid.errors import UserError
from pellucid.training.common.models import BUILTIN_FOLDER, load_tokenizer
from pellucid.types import Prompt

FIELD = "data.train_files"
CHATML = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tokenizer(chat_template=None, adds=None):
    """A byte-level tokenizer, one id a character; `adds` is a template such as "<s> $A </s>"."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(["<s>", "</s>", *alphabet])}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    if adds:
        inner.post_processor = processors.TemplateProcessing(single=adds, special_tokens=[("<s>", 0), ("</s>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = chat_template
    return tokenizer


PLAIN = make_tokenizer()


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def config_for(files, **settings):
    return replace(DataConfig(), train_files=files, seed=0, **settings)


# sources


def test_jsonl_rows_in_order_blank_lines_skipped_source_named(tmp_path):
    path = tmp_path / "sums.jsonl"
    path.write_text('{"prompt": "1+1="}\n\n{"prompt": "é", "data_source": "own"}\n', encoding="utf-8")
    assert load_rows(str(path), FIELD, "train") == [
        {"prompt": "1+1=", "data_source": "sums"},
        {"prompt": "é", "data_source": "own"},
    ]


def test_a_list_is_concatenated(tmp_path):
    one, two = (write_jsonl(tmp_path / f"{name}.jsonl", [{"prompt": name}]) for name in ("a", "b"))
    rows = load_rows([one, two, "task:arithmetic?level=1&size=3"], FIELD, "train")
    assert [row["data_source"] for row in rows] == ["a", "b", "arithmetic", "arithmetic", "arithmetic"]


def test_patterns_and_variables_in_paths(tmp_path, monkeypatch):
    for name in ("b", "a"):
        write_jsonl(tmp_path / f"{name}.jsonl", [{"prompt": name}])
    monkeypatch.setenv("DATA", str(tmp_path))
    assert [row["prompt"] for row in load_rows("$DATA/*.jsonl", FIELD, "train")] == ["a", "b"]
    with pytest.raises(UserError, match="does not exist"):
        load_rows("$DATA/c*.jsonl", FIELD, "train")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": "a"}\n{"prompt": \n', r"bad\.jsonl, line 2 is not valid JSON"),
        ('\n\n["a"]\n', r"bad\.jsonl, line 3 holds a list"),
        (b'{"prompt": "\xff"}\n', r"bad\.jsonl, line 1 is not valid JSON"),
        ("\n \n", r"holds no rows"),
    ],
)
def test_a_broken_jsonl_gives_file_and_line(tmp_path, content, message):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=message) as caught:
        load_rows(str(path), FIELD, "train")
    assert caught.value.field == FIELD


def test_a_missing_file_names_the_nearest(tmp_path):
    write_jsonl(tmp_path / "train.jsonl", [{"prompt": "a"}])
    with pytest.raises(UserError, match=r"Did you mean '.*train\.jsonl'"):
        load_rows(str(tmp_path / "trian.jsonl"), FIELD, "train")
    with pytest.raises(UserError, match="neither does the folder"):
        load_rows(str(tmp_path / "nowhere/train.jsonl"), FIELD, "train")
    with pytest.raises(UserError, match="is a folder"):
        load_rows(str(tmp_path), FIELD, "train")
    with pytest.raises(UserError, match="the list is empty"):
        load_rows([], FIELD, "train")
    (tmp_path / "train.csv").write_text("prompt\na\n")
    with pytest.raises(UserError, match=r"'\.csv' are not read"):
        load_rows(str(tmp_path / "train.csv"), FIELD, "train")


def test_parquet_round_trip_and_damage(tmp_path):
    path = tmp_path / "rows.parquet"
    chat = [{"role": "user", "content": "2+2="}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"prompt": chat, "data_source": "math"}]), path)
    assert load_rows(str(path), FIELD, "train") == [{"prompt": chat, "data_source": "math"}]
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UserError, match="not a whole parquet file"):
        load_rows(str(path), FIELD, "train")


def test_task_uris():
    rows = load_rows("task:arithmetic?level=3&ops=+-&size=40&style=chat", FIELD, "train")
    assert len(rows) == 40
    assert {row["prompt"].split()[3] for row in rows} == {"+", "-"}
    held_out = load_rows("task:arithmetic?level=3&ops=+-&size=40&split=test", FIELD, "train")
    assert held_out == load_rows("task:arithmetic?level=3&ops=+-&size=40", FIELD, "test")


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("task:arithmetic?levle=2", "Did you mean 'level'"),
        ("task:arithmatic", "Did you mean 'arithmetic'"),
        ("task:arithmetic?level", "'level' is not key=value"),
        ("task:arithmetic?level=1&level=2", "given twice"),
        ("task:arithmetic?split=tets", "Did you mean 'test'"),
        ("owner/name?splt=train", "Did you mean 'split'"),
    ],
)
def test_bad_uris(uri, message):
    with pytest.raises(UserError, match=message):
        load_rows(uri, FIELD, "train")


# prompts


def test_task_prompts_are_plain_text_with_answers():
    result = build_prompts(config_for("task:arithmetic?level=1&size=5"), PLAIN, "train")
    prompt = result.prompts[0]
    assert result.describe() == "5 rows"
    assert prompt.uid == "arithmetic:train:0"
    assert prompt.token_ids == PLAIN(prompt.text, add_special_tokens=False).input_ids
    assert str(eval(prompt.text.removesuffix("="))) == prompt.answer
    assert prompt.extra == {"style": "plain", "level": 1}
    assert prompt.messages is None


def test_chat_template_auto_always_never(tmp_path):
    files = write_jsonl(tmp_path / "t.jsonl", [{"prompt": "hi"}])
    chatty = make_tokenizer(CHATML, adds="<s> $A")

    def text(tokenizer, **settings):
        return build_prompts(config_for(files, **settings), tokenizer, "train").prompts[0]

    assert text(chatty).text == "<|user|>hi<|assistant|>"
    assert text(chatty).token_ids[0] != chatty.bos_token_id  # the template writes the special tokens itself
    assert text(chatty, system_prompt="Be brief.").text == "<|system|>Be brief.<|user|>hi<|assistant|>"
    assert text(chatty, chat_template="never").text == "hi"
    assert text(PLAIN).text == "hi"
    with pytest.raises(UserError, match="has no chat template"):
        text(PLAIN, chat_template="always")
    with pytest.raises(UserError, match="go without a chat template"):
        text(PLAIN, system_prompt="Be brief.")


def test_bos_is_kept_and_an_appended_eos_taken_off(tmp_path):
    files = write_jsonl(tmp_path / "t.jsonl", [{"prompt": "hi"}])
    ids = PLAIN("hi", add_special_tokens=False).input_ids
    for adds, expected in (("<s> $A", [0, *ids]), ("$A </s>", ids), ("<s> $A </s>", [0, *ids]), (None, ids)):
        assert build_prompts(config_for(files), make_tokenizer(adds=adds), "train").prompts[0].token_ids == expected


def test_verl_columns(tmp_path):
    chat = [{"role": "system", "content": "S"}, {"role": "user", "content": "2+2="}]
    row = {
        "data_source": "openai/gsm8k",
        "prompt": chat,
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"index": 7},
    }
    path = tmp_path / "verl.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), path)
    config = config_for(str(path), return_raw_chat=True, system_prompt="mine")
    prompt = build_prompts(config, make_tokenizer(CHATML), "train").prompts[0]
    assert (prompt.task, prompt.answer, prompt.messages) == ("openai/gsm8k", "4", chat)
    assert prompt.extra["index"] == 7
    assert prompt.text == "<|system|>S<|user|>2+2=<|assistant|>"  # the row's own system message wins
    assert build_prompts(config_for(str(path)), PLAIN, "train").prompts[0].text == "S\n\n2+2="


def test_a_chat_with_assistant_turns_needs_a_template(tmp_path):
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    files = write_jsonl(tmp_path / "t.jsonl", [{"prompt": chat}])
    with pytest.raises(UserError, match="assistant turns"):
        build_prompts(config_for(files), PLAIN, "train")


@pytest.mark.parametrize("prompt", [None, 3, [], ["a"], [{"role": "user"}], [{"role": "user", "content": None}]])
def test_a_prompt_that_is_neither_text_nor_chat(tmp_path, prompt):
    files = write_jsonl(tmp_path / "t.jsonl", [{"prompt": prompt}])
    with pytest.raises(UserError, match="neither text nor a chat"):
        build_prompts(config_for(files), PLAIN, "train")


def test_missing_columns_list_what_is_there(tmp_path):
    files = write_jsonl(tmp_path / "t.jsonl", [{"prompts": "a", "answers": "b"}])
    with pytest.raises(
        UserError, match=r"row 0 .* no column 'prompt' \(it has prompts, answers.*Did you mean 'prompts'"
    ):
        build_prompts(config_for(files), PLAIN, "train")
    with pytest.raises(UserError, match="Did you mean 'answers'"):
        build_prompts(config_for(files, prompt_key="prompts", answer_key="answerz"), PLAIN, "train")
    with pytest.raises(UserError, match="no column 'sauce'"):
        build_prompts(config_for(files, prompt_key="prompts", reward_fn_key="sauce"), PLAIN, "train")
    assert build_prompts(config_for(files, prompt_key="prompts"), PLAIN, "train").prompts[0].answer is None


def test_the_filter_counts_what_it_drops_and_refuses_an_empty_result(tmp_path):
    files = write_jsonl(tmp_path / "t.jsonl", [{"prompt": "x" * n} for n in (3, 9, 5, 6)])
    result = build_prompts(config_for(files, max_prompt_length=5), PLAIN, "train")
    assert [prompt.uid for prompt in result.prompts] == ["t:train:0", "t:train:2"]
    assert (result.num_rows, result.num_dropped) == (4, 2)
    assert result.describe() == "4 rows, 2 dropped: prompt longer than 5 tokens"
    with pytest.raises(UserError, match=r"no prompt is left .*the shortest has 3.* 3 or more"):
        build_prompts(config_for(files, max_prompt_length=2), PLAIN, "train")


def test_prompts_with_characters_outside_the_vocabulary_are_counted(tmp_path):
    tokenizer = load_tokenizer(BUILTIN_FOLDER)
    files = write_jsonl(tmp_path / "t.jsonl", [{"prompt": "1+1="}, {"prompt": "1×1="}])
    result = build_prompts(config_for(files), tokenizer, "train")
    assert result.describe() == "2 rows, 1 with characters that the tokenizer does not know"


def test_truncation(tmp_path):
    files = write_jsonl(tmp_path / "t.jsonl", [{"prompt": "abcdefg"}])

    def text(truncation, limit=4):
        config = config_for(files, max_prompt_length=limit, filter_overlong_prompts=False, truncation=truncation)
        return build_prompts(config, PLAIN, "train").prompts[0].text

    assert [text("left"), text("right"), text("middle"), text("middle", 5)] == ["defg", "abcd", "abfg", "abefg"]
    assert text("error", 7) == "abcdefg"
    with pytest.raises(UserError, match=r"row t:train:0 has 7 tokens; the limit is 4.*filter_overlong_prompts=true"):
        text("error")


def test_duplicate_rows_keep_distinct_uids_and_max_samples_takes_the_first(tmp_path):
    files = write_jsonl(tmp_path / "t.jsonl", [{"prompt": "same"}] * 4)
    result = build_prompts(config_for([files, files], train_max_samples=6), PLAIN, "train")
    assert len({prompt.uid for prompt in result.prompts}) == result.num_rows == 6


def test_an_empty_prompt_and_unset_files(tmp_path):
    files = write_jsonl(tmp_path / "t.jsonl", [{"prompt": "a"}, {"prompt": ""}])
    with pytest.raises(UserError, match="row 1 is empty"):
        build_prompts(config_for(files), PLAIN, "train")
    with pytest.raises(UserError, match="is not set"):
        build_prompts(config_for(files), PLAIN, "val")


def test_worker_threads_change_nothing():
    config = config_for("task:arithmetic?level=2&size=1500")
    threaded = build_prompts(replace(config, dataloader_num_workers=3), PLAIN, "train")
    assert threaded == build_prompts(config, PLAIN, "train")


def test_custom_class(tmp_path):
    (tmp_path / "mine.py").write_text(
        "class Rows:\n"
        "    def __init__(self, files, tokenizer, config):\n"
        "        self.files, self.limit = files, config.max_prompt_length\n"
        "    def __iter__(self):\n"
        "        yield {'prompt': self.files, 'answer': self.limit}\n"
    )
    config = config_for("anything", custom_cls=CustomClassConfig(path=str(tmp_path / "mine.py"), name="Rows"))
    prompt = build_prompts(config, PLAIN, "train").prompts[0]
    assert (prompt.text, prompt.answer, prompt.task) == ("anything", 512, "Rows")
    with pytest.raises(UserError, match="Did you mean 'Rows'"):
        build_prompts(replace(config, custom_cls=replace(config.custom_cls, name="Row")), PLAIN, "train")


# loader


def make_prompts(count):
    return [Prompt(uid=f"t:train:{i}", token_ids=[i], text=str(i), task="t") for i in range(count)]


def uids(batch):
    return [prompt.uid for prompt in batch]


@settings(deadline=None)
@given(st.data())
def test_any_split_into_saved_and_resumed_parts_yields_the_same_batches(data):
    num_prompts = data.draw(st.integers(1, 30))
    batch_size = data.draw(st.integers(1, num_prompts))
    shuffle, seed = data.draw(st.booleans()), data.draw(st.integers(0, 5))
    parts = data.draw(st.lists(st.integers(0, 8), max_size=6))

    def fresh():
        return PromptLoader(make_prompts(num_prompts), batch_size, shuffle, seed)

    undisturbed = fresh()
    expected = [(undisturbed.epoch, uids(undisturbed.next_batch())) for _ in range(sum(parts))]
    got, state = [], json.loads(json.dumps(fresh().state_dict()))
    for length in parts:
        loader = fresh()
        loader.load_state_dict(state)
        got += [(loader.epoch, uids(loader.next_batch())) for _ in range(length)]
        state = json.loads(json.dumps(loader.state_dict()))
    assert got == expected


@settings(deadline=None)
@given(st.integers(1, 30), st.integers(1, 30), st.integers(0, 3))
def test_an_epoch_deals_each_prompt_at_most_once(num_prompts, batch_size, seed):
    if batch_size > num_prompts:
        with pytest.raises(UserError, match=f"a batch of {batch_size} prompts cannot be filled from {num_prompts}"):
            PromptLoader(make_prompts(num_prompts), batch_size, shuffle=True, seed=seed)
        return
    loader = PromptLoader(make_prompts(num_prompts), batch_size, shuffle=True, seed=seed)
    for epoch in range(3):
        dealt = []
        for _ in range(loader.steps_per_epoch):
            assert loader.epoch == epoch
            batch = uids(loader.next_batch())
            assert len(batch) == batch_size
            dealt += batch
        assert len(set(dealt)) == len(dealt) == num_prompts // batch_size * batch_size


def test_order_follows_seed_and_epoch():
    def epochs(seed, shuffle=True):
        loader = PromptLoader(make_prompts(20), 20, shuffle, seed)
        return [uids(loader.next_batch()) for _ in range(2)]

    assert epochs(1) == epochs(1)
    assert epochs(1)[0] != epochs(1)[1]
    assert epochs(1) != epochs(2)
    assert epochs(1, shuffle=False) == [uids(make_prompts(20))] * 2


def test_a_state_of_other_data_or_another_order_is_refused():
    state = PromptLoader(make_prompts(6), 2, shuffle=True, seed=0).state_dict()
    with pytest.raises(UserError, match="6 prompts then, 7 now"):
        PromptLoader(make_prompts(7), 2, shuffle=True, seed=0).load_state_dict(state)
    changed = make_prompts(6)
    changed[3].token_ids = [99]
    with pytest.raises(UserError, match="content or order differs"):
        PromptLoader(changed, 2, shuffle=True, seed=0).load_state_dict(state)
    with pytest.raises(UserError, match=r"data\.seed: is 1"):
        PromptLoader(make_prompts(6), 2, shuffle=True, seed=1).load_state_dict(state)
    with pytest.raises(UserError, match=r"data\.shuffle"):
        PromptLoader(make_prompts(6), 2, shuffle=False, seed=0).load_state_dict(state)


def test_a_smaller_batch_size_continues_at_the_same_position():
    first = PromptLoader(make_prompts(8), 4, shuffle=False, seed=0)
    first.next_batch()
    second = PromptLoader(make_prompts(8), 2, shuffle=False, seed=0)
    second.load_state_dict(first.state_dict())
    assert uids(second.next_batch()) == ["t:train:4", "t:train:5"]
