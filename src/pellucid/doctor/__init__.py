"""The checks of `pellucid doctor`: what can be known before a run starts, most deadly first.

They read the machine and, where one is given, a recipe and the shape of its model; they load no model and keep nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from pellucid.config import RunConfig, build_plan, read_model_facts
from pellucid.doctor import hardware, network, software, storage
from pellucid.doctor.findings import Finding, Status
from pellucid.doctor.machine import Machine, read_machine
from pellucid.errors import UserError

__all__ = ["Finding", "Status", "examine"]

_TOKEN_BYTES = 48
"""Bytes that a sampled token takes in shared memory: ids, versions and the numbers of a batch, four bytes each."""


def examine(config: RunConfig | None, *, start_ray: bool) -> Iterator[Finding]:
    """Yield what was found, in the order in which it would end a run.

    Args:
        config: a checked config; None looks at the machine alone.
        start_ray: start a Ray cluster even where no recipe asks for one.
    """
    with_ray = start_ray or (config is not None and config.trainer.placement == "ray")
    device = "auto" if config is None else config.trainer.device
    yield software.check_python()
    extras = set() if config is None else software.needed_extras(config)
    yield from software.check_packages(extras | ({"ray"} if with_ray else set()))
    if not all(software.is_installed(name) for name in ("torch", "transformers")):
        return

    yield software.check_torch_build(device)
    plan = None
    if config is not None:  # the rows are not read, and what is asked of the plan does not depend on their number
        enough = config.data.train_batch_size * (config.trainer.critic_warmup + 1)
        plan = build_plan(config, enough, read_model_facts(config.actor_rollout_ref.model.path))
    try:
        machine = read_machine(device)
    except UserError as error:
        yield Finding.of_error("devices", error)
        machine, ranks, there_is_room = read_machine("cpu"), None, False
    else:
        ranks = None if config is None else _ranks_here(config, machine)
        devices = hardware.check_devices(machine, ranks)
        yield devices
        there_is_room = config is not None and devices.status == "ok"

    if config is not None and config.global_profiler.steps and there_is_room:
        yield from software.check_profilers(config)
    if config is not None and config.actor_rollout_ref.rollout.server_addresses:
        yield network.check_servers(config)
    if config is not None and config.trainer.nnodes > 1:
        yield network.check_host_name()
    if with_ray:
        if config is None or config.trainer.ray_address is None:
            yield network.check_ray_port()
        if software.is_installed("ray"):
            # Without room for all ranks, which is said above, it is still worth knowing whether Ray starts at all.
            yield network.check_ray(config if there_is_room else None)
    yield from hardware.check_memory(machine, plan, ranks)
    if config is not None:
        yield storage.check_run_directory(config, storage.checkpoint_bytes(config, plan))
    yield storage.check_temp_folder(with_ray)
    if with_ray or config is None:
        step_bytes = plan.max_tokens_per_step * _TOKEN_BYTES if plan else 0
        yield storage.check_shared_memory(machine, ranks or 1, step_bytes)
    yield hardware.check_cores(machine, ranks or 1)
    if config is not None and config.actor_rollout_ref.model.dtype == "bfloat16":
        yield hardware.check_bfloat16(machine)


def _ranks_here(config: RunConfig, machine: Machine) -> int | None:
    """Return how many ranks this machine gets; None when they run on other machines of a cluster."""
    trainer = config.trainer
    if trainer.placement == "ray" and trainer.ray_address is not None:
        there = len(machine.devices) or machine.cores
        return trainer.n_gpus_per_node if trainer.n_gpus_per_node <= there else None
    return config.num_ranks + sum(trainer.resource_pools.values())
