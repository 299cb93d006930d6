"""Rules on where a run is placed: ranks and machines, roles with ranks of their own, copies of a model, offloading.

`validate` in the package calls `mistakes` and `unusual`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from pellucid.config.schema import RunConfig
from pellucid.config.schema.profiler import PROFILED_SECTIONS
from pellucid.config.schema.sharding import RefFsdpConfig
from pellucid.errors import UserError

_ROLLOUT = "actor_rollout_ref.rollout"


def mistakes(config: RunConfig) -> Iterator[UserError]:
    """Yield a mistake for each setting that cannot be placed on the ranks there are."""
    trainer, ranks, address = config.trainer, config.num_ranks, config.trainer.ray_address
    if trainer.placement == "local" and ranks > 1:
        key = "n_gpus_per_node" if trainer.n_gpus_per_node > 1 else "nnodes"
        arithmetic = f"{trainer.n_gpus_per_node} (n_gpus_per_node) × {trainer.nnodes} (nnodes) = {ranks} ranks"
        reason = f"{arithmetic}, but placement: local keeps all in one process."
        yield UserError(f"trainer.{key}", reason, "Set trainer.placement: ray, or both to 1.")
        return
    if address not in (None, "auto") and not re.fullmatch(r"[^/\s]+:\d+", address):
        remedy = "Set it to host:port of its head, e.g. 10.0.0.1:6379, to auto, or to null."
        yield UserError("trainer.ray_address", f"'{address}' is no address of a cluster.", remedy)
    for section, count in {"trainer": trainer.nnodes, _ROLLOUT: config.actor_rollout_ref.rollout.nnodes}.items():
        if address is None and count > 1:
            reason = f"{count} machines, but trainer.ray_address: null starts a cluster on this machine alone."
            remedy = "Start Ray on each machine and set trainer.ray_address, e.g. to auto; or set nnodes to 1."
            yield UserError(f"{section}.nnodes", reason, remedy)
    yield from _replicas(config)
    yield from _copies(config)
    absent = absent_roles(config)
    if not config.has_own_reference or "full" in config.kl_types:
        absent["ref"] = "it is another model only with a KL term, without LoRA, and with an estimate instead of full"
    for role in trainer.resource_pools if trainer.placement == "ray" else ():
        if role in absent:
            reason = f"the role cannot have ranks of its own: {absent[role]}."
            yield UserError(f"trainer.resource_pools.{role}", reason, "Remove it.")
    lab = config.actor_rollout_ref.rollout.simulate_mismatch
    actor = config.actor_rollout_ref.actor
    copied = trainer.placement == "ray" or actor.fsdp_config.param_offload or config.uses_megatron
    for key, value in vars(lab).items() if copied else ():
        if value:
            reason = f"{value} is simulated only where one process samples from the trained weights themselves."
            remedy = "Set trainer.placement: local, strategy: fsdp2 and its param_offload: false, or remove the key."
            yield UserError(f"actor_rollout_ref.rollout.simulate_mismatch.{key}", reason, remedy)


def _replicas(config: RunConfig) -> Iterator[UserError]:
    """Yield a mistake for devices of rollout engines that do not come out."""
    rollout, trainer = config.actor_rollout_ref.rollout, config.trainer
    if rollout.weight_transport == "cuda_ipc":
        apart = rollout.server_addresses or rollout.mode == "separate"
        if config.num_ranks > 1 or apart:
            reason = "cuda_ipc is for one rank and an engine on its GPU; here are " + (
                "engines with devices of their own." if apart else f"{config.num_ranks} ranks."
            )
            yield UserError(f"{_ROLLOUT}.weight_transport", reason, "Set it to shared_memory, collective or files.")
    if rollout.server_addresses:
        yield from _servers(config)
        return
    if trainer.placement == "local":
        if rollout.mode == "separate":
            reason = "placement: local has no devices beside the trainer's."
            yield UserError(f"{_ROLLOUT}.mode", reason, "Set trainer.placement: ray, or it to colocated.")
        return
    per_machine, size = config.rollout_machines[0], rollout.tensor_model_parallel_size
    if per_machine == 0:
        remedy = "Set it to the devices that engines may have for themselves, or mode: colocated."
        yield UserError(f"{_ROLLOUT}.n_gpus_per_node", "mode: separate needs devices, and has none.", remedy)
    elif config.has_replicas and per_machine % size:
        whose = _ROLLOUT if rollout.mode == "separate" else "trainer"
        reason = (
            f"replicas of {size} devices do not come out with {per_machine} on a machine ({whose}.n_gpus_per_node): "
            f"{per_machine} = {per_machine // size} × {size} + {per_machine % size}."
        )
        yield UserError(f"{_ROLLOUT}.tensor_model_parallel_size", reason, f"Set it to a divisor of {per_machine}.")


def _servers(config: RunConfig) -> Iterator[UserError]:
    """Yield a mistake for servers that cannot be joined, whatever they answer."""
    key, rollout = f"{_ROLLOUT}.server_addresses", config.actor_rollout_ref.rollout
    for address, count in Counter(rollout.server_addresses).items():
        if not re.fullmatch(r"https?://([^/\s:]+|\[[0-9a-fA-F:]+\]):\d+", address):
            yield UserError(key, f"'{address}' is no address of a server.", "Write http://host:port.")
        elif count > 1:
            yield UserError(key, f"{address} is there {count} times.", "Name each server once.")
    if rollout.mode == "separate":
        yield UserError(f"{_ROLLOUT}.mode", "servers have devices of their own already.", "Remove it.")


def absent_roles(config: RunConfig) -> dict[str, str]:
    """Return the roles that a run does not have, each with the reason."""
    absent: dict[str, str] = {}
    if not config.samples_kl:
        absent["ref"] = "no KL term is estimated from tokens' log-probabilities under the reference"
    if not config.has_critic:
        absent["critic"] = f"adv_estimator: {config.algorithm.adv_estimator} has no critic"
    if not config.reward_model.enable:
        absent["reward_model"] = "reward_model.enable is false"
    return absent


def _copies(config: RunConfig) -> Iterator[UserError]:
    """Yield a mistake for each model whose copies do not fill its ranks."""
    policy = config.actor_rollout_ref
    if config.uses_megatron:
        return
    models: dict[str, RefFsdpConfig] = {"actor": policy.actor.fsdp_config}
    if config.has_own_reference:
        models["ref"] = policy.ref.fsdp_config
    if config.has_critic:
        models["critic"] = config.critic.fsdp_config
    for role, fsdp in models.items():
        size, ranks = fsdp.fsdp_size, config.pool_ranks(role)
        if size != -1 and (size == 0 or ranks % size):
            reason = f"copies of the model over {size} ranks each do not come out with {ranks} ranks in all."
            remedy = f"Set it to a divisor of {ranks}, or to -1 for one copy over all of them."
            yield UserError(f"{PROFILED_SECTIONS[role]}.fsdp_config.fsdp_size", reason, remedy)


def unusual(config: RunConfig, changed: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each setting that is allowed but changes nothing here."""
    trainer = config.trainer
    offloads = [key for key, value in changed.items() if key.endswith("_offload") and value]
    if offloads and trainer.device == "cpu":
        yield f"On a CPU there is nothing to offload to, so these change nothing: {', '.join(offloads)}"
    if trainer.max_restarts and trainer.save_freq < 1:
        yield (
            f"trainer.max_restarts: {trainer.max_restarts}, but save_freq: {trainer.save_freq} keeps no checkpoint on "
            "the way: a restart begins where the run began."
        )
