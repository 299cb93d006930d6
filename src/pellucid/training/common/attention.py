"""One attention function for every model: the layout handed to the forward pass decides what attends to what.

Hugging Face models look attention up by name; ours forwards to `layout.attend`. Training packs sequences
(`packing.py`), the native rollout engine prefills and decodes against its cache (`rollout/native/cache.py`); no model
code is patched.
"""

import copy
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from pellucid.errors import UserError

NAME = "pellucid"


class AttentionLayout(Protocol):
    """Knows which keys each query token sees; shapes N tokens, H query heads, K key heads, D head size."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None
    ) -> Tensor:
        """Return the attention output [1, N, H, D] for query [1, H, N, D], key and value [1, K, N, D]."""
        ...


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Any = None,
    layout: AttentionLayout | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    if layout is None:
        raise unsupported(module, "does not hand its keyword arguments on to attention")
    if softcap is not None or s_aux is not None:
        raise unsupported(module, "uses soft-capped or sink attention, which the packed attention does not compute")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    layer: int = module.layer_idx  # pyright: ignore[reportAssignmentType]
    return layout.attend(layer, query, key, value, scale=scale, window=sliding_window), None


def unsupported(module: torch.nn.Module, why: str, field: str = "actor_rollout_ref.model.path") -> UserError:
    """Return the error for an architecture that the packed path cannot run; `field` is the config key that names it."""
    remedy = "Use another architecture (Llama, Qwen, Mistral, SmolLM, GPT-NeoX, …)."
    return UserError(field, f"{type(module).__name__} {why}.", remedy)


def register_attention() -> None:
    """Make `attn_implementation="pellucid"` known to transformers; no mask is built, the layout knows."""
    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)


@dataclass(slots=True)
class SegmentBucket:
    """R segments of similar length, right-padded; query i of segment r sees keys j ≤ i + offset[r]."""

    query_index: Tensor
    """[R, Lq] int64 token positions in the pack; padding points at token 0 and its output is dropped."""
    key_index: Tensor
    """[R, Lk] int64 token positions in the pack."""
    offset: Tensor
    """[R] int64 number of keys before the segment's first query (the shared prompt's length, or 0)."""
    causal: bool
    """True when every offset is 0, so that the kernel's own causal mask serves."""

    def mask(self, window: int | None) -> Tensor | None:
        """Return the [R, 1, Lq, Lk] bool mask, or None where the causal flag says it all."""
        if self.causal and window is None:
            return None
        queries = torch.arange(self.query_index.shape[1], device=self.offset.device)[:, None]
        keys = torch.arange(self.key_index.shape[1], device=self.offset.device)
        last = queries + self.offset[:, None, None]
        mask = keys <= last
        if window is not None:
            mask &= keys > last - window
        return mask[:, None]


class PackedAttention:
    """Attention over a pack of N tokens in which each segment sees its own tokens and its prompt, nothing else."""

    def __init__(self, buckets: list[SegmentBucket], num_tokens: int) -> None:
        device = buckets[0].query_index.device
        self.buckets = buckets
        self._masks: dict[int | None, list[Tensor | None]] = {}
        # Row of the concatenated bucket outputs that holds each token; padding rows point at token 0 and come first.
        flat = torch.cat([bucket.query_index.reshape(-1) for bucket in buckets])
        self._output_row = torch.zeros(num_tokens, dtype=torch.int64, device=device)
        real = torch.cat([self._real_queries(bucket) for bucket in buckets])
        self._output_row[flat[real]] = torch.arange(flat.numel(), device=device)[real]

    def padded(self, missing: int) -> "PackedAttention":
        """Return the same over `missing` more tokens, which attend like the first one and which nothing attends to."""
        longer = copy.copy(self)
        longer._output_row = F.pad(self._output_row, (0, missing))
        return longer

    @staticmethod
    def _real_queries(bucket: SegmentBucket) -> Tensor:
        width = bucket.query_index.shape[1]
        first = bucket.query_index[:, :1]
        steps = torch.arange(width, device=first.device)
        # A segment's tokens are consecutive in the pack, so padding is where the run breaks.
        return (bucket.query_index == first + steps).reshape(-1)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None
    ) -> Tensor:
        """Return the output [1, N, H, D] of each token over its own sequence and the prompt it shares."""
        query_NHD, key_NKD, value_NKD = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        if window not in self._masks:
            self._masks[window] = [bucket.mask(window) for bucket in self.buckets]
        outputs = []
        for bucket, mask in zip(self.buckets, self._masks[window]):
            q = _gather(query_NHD, bucket.query_index)
            k, v = (_gather(tokens, bucket.key_index) for tokens in (key_NKD, value_NKD))
            output = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
            )
            outputs.append(output.transpose(1, 2).flatten(0, 1))
        return _take_rows(torch.cat(outputs), self._output_row)[None]


def _gather(tokens: Tensor, index: Tensor) -> Tensor:
    """Return the [N, H, D] tokens at [R, L] positions as [R, H, L, D]."""
    return _take_rows(tokens, index.reshape(-1)).unflatten(0, index.shape).transpose(1, 2)


def _take_rows(tokens: Tensor, index: Tensor) -> Tensor:
    """Return the [N, H, D] tokens at [M] positions as [M, H, D].

    It is an embedding look-up rather than an index: its backward sums the rows in parallel and in a fixed order.
    """
    return F.embedding(index, tokens.flatten(1)).unflatten(1, tokens.shape[1:])
