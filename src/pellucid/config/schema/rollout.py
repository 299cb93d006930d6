"""Section `actor_rollout_ref.rollout`: how responses are sampled."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pellucid.config.fields import Alias, Needs, Range, option
from pellucid.config.schema.agent import AgentConfig
from pellucid.config.schema.model import Dtype
from pellucid.config.schema.profiler import ProfilerConfig

Positive = Annotated[int, Range(ge=1)]
TopP = Annotated[float, Range(gt=0, le=1)]
TopK = Annotated[int, Alias(0, -1), Range(ge=-1)]
_NAME = "actor_rollout_ref.rollout.name"
NATIVE, VLLM, SGLANG = (Needs(_NAME, (name,)) for name in ("native", "vllm", "sglang"))
OTHER_ENGINE = Needs(_NAME, ("vllm", "sglang"))
_OWN_DEVICES = (Needs("actor_rollout_ref.rollout.mode", ("separate",)), Needs("trainer.placement", ("ray",)))


@dataclass(frozen=True)
class ValSamplingConfig:
    """Sampling during validation."""

    do_sample: bool = False
    """Sample; false decodes greedily."""
    temperature: Annotated[float, Range(ge=0)] = 1.0
    """Divisor of the logits when sampling."""
    top_p: TopP = 1.0
    """Sample from the smallest set of tokens that holds this much probability."""
    top_k: TopK = -1
    """Sample from the k most likely tokens; -1 means all."""
    n: Positive = 1
    """Responses per validation prompt."""


@dataclass(frozen=True)
class SimulateMismatchConfig:
    """The mismatch laboratory: training samples come from a policy that differs from the trained one on purpose."""

    dtype: Annotated[Literal["bfloat16"], Alias("bf16", "bfloat16")] | None = None
    """Sample with weights, activations and cache in this format; null keeps the trained one."""
    stale_steps: Annotated[int, Range(ge=0)] = 0
    """Sample with the weights of this many steps ago, or the oldest there are."""
    noise: Annotated[float, Range(ge=0)] = 0.0
    """Gaussian noise added to each weight tensor before sampling, as a fraction of its root mean square."""


@dataclass(frozen=True)
class EngineOptions:
    """Arguments that go to an engine as they are, beside those that the section's own keys set."""

    vllm: dict[str, Any] = option(dict, needs=VLLM)
    """Of vLLM's `AsyncEngineArgs`, e.g. `kv_cache_memory_bytes`."""
    sglang: dict[str, Any] = option(dict, needs=SGLANG)
    """Of SGLang's `ServerArgs`, e.g. `max_total_tokens`."""


@dataclass(frozen=True)
class RolloutConfig:
    """The engine that samples responses, and its limits."""

    name: Annotated[Literal["native", "vllm", "sglang"], Alias("hf", "native")] = "native"
    """Rollout engine: native (hf) runs in the process, on the actor's own weights; vllm and sglang (extras of these
    names) in processes of their own, which get the weights after each update."""
    mode: Annotated[
        Literal["colocated", "separate"],
        Alias("sync", "colocated"),
        Alias("async", "colocated"),
        Alias("hybrid", "colocated"),
        Alias("standalone", "separate"),
    ] = "colocated"
    """Devices of the engines: colocated takes the trainers', separate (placement ray) others beside them. There is a
    replica for every `tensor_model_parallel_size` of these devices."""
    nnodes: Annotated[int, Alias(0, 1), Range(ge=1)] = option(1, needs=_OWN_DEVICES)
    """Machines with devices of separate engines."""
    n_gpus_per_node: Annotated[int, Range(ge=0)] = option(0, needs=_OWN_DEVICES)
    """Devices of separate engines on each of their machines: GPUs, or CPU cores where the run is on CPUs."""
    tensor_model_parallel_size: Positive = option(1, needs=OTHER_ENGINE)
    """Devices over which a replica spreads each layer; they are on one machine."""
    weight_transport: Literal["auto", "shared_memory", "cuda_ipc", "files", "collective"] = option(
        "auto", needs=Needs("has_replicas")
    )
    """How weights reach engines beside the trainer: through the memory of the machine that all are on, or of their one
    GPU (cuda_ipc), through files in the run's folder, or by connections (collective: gloo, or NCCL where each side has
    GPUs of its own). auto takes shared_memory where it can, else files."""
    server_addresses: list[str] = option(list, needs=OTHER_ENGINE)
    """Servers, e.g. `http://10.0.0.2:8000`, that `pellucid serve` has started and that sample in place of engines that
    the run starts; what this section says of engines must be so there."""
    server_token_file: str | None = option("~/.pellucid/server_token", needs=OTHER_ENGINE)
    """File with the secret that servers ask for, which `pellucid serve` writes where there is none; null: they ask for
    none."""
    n: Annotated[int, Range(ge=1, le=100_000)] = 1
    """Responses sampled per prompt; they form the group whose rewards are compared."""
    temperature: Annotated[float, Range(gt=0)] = 1.0
    """Divisor of the logits: below 1 sharper, above 1 more random. Log-probabilities are of the scaled distribution;
    for greedy decoding set `do_sample: false`."""
    top_p: TopP = 1.0
    """Sample from the smallest set of tokens that holds this much probability; 1 means all."""
    top_k: TopK = -1
    """Sample from the k most likely tokens; -1 means all."""
    do_sample: bool = True
    """Sample; false decodes greedily."""
    ignore_eos: bool = False
    """Go on after the end-of-text token until the length limit; for benchmarks."""
    stop: list[str] = field(default_factory=list)
    """Texts that end a response when they appear."""
    prompt_length: Positive = option(512, link="${data.max_prompt_length}")
    """Longest prompt the engine makes room for; null follows `data.max_prompt_length`."""
    response_length: Positive = option(512, link="${data.max_response_length}")
    """Longest response in tokens; null follows `data.max_response_length`."""
    calculate_log_probs: bool = True
    """Keep the log-probability of each sampled token, which measures the gap between sampling and training."""
    dtype: Dtype = option("float32", link="${actor_rollout_ref.model.dtype}")
    """Number format of generation; the native engine shares the actor's weights, so it equals the model's."""
    max_num_seqs: Positive = 256
    """Most sequences decoded at once; the others wait and enter as sequences finish."""
    max_num_batched_tokens: Positive = 8192
    """Most prompt tokens read in one forward pass."""
    seed: int = option(0, link="${trainer.seed}")
    """Seed of the sampling noise; null follows `trainer.seed`."""
    verify_weights: Literal["first", "always", "off"] = "first"
    """Which updates of a copy of the weights are compared with what the trainer sent; one process has no copy."""
    update: Literal["keep", "finish", "abort"] = option("keep", needs=Needs("trainer.schedule", ("async",)))
    """What happens to requests under way when new weights come: keep lets them go on with these, finish waits for them,
    abort makes each a new request that begins with the tokens drawn so far."""
    enforce_eager: bool = option(True, needs=OTHER_ENGINE)
    """Do without compiled graphs, which take minutes to make and pay on GPUs in long runs."""
    gpu_memory_utilization: Annotated[float, Range(gt=0, le=1)] = option(0.5, needs=OTHER_ENGINE)
    """Share of a GPU's memory that the engine takes, weights and cache together."""
    free_cache_engine: bool = option(True, needs=OTHER_ENGINE)
    """Give the GPU memory of weights and cache to the trainer while it works on the engine's devices; on CPUs the
    engine keeps it."""
    max_model_len: Positive | None = option(None, needs=OTHER_ENGINE)
    """Longest sequence the engine makes room for; null: `prompt_length` and `response_length` together."""
    enable_chunked_prefill: bool = option(True, needs=OTHER_ENGINE)
    """Read long prompts in pieces between the steps of answers under way."""
    enable_prefix_caching: bool = option(True, needs=OTHER_ENGINE)
    """Keep what was computed of a beginning for requests that share it."""
    engine_kwargs: EngineOptions = field(default_factory=EngineOptions)
    """More arguments of the engine."""
    simulate_mismatch: SimulateMismatchConfig = option(SimulateMismatchConfig, needs=NATIVE)
    """A deliberate gap between sampling and training, to study its correction; validation is not touched."""
    agent: AgentConfig = option(AgentConfig)
    """What makes trajectories of prompts, in one turn or in many."""
    val_kwargs: ValSamplingConfig = field(default_factory=ValSamplingConfig)
    """Sampling during validation."""
    profiler: ProfilerConfig = option(ProfilerConfig, follows=("actor_rollout_ref.actor.profiler", ProfilerConfig))
    """Profiling of the engine; what is not set here follows the actor's block. Ranks are numbers of engines."""
