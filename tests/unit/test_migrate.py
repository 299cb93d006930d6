"""The way from verl: launch scripts, commands and YAML become a config, with one list of what became of each key."""

import os
import shutil
import subprocess

import pytest

from pellucid.config import load_config
from pellucid.config.launch import Script
from pellucid.config.migrate import migrate
from pellucid.errors import UserError

SCRIPT = r"""#!/usr/bin/env bash
set -euo pipefail
# one run of several settings
MODEL=${MODEL:-"org/model-1b"}
ROOT=${ROOT:-$HOME/work}
prompt=$((512 * 2)); response=2048
budget=$(((prompt + response) * 2))
engine="vllm"; devices=gpu
EXTRA=()
case "$devices" in
    gpu | npu) memory=0.6 ;;
    *) exit 1 ;;
esac
if [ "$engine" = sglang ] && { [ $response -gt 4096 ] || [ "$prompt" != 1024 ]; }; then
    EXTRA+=(actor_rollout_ref.rollout.n=2)
elif [[ $engine == "vllm" ]]; then
    EXTRA+=(
        actor_rollout_ref.rollout.n=8   # samples
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.swap_space=4"
    )
else
    EXTRA+=(actor_rollout_ref.rollout.n=3)
fi
[ -n "$engine" ] && memory=0.7 || memory=0.1
python3 tools/prepare.py --out "$ROOT/data"
python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="['$ROOT/a.parquet', '$ROOT/b.parquet']" \
    data.max_prompt_length=$prompt data.max_response_length=${response} \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$budget \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.rollout.name=$engine \
    actor_rollout_ref.rollout.gpu_memory_utilization=${memory} \
    trainer.logger='["console","wandb"]' \
    trainer.experiment_name=run_$(basename $MODEL)_'$x' \
    "${EXTRA[@]}" $@ 2>&1 | tee "$ROOT/log.txt"
"""
COMMAND = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=a.parquet " \
    "actor_rollout_ref.model.path=m actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=4 "
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
MEGATRON = f"{ACTOR}.megatron"


def command(*words: str, drops: bool = False):
    return migrate(COMMAND + " ".join(words), drops)


def loaded(done, tmp_path):
    (file := tmp_path / "new.yaml").write_text(done.yaml)
    return load_config(file, [])


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_a_script_is_read_as_the_shell_reads_it(tmp_path):
    stub = "python3() { for word in \"$@\"; do printf '%s\\n' \"$word\"; done; }; tee() { cat; }\n"
    environment = {"PATH": os.environ["PATH"], "HOME": "/home/me"}
    ran = subprocess.run(["bash", "-c", stub + SCRIPT], capture_output=True, text=True, env=environment, check=True)
    words = ran.stdout.splitlines()
    [call] = [each for each in Script(SCRIPT, {"HOME": ["/home/me"]}).calls() if "verl" in each.program]
    assert call.words == words[words.index("verl.trainer.main_ppo") + 1 :]


def test_a_script_becomes_a_config_that_loads(tmp_path):
    (script := tmp_path / "run.sh").write_text(SCRIPT)
    done = migrate(str(script))
    assert not done.unsupported
    config = loaded(done, tmp_path).config
    home = os.environ["HOME"]
    assert config.data.train_files == [f"{home}/work/a.parquet", f"{home}/work/b.parquet"]
    assert (config.data.max_prompt_length, config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu) == (1024, 6144)
    rollout = config.actor_rollout_ref.rollout
    assert (rollout.n, rollout.gpu_memory_utilization, rollout.engine_kwargs.vllm) == (8, 0.7, {"swap_space": 4})
    assert (config.trainer.experiment_name, config.trainer.logger) == ("run_model-1b_$x", ["console", "wandb"])
    assert "data.train_files" in done.taken and "${oc.env:HOME} is not known here: data.train_files" in done.unknown
    # What verl does where nothing is set.
    assert (config.data.train_batch_size, config.trainer.n_gpus_per_node, config.trainer.placement) == (1024, 8, "ray")
    assert {"data.train_batch_size", "trainer.placement"} < set(done.added)
    titles = [line.split(" (")[0] for line in done.lines() if not line.startswith(" ")]
    assert titles == ["Taken as is", "Added, as verl does it where nothing is set", "To look at"]


@pytest.mark.parametrize(
    "wrapped",
    [
        "ray job submit --address http://h:1 --runtime-env e.yaml -- {}",
        "docker exec box bash -c '{}'",
        "CUDA_VISIBLE_DEVICES=0 nohup {} > log 2>&1 &",
        "srun --nodes=1 \\\n  {}",
        "train() {{\n  {} \"$@\"\n}}\ntrain",
        "cat <<EOF > x\npython3 -m verl.trainer.main_ppo data.train_batch_size=3\nEOF\n{}",
        "python3 -m verl.trainer.main_generation data.path=x\n{}",
    ],
)
def test_a_training_is_found_wherever_it_is_started(wrapped):
    done = migrate(wrapped.format(COMMAND + "trainer.total_epochs=7"))
    assert not done.unsupported and done.tree["trainer"]["total_epochs"] == 7 and done.tree["data"]["train_batch_size"] == 1024


def test_of_several_trainings_one_is_read():
    text = f"for lr in 1 2; do\n{COMMAND} {ACTOR}.optim.lr=1e-5\ndone\n{COMMAND} {ACTOR}.optim.lr=1e-6"
    assert migrate(text).tree["actor_rollout_ref"]["actor"]["optim"]["lr"] == 1e-5
    second = migrate(text, call=2)
    assert second.tree["actor_rollout_ref"]["actor"]["optim"]["lr"] == 1e-6
    assert any("2 trainings" in line for line in second.unknown)


def test_what_a_comment_or_a_blank_cut_off_is_read_all_the_same():
    done = migrate(f"{COMMAND} \\\n  # data.shuffle=False \\\n  data.max_prompt_length=9 \\ \n  trainer.nnodes=1")
    assert done.tree["data"]["max_prompt_length"] == 9 and done.tree["trainer"]["nnodes"] == 1


def test_what_only_the_shell_knows_is_shown_and_may_be_told(tmp_path):
    (script := tmp_path / "run.sh").write_text(
        "DEVICE=${DEVICE:-$(probe || echo gpu)}\ncase $DEVICE in gpu) n=2 ;; npu) n=16 ;; esac\n"
        f"{COMMAND} trainer.n_gpus_per_node=$n trainer.nnodes=$NODES trainer.project_name=p_$(date +%Y) trainer.save_freq=$1"
    )
    done = migrate(str(script))
    assert not done.unsupported and "${oc.env:NODES}" in done.yaml and "p_<date +%Y>" in done.yaml
    assert done.tree["trainer"]["n_gpus_per_node"] == 2
    shown = "\n".join(done.lines())
    assert "--set DEVICE=" in shown and "<argument 1> is not known here: trainer.save_freq" in shown
    told = migrate(str(script), variables=("DEVICE=npu", "NODES=4"))
    assert (told.tree["trainer"]["n_gpus_per_node"], told.tree["trainer"]["nnodes"]) == (16, 4)
    assert told.tree["trainer"]["ray_address"] == "auto"


@pytest.mark.parametrize(
    ("words", "new"),
    [
        ("critic.model.fsdp_config.param_offload=True", {"critic.fsdp_config.param_offload": True}),
        ("custom_reward_function.path=r.py", {"reward_model.custom_reward_function.path": "r.py"}),
        ("reward.custom_reward_function.path=r.py", {"reward_model.custom_reward_function.path": "r.py"}),
        ("trainer.logger=console", {"trainer.logger": ["console"]}),
        (f"{ACTOR}.fsdp_config.model_dtype=bf16", {"actor_rollout_ref.model.dtype": "bf16"}),
        (f"{ACTOR}.optim.warmup_style=cosine", {f"{ACTOR}.optim.lr_scheduler_type": "cosine"}),
        (f"{ACTOR}.policy_loss.loss_mode=gspo {ACTOR}.loss_agg_mode=token-mean", {f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean"}),
        (f"{ACTOR}.policy_loss.loss_mode=cispo {ACTOR}.clip_ratio_low=10", {f"{ACTOR}.clip_ratio_low": 1.0}),
        (
            f"{ACTOR}.ppo_max_token_len_per_gpu=700 {ACTOR}.ulysses_sequence_parallel_size=2 {ACTOR}.use_dynamic_bsz=true",
            {f"{ACTOR}.ppo_max_token_len_per_gpu": 1024},
        ),
        (f"{ACTOR}.ppo_mini_batch_size=16 {ACTOR}.ppo_micro_batch_size_per_gpu=6", {f"{ACTOR}.ppo_micro_batch_size_per_gpu": 4}),
        ("model_engine=megatron", {f"{ACTOR}.strategy": "megatron"}),
        (f"{ACTOR}.model_engine=megatron", {f"{ACTOR}.strategy": "megatron"}),
        (f"model_engine=megatron {MEGATRON}.dtype=float32", {"actor_rollout_ref.model.dtype": "float32"}),
        (f"{ACTOR}.optim.lr_decay_style=cosine", {f"{ACTOR}.optim.lr_scheduler_type": "cosine"}),
        (
            f"model_engine=megatron {ACTOR}.optim.override_optimizer_config.optimizer_cpu_offload=True "
            f"{ACTOR}.optim.override_optimizer_config.optimizer_offload_fraction=0.5",
            {f"{MEGATRON}.optimizer_offload": True},
        ),
        (
            "+actor_rollout_ref.model.override_config.model_config.max_position_embeddings=9",
            {"actor_rollout_ref.model.override_config": {"max_position_embeddings": 9}},
        ),
        (
            "reward_model.reward_manager=dapo +reward_model.reward_kwargs.overlong_buffer_cfg.enable=True "
            "+reward_model.reward_kwargs.overlong_buffer_cfg.len=64 +reward_model.reward_kwargs.max_resp_len=512",
            {"reward_model.overlong_buffer.enable": True, "reward_model.overlong_buffer.len": 64},
        ),
    ],
)  # fmt: skip
def test_keys_with_another_place_or_value_are_renamed(words, new, tmp_path):
    done = command(words)
    text = "\n".join(done.renamed)
    assert not done.unsupported and done.renamed
    for key, value in new.items():
        node = done.tree
        for name in key.split("."):
            node = node.get(name, {})
        assert node == value or key.startswith("critic"), (node, text)


@pytest.mark.parametrize(
    "word",
    [
        f"{ROLLOUT}.log_prob_use_dynamic_bsz=True", "+ray_kwargs.ray_init.runtime_env.py_executable=null", "model_engine=dp",
        f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes=4096", "actor_rollout_ref.ref.strategy=fsdp2",
        f"{ACTOR}.entropy_from_logits_with_chunking=True", "trainer.rollout_data_dir=x", "distillation.enabled=False",
        "critic.enable=False", "reward_model.reward_manager=prime", f"{ACTOR}.kl_loss_coef=0.5", "~trainer.logger",
        "+reward_model.reward_kwargs.overlong_buffer_cfg.enable=False", "actor_rollout_ref.model.use_fused_kernels=True",
    ],
)  # fmt: skip
def test_what_changes_no_result_is_dropped_with_the_reason(word, tmp_path):
    done = command(word)
    assert not done.unsupported and done.dropped and all(done.dropped.values())
    assert loaded(done, tmp_path).config == loaded(command(), tmp_path).config


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("data.image_key=images", "data.image_key"),
        ("distillation.enabled=True distillation.nnodes=1", "distillation.enabled"),
        (f"{ROLLOUT}.name=trtllm", f"{ROLLOUT}.name"),
        (f"{ACTOR}.optim.override_optimizer_config.fused=True", f"{ACTOR}.optim.override_optimizer_config.fused"),
        (f"{ACTOR}.optim.min_lr=1e-7 {ACTOR}.optim.lr_decay_style=cosine", f"{ACTOR}.optim.min_lr"),
        (f"{ACTOR}.optim.lr_decay_steps=9", f"{ACTOR}.optim.lr_decay_steps"),
        (f"model_engine=megatron {ACTOR}.optim.optimizer=sgd", f"{ACTOR}.optim.optimizer"),
        (f"model_engine=megatron {MEGATRON}.use_dist_checkpointing=True", f"{MEGATRON}.use_dist_checkpointing"),
        (f"model_engine=megatron {MEGATRON}.override_transformer_config.moe_aux_loss_coeff=0.1",
         f"{MEGATRON}.override_transformer_config.moe_aux_loss_coeff"),
        ("model_engine=megatron trainer.n_gpus_per_node=6 actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4",
         f"{MEGATRON}.tensor_model_parallel_size"),
        ("model_engine=megatron actor_rollout_ref.model.lora.rank=8", "actor_rollout_ref.model.lora.rank"),
        ("data.trian_batch_size=4", "data.trian_batch_size"),
        ("data.train_batch_size=many", "data.train_batch_size"),
        ("algorithm.adv_estimator=grop", "algorithm.adv_estimator"),
        ("trainer.experiment_name=a}", "trainer.experiment_name=a}"),
        ("reward_model.reward_manager=batch", "reward_model.reward_manager"),
        ("+reward_model.reward_kwargs.bonus=2", "reward_model.reward_kwargs.bonus"),
        ("+reward_model.reward_kwargs={overlong_buffer_cfg:{enable:true,len:8},max_resp_len:99} data.max_response_length=64",
         "data.max_response_length"),
        ("--config-path=conf --config-name=mine", "--config-name"),
        ("model_engine=veomni", "engine"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_named_and_can_be_left_out(words, key, tmp_path):
    done = command(words)
    assert next(iter(done.unsupported)) == key, done.unsupported
    assert next(done.lines()).startswith("Not supported")
    loaded(command(words, drops=True), tmp_path)


@pytest.mark.parametrize("start", ["--config-name=ppo_megatron_trainer.yaml", "model_engine=megatron", f"{ACTOR}.strategy=megatron"])
def test_megatron_comes_with_verls_defaults_and_the_roles_are_spread_alike(start, tmp_path):
    done = command(
        start, f"{MEGATRON}.tensor_model_parallel_size=2 {MEGATRON}.pipeline_model_parallel_size=2 {ACTOR}.use_kl_loss=True "
        "actor_rollout_ref.ref.megatron.tensor_model_parallel_size=4 critic.megatron.pipeline_model_parallel_size=1 "
        f"{ACTOR}.ppo_mini_batch_size=2 {ACTOR}.ppo_micro_batch_size_per_gpu=4 data.train_batch_size=8",
    )  # fmt: skip
    assert not done.unsupported and "actor_rollout_ref.model.enable_gradient_checkpointing" not in done.added
    config = loaded(done, tmp_path).config
    assert config.uses_megatron and config.actor_rollout_ref.model.dtype == "bfloat16"
    # 2 prompts × 4 samples over 8 ÷ (2 × 2) data ranks are 4 each: the micro-batch stays as it is.
    assert (config.data_ranks("actor"), config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu) == (2, 4)
    assert config.megatron("ref").tensor_model_parallel_size == config.megatron("critic").pipeline_model_parallel_size == 2
    assert {"actor_rollout_ref.ref.megatron.tensor_model_parallel_size", "critic.megatron.pipeline_model_parallel_size"} <= set(done.dropped)


def test_the_file_that_a_script_begins_from_is_read(tmp_path):
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "mine.yaml").write_text(
        "defaults: [ppo_trainer, _self_]\nhydra: {searchpath: [x]}\ndata: {max_prompt_length: 9, shuffle: false}\n"
    )
    (script := tmp_path / "run.sh").write_text(
        f'HERE="$(pwd)"\n{COMMAND} --config-path="$HERE/conf" --config-name=mine data.max_prompt_length=11'
    )
    done = migrate(str(script))
    assert not done.unsupported
    assert (done.tree["data"]["max_prompt_length"], done.tree["data"]["shuffle"]) == (11, False)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("nowhere.sh", "does not exist"),
        ("python3 -m verl.trainer.sft_trainer data.x=1", "programs that it runs: verl.trainer.sft_trainer"),
        ("nowhere.yaml", "does not exist"),
    ],
)
def test_what_starts_no_training_is_refused(source, words):
    with pytest.raises(UserError, match=words):
        migrate(source)
