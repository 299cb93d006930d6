"""What an engine's own process does with weights: it compares their digests, and afterwards what it serves."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.functional import linear

from pellucid.rollout.transports import NOT_ARRIVED, parse_handle
from pellucid.training.common.buckets import tensor_digest

TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""By how much of its largest output a layer may differ from its weights applied in plain PyTorch."""
Difference = tuple[str, str, str]
"""A tensor's name, the digest that was sent, and what the engine has."""


class Arrival:
    """The weights of a `WeightHandle` in JSON on their way into an engine's model."""

    def __init__(self, handle: str, verify: bool) -> None:
        self._handle, self._verify = parse_handle(handle), verify
        self._names: list[str] = []
        self._arrived: dict[str, torch.Tensor] = {}
        self.wrong: Difference | None = None
        """The first of those to be verified that is not what was sent."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors with their names; of those to be verified the digest is compared."""
        for bucket in self._handle.buckets():
            self._names += bucket.tensors
            for name, tensor in bucket.tensors.items():
                if self._verify:  # or none is kept
                    self._arrived[name] = tensor
                    if (digest := tensor_digest(tensor)) != bucket.digests[name]:
                        self.wrong = self.wrong or (name, bucket.digests[name], f"digest {digest}")
                yield name, tensor

    def difference(
        self, model: Any, merged: Mapping[str, Sequence[str]], dtype: torch.dtype, *, tied: bool, whole: bool
    ) -> Difference | None:
        """Return the first tensor that is not what was sent, once all are loaded; of what is not to be verified, the
        first that did not arrive.

        What an engine computes with is packed and merged for its kernels, so the outputs are compared: each linear
        layer, the output head among them, is applied to noise, as are the weights that were sent. Norms, biases and
        embeddings are compared themselves.

        Args:
            model: the engine's.
            merged: its layers that hold several of the sent ones, with the names of these in order.
            dtype: what it computes in.
            tied: its output head has the embeddings' weights.
            whole: it has each layer whole; where layers are spread over several workers, the digest is all.
        """
        if (lost := first_missing(model, merged, self._names, tied=tied)) is not None:
            return lost, *NOT_ARRIVED
        if self.wrong or not self._verify or not whole:
            return self.wrong
        embedding = next((name for name in self._arrived if name.endswith("embed_tokens.weight")), None)
        sent = self._arrived | ({"lm_head.weight": self._arrived[embedding]} if tied and embedding else {})
        return first_difference(model, merged, sent, dtype)


def first_missing(model: Any, merged: Mapping[str, Sequence[str]], names: Iterable[str], *, tied: bool) -> str | None:
    """Return the first weight of a model that is not among the sent ones, where its like of other layers is."""
    sent = {name.rpartition(".")[0] for name in names}
    parts_of: dict[str, list[str]] = {}
    for place, _ in model.named_modules():
        parent, _, own = place.rpartition(".")
        parts_of[place] = [f"{parent}.{part}" for part in merged.get(own, ())] or [place]
    kinds = {type(module).__name__ for place, module in model.named_modules() if not sent.isdisjoint(parts_of[place])}
    kinds |= {"VocabParallelEmbedding"} if tied else {"VocabParallelEmbedding", "ParallelLMHead"}
    places = [place for place, module in model.named_modules() if type(module).__name__ in kinds]
    expected = (part for place in places for part in parts_of[place])
    return next((f"{part}.weight" for part in expected if part not in sent), None)


@torch.no_grad()
def first_difference(
    model: Any, merged: Mapping[str, Sequence[str]], sent: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> Difference | None:
    """Return the first weight of a model, which computes in `dtype`, that is not what was sent."""
    whole_of = {part: whole for whole, parts in merged.items() for part in parts}
    order = list(whole_of)  # in which a merged layer has its parts
    wholes: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    for name, tensor in sent.items():
        *parents, own, kind = name.split(".")
        wholes[".".join((*parents, whole_of.get(own, own), kind))][name] = tensor
    served = dict(model.named_parameters(remove_duplicate=False))
    modules = dict(model.named_modules(remove_duplicate=False))
    for place, parts in wholes.items():
        names = sorted(parts, key=lambda name: order.index(own) if (own := name.split(".")[-2]) in order else 0)
        whole, module = torch.cat([parts[name] for name in names]).to(dtype), modules.get(place.rpartition(".")[0])
        if whole.dim() == 2 and not place.endswith("embed_tokens.weight") and module is not None:
            noise = torch.randn(4, whole.shape[1], generator=torch.Generator().manual_seed(0)).to(whole)
            expected, there = linear(noise, whole), noise.to(next(model.parameters()).device)
            computed = module.quant_method.apply(module, there)[:, : len(whole)].to(expected)
            tolerance = TOLERANCE[dtype]
        elif place in served:
            expected, computed, tolerance = whole, served[place][: len(whole)].to(whole), 0.0
        else:
            continue
        gap = float((computed - expected).abs().max() / expected.abs().max().clamp(min=1e-30))
        # Where NaN was sent, NaN is served rightly.
        if gap > tolerance or (math.isnan(gap) and expected.isfinite().all()):
            found = f"a kernel whose outputs differ by {gap:.2%} of the largest from those of the weights sent"
            return names[0], tensor_digest(sent[names[0]]), found
    return None
