"""The rollout section of verl's launch scripts and YAML: it runs as it is, or each key that cannot has an answer."""

import pytest
import yaml
from config_cases import error_of, load, migrated

ROLLOUT = "actor_rollout_ref.rollout"
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
