"""The rollout section and the Megatron sections of verl's launch scripts and YAML: they run as they are, or each key that
cannot has an answer.
"""

from dataclasses import replace

import pytest
import yaml
from config_cases import error_of, load, migrated

from pellucid.config.migrate import migrate

ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
SCRIPT = """
    name=vllm mode=sync n=16 temperature=1.0 top_p=1.0 top_k=-1 tensor_model_parallel_size=1 gpu_memory_utilization=0.80
    enforce_eager=False free_cache_engine=True enable_chunked_prefill=True enable_prefix_caching=True max_num_seqs=1024
    max_num_batched_tokens=22528 max_model_len=22528 load_format=dummy_dtensor layered_summon=True disable_log_stats=False
    log_prob_micro_batch_size_per_gpu=32 log_prob_use_dynamic_bsz=True log_prob_max_token_len_per_gpu=22528
    val_kwargs.temperature=1.0 val_kwargs.top_p=0.7 val_kwargs.top_k=-1 val_kwargs.do_sample=True val_kwargs.n=1
    calculate_log_probs=True agent.num_workers=8 multi_turn.enable=False
"""
REFUSED = """
    load_format=bitsandbytes data_parallel_size=2 pipeline_model_parallel_size=2 expert_parallel_size=8 logprobs_mode=raw_logprobs
    agent.agent_loop_config_path=loops.yaml skip_rollout=True
    quantization=fp8 over_sample_rate=0.1 engine_kwargs.trtllm.max=1
"""
BLOCK = """
actor_rollout_ref:
  rollout:
    _target_: verl.workers.config.RolloutConfig
    name: vllm
    mode: async
    temperature: 1.0
    top_k: -1
    top_p: 1
    prompt_length: ${oc.select:data.max_prompt_length,512}
    response_length: ${oc.select:data.max_response_length,512}
    dtype: bfloat16
    gpu_memory_utilization: 0.5
    ignore_eos: False
    enforce_eager: True
    cudagraph_capture_sizes: null
    free_cache_engine: True
    tensor_model_parallel_size: 1
    data_parallel_size: 1
    expert_parallel_size: 1
    pipeline_model_parallel_size: 1
    max_num_batched_tokens: 8192
    max_model_len: null
    max_num_seqs: 1024
    enable_chunked_prefill: True
    enable_prefix_caching: True
    logprobs_mode: processed_logprobs
    scheduling_policy: fcfs
    load_format: dummy
    log_prob_micro_batch_size: null
    log_prob_micro_batch_size_per_gpu: null
    log_prob_use_dynamic_bsz: ${oc.select:actor_rollout_ref.actor.use_dynamic_bsz,false}
    log_prob_max_token_len_per_gpu: ${oc.select:actor_rollout_ref.actor.ppo_max_token_len_per_gpu,16384}
    disable_log_stats: True
    do_sample: True
    n: 4
    over_sample_rate: 0
    multi_stage_wake_up: false
    engine_kwargs: {vllm: {disable_mm_preprocessor_cache: null, swap_space: null}}
    val_kwargs: {_target_: verl.workers.config.SamplingConfig, top_k: -1, top_p: 1.0, temperature: 0, n: 1, do_sample: False}
    multi_turn: {_target_: verl.workers.config.MultiTurnConfig, enable: False, max_assistant_turns: null, format: hermes}
    calculate_log_probs: False
    agent: {_target_: verl.workers.config.AgentLoopConfig, num_workers: 8, default_agent_loop: single_turn_agent,
            agent_loop_config_path: null, custom_async_server: {path: null, name: null}}
    checkpoint_engine: {backend: naive, update_weights_bucket_megabytes: 2048, engine_kwargs: {}}
    trace: {backend: null, token2text: False}
    skip_rollout: False
    skip_dump_dir: /tmp/rollout_dump
    skip_tokenizer_init: True
    prometheus: {enable: false, port: 9090, file: /tmp/prometheus.yml, served_model_name: null}
    quantization: null
    quantization_config_file: null
    layered_summon: False
"""


def test_the_rollout_keys_of_a_launch_script_run_as_they_are():
    loaded = load(*(f"{ROLLOUT}.{key}" for key in SCRIPT.split()))
    rollout = loaded.config.actor_rollout_ref.rollout
    assert (rollout.name, rollout.mode, rollout.n, rollout.gpu_memory_utilization) == ("vllm", "colocated", 16, 0.8)
    assert (rollout.max_num_seqs, rollout.max_num_batched_tokens, rollout.max_model_len) == (1024, 22528, 22528)
    assert not rollout.enforce_eager and loaded.config.engines_sleep
    assert not load(*(f"{ROLLOUT}.{key}" for key in [*SCRIPT.split(), "free_cache_engine=False"])).config.engines_sleep


def test_the_rollout_block_of_verls_yaml_runs_as_it_is(tmp_path):
    (file := tmp_path / "verl.yaml").write_text(BLOCK)
    loaded = load("actor_rollout_ref.model.dtype=bfloat16", source=file)
    [dropped] = [line for line in loaded.notices if line.startswith("Keys that change no result here")]
    assert all(f"{ROLLOUT}.{key}" in dropped for key in ("load_format", "agent.num_workers", "log_prob_use_dynamic_bsz"))
    text, _ = migrated(file)
    (new := tmp_path / "new.yaml").write_text(text)
    assert load("actor_rollout_ref.model.dtype=bfloat16", source=new).config == loaded.config
    assert "agent" not in yaml.safe_load(text)["actor_rollout_ref"]["rollout"]


MEGATRON_FILE = """
defaults: [ppo_megatron_trainer, _self_]
data: {train_files: x.parquet, train_batch_size: 16, tool_config_path: null, tokenizer: null}
algorithm: {_target_: verl.trainer.config.AlgoConfig, adv_estimator: gae}
actor_rollout_ref:
  hybrid_engine: True
  nccl_timeout: 600
  model:
    path: m
    override_config: {model_config: {}, moe_config: {freeze_moe_router: False}}
    use_remove_padding: false
    lora: {type: lora, merge: False, rank: 0, alpha: 32, target_modules: [linear_qkv, linear_proj]}
  actor:
    _target_: verl.workers.config.McoreActorConfig
    strategy: megatron
    ppo_mini_batch_size: 8
    use_kl_loss: true
    use_remove_padding: false
    load_weight: True
    checkpoint: {_target_: verl.workers.config.McoreCheckpointConfig, async_save: False, strict: True, mbridge_config: {}}
    optim: &optim
      _target_: verl.workers.config.McoreOptimizerConfig
      lr: 1.0e-06
      clip_grad: 0.5
      optimizer: adam
      lr_warmup_init: 0.0
      lr_decay_steps: null
      lr_decay_style: linear
      min_lr: 0.0
      weight_decay_incr_style: constant
      lr_wsd_decay_style: exponential
      lr_wsd_decay_steps: null
      use_checkpoint_opt_param_scheduler: False
      use_precision_aware_optimizer: True
      use_layer_wise_distributed_optimizer: False
      main_grads_dtype: fp32
      exp_avg_sq_dtype: fp32
      muon_momentum: 0.95
      override_optimizer_config: {}
    megatron: &megatron
      _target_: verl.workers.config.McoreEngineConfig
      param_offload: True
      grad_offload: True
      optimizer_offload: True
      tensor_model_parallel_size: 2
      expert_model_parallel_size: 1
      expert_tensor_parallel_size: null
      pipeline_model_parallel_size: 2
      virtual_pipeline_model_parallel_size: null
      context_parallel_size: 1
      sequence_parallel: True
      use_distributed_optimizer: True
      use_dist_checkpointing: False
      dist_checkpointing_path: null
      dist_checkpointing_prefix: ''
      dynamic_context_parallel: False
      max_seqlen_per_dp_cp_rank: null
      dist_ckpt_optim_fully_reshardable: False
      seed: 42
      override_ddp_config: {}
      override_transformer_config:
        recompute_granularity: selective
        recompute_modules: [core_attn]
        recompute_method: null
        recompute_num_layers: null
        attention_backend: flash
        apply_rope_fusion: True
        moe_router_dtype: fp32
        moe_grouped_gemm: True
        moe_token_dispatcher_type: flex
        moe_aux_loss_coeff: 0.0
        account_for_loss_in_pipeline_split: True
        moe_router_load_balancing_type: none
        moe_router_bias_update_rate: 0
        moe_enable_deepep: True
        moe_shared_expert_overlap: False
        deallocate_pipeline_outputs: True
        persist_layer_norm: True
        context_parallel_algo: kvallgather_cp_algo
        use_flash_attn: True
        use_fused_rmsnorm: True
        normalization: RMSNorm
        swiglu: True
      override_mcore_model_config: {}
      use_mbridge: True
      vanilla_mbridge: True
      use_remove_padding: True
      pad_bshd_to_minibatch_max: True
      use_megatron_fsdp: False
      forward_only: False
      dtype: bfloat16
      router_replay: {mode: disabled, record_file: null}
      qat: {enable: false, mode: w4a16}
    profiler: &profiler
      _target_: verl.utils.profiler.ProfilerConfig
      enable: True
      all_ranks: True
      finish_hook_cmd: ${oc.select:global_profiler.finish_hook_cmd,null}
      tool_config: {npu: {contents: [npu, cpu], level: level0, analysis: True, discrete: True}}
  ref:
    strategy: megatron
    megatron:
      tensor_model_parallel_size: ${oc.select:actor_rollout_ref.actor.megatron.tensor_model_parallel_size,1}
      override_transformer_config: ${oc.select:actor_rollout_ref.actor.megatron.override_transformer_config,{}}
      param_offload: ${oc.select:actor_rollout_ref.actor.megatron.param_offload,False}
      optimizer_offload: False
      seed: ${oc.select:actor_rollout_ref.actor.megatron.seed,42}
      forward_only: True
    load_weight: True
  rollout: {name: vllm, n: 4, mode: async, layer_name_map: {qkv_layer_name: qkv}, profiler: {enable: False}}
critic:
  strategy: megatron
  nccl_timeout: 600
  load_weight: True
  optim: *optim
  megatron: *megatron
  loss_scale_factor: ${oc.select:actor_rollout_ref.actor.loss_scale_factor,null}
  model:
    override_config: {model_config: {}, moe_config: {freeze_moe_router: False}}
    tokenizer_path: ${oc.select:actor_rollout_ref.model.path,null}
  checkpoint: {save_contents: [model, optimizer, extra], load_contents: "${.save_contents}"}
reward_model:
  {enable: False, strategy: megatron, nccl_timeout: 600, load_weight: True, megatron: {tensor_model_parallel_size: 1}, max_length: null,
   model: {override_config: {}}, reward_loop_module_path: null, reward_loop_class_name: null}
trainer: {n_gpus_per_node: 8, placement: ray}
global_profiler:
  _target_: verl.utils.profiler.ProfilerConfig
  tool: npu
  steps: [2, 4]
  save_path: outputs/profile
"""


def test_a_megatron_file_runs_as_it_is_and_migrates_to_the_same(tmp_path):
    (file := tmp_path / "mcore.yaml").write_text(MEGATRON_FILE)
    (plain := tmp_path / "plain.yaml").write_text(MEGATRON_FILE.replace("defaults: [ppo_megatron_trainer, _self_]", ""))
    config = load(source=plain, base=[]).config
    actor, layout = config.actor_rollout_ref.actor, config.actor_rollout_ref.actor.megatron
    assert (actor.grad_clip, config.critic.grad_clip, actor.optim.lr_scheduler_type) == (0.5, 0.5, "linear")
    assert (config.actor_rollout_ref.model.dtype, config.actor_rollout_ref.model.override_config) == ("bfloat16", {})
    assert (layout.batch_ranks, layout.optimizer_offload, config.data_ranks("ref"), config.data_ranks("critic")) == (4, True, 2, 2)
    assert config.actor_rollout_ref.ref.megatron.override_transformer_config.recompute_modules == ["core_attn"]
    done = migrate(str(file))
    assert not done.unsupported, done.unsupported
    (new := tmp_path / "new.yaml").write_text(done.yaml)
    again = load("trainer.ray_address=null", "trainer.total_epochs=1", source=new, base=[]).config
    assert again.actor_rollout_ref == replace(config.actor_rollout_ref, rollout=again.actor_rollout_ref.rollout)
    assert again.critic == config.critic


@pytest.mark.parametrize(
    "key",
    [
        "actor_rollout_ref.ref.strategy=veomni", "reward_model.strategy=veomni", f"{ACTOR}.load_weight=false",
        f"{ACTOR}.optim.weight_decay_incr_style=linear", f"{ACTOR}.optim.lr_warmup_init=1e-7", f"{ACTOR}.optim.optimizer=sgd",
        f"{ACTOR}.optim.use_layer_wise_distributed_optimizer=true", f"{ACTOR}.optim.exp_avg_dtype=bf16",
        f"{ACTOR}.megatron.dynamic_context_parallel=true", f"{ACTOR}.megatron.override_mcore_model_config={{x:1}}",
        f"{ACTOR}.megatron.override_transformer_config.moe_z_loss_coeff=0.001",
        f"{ACTOR}.megatron.override_transformer_config.moe_router_dtype=fp64",
        f"{ACTOR}.megatron.override_transformer_config.moe_router_enable_expert_bias=true",
        "actor_rollout_ref.model.override_config.moe_config.freeze_moe_router=true",
    ],
)  # fmt: skip
def test_what_megatron_would_do_otherwise_stops_the_run(key):
    error = error_of(f"{ACTOR}.strategy=megatron", key)
    assert error.field == key.partition("=")[0] and "asks for what this version does not have" in str(error)


@pytest.mark.parametrize("where", ["actor_rollout_ref.actor", "critic"])
def test_a_number_format_that_megatron_knows_and_this_does_not_is_refused(where):
    assert error_of(f"{ACTOR}.strategy=megatron", f"{where}.megatron.dtype=float16").field == "actor_rollout_ref.model.dtype"


def test_the_settings_of_the_other_engine_may_stay_at_their_defaults():
    unset = "{param_offload: False, tensor_model_parallel_size: 1, use_mbridge: True, seed: 42, dtype: float32, grad_offload: True}"
    assert load(f"{ACTOR}.megatron={unset}").config == load().config
    assert "no effect" in str(error_of(f"{ACTOR}.megatron.tensor_model_parallel_size=2"))
    fsdp = "{strategy: fsdp, fsdp_size: -1, forward_prefetch: True, use_orig_params: True, forward_only: False, seed: 42}"
    under = f"{ACTOR}.strategy=megatron"
    assert load(under, f"{ACTOR}.fsdp_config={fsdp}").config == load(under).config
    assert "no effect" in str(error_of(under, f"{ACTOR}.fsdp_config.fsdp_size=2"))


def test_the_sizes_of_graphs_go_to_vllm():
    config = load(f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.enforce_eager=false", f"{ROLLOUT}.cudagraph_capture_sizes=[1,2,4]").config
    assert config.actor_rollout_ref.rollout.engine_kwargs.vllm == {"cudagraph_capture_sizes": [1, 2, 4]}


@pytest.mark.parametrize("key", REFUSED.split())
def test_what_would_change_the_run_and_is_not_there_stops_it(key):
    error = error_of(f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.{key}")
    assert error.field in f"{ROLLOUT}.{key.partition('=')[0]}" and "asks for what this version does not have" in str(error)


AGENT = f"{ROLLOUT}.agent"
TOOLS = f"{AGENT}.tools=[python]"


@pytest.mark.parametrize(
    ("keys", "max_turns"),
    [
        ("multi_turn.enable=True", 8),
        ("agent.default_agent_loop=tool_agent agent.num_workers=8", 8),
        ("agent.default_agent_loop=tool_agent multi_turn.enable=True", 8),
        ("agent.default_agent_loop=single_turn_agent multi_turn.enable=True multi_turn.max_turns=3", 3),
        ("multi_turn.enable=True multi_turn.max_assistant_turns=5", 5),
        ("multi_turn.enable=True multi_turn.max_user_turns=5", 6),
        ("multi_turn.enable=True multi_turn.max_user_turns=5 multi_turn.max_assistant_turns=7", 6),
        ("multi_turn.enable=True multi_turn.max_user_turns=null multi_turn.max_assistant_turns=7", 7),
    ],
)
def test_a_loop_of_several_turns_becomes_an_agent_with_tools(keys, max_turns):
    agent = load(TOOLS, *(f"{ROLLOUT}.{key}" for key in keys.split())).config.actor_rollout_ref.rollout.agent
    assert (agent.name, agent.max_turns, agent.format, agent.max_tool_output) == ("tools", max_turns, "auto", 4096)


def test_how_calls_are_written_and_results_are_cut_is_read(tmp_path):
    block = "{enable: true, format: llama3_json, max_tool_response_length: 256, tool_response_truncate_side: middle, " \
        "max_assistant_turns: null, tool_config_path: null, tokenization_sanity_check_mode: strict}"
    (file := tmp_path / "verl.yaml").write_text(f"actor_rollout_ref: {{rollout: {{multi_turn: {block}}}}}")
    loaded = load(TOOLS, source=file)
    agent = loaded.config.actor_rollout_ref.rollout.agent
    assert (agent.name, agent.format, agent.max_tool_output) == ("tools", "llama3", 256)
    text, _ = migrated(file)
    rollout = yaml.safe_load(text)["actor_rollout_ref"]["rollout"]
    assert rollout == {"agent": {"name": "tools", "format": "llama3", "max_tool_output": 256}}


@pytest.mark.parametrize(
    ("key", "remedy"),
    [
        ("multi_turn.tool_config_path=tools.yaml", "rollout.agent.tools: [file.py:function]"),
        ("multi_turn.interaction_config_path=talk.yaml", "rollout.agent.environment: file.py:Class"),
        ("multi_turn.completion_callback=mine.Callback", "rollout.agent.name: file.py:function"),
        ("multi_turn.max_parallel_calls=2", "max_tool_calls"),
        ("multi_turn.tool_response_truncate_side=left", "Set it to middle"),
        ("multi_turn.num_repeat_rollouts=4", "rollout.n."),
        ("multi_turn.max_asistant_turns=2", "max_assistant_turns"),
        ("agent.default_agent_loop=my_agent", "rollout.agent.name: file.py:function"),
        ("agent.agent_loop_config_path=loops.yaml", "rollout.agent.name: file.py:function"),
    ],
)
def test_what_a_loop_does_otherwise_here_is_said(key, remedy):
    error = error_of(TOOLS, f"{ROLLOUT}.multi_turn.enable=true", f"{ROLLOUT}.{key}")
    assert error.field == f"{ROLLOUT}.{key.partition('=')[0]}" and remedy in error.remedy


def test_a_format_that_nothing_reads_names_those_that_are():
    error = error_of(TOOLS, f"{ROLLOUT}.multi_turn.enable=true", f"{ROLLOUT}.multi_turn.format=gpt-oss")
    assert error.field == f"{AGENT}.format" and "hermes" in str(error)
