"""Benchmarks of lm-evaluation-harness on a model or a run: `pellucid eval MODEL --harness arc_easy,hellaswag`.

The package (extra `[harness]`) reads the tasks' data, asks the model and scores; what leaves is each metric of a task.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from pellucid import devices
from pellucid.errors import MissingExtraError, UserError, did_you_mean
from pellucid.trained import load_trained
from pellucid.training.common.models import save_hf_model


@dataclass(frozen=True)
class HarnessScore:
    """One metric of one benchmark."""

    task: str
    metric: str
    """acc, acc_norm, exact_match, …"""
    value: float
    stderr: float | None
    """Standard error; None where the package gives none."""
    num: int
    """Problems."""


def run_harness(
    model: str, tasks: Sequence[str], *, num: int | None = None, device: str = "auto", folder: str | None = None
) -> list[HarnessScore]:
    """Return what lm-evaluation-harness measures of a model.

    Args:
        model: a run, a checkpoint, a model folder, a hub id or `builtin`.
        tasks: names of its tasks or groups.
        num: at most this many problems of each task.
        device: auto, cpu, cuda or npu.
        folder: one with more tasks, as YAML files.

    Raises:
        MissingExtraError: the package is not installed.
        UserError: there is no such model or task.
    """
    try:
        import lm_eval
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ModuleNotFoundError as error:
        raise MissingExtraError("--harness", "lm_eval", "harness") from error
    manager = TaskManager(include_path=folder)
    for name in tasks:
        if not manager.match_tasks([name]):
            remedy = did_you_mean(name, manager.all_tasks)
            raise UserError("--harness", f"lm-evaluation-harness has no task '{name}'.", remedy)
    with TemporaryDirectory() as plain:  # what it asks is the model of plain transformers
        policy, tokenizer, _ = load_trained(model, torch.device("cpu"))
        save_hf_model(policy, tokenizer, Path(plain))
        asked = HFLM(pretrained=plain, batch_size=8, device=str(devices.choose_device(device)))
        settings = {"limit": num, "task_manager": manager, "log_samples": False}
        done: Any = lm_eval.simple_evaluate(asked, tasks=list(tasks), **settings)
    return [
        HarnessScore(task, name.partition(",")[0], value, _stderr(measured, name), done["n-samples"][task]["effective"])
        for task, measured in done["results"].items()
        for name, value in measured.items()
        if isinstance(value, float) and "_stderr," not in name and task in done["n-samples"]
    ]


def _stderr(measured: dict[str, Any], name: str) -> float | None:
    metric, _, how = name.partition(",")
    value = measured.get(f"{metric}_stderr,{how}")
    return value if isinstance(value, float) else None
