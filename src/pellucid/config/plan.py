"""What a run is going to do, in numbers, before it starts: steps, batches, tokens, ranks and memory.

Comes from a checked config, the number of prompts and the model's shape, which is read from its files without torch.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pellucid.config.convert import raise_all
from pellucid.config.plan_roles import count_text, role_rows
from pellucid.config.schema import RunConfig
from pellucid.config.validate.run import critic_warmup_mistakes
from pellucid.errors import UserError

_WIDTHS = {"float32": 4, "bfloat16": 2}
_LOGITS_CHUNK_BYTES = 48 * 2**20
_BUILTIN = Path(__file__).parents[1] / "assets" / "builtin"


@dataclass(frozen=True)
class ModelFacts:
    """A model's shape, as its files state it."""

    num_parameters: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    dtype: str
    """Number format of the weights on disk."""
    linears: tuple[tuple[str, int, int], ...] = ()
    """Name, outputs and inputs of each linear layer but the output head."""


@dataclass(frozen=True)
class Memory:
    """Estimated bytes on one rank at the peak; activations are rough, the rest is arithmetic.

    Weights, gradients and optimizer state are this rank's shards; roles with ranks of their own are left out.
    """

    weights: int
    gradients: int
    optimizer: int
    reference: int
    activations: int
    logits_chunk: int
    kv_cache: int
    critic: int = 0
    """The critic's weights, gradients and AdamW."""
    reward_model: int = 0
    rollout_copy: int = 0
    """The whole float32 model that each of several ranks samples from."""
    offloaded: int = 0
    """Part of the above that is kept in CPU memory."""

    @property
    def total(self) -> int:
        """Peak: generation and update never overlap, so the larger of cache and activations counts."""
        roles = self.weights + self.gradients + self.optimizer + self.reference + self.critic + self.reward_model
        fixed = roles + self.rollout_copy - self.offloaded
        return fixed + max(self.kv_cache, self.activations + self.logits_chunk)


@dataclass(frozen=True)
class Plan:
    """The run in numbers."""

    prompts_per_step: int
    samples_per_prompt: int
    samples_per_step: int
    mini_batch_prompts: int
    epochs_per_step: int
    optimizer_steps_per_step: int
    micro_batches_per_mini_batch: int
    """On one rank."""
    micro_batches_exact: bool
    """False: the number when every sequence is as long as allowed; on a single rank there are never more."""
    num_train_prompts: int
    steps_per_epoch: int
    total_steps: int
    max_prompt_length: int
    max_response_length: int
    max_tokens_per_step: int
    num_ranks: int
    """Ranks that hold the policy."""
    num_machines: int
    num_copies: int
    """Copies of the policy among its ranks."""
    pools: dict[str, int]
    """Ranks of their own of the roles that have such."""
    placement: str
    strategy: str
    memory: Memory | None
    """On one of the policy's ranks; None when the model's files are not at hand."""
    pool_bytes: dict[str, int]
    """Estimated bytes of weights, gradients and optimizer state on each rank of a role in `pools` whose model's files are
    at hand."""
    model: ModelFacts | None
    roles: list[tuple[str, str]]
    """Lines on what is switched on, from `plan_roles`."""

    def rows(self) -> list[tuple[str, str]]:
        """Return label and sentence for each line of the printed plan."""
        longest = self.max_prompt_length + self.max_response_length
        left_over = self.num_train_prompts - self.steps_per_epoch * self.prompts_per_step
        passes = f" × {self.epochs_per_step} epochs" if self.epochs_per_step > 1 else ""
        rows = [
            (
                "samples per step",
                f"{self.prompts_per_step} prompts × {self.samples_per_prompt} samples = "
                f"{self.samples_per_step} samples",
            ),
            (
                "optimizer steps",
                f"{self.prompts_per_step} prompts ÷ {self.mini_batch_prompts} per mini-batch{passes} = "
                f"{self.optimizer_steps_per_step} per step",
            ),
            ("micro-batches", self._micro_batches()),
            (
                "steps",
                f"{self.num_train_prompts} prompts ÷ {self.prompts_per_step} = {self.steps_per_epoch} steps per epoch"
                + (f" ({left_over} prompts left over in each)" if left_over else "")
                + f"; {self.total_steps} steps in all",
            ),
            (
                "tokens per step",
                f"at most {self.samples_per_step} samples × ({self.max_prompt_length} prompt + "
                f"{self.max_response_length} response) = {self.samples_per_step} × {longest} = "
                f"{self.max_tokens_per_step:,} tokens",
            ),
            ("ranks", self._ranks()),
            *self.roles,
        ]
        if self.model is not None:
            rows.append(
                (
                    "model",
                    f"{self.model.num_parameters:,} parameters, {self.model.num_layers} layers × "
                    f"{self.model.hidden_size}, vocabulary {self.model.vocab_size:,}",
                )
            )
        if self.memory is not None:
            rows.append(("memory (estimate)", _memory_text(self.memory, "" if self.num_ranks == 1 else " per rank")))
        if self.pool_bytes:
            held = ", ".join(f"{role} {_size(num_bytes)}" for role, num_bytes in self.pool_bytes.items())
            rows.append(("on own ranks", f"{held} on each, and activations"))
        return rows

    def _micro_batches(self) -> str:
        samples, count = self.mini_batch_prompts * self.samples_per_prompt, self.micro_batches_per_mini_batch
        batches = f"{count} micro-batch{'es' * (count > 1)}"
        if self.num_ranks == 1:
            return f"{samples} samples per mini-batch in {'' if self.micro_batches_exact else 'at most '}{batches}"
        share, rest = divmod(samples, self.num_ranks)
        each = f"{share} or {share + 1} each" if rest else f"{share} each"
        bound = "" if self.micro_batches_exact else " when all are as long as allowed"
        return f"{samples} samples per mini-batch ÷ {self.num_ranks} ranks = {each}, in {batches} a rank{bound}"

    def _ranks(self) -> str:
        if self.placement == "local":
            return f"{self.num_ranks} process, placement {self.placement}, strategy {self.strategy}"
        text = (
            f"{count_text(self.num_ranks, 'rank')} on {count_text(self.num_machines, 'machine')}, placement "
            f"{self.placement}, strategy {self.strategy}"
        )
        if self.num_ranks > 1:
            over = self.num_ranks // self.num_copies
            copies = "one copy" if self.num_copies == 1 else f"{self.num_copies} copies"
            text += f": {copies} of the model over {count_text(over, 'rank')}{' each' * (self.num_copies > 1)}"
        own = [f"{role} on {count_text(count, 'rank')} of its own" for role, count in self.pools.items()]
        return "; ".join([text, *own])


def build_plan(config: RunConfig, num_train_prompts: int, model: ModelFacts | None) -> Plan:
    """Work out the plan.

    Args:
        config: a checked config.
        num_train_prompts: prompts left after filtering.
        model: its shape; None leaves the memory estimate out.

    Raises:
        UserError: the prompts do not fill one step, or the run ends before the policy starts to learn.
    """
    data, actor, rollout = config.data, config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    prompts, mini = data.train_batch_size, actor.ppo_mini_batch_size
    steps_per_epoch = num_train_prompts // prompts
    if steps_per_epoch == 0:
        raise UserError(
            "data.train_batch_size",
            f"{num_train_prompts} training prompts ÷ {prompts} per step = 0 steps.",
            f"Set it to at most {num_train_prompts}, or give more training rows."
            if num_train_prompts
            else "Give training rows.",
        )
    total_steps = config.trainer.total_training_steps or config.trainer.total_epochs * steps_per_epoch
    raise_all([*critic_warmup_mistakes(config.trainer, total_steps)])
    longest = data.max_prompt_length + data.max_response_length
    exact, share = not actor.use_dynamic_bsz, math.ceil(mini * rollout.n / config.num_ranks)
    if exact:
        assert actor.ppo_micro_batch_size_per_gpu is not None
        micro_samples = min(actor.ppo_micro_batch_size_per_gpu, share)
    else:
        micro_samples = min(actor.ppo_max_token_len_per_gpu // longest, share)
    micro_tokens = min(micro_samples * longest if exact else actor.ppo_max_token_len_per_gpu, share * longest)
    return Plan(
        prompts_per_step=prompts,
        samples_per_prompt=rollout.n,
        samples_per_step=prompts * rollout.n,
        mini_batch_prompts=mini,
        epochs_per_step=actor.ppo_epochs,
        optimizer_steps_per_step=prompts // mini * actor.ppo_epochs,
        micro_batches_per_mini_batch=math.ceil(share / micro_samples),
        micro_batches_exact=exact,
        num_train_prompts=num_train_prompts,
        steps_per_epoch=steps_per_epoch,
        total_steps=total_steps,
        max_prompt_length=data.max_prompt_length,
        max_response_length=data.max_response_length,
        max_tokens_per_step=prompts * rollout.n * longest,
        num_ranks=config.num_ranks,
        num_machines=config.trainer.nnodes,
        num_copies=config.num_ranks // config.copy_ranks("actor"),
        pools=config.trainer.resource_pools,
        placement=config.trainer.placement,
        strategy=actor.strategy,
        memory=None if model is None else _estimate(config, model, micro_tokens),
        pool_bytes={} if model is None else _pool_bytes(config, model),
        model=model,
        roles=role_rows(
            config,
            None if model is None else adapter_size(config, model),
            None if model is None else model.num_parameters,
        ),
    )


def _estimate(config: RunConfig, model: ModelFacts, micro_tokens: int) -> Memory:
    """Estimate peak bytes; weights, gradients and AdamW's two moments are float32, the passes the model's dtype."""
    policy, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    width, ranks = _WIDTHS[policy.dtype], config.num_ranks
    adapter = 4 * adapter_size(config, model)
    whole = 4 * model.num_parameters + adapter
    copy_ranks = config.copy_ranks("actor")
    weights, trained = _share(whole, copy_ranks), _share(adapter if policy.lora_rank else whole, copy_ranks)
    pools = config.trainer.resource_pools
    others = {role: held for role, held in _role_bytes(config, model).items() if role not in pools}
    # One layer keeps about ten hidden-sized and three MLP-sized tensors per token for its backward pass.
    layer_bytes = width * (10 * model.hidden_size + 3 * model.intermediate_size)
    kept_bytes = width * model.hidden_size * model.num_layers + layer_bytes
    per_token = kept_bytes if policy.enable_gradient_checkpointing else layer_bytes * model.num_layers
    sequences = min(rollout.max_num_seqs, math.ceil(config.data.train_batch_size / ranks) * rollout.n)
    cached_tokens = sequences * (rollout.prompt_length + rollout.response_length)
    return Memory(
        weights=weights,
        gradients=trained,
        optimizer=2 * trained,
        reference=others.get("ref", 0),
        activations=micro_tokens * per_token,
        logits_chunk=min(_LOGITS_CHUNK_BYTES, 4 * micro_tokens * model.vocab_size),
        kv_cache=cached_tokens * 2 * model.num_layers * model.num_kv_heads * model.head_dim * width,
        critic=others.get("critic", 0),
        reward_model=others.get("reward_model", 0),
        rollout_copy=whole if ranks > 1 else 0,
        offloaded=_offloaded(config, weights, trained, others),
    )


def _share(num_bytes: int, ranks: int) -> int:
    return math.ceil(num_bytes / ranks)


def _role_bytes(config: RunConfig, policy: ModelFacts) -> dict[str, int]:
    """Return the bytes on one rank of weights, gradients and AdamW of each model beside the policy."""
    whole = {}
    if config.has_own_reference:
        whole["ref"] = 4 * policy.num_parameters
    if config.has_critic:
        whole["critic"] = 16 * _size_of(config.critic.model.path, config, policy)
    if config.reward_model.enable:
        whole["reward_model"] = 4 * _size_of(config.reward_model.model.path, config, policy)
    return {role: _share(num_bytes, config.copy_ranks(role)) for role, num_bytes in whole.items()}


def _pool_bytes(config: RunConfig, policy: ModelFacts) -> dict[str, int]:
    """Return the same of the roles with ranks of their own, as far as their models' files are at hand."""
    held = _role_bytes(config, policy)
    return {role: held[role] for role in config.trainer.resource_pools if held.get(role)}


def _offloaded(config: RunConfig, weights: int, trained: int, others: dict[str, int]) -> int:
    """Return the bytes that are kept in CPU memory: of the actor's shards, and of the `others` on the same ranks."""
    if config.trainer.device == "cpu":
        return 0
    actor, critic = config.actor_rollout_ref.actor.fsdp_config, config.critic.fsdp_config
    optimizer = 2 * trained
    total = weights + trained + optimizer if actor.param_offload else optimizer * actor.optimizer_offload
    if config.actor_rollout_ref.ref.fsdp_config.param_offload:
        total += others.get("ref", 0)
    if critic.param_offload or critic.optimizer_offload:
        held = others.get("critic", 0)
        total += held if critic.param_offload else held // 2  # two of AdamW's four numbers a weight are its moments
    return total


def adapter_size(config: RunConfig, model: ModelFacts) -> int:
    """Return the LoRA adapter's number of parameters: rank × (inputs + outputs) of each of its layers."""
    policy = config.actor_rollout_ref.model
    targets = policy.target_modules
    chosen = [
        outputs + inputs
        for name, outputs, inputs in model.linears
        if isinstance(targets, str) or any(f".{name}".endswith(f".{target}") for target in targets)
    ]
    return policy.lora_rank * sum(chosen)


def _size_of(path: str | None, config: RunConfig, policy: ModelFacts) -> int:
    """Return a model's number of parameters; 0 when its files are not at hand."""
    facts = policy if path in (None, config.actor_rollout_ref.model.path) else read_model_facts(path)
    return facts.num_parameters if facts else 0


def _memory_text(memory: Memory, where: str) -> str:
    others = "".join(
        f" + {name} {_size(num_bytes)}"
        for name, num_bytes in (
            ("reference", memory.reference),
            ("critic", memory.critic),
            ("reward model", memory.reward_model),
            ("rollout copy", memory.rollout_copy),
        )
        if num_bytes
    )
    offloaded = f" − {_size(memory.offloaded)} kept in CPU memory" if memory.offloaded else ""
    return (
        f"about {_size(memory.total)}{where} = weights {_size(memory.weights)} + gradients {_size(memory.gradients)} + "
        f"AdamW {_size(memory.optimizer)}{others}{offloaded} + the larger of (activations {_size(memory.activations)} + "
        f"logits chunk {_size(memory.logits_chunk)}) and KV cache {_size(memory.kv_cache)}"
    )


def _size(num_bytes: int) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes / 2**10:.1f} KiB"


def read_model_facts(path: str) -> ModelFacts | None:
    """Read a model's shape from its folder; `builtin` is the shipped one.

    Returns:
        None when `path` is not a local folder with safetensors weights (a hub id that was not downloaded).

    Raises:
        UserError: a config or weights file cannot be read.
    """
    folder = _BUILTIN if path == "builtin" else Path(path)
    config_file = folder / "config.json"
    if not config_file.is_file():
        return None
    weights = _weight_files(folder)
    if not weights:
        return None
    facts = _read_json(config_file)
    headers = [_read_header(file) for file in weights]
    tensors = {name: entry for header in headers for name, entry in header.items() if name != "__metadata__"}
    try:
        heads, hidden = facts["num_attention_heads"], facts["hidden_size"]
        return ModelFacts(
            num_parameters=sum(math.prod(entry["shape"]) for entry in tensors.values()),
            hidden_size=hidden,
            intermediate_size=facts["intermediate_size"],
            num_layers=facts["num_hidden_layers"],
            num_kv_heads=facts.get("num_key_value_heads") or heads,
            head_dim=facts.get("head_dim") or hidden // heads,
            vocab_size=facts["vocab_size"],
            dtype=_dtype_of(tensors),
            linears=_linears(tensors),
        )
    except KeyError:
        return None


def _linears(tensors: dict[str, Any]) -> tuple[tuple[str, int, int], ...]:
    """Return the matrices that are neither an embedding nor the output head."""
    return tuple(
        (name.removesuffix(".weight"), *entry["shape"])
        for name, entry in sorted(tensors.items())
        if name.endswith(".weight")
        and len(entry["shape"]) == 2
        and not any(part in name for part in ("embed", "wte", "wpe", "lm_head", "score"))
    )


def _dtype_of(tensors: dict[str, Any]) -> str:
    """Return the number format of the largest tensor, spelled as in the config."""
    largest: str = max(tensors.values(), key=lambda entry: math.prod(entry["shape"]))["dtype"]
    return {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}.get(largest, largest)


def _weight_files(folder: Path) -> list[Path]:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        return []
    return [folder / name for name in sorted(set(_read_json(index)["weight_map"].values()))]


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(str(file), f"this file is not valid JSON ({error}).", "Fetch the model again.") from error


def _read_header(file: Path) -> dict[str, Any]:
    """Return a safetensors file's JSON header: eight bytes of little-endian length, then that many bytes of JSON."""
    if not file.is_file():
        raise UserError(str(file), "this weights file is missing.", "Fetch the model again.")
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        text = stream.read(length) if 0 < length <= file.stat().st_size - 8 else b""
    try:
        header = json.loads(text)
    except ValueError as error:
        raise UserError(str(file), "this is not a whole safetensors file.", "Fetch the model again.") from error
    data_bytes = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
    if (actual := file.stat().st_size) != 8 + length + data_bytes:
        raise UserError(
            str(file),
            f"has {actual} bytes where its header promises {8 + length + data_bytes}: it is cut off or altered.",
            "Fetch the model again.",
        )
    return header
