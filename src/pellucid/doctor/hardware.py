"""Checks of what computes: devices and cores against ranks, memory against the plan, bfloat16 against float32."""

from __future__ import annotations

import os
from collections.abc import Iterator

from pellucid.config.plan import Plan, counted, size
from pellucid.doctor.findings import Finding
from pellucid.doctor.machine import Machine

PROCESS_BYTES = 400 * 2**20
"""RAM of a process that has imported torch and transformers, before any model."""
_TIGHT = 0.9
"""Share of the free memory from which the estimate, whose activations are rough, is cutting it fine."""
_LESS_MEMORY = (
    "End other processes; lower actor_rollout_ref.actor.ppo_max_token_len_per_gpu or "
    "actor_rollout_ref.rollout.max_num_seqs; or set actor_rollout_ref.model.enable_gradient_checkpointing: true."
)


def check_devices(machine: Machine, num_ranks: int | None) -> Finding:
    """Check that each of this machine's `num_ranks` ranks has a device, or a core, of its own; None is unknown."""
    available = len(machine.devices) or machine.cores
    if machine.devices:
        names = [f"{device.name} {size(device.memory_bytes)}" for device in machine.devices]
        found = f"{machine.kind}: " + ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names))
        if machine.kind == "cuda" and (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
            found += f" (CUDA_VISIBLE_DEVICES={visible})"
    else:
        found = f"cpu, {counted(machine.cores, 'core')}"
    if num_ranks is None:
        return Finding("devices", found)
    few = f"Ask for at most {available} ranks (trainer.n_gpus_per_node), or join a cluster (trainer.ray_address)."
    found += f"; {counted(num_ranks, 'rank')}, each on one of its own"
    return Finding.judged("devices", found, few if num_ranks > available else "", "problem")


def check_cores(machine: Machine, num_ranks: int) -> Finding:
    """Check that the threads of the ranks, which share this machine's cores evenly, have a core each and use all."""
    import torch

    threads = torch.get_num_threads() if num_ranks == 1 else max(1, machine.cores // num_ranks) * num_ranks
    found, remedy = f"{counted(threads, 'thread')} on {counted(machine.cores, 'core')}", ""
    if machine.core_quota is not None and machine.core_quota < threads:
        found += f", of which the container may use {machine.core_quota:g}"
        remedy = f"Raise the container's CPU limit to {threads}, or bind it to fewer cores (taskset, cpuset)."
    elif num_ranks == 1 and threads > machine.cores:
        remedy = f"Set OMP_NUM_THREADS to {machine.cores}, or unset it."
    elif num_ranks == 1 and machine.kind == "cpu" and threads < machine.cores // 2:
        remedy = "Unset OMP_NUM_THREADS, or raise it, to compute with all cores."
    return Finding.judged("cores", found, remedy)


def check_memory(machine: Machine, plan: Plan | None, num_ranks: int | None) -> Iterator[Finding]:
    """Check RAM, and the memory of the devices, against the plan's estimate for this machine's ranks."""
    ram = f"{size(machine.free_memory_bytes)} of {size(machine.memory_bytes)} free"
    if plan is None or plan.memory is None or num_ranks is None:
        unknown = "; what the model needs is not known, its files are not at hand" if plan and not plan.memory else ""
        yield Finding("memory", ram + unknown)
        return
    policy = plan.config.num_ranks // plan.config.trainer.nnodes
    # Ranks beyond the policy's are those of roles with ranks of their own.
    pools = [
        plan.pool_bytes.get(role, 0) for role, count in plan.config.trainer.resource_pools.items() for _ in range(count)
    ]
    own, held = pools[: num_ranks - policy], plan.memory.offloaded
    if machine.devices:
        fullest, largest = min(device.free_bytes for device in machine.devices), max([plan.memory.total, *own])
        yield _compare("device memory", f"{size(fullest)} free on the fullest", largest, fullest)
        own = []
    else:
        held += plan.memory.total
    needed = num_ranks * PROCESS_BYTES + policy * held + sum(own)
    parts = f"{num_ranks} × {size(PROCESS_BYTES)} of processes + {policy} × {size(held)} of the plan"
    if own:
        parts += f" + {size(sum(own))} on other ranks"
    yield _compare("memory", f"{ram}; {parts}", needed, machine.free_memory_bytes)


def _compare(name: str, found: str, needed_bytes: int, free_bytes: int) -> Finding:
    tight = needed_bytes > _TIGHT * free_bytes
    status = "problem" if needed_bytes > free_bytes else "warning"
    found += f"; {size(needed_bytes)} needed (estimate)"
    return Finding.judged(name, found, _LESS_MEMORY if tight else "", status)


def check_bfloat16(machine: Machine) -> Finding:
    """Check that products in bfloat16 are not slower than in float32, by the architecture or by trying."""
    import torch

    from pellucid.devices import measure_gemm_flops

    if machine.kind == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
        found = "the GPU has it" if fast else "the GPU emulates it, slowly"
    else:
        device = torch.device(machine.kind)
        speed = {dtype: measure_gemm_flops(device, dtype, size=512) for dtype in (torch.bfloat16, torch.float32)}
        ratio = speed[torch.bfloat16] / speed[torch.float32]
        fast, found = ratio > 0.5, f"a product of matrices runs at {ratio:.2g} × the speed of float32"
    return Finding.judged("bfloat16", found, "" if fast else "Set actor_rollout_ref.model.dtype: float32.")
