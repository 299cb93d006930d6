"""A policy loss that is the usual one, and on import plants the fault of `fault.json` beside the recipe into the process's models.

`planted_faults.py` runs `pellucid train` with it: a plug-in is the one piece of user code that every process of a run loads before its
models are made. What is planted is the numbers alone; no code of the precision debugger is touched.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pellucid.algo.policy_loss import vanilla
from pellucid.observe.process import ProcessProfiler
from pellucid.precision.capture import named_modules
from pellucid.rollout.native import NativeRolloutEngine
from pellucid.rollout.native.decoder import Decoder
from pellucid.stages import Probes
from pellucid.training.common.optimizer import ScheduledAdamW
from pellucid.training.common.packing import packed_spans
from pellucid.training.fsdp import FsdpEngine

FAULT: dict[str, Any] = json.loads(Path("fault.json").read_text()) if Path("fault.json").exists() else {}
loss = vanilla
_spans: list[Any] = []
_calls: Counter[tuple[Any, ...]] = Counter()


def spoiled(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with NaN, or with 1% more, in the tokens of the fault's sample; without a sample in all of it."""
    spans = [span for span in (_spans[-1] if _spans else []) if span.sample == FAULT["sample"]]
    if FAULT["sample"] is not None and not spans:
        return tensor
    result = tensor.clone()
    tokens = result.view(-1, result.shape[-1]) if FAULT["sample"] is not None else None
    parts = [result] if tokens is None else [tokens[span.start : span.start + span.length] for span in spans]
    for part in parts:
        part.mul_(torch.nan if FAULT["how"] == "nan" else 1.01)
    return result


def strikes(profiler: Any, what: str) -> bool:
    """Tell whether this is where and when the fault is to be, and count the calls until then."""
    if FAULT["what"] != what or FAULT["rank"] not in (None, dist.get_rank() if dist.is_initialized() else 0):
        return False
    probes = profiler.probes if isinstance(profiler, Probes) else [profiler]
    process = next((probe for probe in probes if isinstance(probe, ProcessProfiler)), None)
    if process is None:  # `pellucid precision replay` runs the failed stage and nothing else
        return True
    if process.at is None:  # a run that repeats the stage that failed
        return FAULT["how"] == "nan" and what != "optimizer"
    stage, step = process.at
    if (stage, step) != (FAULT["stage"], FAULT["step"]):
        return False
    if FAULT["how"] == "nan" and what != "optimizer":  # a failed stage is repeated: the fault goes with the sample, not with time
        return True
    _calls[stage, step] += 1
    return FAULT["call"] in (None, _calls[stage, step] - 1)


def plant(model: torch.nn.Module, profiler: Any) -> None:
    """Spoil what the fault's module computes, or the gradient that comes back to it."""
    module = dict(named_modules([model])).get(FAULT.get("module", ""))
    if module is None:
        return

    def hook(module: torch.nn.Module, args: Any, output: Any) -> Any:
        tensor = output[0] if isinstance(output, tuple) else output
        if strikes(profiler, "output"):
            tensor = spoiled(tensor)
        elif tensor.requires_grad and strikes(profiler, "gradient"):
            tensor.register_hook(spoiled)
        return (tensor, *output[1:]) if isinstance(output, tuple) else tensor

    module.register_forward_hook(hook)


def spoil_update(model: torch.nn.Module, optimizer: ScheduledAdamW, profiler: Any) -> None:
    """Spoil one weight as the optimizer makes its step."""
    def wrong_step(*_: Any) -> None:
        if strikes(profiler, "optimizer"):
            weight = dict(named_modules([model]))[FAULT["module"]].weight.data  # pyright: ignore[reportAttributeAccessIssue]
            (weight.to_local() if hasattr(weight, "to_local") else weight).mul_(torch.nan if FAULT["how"] == "nan" else 1.01)

    optimizer.adamw.register_step_post_hook(wrong_step)


def spoil_sampling(engine: NativeRolloutEngine) -> None:
    """Let the engine sample with one weight as it was at first, or rounded to bfloat16; the trainer's stays."""
    weight = dict(named_modules([engine.policy.model]))[FAULT["module"]].weight  # pyright: ignore[reportAttributeAccessIssue]
    first, begin, step = weight.detach().clone(), engine._begin, engine._step

    def with_wrong_weight(work: Any) -> Any:
        def call() -> Any:
            own = weight.data
            weight.data = first if FAULT["what"] == "stale" else own.bfloat16().float()
            try:
                return work()
            finally:
                weight.data = own

        return call

    engine._begin, engine._step = with_wrong_weight(begin), with_wrong_weight(step)


def follow_passes() -> None:
    """Keep in `_spans` whose tokens the pass in hand holds, also when the sentinel repeats one."""
    micro_batch, run = FsdpEngine._micro_batch, FsdpEngine._run
    prefill, decode = Decoder.prefill, Decoder.decode
    spans_of: dict[int, Any] = {}

    def seen_micro_batch(engine: FsdpEngine, sequences: Any, rows: list[int], inputs: Any) -> Any:
        spans_of[id(inputs)] = packed_spans([sequences[row] for row in rows]) if rows else []
        return micro_batch(engine, sequences, rows, inputs)

    def seen_run(engine: FsdpEngine, inputs: Any, head: Any) -> Any:
        _spans[:] = [spans_of[id(inputs)]]
        return run(engine, inputs, head)

    def seen_prefill(decoder: Decoder, rows: Any) -> Any:
        _spans[:] = [[]]
        return prefill(decoder, rows)

    def seen_decode(decoder: Decoder) -> None:
        _spans[:] = [decoder.decode_spans()]
        decode(decoder)

    FsdpEngine._micro_batch, FsdpEngine._run = seen_micro_batch, seen_run
    Decoder.prefill, Decoder.decode = seen_prefill, seen_decode


def _install() -> None:
    make_engine, make_rollout = FsdpEngine.__init__, NativeRolloutEngine.__init__

    def make(engine: FsdpEngine, model: Any, optimizer: Any, *args: Any, **options: Any) -> None:
        make_engine(engine, model, optimizer, *args, **options)
        plant(model, engine._probe)
        if optimizer is not None and FAULT["what"] == "optimizer":
            spoil_update(model, optimizer, engine._probe)

    def make_sampler(engine: NativeRolloutEngine, policy: Any, *args: Any, **options: Any) -> None:
        make_rollout(engine, policy, *args, **options)
        if not isinstance(policy, FsdpEngine):  # a copy of its own
            plant(policy.model, engine.decoder.probe)
        if FAULT["what"] in ("stale", "bf16"):
            spoil_sampling(engine)

    FsdpEngine.__init__, NativeRolloutEngine.__init__ = make, make_sampler
    follow_passes()


if FAULT:
    _install()
