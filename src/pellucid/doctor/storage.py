"""Checks of where a run writes: its folder, the folder for temporary files, and shared memory."""

from __future__ import annotations

import math
import os
import shutil
import tempfile

from pellucid.config import Plan, RunConfig
from pellucid.config.memory import WIDTHS
from pellucid.config.model_facts import read_model_facts
from pellucid.config.plan import size
from pellucid.doctor.findings import Finding
from pellucid.doctor.machine import Machine
from pellucid.files.checkpoint_store import CheckpointStore
from pellucid.files.rundir import RunDir

_TEMP_BYTES = 2**30
"""Room that logs, sockets and compiled kernels of one run fit into with ease."""
_RAY_FULL = 0.95
"""Ray stops writing objects to a disk that is fuller than this."""
_LONGEST_SOCKET, _RAY_SOCKET = 107, len("/ray/session_2000-01-01_00-00-00_000000_0000000/sockets/plasma_store")
"""Bytes that the system allows in a socket's name, and those that Ray adds to the folder's."""
_RAY_STORE_SHARE, _RAY_STORE_BYTES = 0.3, 10**10
"""Ray's object store takes this share of the memory, and at most so many bytes; it falls back to the disk."""
_NCCL_BYTES = 2**30
_PLENTY = 100
"""Checkpoints that a disk may have room for without a word about their number."""


def checkpoint_bytes(config: RunConfig, plan: Plan | None) -> int | None:
    """Return the size of one checkpoint; None when the models' files are not at hand."""
    if plan is None or plan.memory is None:
        return None
    memory, copy = plan.memory, config.copy_ranks("actor")
    if config.uses_megatron:  # whose ranks divide weights and optimizer in different ways
        assert plan.model is not None
        critic = (read_model_facts(config.critic.model.path) or plan.model) if config.has_critic else None
        number = plan.model.num_parameters + (0 if critic is None else critic.num_parameters)
        width = WIDTHS[config.actor_rollout_ref.model.dtype]
        masters = 0 if width == 4 else 4
        parts = {"model": (width + masters) * number, "optimizer": 8 * number, "hf_model": width * number}
        return sum(parts.get(part, 0) for part in config.actor_rollout_ref.actor.checkpoint.save_contents)
    critic = (memory.critic + plan.pool_bytes.get("critic", 0)) * config.copy_ranks("critic")
    # What has a gradient is saved; of the critic's four numbers a weight, the gradient is not.
    parts = {"model": memory.gradients * copy + critic // 4, "optimizer": memory.optimizer * copy + critic // 2}
    parts["hf_model"] = memory.weights * copy
    return sum(parts.get(part, 0) for part in config.actor_rollout_ref.actor.checkpoint.save_contents)


def check_run_directory(config: RunConfig, bytes_each: int | None) -> Finding:
    """Check that the run's folder can be written, and has room for the checkpoints that the recipe keeps.

    `bytes_each` is the size of one checkpoint; None when the model's files are not at hand.
    """
    name, run_dir = "run directory", RunDir(config.trainer.default_local_dir)
    path = run_dir.path.absolute()
    folder = next(place for place in (path, *path.parents) if os.path.lexists(place))
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        found = f"{folder} cannot be written to ({error.strerror})"
        return Finding(name, found, "problem", "Set trainer.default_local_dir to another folder.")
    free = shutil.disk_usage(folder).free
    found = f"{run_dir.path}: {size(free)} free"
    if bytes_each is None:
        return Finding(name, f"{found}; the size of a checkpoint is not known")
    trainer, there = config.trainer, len(CheckpointStore(run_dir.checkpoints).steps())
    steps, keep = trainer.total_training_steps, trainer.max_actor_ckpt_to_keep
    saved = 1 if trainer.save_freq < 1 else math.inf if steps is None else math.ceil(steps / trainer.save_freq)
    # A checkpoint is written whole before the oldest is deleted: one more than is kept must fit.
    most = min(saved, math.inf if keep is None else keep + 1)
    if most == math.inf:
        room = free // bytes_each
        found += f", room for {room} checkpoints of {size(bytes_each)}; every one is kept"
        return Finding.judged(name, found, "" if room >= _PLENTY else "Set trainer.max_actor_ckpt_to_keep, e.g. to 2.")
    needed = max(1, int(most) - there) * bytes_each
    found += f"; {needed // bytes_each} × {size(bytes_each)} = {size(needed)} for checkpoints"
    remedy = "Free some space, lower trainer.max_actor_ckpt_to_keep, or move trainer.default_local_dir."
    return Finding.judged(name, found, remedy if needed > free else "", "problem")


def check_temp_folder(with_ray: bool) -> Finding:
    """Check the folder for temporary files, where Ray keeps its logs and the objects that do not fit into memory."""
    name = "temporary files"
    try:
        folder = tempfile.gettempdir()
    except FileNotFoundError as error:
        return Finding(name, str(error), "problem", "Set TMPDIR to a folder that can be written.")
    usage = shutil.disk_usage(folder)
    found = f"{folder}: {size(usage.free)} of {size(usage.total)} free"
    if with_ray and len(os.fsencode(folder)) + _RAY_SOCKET > _LONGEST_SOCKET:
        found += f"; the names of Ray's sockets there would be longer than {_LONGEST_SOCKET} bytes"
        return Finding(name, found, "problem", "Set TMPDIR to a shorter path, e.g. /tmp.")
    full = usage.free < _TEMP_BYTES or (with_ray and usage.free < (1 - _RAY_FULL) * usage.total)
    return Finding.judged(name, found, "Free some space, or set TMPDIR to a larger disk." if full else "")


def check_shared_memory(machine: Machine, num_ranks: int, step_bytes: int) -> Finding:
    """Check the shared memory, through which Ray's processes and NCCL hand on data: `step_bytes` in a step."""
    name, free = "shared memory", machine.free_shared_bytes
    if free is None:
        return Finding(name, "none, so Ray takes the disk")
    store = min(int(_RAY_STORE_SHARE * machine.free_memory_bytes), _RAY_STORE_BYTES)
    if machine.kind == "cuda" and num_ranks > 1 and free < _NCCL_BYTES:
        status, why = "problem", f"; NCCL fails with less than about {size(_NCCL_BYTES)}"
    elif free < max(step_bytes, store):
        status = "warning"
        why = f"; one step takes up to {size(step_bytes)}, Ray asks for {size(store)} and falls back to the disk"
    else:
        return Finding(name, f"{size(free)} free")
    enough = math.ceil(max(store, 2 * step_bytes, 2 * _NCCL_BYTES) / 2**30)
    remedy = f"Enlarge it: docker run --shm-size={enough}g; in Kubernetes an emptyDir with medium: Memory at /dev/shm."
    return Finding(name, f"{size(free)} free{why}", status, remedy)
