"""The native capture of a model that runs inside of vLLM: hooks in its worker, under the names that the trainer's
modules have, so that `pellucid precision compare --rollout` finds the first of them that computes something else.

Nothing of it is in the engine: `begin` and `end` are called in the worker by their import path. vLLM merges layers and
leaves residual sums to the next norm; what is written is what the trainer's model would have: `qkv_proj` as `q_proj`,
`k_proj` and `v_proj`, `gate_up_proj` as its two, a decoder layer with its sum. Kernels between them (rotary embeddings,
attention, activation, output head) are no modules here. Where layers are spread over workers, the first records what is
whole on each: norms, layers, and outputs that are summed up.
"""

from __future__ import annotations

import re
from collections import defaultdict
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch

from pellucid.precision.capture import Guarded, Recorder, entry_prefix
from pellucid.precision.dump import About, StageDump, write_dump
from pellucid.stages import PREFILL, TokenSpan, Unit

_REQUEST = re.compile(r"(?P<name>(?P<uid>.*) sample \d+) turn 0 request \d+")
"""What `InferenceRolloutEngine` calls the first request of a trajectory; vLLM adds to it."""
_LAYER = re.compile(r"(^|\.)layers\.\d+$")
_sessions: list[EngineSession] = []
"""The capture that is being taken in this worker, if there is one."""


def begin(worker: Any, about: dict[str, Any], skip_steps: int, num_steps: int | None) -> None:
    """Begin a capture; `about` has the fields of `About` that the caller knows."""
    if worker.rank == 0:
        _sessions.append(EngineSession(worker, About(**about), skip_steps, num_steps))


def end(worker: Any, folder: str) -> tuple[list[str], str | None]:
    """End it, write its files into `folder`, and return them, with the error that cut it short."""
    if worker.rank != 0:
        return [], None
    session = _sessions.pop()
    return [str(file) for file in write_dump(Path(folder), session.end())], session.about.error


class EngineSession(Guarded):
    """One capture of the model of one worker."""

    def __init__(self, worker: Any, about: About, skip_steps: int, num_steps: int | None) -> None:
        self.about = about
        self._runner, self._is_alone = worker.model_runner, worker.parallel_config.world_size == 1
        self._passes_to_skip, self._passes_left = skip_steps, num_steps
        model = self._runner.get_model()
        about.dtype, about.model = str(self._runner.model_config.dtype), type(model).__name__
        self._recorder = Recorder(next(model.parameters()).device)
        self._parts = {whole: list(parts) for whole, parts in model.packed_modules_mapping.items()}
        self._num_calls: defaultdict[str, count[int]] = defaultdict(count)
        self._num_tokens = 0
        """Of the pass in hand; 0: it is not captured."""
        self._hooks = [model.register_forward_pre_hook(self.guarded(self._begin_pass), with_kwargs=True)]
        for path, module in model.named_modules():
            own = path.rpartition(".")[2]
            if path and own != "lm_head" and next(module.parameters(), None) is not None:
                hook = self.guarded(partial(self._record, path, own))
                self._hooks.append(module.register_forward_hook(hook, with_kwargs=True))

    def end(self) -> StageDump:
        """Take the hooks away and return the capture."""
        for hook in self._hooks:
            hook.remove()
        self.about.end(self.error)
        self.about.passes = self._recorder.passes
        return StageDump(self.about, *self._recorder.dump())

    def _begin_pass(self, model: Any, args: Any, kwargs: Any) -> None:
        """Note whose tokens a pass holds."""
        batch, bounds = self._runner.input_batch, self._runner.query_start_loc.np
        self._num_tokens = 0
        if not batch.num_reqs or self._passes_left == 0:
            return
        if self._passes_to_skip:
            self._passes_to_skip -= 1
            return
        if self._passes_left is not None:
            self._passes_left -= 1
        spans: list[TokenSpan] = []
        for index, request in enumerate(batch.req_ids[: batch.num_reqs]):
            if (named := _REQUEST.match(request)) is None:
                continue
            start, end = int(bounds[index]), int(bounds[index + 1])
            position, num_prompt = int(batch.num_computed_tokens_cpu[index]), int(batch.num_prompt_tokens[index])
            of_prompt = min(max(num_prompt - position, 0), end - start)
            if of_prompt:
                spans.append(TokenSpan(named["uid"], "prompt", start, of_prompt, position))
            if end - start > of_prompt:
                rest, at = end - start - of_prompt, position + of_prompt
                spans.append(TokenSpan(named["name"], "response", start + of_prompt, rest, at))
        self._num_tokens = int(bounds[batch.num_reqs])
        self._recorder.begin_pass(PREFILL if any(one.part == "prompt" for one in spans) else Unit.DECODE_STEP, spans)
        ids = kwargs.get("input_ids", args[0] if args else None)
        self._recorder.leaf(ids[: self._num_tokens].view(1, -1))  # from which the length of the token axis is known

    def _record(self, path: str, own: str, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Record what a module of vLLM has computed, as calls of the trainer's modules."""
        if not self._num_tokens:
            return
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        # Of a decoder layer and of attention the positions come first.
        read = next((value for value in given if value.is_floating_point()), given[0])
        made: tuple[Any, ...] = output if isinstance(output, tuple) else (output,)
        is_pair = len(made) == 2 and isinstance(made[1], torch.Tensor) and made[0].shape == made[1].shape
        is_layer, has_parts = _LAYER.search(path) is not None, next(module.children(), None) is not None
        if own in self._parts:
            if self._is_alone:
                self._record_parts(path, own, module, read, made[0])
        elif is_layer and is_pair:  # what the next norm will add
            self._add(path, module, None, made[0] + made[1])
        elif is_pair:  # a norm, which has added the residual first, in place
            self._add(path, module, made[1], made[0], self._weight(module))
        else:
            whole = read if self._is_alone or has_parts or module_weight(module) is None else None
            self._add(path, module, whole, made[0], self._weight(module), by_name=has_parts)

    def _record_parts(self, path: str, own: str, module: Any, read: torch.Tensor, made: torch.Tensor) -> None:
        """Record a merged layer as those that it is made of."""
        names, sizes = self._parts[own], list(module.output_partition_sizes)
        if len(names) != len(sizes) or sum(sizes) != made.shape[-1]:
            return
        weight = module_weight(module)
        weights = [None] * len(names) if weight is None or len(weight) != sum(sizes) else weight.split(sizes)
        for name, part, of_weight in zip(names, made.split(sizes, -1), weights):
            self._add(path.removesuffix(own) + name, module, read, part, of_weight)

    def _add(
        self,
        path: str,
        module: Any,
        read: torch.Tensor | None,
        made: torch.Tensor,
        weight: torch.Tensor | None = None,
        *,
        by_name: bool = False,
    ) -> None:
        prefix, groups = entry_prefix(path, module), dict[str, Any]()
        if read is not None:
            groups["input_args"] = [self._measure(read)]
            if by_name:  # as transformers calls attention
                groups["input_kwargs"] = {"hidden_states": self._measure(read)}
        groups["output"] = [self._measure(made)]
        number = next(self._num_calls[prefix])
        if weight is not None and number == 0:
            groups["parameters"] = {"weight": self._recorder.leaf(weight, of_tokens=False)}
        self._recorder.add(f"{prefix}.forward.{number}", None, groups)

    def _measure(self, tensor: torch.Tensor) -> Any:
        """Measure a tensor of tokens, without what pads it, in the trainer's shape."""
        return self._recorder.leaf(tensor[: self._num_tokens][None])

    def _weight(self, module: Any) -> torch.Tensor | None:
        """Return a module's weight where it is whole and not packed for a kernel."""
        weight = module_weight(module)
        return weight if self._is_alone or (weight is not None and weight.dim() == 1) else None


def module_weight(module: Any) -> torch.Tensor | None:
    """Return a module's weight without a vocabulary's padding; None where it has none, or a kernel has packed it."""
    weight = dict(module.named_parameters(recurse=False)).get("weight")
    if weight is None or not weight.numel() or not weight.is_floating_point():
        return None
    return weight[: module.org_vocab_size] if hasattr(module, "org_vocab_size") else weight
