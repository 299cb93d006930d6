"""Checks of what computes: devices and cores against ranks, memory against the plan, number formats against the chip."""

from __future__ import annotations

import os
from collections.abc import Iterator

from pellucid.config.plan import Plan
from pellucid.doctor.findings import Finding, Status, size
from pellucid.doctor.machine import Machine

PROCESS_BYTES = 400 * 2**20
"""RAM of a process that has imported torch and transformers, before any model."""
_TIGHT = 0.9
"""Share of the free memory from which the estimate, whose activations are rough, is cutting it fine."""
_LESS_MEMORY = (
    "End other processes; lower actor_rollout_ref.actor.ppo_max_token_len_per_gpu or actor_rollout_ref.rollout.max_num_seqs; "
    "or set actor_rollout_ref.model.enable_gradient_checkpointing: true."
)


def check_devices(machine: Machine, num_ranks: int | None) -> Finding:
    """Check that each rank of this machine has a device, or cores, of its own.

    Args:
        machine: what is there.
        num_ranks: ranks that the recipe puts on this machine; None when none are known.
    """
    found, there = _devices(machine), len(machine.devices) if machine.devices else machine.cores
    if num_ranks is None:
        return Finding("devices", found)
    found += f"; {num_ranks} rank{'s' * (num_ranks > 1)}"
    if num_ranks > there:
        remedy = (
            f"Ask for at most {there} ranks (trainer.n_gpus_per_node), or join a larger cluster (trainer.ray_address)."
        )
        return Finding("devices", f"{found}, each of which needs one of its own", "problem", remedy)
    return Finding("devices", found)


def _devices(machine: Machine) -> str:
    if not machine.devices:
        return f"cpu, {machine.cores} core{'s' * (machine.cores > 1)}"
    names = [f"{device.name} {size(device.memory_bytes)}" for device in machine.devices]
    models = ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") if machine.kind == "cuda" else None
    return f"{machine.kind}: {models}" + (f" (CUDA_VISIBLE_DEVICES={visible})" if visible is not None else "")


def check_cores(machine: Machine, num_ranks: int) -> Finding:
    """Check that the threads that compute have a core each, and that no core is left without.

    Args:
        machine: what is there.
        num_ranks: ranks on this machine, which share its cores evenly.
    """
    import torch

    threads = torch.get_num_threads() if num_ranks == 1 else max(1, machine.cores // num_ranks) * num_ranks
    found = f"{threads} thread{'s' * (threads > 1)} on {machine.cores} core{'s' * (machine.cores > 1)}"
    if machine.core_quota is not None and machine.core_quota < threads:
        found += f", of which the container may use {machine.core_quota:g}"
        remedy = f"Raise the container's CPU limit to {threads}, or bind it to fewer cores (taskset, cpuset)."
        return Finding("cores", found, "warning", remedy)
    if num_ranks == 1 and threads > machine.cores:
        return Finding("cores", found, "warning", f"Set OMP_NUM_THREADS to {machine.cores}, or unset it.")
    if machine.kind == "cpu" and num_ranks == 1 and threads < machine.cores // 2:
        return Finding("cores", found, "warning", "Unset OMP_NUM_THREADS, or raise it, to compute with all cores.")
    return Finding("cores", found)


def check_memory(machine: Machine, plan: Plan | None, num_ranks: int | None) -> Iterator[Finding]:
    """Check RAM, and the memory of the devices, against the plan's estimate.

    Args:
        machine: what is there.
        plan: the recipe's; None without a recipe.
        num_ranks: ranks on this machine; None when none are known.
    """
    free, ram = machine.free_memory_bytes, f"{size(machine.free_memory_bytes)} of {size(machine.memory_bytes)} free"
    if plan is None or plan.memory is None or num_ranks is None:
        unknown = "; what the model needs is not known, its files are not at hand" if plan and not plan.memory else ""
        yield Finding("memory", ram + unknown)
        return
    policy = plan.num_ranks // plan.num_machines
    # Ranks beyond the policy's are those of roles with ranks of their own.
    pools = [plan.pool_bytes.get(role, 0) for role, count in plan.pools.items() for _ in range(count)]
    own = pools[: num_ranks - policy]
    parts = {f"processes {_times(num_ranks, PROCESS_BYTES)}": num_ranks * PROCESS_BYTES}
    if machine.devices:
        fullest, largest = min(device.free_bytes for device in machine.devices), max([plan.memory.total, *own])
        yield _against(
            "device memory", f"{size(fullest)} free on the fullest; {size(largest)} a rank", largest, fullest
        )
        parts[f"offloaded {_times(policy, plan.memory.offloaded)}"] = policy * plan.memory.offloaded
    else:
        held = plan.memory.total + plan.memory.offloaded
        parts[f"the plan's {_times(policy, held)}"] = policy * held
        parts[f"roles with ranks of their own {size(sum(own))}"] = sum(own)
    needed = sum(parts.values())
    sums = " + ".join(text for text, num_bytes in parts.items() if num_bytes)
    yield _against("memory", f"{ram}; {sums} = {size(needed)}", needed, free)


def _times(count: int, num_bytes: int) -> str:
    return f"{count} × {size(num_bytes)}" if count > 1 else size(num_bytes)


def _against(name: str, found: str, needed_bytes: int, free_bytes: int) -> Finding:
    if needed_bytes <= _TIGHT * free_bytes:
        return Finding(name, f"{found} needed (estimate)")
    status: Status = "problem" if needed_bytes > free_bytes else "warning"
    return Finding(name, f"{found} needed (estimate)", status, _LESS_MEMORY)


def check_bfloat16(machine: Machine) -> Finding:
    """Check that products in bfloat16 are not slower than in float32, by the architecture or by trying."""
    import torch

    from pellucid.devices import measure_gemm_flops

    remedy = "Set actor_rollout_ref.model.dtype: float32."
    if machine.kind == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return Finding("bfloat16", "the GPU has it")
        return Finding("bfloat16", "the GPU emulates it, slowly", "warning", remedy)
    device = torch.device(machine.kind)
    ratio = measure_gemm_flops(device, torch.bfloat16, size=512) / measure_gemm_flops(device, torch.float32, size=512)
    found = f"a product of matrices runs at {ratio:.2g} × the speed of float32"
    return Finding("bfloat16", found) if ratio > 0.5 else Finding("bfloat16", found, "warning", remedy)
