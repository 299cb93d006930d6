"""verl's keys that Pellucid has no key for: the values at which each asks for nothing here, and why that is safe.

`compat.py` makes rows of them for runs and for `pellucid config migrate`. A pattern that is a section's stands for all
that is in it; the first that fits counts.
"""

from __future__ import annotations

from typing import Any

ANY = (...,)
_ENGINE = ("dp", "fsdp", "fsdp2", "megatron")
_EMPTY = "dummy dummy_dtensor dummy_megatron dummy_hf auto hf safetensors"
_GROUPS: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("all models have the actor's engine", _ENGINE, "*.ref.strategy reward_model.strategy *.fsdp_config.strategy"),
    ("", (), "*.veomni"),
    ("only another engine reads it", ANY, "*.fsdp_config.turbo_config"),
    ("how a number is computed changes no more than its rounding", ANY,
     "*.use_fused_kernels *.fused_kernel_options *.use_liger *.use_prefix_grouper *.pad_to_length* "
     "*_transformer_config.*_fusion *_transformer_config.use_fused_* *_transformer_config.use_flash_attn "
     "*_transformer_config.attention_backend"),
    ("how memory is saved changes no result; long sequences may need more of it here", ANY,
     "*.entropy_from_logits_* *.entropy_checkpointing *.sum_pi_squared_checkpointing *.enable_activation_offload "
     "*.tiled_mlp *.fsdp_config.wrap_policy *.rollout.multi_stage_wake_up *.use_megatron_fsdp"),
    ("a rank holds whole sequences, which changes no result, but needs more memory for long ones", ANY,
     "*.ulysses_sequence_parallel_size"),
    ("it changes the speed, and no result", ANY,
     "*.fsdp_config.forward_prefetch *.fsdp_config.use_torch_compile *.ref.use_torch_compile *.use_shm "
     "data.filter_overlong_prompts_workers *.deallocate_pipeline_outputs *.persist_layer_norm *.moe_grouped_gemm "
     "*.moe_enable_deepep *.moe_shared_expert_overlap *.context_parallel_algo *.moe_token_dispatcher_type"),
    ("where layers are cut changes no result; num_layers_in_first_pipeline_stage says it here", ANY,
     "*.account_for_*_in_pipeline_split"),
    ("data ranks always divide the optimizer's state", ANY, "*.use_distributed_optimizer"),
    ("param_offload moves the gradients, too", ANY, "*.megatron.grad_offload"),
    ("it only says how verl works inside", ANY,
     "*.fsdp_config.use_orig_params *.forward_only *.use_mbridge *.vanilla_mbridge *.pad_bshd_to_minibatch_max "
     "*_fully_reshardable* *.rollout.layer_name_map transfer_queue trainer.use_legacy_worker_impl "
     "trainer.ray_wait_register_center_timeout trainer.esi_redundant_time data.return_raw_input_ids "
     "data.return_full_prompt data.return_multi_modal_inputs data.image_patch_size hydra"),
    ("trainer.seed seeds every random stream", ANY, "*.fsdp_config.seed *.megatron.seed *.data_loader_seed"),
    ("a frozen model has no optimizer", ANY, "*.ref.*.optimizer_offload"),
    ("how a pass without gradients is cut changes no number; it is cut like the update", ANY,
     "*.rollout.log_prob_* *.log_prob_micro_batch_size critic.forward_* reward_model.use_dynamic_bsz "
     "reward_model.micro_batch_size"),
    ("sequences are always packed", ANY,
     "critic.model.use_remove_padding reward_model.model.use_remove_padding *.megatron.use_remove_padding "
     "*.actor.use_remove_padding"),
    ("algorithm.adv_estimator says whether there is a critic", ANY, "critic.enable"),
    ("another key, which is read, says the same", ANY, "*.rollout_n *.rollout.mtp *.rollout.qat"),
    ("it only adds a metric", ANY, "*.calculate_entropy *.rollout.moe_load_balance_metrics_interval"),
    ("AdamW is the optimizer", ("AdamW", "torch.optim", "adam"), "*.optim.optimizer *.optim.optimizer_impl"),
    ("the schedule is this one", (0.5, True), "*.optim.num_cycles *.optim.zero_indexed_step"),
    ("trainer.stall_timeout_s says how long a rank may hang", ANY, "*.nccl_timeout"),
    ("its state is in float32", ("fp32", True, False),
     "*.optim.main_grads_dtype *.optim.exp_avg_dtype *.optim.exp_avg_sq_dtype *.optim.use_precision_aware_optimizer"),
    ("an engine starts empty and is sent the trainer's weights, whatever this says", tuple(_EMPTY.split()),
     "*.rollout.load_format"),
    ("an engine is sent the trainer's weights in buckets, whatever this says", ANY,
     "*.rollout.layered_summon *.rollout.update_weights_bucket_megabytes *.rollout.checkpoint_engine "
     "*.model.lora.merge"),
    ("what an engine does is among the metrics", ANY, "*.rollout.disable_log_stats *.rollout.prometheus"),
    ("a run has one tokenizer, and one loop of requests", ANY,
     "*.rollout.skip_tokenizer_init *.agent.num_workers critic.model.tokenizer_path"),
    ("this is how it is done", ("processed_logprobs", "fcfs", "priority"),
     "*.rollout.logprobs_mode *.rollout.scheduling_policy"),
    ("this is how it is done", ("fp32", "none", "RMSNorm", True),
     "*.moe_router_dtype *.moe_router_load_balancing_type *_transformer_config.normalization "
     "*_transformer_config.swiglu"),
    ("every rollout is in the run's folder, where `pellucid rollouts` shows it", ANY,
     "*.rollout.trace trainer.rollout_data_dir trainer.validation_data_dir"),
    ("the order of validation changes no metric", ANY, "data.validation_shuffle"),
    ("when a response is scored changes no score", ANY,
     "reward_model.use_reward_loop reward_model.launch_reward_fn_async reward_model.num_workers"),
    ("a reward model is a role of its own, and reads text with its own tokenizer", ANY,
     "reward_model.rollout reward_model.model.fsdp_config reward_model.model.input_tokenizer"),
    ("a reward model is spread as the actor is", ANY, "reward_model.megatron"),
    ("trainer.resource_pools says where a role runs", ANY,
     "reward_model.enable_resource_pool reward_model.n_gpus_per_node reward_model.nnodes"),
    ("how Ray is started changes no result; trainer.ray_address joins a cluster", ANY, "ray_kwargs ray_init"),
    ("a checkpoint holds all roles; max_actor_ckpt_to_keep counts them", ANY,
     "trainer.max_critic_ckpt_to_keep critic.checkpoint"),
    ("what is loaded must fit whole", ANY, "*.checkpoint.strict"),
    ("captures are in the run's folder, and the hook runs once", ANY,
     "*.relocate_results *.finish_hook_*ranks *.profiler.finish_hook_cmd"),
    ("profiler.schedule says this", (0,), "*.tool_config.torch.schedule.* *.tool_config.*.profile_token_*"),
    ("all is recorded", ("all", {}), "*.torch_memory.context *.torch_memory.stacks *.torch_memory.kw_args"),
    ("this version reads neither images nor sound", (), "data.image_key data.video_key data.audio_key"),
    # What this version does not have, but at the value that asks for nothing.
    ("", (False,),
     "*.fsdp_config.full_determinism *.rollout.full_determinism *.qat.enable *.calculate_sum_pi_squared *.mtp.enable "
     "*.freeze_vision_tower *.rollout.disaggregation.enabled *.rollout.skip_rollout distillation.enabled "
     "*.enable_rollout_routing_replay algorithm.use_pf_ppo trainer.del_local_ckpt_after_load "
     "*.dynamic_context_parallel *.moe_router_enable_expert_bias *.moe_config.freeze_moe_router "
     "*.optim.use_checkpoint_opt_param_scheduler *.optim.use_layer_wise_distributed_optimizer"),
    ("", (1,), "*.rollout.data_parallel_size *.rollout.pipeline_model_parallel_size *.rollout.expert_parallel_size"),
    ("", (0,), "*.rollout.over_sample_rate *.model.lora.rank critic.model.lora_rank *.moe_aux_loss_coeff "
     "*.moe_z_loss_coeff *.moe_router_bias_update_rate *.optim.lr_warmup_init"),
    ("", ({},), "*.engine_kwargs.trtllm data.mm_processor_kwargs data.apply_chat_template_kwargs "
     "reward_model.model.override_config *.override_ddp_config *.override_mcore_model_config *.mbridge_config"),
    ("", ("constant",), "*.optim.weight_decay_incr_style"),
    ("", (True,), "*.load_weight"),
    ("", ("disabled",), "*.router_replay.mode"),
    ("", ("register",), "reward_model.reward_loop_source"),
    ("", (), "*.custom_async_server.* *.rollout.quantization* *.model.lora.adapter_path *.model.lora_adapter_path "
     "*.model.exclude_modules *.model.custom_chat_template *.model.external_lib *.model.hf_config_path "
     "data.sampler.class_path data.datagen.path data.gen_batch_size reward_model.sandbox_fusion.url "
     "trainer.default_hdfs_dir data.tokenizer data.tool_config_path data.function_tool_path critic.loss_scale_factor "
     "reward_model.max_length reward_model.reward_loop_*_path reward_model.reward_loop_class_name"),
    ("only read with a key that is not on", ANY,
     "*.optim.lr_wsd_* *.optim.muon_* *.dist_checkpointing_* *.max_seqlen_per_dp_cp_rank *.qat.* *.mtp.* "
     "*.router_replay.* *.model.lora.* critic.model.lora_alpha critic.model.target_modules "
     "*.disaggregation.* *.rollout.skip_* data.sampler.* data.datagen.* reward_model.sandbox_fusion.* "
     "algorithm.pf_ppo distillation.*"),
)  # fmt: skip
KEYS = tuple((pattern, off, why) for why, off, patterns in _GROUPS for pattern in patterns.split())
"""A pattern of keys, the values beside null that ask for nothing (`...`: any), and why it is safe to drop them."""

MOVED = {
    "critic.model.fsdp_config": "critic.fsdp_config",
    "critic.fsdp": "critic.fsdp_config",
    "custom_reward_function": "reward_model.custom_reward_function",
    "sandbox_fusion": "reward_model.sandbox_fusion",
    "reward_manager": "reward_model.reward_manager",
    "reward.reward_model.model_path": "reward_model.model.path",
    "reward.reward_model": "reward_model",
    "reward": "reward_model",
    "actor_rollout_ref.actor.tau_pos": "actor_rollout_ref.actor.policy_loss.tau_pos",
    "actor_rollout_ref.actor.tau_neg": "actor_rollout_ref.actor.policy_loss.tau_neg",
}
"""Keys and sections that have another place here; the first that a key begins with counts."""

DEFAULTS: dict[str, Any] = {
    "algorithm.adv_estimator": "gae",
    "data.train_batch_size": 1024,
    "data.filter_overlong_prompts": False,
    "actor_rollout_ref.model.enable_gradient_checkpointing": True,
    "actor_rollout_ref.model.dtype": "bfloat16",
    "actor_rollout_ref.actor.strategy": "fsdp2",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 2,
    "actor_rollout_ref.rollout.enforce_eager": False,
    "trainer.total_epochs": 30,
    "trainer.n_gpus_per_node": 8,
    "trainer.placement": "ray",
    "trainer.ray_address": "auto",
}
"""What verl does where a launch script says nothing, and Pellucid would do otherwise."""

UNDER_MEGATRON = {"actor_rollout_ref.model.enable_gradient_checkpointing": None}
"""Of these, those that are others with verl's Megatron config; null is as Pellucid does it."""
