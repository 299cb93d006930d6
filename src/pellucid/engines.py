"""From `rollout.name` to the engine that samples: in the trainer's process, or beside it as replicas of one model.

`ENGINES` has an entry for each name. `build.py` asks for the engine of the roles; a process that hosts a replica calls
`make_replica`.
"""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from transformers import PreTrainedTokenizerBase

from pellucid import devices
from pellucid.config import RunConfig
from pellucid.config.schema.rollout import EngineOptions, RolloutConfig
from pellucid.errors import UserError
from pellucid.loading import load_policy, run_tokenizer, torch_dtype
from pellucid.observe.captures import save_folder
from pellucid.rollout.collective import Broadcaster, GroupKind, address_towards
from pellucid.rollout.device_memory import DeviceMemory
from pellucid.rollout.engine_process import EngineProcess
from pellucid.rollout.inference import InferenceRolloutEngine, Start
from pellucid.rollout.joining import ServerKind, check_servers, read_token, shape_of
from pellucid.rollout.native import NativeRolloutEngine
from pellucid.rollout.native.copied import CopiedPolicy
from pellucid.rollout.native.decoder import SampledPolicy
from pellucid.rollout.replicas import ReplicaSet
from pellucid.rollout.requests import RolloutEngine, WeightUpdate, run_sync
from pellucid.rollout.sglang_processes import check_sglang, sglang_options
from pellucid.rollout.sglang_processes.sglang_over_http import SGLANG_SERVERS, OwnSglang
from pellucid.rollout.transports import BUCKET_BYTES, Transport, WeightHandle, WeightStore
from pellucid.rollout.vllm_processes import check_vllm
from pellucid.rollout.vllm_processes.adapters import adapter_options
from pellucid.rollout.vllm_processes.joined_vllm import VLLM_SERVERS
from pellucid.rollout.vllm_processes.own_vllm import OwnVllm
from pellucid.stages import NO_PROBE, Probe
from pellucid.training.common.models import eos_token_ids, model_folder, read_config, response_ends
from pellucid.training.protocol import TrainingEngine, WeightBucket


def check_engine(config: RunConfig) -> None:
    """Check that the run's engine is installed, and takes the arguments that the config has for it.

    Raises:
        MissingExtraError: it is not installed.
        UserError: it is of another version, has no such argument, or cannot get weights as the config says.
    """
    section, device = config.actor_rollout_ref.rollout, devices.choose_device(config.trainer.device).type
    if section.weight_transport == "cuda_ipc" and device != "cuda":
        reason = f"cuda_ipc lets an engine read weights on the trainer's GPU, and this run is on a {device}."
        raise UserError("actor_rollout_ref.rollout.weight_transport", reason, "Set it to auto.")
    engine = ENGINES[section.name]
    if engine.servers is not None and section.server_addresses:
        _check_servers(config, engine.servers)
    else:
        engine.check(section.engine_kwargs)


def make_replica(config: RunConfig) -> RolloutEngine:
    """Return an engine that gets its weights through a transport, made where it is to run."""
    return ENGINES[config.actor_rollout_ref.rollout.name].make(config)


def make_local_replicas(config: RunConfig, actor: TrainingEngine) -> ReplicaSet:
    """Return the replica on this host, or the servers that are joined, with the weights of `actor` at this moment."""
    transport = _transport_here(config)

    def send(digests: bool) -> AbstractContextManager[WeightHandle]:
        return transport.send(sent_weights(config, actor, digests=digests))

    replicas = join_servers(config)
    if not replicas:
        engine = ENGINES[config.actor_rollout_ref.rollout.name]
        replica = EngineProcess(partial(make_replica, config)) if engine.servers is None else make_replica(config)
        replicas = {"replica 0": replica}
    section = config.actor_rollout_ref.rollout
    replicas = ReplicaSet(replicas, send, section.verify_weights, longest_request(section))
    run_sync(replicas.load_weights(WeightUpdate(actor.version)))
    return replicas


def longest_request(section: RolloutConfig) -> int:
    """Return how many tokens an engine makes room for in a request and its answer."""
    return section.max_model_len or section.prompt_length + section.response_length


def sent_weights(config: RunConfig, actor: TrainingEngine, *, digests: bool) -> Iterator[WeightBucket]:
    """Yield the weights that the run's replicas are sent; adapters merged in where the engine takes none."""
    model, section = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    merged = bool(model.lora_rank) and section.name != "native" and not adapter_options(model, section)
    return actor.weights(BUCKET_BYTES, digests=digests, merged=merged)


def weight_transport(config: RunConfig, *, shares_memory: bool, host: str) -> Callable[[], Transport]:
    """Return what makes the run's transport in the process that sends.

    Args:
        config: of the run.
        shares_memory: whether all replicas are on that process' machine.
        host: that machine's address, as the replicas reach it.
    """
    section = config.actor_rollout_ref.rollout
    if section.weight_transport == "cuda_ipc":
        return DeviceMemory
    if section.weight_transport == "collective":
        separate = section.mode == "separate" or section.server_addresses
        kind: GroupKind = "nccl" if separate and devices.choose_device(config.trainer.device).type == "cuda" else "gloo"
        return partial(Broadcaster, host, config.num_replicas * section.tensor_model_parallel_size, kind)
    shares_memory = shares_memory and hasattr(os, "memfd_create")  # Linux
    if section.weight_transport == "shared_memory" or (section.weight_transport == "auto" and shares_memory):
        return WeightStore
    folder = Path(config.trainer.default_local_dir).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    return partial(WeightStore, folder)


def host_towards_servers(config: RunConfig) -> str:
    """Return this machine's address as the servers that are joined reach it; loopback where there are none."""
    servers = [urlsplit(address).hostname or "" for address in config.actor_rollout_ref.rollout.server_addresses]
    with suppress(OSError):  # of a server that cannot be found `check_servers` tells
        return address_towards(servers[0]) if servers else "127.0.0.1"
    return "127.0.0.1"


def _transport_here(config: RunConfig) -> Transport:
    here, host = config.weight_transport == "shared_memory", host_towards_servers(config)
    return weight_transport(config, shares_memory=here, host=host)()


def make_native_engine(
    config: RunConfig,
    policy: SampledPolicy,
    take_weights: Callable[[WeightUpdate], None] | None,
    tokenizer: PreTrainedTokenizerBase,
    probe: Probe = NO_PROBE,
) -> NativeRolloutEngine:
    """Return a native engine that samples from `policy`; `take_weights` updates one that has weights of its own."""
    section = config.actor_rollout_ref.rollout
    return NativeRolloutEngine(
        policy,
        tokenizer,
        eos_token_ids(policy.model.generation_config, tokenizer),
        seed=section.seed,
        max_num_seqs=section.max_num_seqs,
        max_num_batched_tokens=section.max_num_batched_tokens,
        probe=probe,
        take_weights=take_weights,
    )


def _make_native_replica(config: RunConfig) -> RolloutEngine:
    devices.keep_freed_memory()
    device, dtype = devices.choose_device(config.trainer.device), torch_dtype(config.actor_rollout_ref.model.dtype)
    policy = CopiedPolicy(load_policy(config, device), device, dtype)
    return make_native_engine(config, policy, policy.take_weights, run_tokenizer(config))


def _vllm_options(config: RunConfig) -> dict[str, Any]:
    """Return the arguments of vLLM's `AsyncEngineArgs` that the config stands for."""
    model, section = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    on_cpu, longest = devices.choose_device(config.trainer.device).type == "cpu", longest_request(section)
    own = {
        "model": model_folder(model.path),
        "dtype": section.dtype,
        "max_model_len": longest,
        "max_num_seqs": section.max_num_seqs,
        "max_num_batched_tokens": max(section.max_num_batched_tokens, longest * on_cpu),
        "tensor_parallel_size": section.tensor_model_parallel_size,
        "enforce_eager": section.enforce_eager,
        "gpu_memory_utilization": section.gpu_memory_utilization,
        # On a CPU vLLM cannot take back what it drew after a part of a prompt for a request with a seed of its own.
        "enable_chunked_prefill": section.enable_chunked_prefill and not on_cpu,
        "enable_prefix_caching": section.enable_prefix_caching,
        "trust_remote_code": model.trust_remote_code,
        "hf_overrides": model.override_config,
    }
    if section.tensor_model_parallel_size > 1:
        own["distributed_executor_backend"] = "mp"  # in an actor of Ray's, vLLM would ask Ray for more of them
    if config.engines_sleep and devices.choose_device(config.trainer.device).type != "cpu":
        own["enable_sleep_mode"] = True
    own |= adapter_options(model, section)
    return own | {name: value for name, value in section.engine_kwargs.vllm.items() if value is not None}


def _sglang_options(config: RunConfig) -> dict[str, Any]:
    """Return the fields of SGLang's `ServerArgs` that the config stands for."""
    policy, device = config.actor_rollout_ref, devices.choose_device(config.trainer.device).type
    saver = ["enable_memory_saver", "enable_weights_cpu_backup"] if config.engines_sleep and device != "cpu" else []
    options = sglang_options(policy.model, policy.rollout, device, longest_request(policy.rollout))
    return dict.fromkeys(saver, True) | options


def _outside(config: RunConfig, start: Start) -> RolloutEngine:
    """Return the engine that is in processes of its own once `start` has begun it."""
    model, tokenizer = config.actor_rollout_ref.model, run_tokenizer(config)
    ends = response_ends(model.path, tokenizer, trust_remote_code=model.trust_remote_code)
    return InferenceRolloutEngine(start, tokenizer, ends, seed=config.actor_rollout_ref.rollout.seed)


def join_servers(config: RunConfig) -> dict[str, RolloutEngine]:
    """Return the servers that the run joins, by their addresses; none where it has engines of its own."""
    section = config.actor_rollout_ref.rollout
    servers = ENGINES[section.name].servers
    if servers is None or not section.server_addresses:
        return {}
    starts = {at: partial(servers.join, at, read_token(section.server_token_file)) for at in section.server_addresses}
    return {address.partition("://")[2]: _outside(config, start) for address, start in starts.items()}


def _check_servers(config: RunConfig, kind: ServerKind) -> None:
    policy, section = config.actor_rollout_ref, config.actor_rollout_ref.rollout
    plain = replace(config, actor_rollout_ref=replace(policy, rollout=RolloutConfig(name=section.name)))
    options, usual = map(ENGINES[section.name].options, (config, plain))
    asked = {name: value for name, value in options.items() if value != usual.get(name)}
    sizes = (kind.num_workers,) if config.weight_transport == "collective" else ()
    asked |= {name: options[name] for name in ("dtype", kind.at_least, *sizes)}
    trusts, field = policy.model.trust_remote_code, "actor_rollout_ref.model.path"
    facts = read_config(policy.model.path, policy.model.override_config, trust_remote_code=trusts, field=field)
    check_servers(kind, section, asked, shape_of(facts), _transport_here(config))


def _vllm_profiler(config: RunConfig) -> dict[str, Any]:
    """Return what vLLM needs at its start to be captured, where the run is to do that."""
    section = config.actor_rollout_ref.rollout.profiler
    contents = section.tool_config.torch.contents
    if not config.global_profiler.steps or not section.collects:
        return {}
    if section.tool != "torch":  # hooks: a step begins only when the one before is known, and no token runs in vain
        return {"async_scheduling": False}
    folder = save_folder(section.save_path, Path(config.trainer.default_local_dir))
    folder.mkdir(parents=True, exist_ok=True)
    return {
        "profiler_config": {
            "profiler": "torch",
            "torch_profiler_dir": tempfile.mkdtemp(prefix="vllm-in-progress-", dir=folder),
            "torch_profiler_activities": [name.upper() for name in contents if name in ("cpu", "cuda")] or None,
            "torch_profiler_record_shapes": "shapes" in contents,
            "torch_profiler_with_memory": "memory" in contents,
            "torch_profiler_with_stack": "stack" in contents or "module" in contents,
            "torch_profiler_dump_cuda_time_total": False,  # a table, printed
            "ignore_frontend": True,  # which is the trainer's process
        }
    }


@dataclass(frozen=True, slots=True)
class _Engine:
    check: Callable[[EngineOptions], None]
    make: Callable[[RunConfig], RolloutEngine]
    options: Callable[[RunConfig], dict[str, Any]] = lambda _: {}
    """Returns the engine's arguments that a config stands for."""
    servers: ServerKind | None = None
    """What runs can join; None: it is never a server, but runs in the process that makes it."""


ENGINES = {
    "native": _Engine(lambda _: None, _make_native_replica),
    "vllm": _Engine(
        lambda given: check_vllm(given.vllm),
        lambda config: _outside(config, partial(OwnVllm.start, _vllm_profiler(config) | _vllm_options(config))),
        options=_vllm_options,
        servers=VLLM_SERVERS,
    ),
    "sglang": _Engine(
        lambda given: check_sglang(given.sglang),
        lambda config: _outside(config, partial(OwnSglang.start, _sglang_options(config))),
        options=_sglang_options,
        servers=SGLANG_SERVERS,
    ),
}
"""By `rollout.name`: what checks that the engine can be had, and what makes one in the process that asks."""
