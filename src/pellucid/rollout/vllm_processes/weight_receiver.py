"""What Pellucid adds to vLLM's worker processes, through vLLM's own extension point (`worker_extension_cls`).

`VllmRolloutEngine` calls it by `collective_rpc`; weights come from the trainer through a transport.
"""

import importlib
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear

from pellucid.rollout.transports import NOT_ARRIVED, WeightHandle
from pellucid.rollout.vllm_processes.joining import shape_of
from pellucid.training.common.buckets import tensor_digest

TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""By how much of its largest output a layer may differ from its weights applied in plain PyTorch."""
Difference = tuple[str, str, str]
"""A tensor's name, the digest that was sent, and what the engine has."""


class WeightReceiver:
    """Methods that vLLM mixes into its worker."""

    model_runner: Any
    model_config: Any
    cache_config: Any
    parallel_config: Any
    scheduler_config: Any
    profiler: Any

    def describe(self, names: list[str], file: str) -> dict[str, Any]:
        """Tell a run that joins this server its arguments in `names`, its model, and whether it sees `file`."""
        parts = self.model_config, self.cache_config, self.parallel_config, self.scheduler_config
        had = {field.name: str(getattr(part, field.name)) for part in reversed(parts) for field in fields(part)}
        model = shape_of(self.model_config.hf_config)
        return {"arguments": {name: had.get(name) for name in names}, "model": model, "sees": Path(file).exists()}

    def take_weights(self, handle: str, verify: bool) -> Difference | None:
        """Load the weights of a `WeightHandle` in JSON; return the first that is not what was sent.

        Of what arrives the digest is compared. What vLLM computes with is packed and merged for its kernels, so of that
        the outputs are compared: each linear layer, the output head among them, is applied to noise, as are the weights
        that were sent. Where a layer is spread over several workers, none has it whole, and the digest is all.
        """
        model, arrived, wrong = self.model_runner.get_model(), dict[str, torch.Tensor](), list[Difference]()
        names = list[str]()

        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            for bucket in WeightHandle.parse(handle).buckets():
                names.extend(bucket.tensors)
                for name, tensor in bucket.tensors.items():
                    if verify:  # or none is kept
                        arrived[name] = tensor
                        if (digest := tensor_digest(tensor)) != bucket.digests[name]:
                            wrong.append((name, bucket.digests[name], f"digest {digest}"))
                    yield name, tensor

        self.model_runner.reload_weights(weights_iterator=tensors())
        self.pack_head(model)
        if (lost := first_missing(model, names)) is not None:
            return lost, *NOT_ARRIVED
        if not verify or wrong:
            return wrong[0] if wrong else None
        if self.parallel_config.world_size > 1:
            return None
        if self.model_runner.model_config.hf_text_config.tie_word_embeddings:
            embedding = next((name for name in arrived if name.endswith("embed_tokens.weight")), None)
            if embedding is not None:
                arrived["lm_head.weight"] = arrived[embedding]
        return first_difference(model, arrived, self.model_runner.model_config.dtype)

    def look_inside(self, function: str, *arguments: Any) -> Any:
        """Call a function of `module:name` with this worker: what looks into the model comes from outside."""
        module, _, name = function.partition(":")
        return vars(importlib.import_module(module))[name](self, *arguments)

    def print_no_tables(self) -> None:
        """Let the profiler that has begun write its trace alone: on a CPU it prints a table of operators, too."""
        self.profiler.dump_cpu_time_total = False

    def pack_head(self, model: Any) -> None:
        """Pack the output head anew: a tied one shares the embeddings, and on a CPU keeps a packed copy of the old."""
        head = dict(model.named_children()).get("lm_head")
        if head is not None and isinstance(head.weight, torch.Tensor):
            head.quant_method.process_weights_after_loading(head)


def first_missing(model: Any, names: Iterable[str]) -> str | None:
    """Return the first weight of a vLLM model that is not among the sent ones, where its like of other layers is."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    sent = {name.rpartition(".")[0] for name in names}
    parts_of: dict[str, list[str]] = {}
    for place, _ in model.named_modules():
        parent, _, own = place.rpartition(".")
        parts_of[place] = [f"{parent}.{part}" for part in model.packed_modules_mapping.get(own, ())] or [place]
    kinds = {type(module) for place, module in model.named_modules() if not sent.isdisjoint(parts_of[place])}
    kinds |= {VocabParallelEmbedding} if model.config.tie_word_embeddings else {VocabParallelEmbedding, ParallelLMHead}
    expected = (part for place, module in model.named_modules() if type(module) in kinds for part in parts_of[place])
    return next((f"{part}.weight" for part in expected if part not in sent), None)


@torch.no_grad()
def first_difference(model: Any, sent: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Difference | None:
    """Return the first linear layer of a vLLM model that computes in `dtype` something else than what was sent."""
    merged = {part: whole for whole, parts in model.packed_modules_mapping.items() for part in parts}
    order = list(merged)  # in which a merged layer has its parts
    layers: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    for name, tensor in sent.items():
        place, _, kind = name.rpartition(".")
        parent, _, own = place.rpartition(".")
        if kind == "weight" and tensor.dim() == 2:
            layers[".".join(filter(None, (parent, merged.get(own, own))))][name] = tensor
    modules = dict(model.named_modules())
    for place, parts in layers.items():
        module = modules[place]
        names = sorted(parts, key=lambda name: order.index(own) if (own := name.split(".")[-2]) in order else 0)
        whole = torch.cat([parts[name] for name in names]).to(dtype)
        if place.endswith("embed_tokens"):
            expected, computed = whole, module.weight[: len(whole)].to(whole)
        else:
            noise = torch.randn(4, whole.shape[1], generator=torch.Generator().manual_seed(0)).to(whole)
            expected = linear(noise, whole)
            there = noise.to(next(model.parameters()).device)
            computed = module.quant_method.apply(module, there)[:, : len(whole)].to(expected)
        gap = float((computed - expected).abs().max() / expected.abs().max().clamp(min=1e-30))
        # Where NaN was sent, NaN is served rightly.
        if gap > TOLERANCE[dtype] or (math.isnan(gap) and expected.isfinite().all()):
            name = names[0]
            found = f"a kernel whose outputs differ by {gap:.2%} of the largest from those of the weights sent"
            return name, tensor_digest(sent[name]), found
    return None
