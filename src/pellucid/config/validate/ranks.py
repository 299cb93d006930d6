"""Rules on where a run happens: ranks and machines, roles with ranks of their own, copies of a model, offloading.

`validate` in the package calls `mistakes` and `unusual`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from pellucid.config.schema import RunConfig
from pellucid.config.schema.sharding import FsdpConfig, RefFsdpConfig
from pellucid.config.validate.effects import Changed
from pellucid.errors import UserError, did_you_mean

_POOL_ROLES = ("ref", "critic", "reward_model")
"""Roles that can have ranks of their own; the rollout engine samples on the actor's."""
_POOLS = "trainer.resource_pools"
_POLICY_RANKS = "trainer.n_gpus_per_node × trainer.nnodes"


def mistakes(config: RunConfig) -> Iterator[UserError]:
    """Yield a mistake for each setting that cannot be placed on the ranks there are."""
    trainer, ranks = config.trainer, config.num_ranks
    if trainer.placement == "local" and ranks > 1:
        key = "n_gpus_per_node" if trainer.n_gpus_per_node > 1 else "nnodes"
        reason = (
            f"{trainer.n_gpus_per_node} (n_gpus_per_node) × {trainer.nnodes} (nnodes) = {ranks} ranks, but placement: "
            "local keeps all in one process."
        )
        yield UserError(f"trainer.{key}", reason, "Set trainer.placement: ray, or both to 1.")
        return
    yield from _copies(config)
    if trainer.placement == "ray":
        yield from _cluster(config)
        yield from _pools(config)
    if trainer.placement == "ray" or config.actor_rollout_ref.actor.fsdp_config.param_offload:
        yield from _laboratory(config)


def _spread_models(config: RunConfig) -> dict[str, tuple[FsdpConfig | RefFsdpConfig, str]]:
    """Return section → (its `fsdp_config`, name of the role) of each model that one spreads over ranks in this run."""
    policy = config.actor_rollout_ref
    models: dict[str, tuple[FsdpConfig | RefFsdpConfig, str]] = {
        "actor_rollout_ref.actor": (policy.actor.fsdp_config, "actor")
    }
    if config.has_own_reference:
        models["actor_rollout_ref.ref"] = (policy.ref.fsdp_config, "ref")
    if config.has_critic:
        models["critic"] = (config.critic.fsdp_config, "critic")
    return models


def _copies(config: RunConfig) -> Iterator[UserError]:
    """Yield a mistake for each model whose copies do not fill its ranks."""
    seen: set[tuple[int, int]] = set()
    for section, (fsdp, role) in _spread_models(config).items():
        size, ranks = fsdp.fsdp_size, config.pool_ranks(role)
        if size == -1 or (size > 0 and ranks % size == 0) or (section.endswith(".ref") and (size, ranks) in seen):
            continue
        seen.add((size, ranks))
        where = f"{_POOLS}.{role}" if role in config.trainer.resource_pools else _POLICY_RANKS
        if 0 < size < ranks:
            why = f"{ranks} = {ranks // size} × {size} + {ranks % size}"
        else:
            why = f"a copy cannot have {'none' if size == 0 else 'more than there are'}"
        divisors = ", ".join(str(number) for number in range(1, ranks + 1) if ranks % number == 0)
        reason = f"copies of the model over {size} ranks each do not come out with {ranks} in all ({where}): {why}."
        remedy = f"Set it to a divisor of {ranks} ({divisors}), or to -1 for one copy over all of them."
        yield UserError(f"{section}.fsdp_config.fsdp_size", reason, remedy)


def _cluster(config: RunConfig) -> Iterator[UserError]:
    trainer = config.trainer
    address = trainer.ray_address
    if address is not None and address != "auto" and not re.fullmatch(r"[^/\s]+:\d+", address):
        yield UserError(
            "trainer.ray_address",
            f"'{address}' is no address of a cluster.",
            "Set it to host:port of its head, e.g. 10.0.0.1:6379, to auto, or to null for a cluster on this machine.",
        )
    if address is None and trainer.nnodes > 1:
        reason = f"{trainer.nnodes} machines, but trainer.ray_address: null starts a cluster on this machine alone."
        remedy = "Start Ray on each machine and set trainer.ray_address, e.g. to auto; or set nnodes to 1."
        yield UserError("trainer.nnodes", reason, remedy)


def _pools(config: RunConfig) -> Iterator[UserError]:
    """Yield a mistake for each role that cannot have ranks of its own, or is not there."""
    for role in config.trainer.resource_pools:
        key = f"{_POOLS}.{role}"
        if role in ("actor", "rollout"):
            yield UserError(key, f"the policy's ranks are {_POLICY_RANKS}.", "Set these, and remove it here.")
        elif role not in _POOL_ROLES:
            yield UserError(key, "there is no such role.", did_you_mean(role, _POOL_ROLES))
        elif (found := _no_own_ranks(config, role)) is not None:
            yield UserError(key, *found)


def _no_own_ranks(config: RunConfig, role: str) -> tuple[str, str] | None:
    """Return why a role cannot have ranks of its own, and what to do about it."""
    remedy, absent = "Remove it.", ""
    match role:
        case "critic" if not config.has_critic:
            absent = f"adv_estimator: {config.algorithm.adv_estimator} has no critic."
            remedy = "Set algorithm.adv_estimator: gae, or remove it."
        case "reward_model" if not config.reward_model.enable:
            absent, remedy = "reward_model.enable is false.", "Set that to true, or remove it."
        case "ref" if not config.needs_reference:
            absent = "no KL term needs a reference model."
            remedy = "Set actor_rollout_ref.actor.use_kl_loss: true, or remove it."
        case "ref" if not config.has_own_reference:
            return "under LoRA the reference is the actor's own base, on the actor's ranks.", remedy
        case "ref" if config.has_exact_kl:
            reason = "the exact KL (full) runs the reference on the actor's micro-batches, so on the actor's ranks."
            return reason, "Remove it, or take an estimate such as low_var_kl."
    return (f"is for a role that the run does not have: {absent}", remedy) if absent else None


def _laboratory(config: RunConfig) -> Iterator[UserError]:
    lab = config.actor_rollout_ref.rollout.simulate_mismatch
    for key, value in (("dtype", lab.dtype), ("stale_steps", lab.stale_steps), ("noise", lab.noise)):
        if value:
            yield UserError(
                f"actor_rollout_ref.rollout.simulate_mismatch.{key}",
                f"{value} is simulated only where one process samples from the trained weights themselves; "
                "placement: ray and "
                "param_offload sample from a copy.",
                "Set trainer.placement: local and actor_rollout_ref.actor.fsdp_config.param_offload: "
                "false, or remove the key.",
            )


def unusual(config: RunConfig, changed: dict[str, Changed]) -> Iterator[str]:
    """Yield a line for each setting that is allowed but changes nothing here.

    Args:
        config: the whole config.
        changed: what `effects.changed_keys` found.
    """
    trainer = config.trainer
    offloads = [key for key, change in changed.items() if key.endswith("_offload") and change.value]
    if offloads and trainer.device == "cpu":
        yield f"On a CPU there is nothing to offload to, so these change nothing: {', '.join(offloads)}"
    if trainer.max_restarts and trainer.save_freq < 1:
        yield (
            f"trainer.max_restarts: {trainer.max_restarts}, but save_freq: {trainer.save_freq} keeps no checkpoint on "
            "the way: a restart begins where the run began."
        )
