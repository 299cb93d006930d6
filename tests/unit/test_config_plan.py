"""The plan's arithmetic and the model facts read from files."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid.config import ModelFacts, RunConfig, build_plan, load_config, read_model_facts
from pellucid.config.plan import plan_rows
from pellucid.config.schema.actor import ActorConfig
from pellucid.config.schema.data import DataConfig
from pellucid.config.schema.rollout import RolloutConfig
from pellucid.config.schema.root import ActorRolloutRefConfig
from pellucid.errors import UserError

FACTS = ModelFacts(1000, 8, 16, 2, 4, 2, 4, 50)


def run_config(prompts=8, mini=4, n=4, micro=None, budget=64, epochs=1, prompt=16, response=16) -> RunConfig:
    actor = ActorConfig(
        strategy="fsdp2",
        ppo_mini_batch_size=mini,
        ppo_micro_batch_size_per_gpu=micro,
        use_dynamic_bsz=micro is None,
        ppo_max_token_len_per_gpu=budget,
        ppo_epochs=epochs,
    )
    rollout = RolloutConfig(n=n, prompt_length=prompt, response_length=response)
    return RunConfig(
        data=DataConfig(train_batch_size=prompts, max_prompt_length=prompt, max_response_length=response),
        actor_rollout_ref=ActorRolloutRefConfig(actor=actor, rollout=rollout),
    )


def test_the_plan_of_a_small_run():
    plan = build_plan(run_config(), 100, FACTS)
    rows = dict(plan_rows(plan))
    assert rows["samples per step"] == "8 prompts × 4 samples = 32 samples"
    assert rows["optimizer steps"] == "8 prompts ÷ 4 per mini-batch = 2 per step"
    assert rows["micro-batches"] == "16 samples per mini-batch in at most 8 micro-batches"
    assert rows["steps"] == "100 prompts ÷ 8 = 12 steps per epoch (4 prompts left over in each); 12 steps in all"
    assert rows["tokens per step"] == "at most 32 samples × (16 prompt + 16 response) = 32 × 32 = 1,024 tokens"
    assert plan.memory is not None
    assert (plan.memory.weights, plan.memory.gradients, plan.memory.optimizer, plan.memory.reference) == (
        4000,
        4000,
        8000,
        0,
    )
    assert plan.memory.kv_cache == 32 * 32 * 2 * 2 * 2 * 4 * 4


def test_fixed_micro_batches_are_exact_and_epochs_multiply():
    plan = build_plan(run_config(micro=2, epochs=3), 16, None)
    assert plan.micro_batches_per_mini_batch == 8 and dict(plan_rows(plan))["micro-batches"].endswith(
        "mini-batch in 8 micro-batches"
    )
    assert plan.optimizer_steps_per_step == 6
    assert plan.memory is None
    assert "× 3 epochs = 6 per step" in dict(plan_rows(plan))["optimizer steps"]


def test_a_step_that_cannot_be_filled():
    with pytest.raises(UserError, match="7 training prompts ÷ 8 per step = 0 steps"):
        build_plan(run_config(), 7, None)


def test_total_steps_and_reference(tmp_path):
    loaded = load_config(
        None,
        [
            "data.train_files=x",
            "data.train_batch_size=4",
            "actor_rollout_ref.model.path=m",
            "actor_rollout_ref.actor.strategy=fsdp2",
            "actor_rollout_ref.actor.ppo_mini_batch_size=4",
            "actor_rollout_ref.rollout.n=2",
            "trainer.total_training_steps=9",
            "actor_rollout_ref.actor.use_kl_loss=true",
            "actor_rollout_ref.model.dtype=bf16",
        ],
    )
    plan = build_plan(loaded.config, 8, FACTS)
    assert plan.total_steps == 9
    assert plan.memory is not None
    assert plan.memory.reference == 4000
    assert "reference" in dict(plan_rows(plan))["memory (estimate)"]


@settings(deadline=None)
@given(
    st.integers(1, 6), st.integers(1, 6), st.integers(1, 8), st.integers(1, 30), st.integers(1, 30), st.integers(0, 100)
)
def test_the_bound_on_micro_batches_holds_for_greedy_packing(mini, factor, n, prompt, response, slack):
    """Packing the longest possible sequences one after the other never needs more than the plan says."""
    budget = prompt + response + slack
    plan = build_plan(
        run_config(mini * factor, mini, n, budget=budget, prompt=prompt, response=response), mini * factor, None
    )
    micro_batches, used = 1, 0
    for _ in range(mini * n):
        if used + prompt + response > budget:
            micro_batches, used = micro_batches + 1, 0
        used += prompt + response
    assert plan.micro_batches_per_mini_batch == micro_batches
    assert plan.samples_per_step == mini * factor * n
    assert plan.optimizer_steps_per_step * mini == mini * factor


def write_model(folder, shapes, *, shards=1, dtype="F32", **facts):
    width = {"F32": 4, "BF16": 2}[dtype]
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(
        json.dumps(
            {
                "hidden_size": 8,
                "intermediate_size": 16,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "vocab_size": 50,
            }
            | facts
        )
    )
    names = list(shapes)
    weight_map = {}
    for shard in range(shards):
        file = "model.safetensors" if shards == 1 else f"model-{shard}.safetensors"
        header, offset = {"__metadata__": {"format": "pt"}}, 0
        for name in names[shard::shards]:
            size = math.prod(shapes[name]) * width
            header[name] = {"dtype": dtype, "shape": shapes[name], "data_offsets": [offset, offset + size]}
            offset, weight_map[name] = offset + size, file
        text = json.dumps(header).encode()
        (folder / file).write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * offset)
    if shards > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("shards", [1, 2])
def test_model_facts_from_files(tmp_path, shards):
    write_model(
        tmp_path / "m", {"embed": [50, 8], "a": [8, 8], "b": [8]}, shards=shards, dtype="BF16", num_key_value_heads=2
    )
    facts = read_model_facts(str(tmp_path / "m"))
    assert facts == ModelFacts(50 * 8 + 64 + 8, 8, 16, 2, 4, 2, 2, 50)


def test_model_facts_agree_with_safetensors(tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy")
    import numpy as np

    write_model(tmp_path / "m", {"x": [1]})
    safetensors.save_file(
        {"w": np.zeros((3, 5), np.float32), "v": np.zeros(7, np.float32)}, tmp_path / "m" / "model.safetensors"
    )
    facts = read_model_facts(str(tmp_path / "m"))
    assert facts is not None
    assert facts.num_parameters == 22


def test_a_damaged_weights_file_is_named(tmp_path):
    write_model(tmp_path / "m", {"embed": [50, 8]})
    file = tmp_path / "m" / "model.safetensors"
    whole = file.read_bytes()
    for damaged in (whole[:-1], whole[:20], b"", whole + b"x", b"\xff" * 64):
        file.write_bytes(damaged)
        with pytest.raises(UserError, match=r"model\.safetensors"):
            read_model_facts(str(tmp_path / "m"))


def test_a_model_that_is_not_here_has_no_facts(tmp_path):
    assert read_model_facts("owner/name-of-a-model") is None
    (tmp_path / "config.json").write_text("{}")
    assert read_model_facts(str(tmp_path)) is None
    write_model(tmp_path / "m", {"a": [2]}, shards=2)
    (tmp_path / "m" / "config.json").write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        read_model_facts(str(tmp_path / "m"))
