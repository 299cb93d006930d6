"""Layouts of strategy megatron that cannot be: each gets one clear error, before megatron-core or a model is touched."""

import json
import shutil

import pytest

from pellucid import build, fsdp_engines, loading
from pellucid.build import check_roles
from pellucid.config import load_config
from pellucid.config.plan import build_plan, plan_rows
from pellucid.errors import MissingExtraError, UserError
from pellucid.training.common.models import BUILTIN_FOLDER, load_tokenizer
from pellucid.training.megatron import architectures

RECIPE = """
data: {train_files: "task:arithmetic?level=2&size=50", train_batch_size: 8, max_prompt_length: 16, max_response_length: 8}
actor_rollout_ref:
  model: {path: builtin}
  actor: {strategy: megatron, ppo_mini_batch_size: 8, use_dynamic_bsz: true, ppo_max_token_len_per_gpu: 256}
  rollout: {n: 4}
trainer: {placement: ray, n_gpus_per_node: 8}
"""
ACTOR = "actor_rollout_ref.actor"
GAE, KL = "algorithm.adv_estimator=gae", f"{ACTOR}.use_kl_loss=true"
SIZES = {"TP": "tensor_model_parallel_size", "PP": "pipeline_model_parallel_size", "CP": "context_parallel_size"}
SIZES |= {
    "VP": "virtual_pipeline_model_parallel_size",
    "EP": "expert_model_parallel_size",
    "ETP": "expert_tensor_parallel_size",
}


def megatron(section: str = ACTOR, **sizes: object) -> list[str]:
    return [f"{section}.megatron.{SIZES.get(name, name)}={value}" for name, value in sizes.items()]


@pytest.fixture(autouse=True)
def no_model_is_loaded(monkeypatch):
    for place, name in ((loading, "load_model"), (loading, "load_value_model"), (fsdp_engines, "load_reward_model")):
        monkeypatch.setattr(place, name, lambda *_, **__: pytest.fail("a model was loaded"))


@pytest.fixture
def models(tmp_path):
    """Folders like the built-in one, of other shapes."""
    fields = {
        "experts": {
            "model_type": "qwen3_moe",
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "norm_topk_prob": True,
        },
        "neox": {"model_type": "gpt_neox"},
        "biased": {"mlp_bias": True},
        "stretched": {"rope_parameters": {"rope_theta": 1e4, "rope_type": "dynamic", "factor": 2.0}},
        "half rotary": {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5}},
    }
    for name, changed in fields.items():
        shutil.copytree(BUILTIN_FOLDER, tmp_path / name)
        path = tmp_path / name / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    return tmp_path


def load(tmp_path, *overrides):
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    config = load_config(tmp_path / "recipe.yaml", list(overrides)).config
    check_roles(config, load_tokenizer(str(BUILTIN_FOLDER)))
    return config


OF_ALL = f"{ACTOR}.megatron."
LAYOUTS = {
    "no divisor": (megatron(TP=3), "tensor_model_parallel_size", ["3 (tensor) × 1 (pipeline)", "8 ranks = 2 × 3 + 2"]),
    "too many": (megatron(PP=4, CP=4), "pipeline_model_parallel_size", ["16 ranks", "8 ranks = 0 × 16 + 8"]),
    "none": (megatron(TP=0), "tensor_model_parallel_size", ["≥ 1"]),
    "chunks of one stage": (
        megatron(VP=2),
        "virtual_pipeline_model_parallel_size",
        ["2 chunks a stage, and there is one stage"],
    ),
    "one chunk": (megatron(PP=2, VP=1), "virtual_pipeline_model_parallel_size", ["≥ 2"]),
    "layers": (megatron(PP=8), "pipeline_model_parallel_size", ["4 layers do not divide by 8", "4 = 0 × 8 + 4"]),
    "layers of chunks": (megatron(PP=2, VP=4), "virtual_pipeline_model_parallel_size", ["4 layers do not divide by 8"]),
    "padding": (
        megatron(TP=8),
        "tensor_model_parallel_size",
        ["8 ranks for 4 heads", "4 of 8 would be padding", "at most 4"],
    ),
    "heads": (megatron(CP=8), "context_parallel_size", ["4 attention heads a rank do not divide by 8"]),
    "heads of tensor ranks": (
        megatron(TP=2, CP=4),
        "context_parallel_size",
        ["2 attention heads a rank do not divide by 4"],
    ),
    "experts of none": (megatron(EP=2), "expert_model_parallel_size", ["the model has none"]),
    "experts over ranks": (
        megatron(TP=2, EP=8),
        "expert_model_parallel_size",
        ["8 (expert) × 2 (expert tensor)", "no divisor of 8 ranks"],
    ),
    "matrices of no experts": (megatron(TP=2, ETP=1), "expert_tensor_parallel_size", ["1 beside 2 tensor ranks"]),
    "unknown field": (
        megatron(**{"override_transformer_config.recompute_granularit": "full"}),
        "override_transformer_config.recompute_granularit",
        ["recompute_granularity"],
    ),
    "layers of nothing": (
        megatron(**{"override_transformer_config.recompute_num_layers": 1}),
        "override_transformer_config.recompute_num_layers",
        ["no effect", "recompute_granularity"],
    ),
    "a stage of one": (
        megatron(**{"override_transformer_config.num_layers_in_first_pipeline_stage": 2}),
        "override_transformer_config.num_layers_in_first_pipeline_stage",
        ["one stage"],
    ),
    "unknown module": (
        megatron(**{"override_transformer_config.recompute_granularity": "selective"})
        + megatron(**{"override_transformer_config.recompute_modules": "[layernorm]"}),
        "override_transformer_config.recompute_modules[0]",
        ["core_attn | mlp | moe"],
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_that_does_not_come_out_is_explained(tmp_path, layout):
    overrides, field, words = LAYOUTS[layout]
    with pytest.raises(UserError) as caught:
        load(tmp_path, *overrides)
    assert caught.value.field == OF_ALL + field
    assert all(word in f"{caught.value.reason} {caught.value.remedy}" for word in words)


OTHERS = {
    "critic": (
        [GAE, *megatron(TP=2), *megatron("critic", TP=4)],
        "critic.megatron.tensor_model_parallel_size",
        ["4 beside 2", "ranks of its own"],
    ),
    "reference": (
        [KL, *megatron(PP=2), *megatron("actor_rollout_ref.ref", PP=1)],
        "actor_rollout_ref.ref.megatron.pipeline_model_parallel_size",
        ["1 beside 2"],
    ),
    "critic's ranks": (
        [GAE, *megatron(TP=2), "trainer.resource_pools={critic: 3}"],
        "critic.megatron.tensor_model_parallel_size",
        ["3 ranks = 1 × 2 + 1"],
    ),
    "critic's strategy": ([GAE, "critic.strategy=fsdp2"], "critic.strategy", ["one kind"]),
    "reference's layers": (
        [KL, "trainer.resource_pools={ref: 3}", *megatron("actor_rollout_ref.ref", PP=3)],
        "actor_rollout_ref.ref.megatron.pipeline_model_parallel_size",
        ["4 layers do not divide by 3"],
    ),
    "exact KL elsewhere": (
        [KL, f"{ACTOR}.kl_loss_type=full", *megatron("actor_rollout_ref.ref", param_offload="true")],
        "actor_rollout_ref.ref.megatron.param_offload",
        ["the actor's passes"],
    ),
    "reference's recomputation": (
        [KL, *megatron("actor_rollout_ref.ref", **{"override_transformer_config.recompute_granularity": "full"})],
        "actor_rollout_ref.ref.megatron.override_transformer_config.recompute_granularity",
        ["no backward pass"],
    ),
    "adapters": (["actor_rollout_ref.model.lora_rank=4"], "actor_rollout_ref.model.lora_rank", ["FSDP2 only"]),
    "exact KL": ([KL, f"{ACTOR}.kl_loss_type=full", *megatron(PP=2)], f"{ACTOR}.kl_loss_type", ["one rank"]),
    "laboratory": (
        ["actor_rollout_ref.rollout.simulate_mismatch.noise=0.1"],
        "actor_rollout_ref.rollout.simulate_mismatch.noise",
        ["fsdp2"],
    ),
    "keys of FSDP": (
        [f"{ACTOR}.fsdp_config.fsdp_size=2"],
        f"{ACTOR}.fsdp_config.fsdp_size",
        ["no effect with strategy: megatron"],
    ),
    "keys without it": (
        [f"{ACTOR}.strategy=fsdp2", *megatron(TP=2)],
        f"{ACTOR}.megatron.tensor_model_parallel_size",
        ["no effect with strategy: fsdp2"],
    ),
    "one process": (
        ["trainer.placement=local", "trainer.n_gpus_per_node=2"],
        "trainer.n_gpus_per_node",
        ["one process"],
    ),
    "share of data ranks": (
        [f"{ACTOR}.use_dynamic_bsz=false", f"{ACTOR}.ppo_micro_batch_size_per_gpu=5", *megatron(TP=4)],
        f"{ACTOR}.ppo_micro_batch_size_per_gpu",
        ["32 samples does not split over 2 ranks"],
    ),
}


@pytest.mark.parametrize("case", OTHERS)
def test_what_does_not_go_with_it_is_explained(tmp_path, case):
    overrides, field, words = OTHERS[case]
    with pytest.raises(UserError) as caught:
        load(tmp_path, *overrides)
    assert caught.value.field == field and caught.value.remedy
    assert all(word in f"{caught.value.reason} {caught.value.remedy}" for word in words)


@pytest.mark.parametrize(
    ("model", "overrides", "field", "words"),
    [
        ("experts", megatron(EP=4), OF_ALL + "expert_model_parallel_size", ["6 experts do not divide by 4"]),
        ("experts", megatron(TP=2, sequence_parallel="false"), OF_ALL + "sequence_parallel", ["tokens are divided"]),
        ("stretched", [], "actor_rollout_ref.model.path", ["dynamic"]),
        ("neox", [], "actor_rollout_ref.model.path", ["gpt_neox", "llama"]),
        ("biased", [], "actor_rollout_ref.model.path", ["mlp_bias"]),
        ("half rotary", [], "actor_rollout_ref.model.path", ["partial_rotary_factor"]),
    ],
)
def test_a_model_that_is_not_computed_is_refused(tmp_path, models, model, overrides, field, words):
    with pytest.raises(UserError) as caught:
        load(tmp_path, f"actor_rollout_ref.model.path={models / model}", *overrides)
    assert caught.value.field == field and all(word in caught.value.reason for word in words)


def test_what_is_missing_is_named(tmp_path, monkeypatch):
    there = architectures.importlib.util.find_spec
    monkeypatch.setattr(
        architectures.importlib.util, "find_spec", lambda name: None if "megatron" in name else there(name)
    )
    with pytest.raises(MissingExtraError, match=r"pellucid\[megatron\]"):
        load(tmp_path)
    monkeypatch.setattr(
        architectures.importlib.util, "find_spec", lambda name: None if name == "mindspeed" else there("json")
    )
    with pytest.raises(UserError, match="MindSpeed"):
        architectures.require_megatron("npu")


def test_the_plan_prints_layout_and_share(tmp_path):
    config = load(tmp_path, *megatron(TP=2, PP=2, VP=2))
    rows = dict(plan_rows(build_plan(config, 50, None)))
    assert rows["ranks"].endswith("strategy megatron: 2 tensor × 2 pipeline × 2 data, 2 chunks a stage")
    assert "32 samples per mini-batch ÷ 2 data ranks" in rows["micro-batches"]


def test_the_adaptor_comes_before_megatron_core(monkeypatch):
    asked = []
    monkeypatch.setattr(architectures.importlib, "import_module", asked.append)
    for kind in ("cpu", "npu"):
        architectures.import_adaptor(kind)
    assert asked == ["mindspeed.megatron_adaptor"]
    assert "megatron" not in {name for module in (build, architectures) for name in vars(module)}
