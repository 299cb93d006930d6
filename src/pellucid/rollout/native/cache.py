"""Key/value cache of the native engine, and attention against it.

A group's prompt is stored once (`prefix`) and read by all its samples; each sample stores only its own tokens (`own`).
Active groups and active rows are always the first ones: what finishes is replaced by the last, so no row is computed
in vain. What a trajectory that comes back for another turn has stored is copied out, and becomes a prefix of its own.

Shapes: S layers, G prefix slots, R rows, B active rows, K key heads, H query heads, D head size, C capacity in tokens.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from pellucid.training.common.attention import PackedAttention, SegmentBucket

GROWTH_TOKENS = 64


@dataclass(frozen=True, slots=True)
class StoredTokens:
    """What the cache held of one sequence, copied out of it."""

    key: torch.Tensor
    """[S, K, L, D]"""
    value: torch.Tensor
    """[S, K, L, D]"""

    @property
    def length(self) -> int:
        """Return the number of tokens."""
        return self.key.shape[2]


class KVCache:
    """Storage for the prompts of the active groups and the responses of the active rows."""

    def __init__(
        self, num_layers: int, num_key_heads: int, head_size: int, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.device = device
        self._empty = (num_layers, 0, num_key_heads, 0, head_size)
        self.prefix_key, self.prefix_value, self.own_key, self.own_value = (
            torch.empty(self._empty, device=device, dtype=dtype) for _ in range(4)
        )
        self.prefix_length = torch.zeros(0, dtype=torch.int64, device=device)
        """[G] prompt tokens of each active group."""
        self.own_length = torch.zeros(0, dtype=torch.int64, device=device)
        """[B] response tokens stored for each active row."""
        self.row_group = torch.zeros(0, dtype=torch.int64, device=device)
        """[B] prefix slot of each active row."""

    def add_groups(self, lengths: list[int]) -> list[int]:
        """Reserve prefix slots for prompts of the given lengths and return them."""
        first = len(self.prefix_length)
        self.prefix_key, self.prefix_value = (
            _grow(tensor, first + len(lengths), max(lengths)) for tensor in (self.prefix_key, self.prefix_value)
        )
        self.prefix_length = torch.cat([self.prefix_length, torch.tensor(lengths, device=self.device)])
        return list(range(first, first + len(lengths)))

    def add_rows(self, groups: list[int]) -> None:
        """Append one active row, without tokens yet, for each given prefix slot."""
        rows = len(self.own_length) + len(groups)
        self.own_key, self.own_value = (_grow(tensor, rows, GROWTH_TOKENS) for tensor in (self.own_key, self.own_value))
        self.own_length = torch.cat([self.own_length, torch.zeros(len(groups), dtype=torch.int64, device=self.device)])
        self.row_group = torch.cat([self.row_group, torch.tensor(groups, device=self.device)])

    def copy_out(self, row: int) -> StoredTokens:
        """Return a copy of all that is stored of an active row: its group's prompt and its own tokens."""
        group, own = int(self.row_group[row]), int(self.own_length[row])
        prefix = int(self.prefix_length[group])
        key, value = (
            torch.cat([shared[:, group, :, :prefix], rows[:, row, :, :own]], dim=2)
            for shared, rows in ((self.prefix_key, self.own_key), (self.prefix_value, self.own_value))
        )
        return StoredTokens(key, value)

    def copy_in(self, slot: int, stored: StoredTokens) -> None:
        """Put what `copy_out` returned at the beginning of a prefix slot."""
        self.prefix_key[:, slot, :, : stored.length] = stored.key
        self.prefix_value[:, slot, :, : stored.length] = stored.value

    @property
    def share_in_use(self) -> float:
        """Return the share of the allocated tokens that hold one."""
        capacity = sum(tensor.shape[1] * tensor.shape[3] for tensor in (self.prefix_key, self.own_key))
        used = int(self.prefix_length.sum()) + int(self.own_length.sum())
        return used / capacity if capacity else 0.0

    def reserve_token(self) -> None:
        """Make room for one more token in every active row."""
        needed = int(self.own_length.max()) + 1 if len(self.own_length) else 0
        if needed > self.own_key.shape[3]:
            capacity = max(needed, self.own_key.shape[3] * 3 // 2)
            self.own_key, self.own_value = (_grow(tensor, 0, capacity) for tensor in (self.own_key, self.own_value))

    def keep_rows(self, keep: torch.Tensor) -> None:
        """Keep the active rows at index `keep` [B'], in that order (which may only move rows towards the front)."""
        moved = (keep != torch.arange(len(keep), device=self.device)).nonzero()[:, 0]
        if len(moved):
            length = int(self.own_length[keep[moved]].max())
            for tensor in (self.own_key, self.own_value):
                tensor[:, moved, :, :length] = tensor[:, keep[moved], :, :length]
        self.own_length, self.row_group = self.own_length[keep], self.row_group[keep]

    def drop_unused_groups(self) -> torch.Tensor:
        """Drop prefix slots that no active row reads; return the [G] map from old slot to new (−1 for dropped)."""
        used = torch.unique(self.row_group)
        slot_map = torch.full((len(self.prefix_length),), -1, dtype=torch.int64, device=self.device)
        if len(used) < len(self.prefix_length):
            # Fill holes from the back so that only the moved prompts are copied.
            holes = torch.tensor(
                sorted(set(range(len(used))) - set(used.tolist())), dtype=torch.int64, device=self.device
            )
            movers = used[used >= len(used)]
            slot_map[used] = used
            slot_map[movers] = holes
            for tensor in (self.prefix_key, self.prefix_value):
                tensor[:, holes] = tensor[:, movers]
            self.prefix_length[holes] = self.prefix_length[movers]
            self.prefix_length = self.prefix_length[: len(used)]
            self.row_group = slot_map[self.row_group]
        else:
            slot_map[used] = used
        return slot_map


def _places(
    slots: list[int], first: list[int], lengths: list[int], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return where packed tokens lie, `lengths` of them for each of `slots`, from position `first` on.

    Returns:
        [R, M] index into the pack, whose padding repeats the first token and is never read back; [N] each token's slot;
        [N] its position there.
    """
    width, starts = max(lengths), [sum(lengths[:index]) for index in range(len(lengths))]
    index = [[*range(start, start + length), *[0] * (width - length)] for start, length in zip(starts, lengths)]
    slot_of = [slot for slot, length in zip(slots, lengths) for _ in range(length)]
    position_of = [start + step for start, length in zip(first, lengths) for step in range(length)]
    index_RM, slot_N = torch.tensor(index, device=device), torch.tensor(slot_of, device=device)
    return index_RM, slot_N, torch.tensor(position_of, device=device)


class PrefillAttention(PackedAttention):
    """Causal attention over packed prompts that also writes their keys and values into prefix slots."""

    def __init__(self, cache: KVCache, slots: list[int], lengths: list[int]) -> None:
        self._cache, first = cache, [0] * len(lengths)
        index, self._slot_N, self._position_N = _places(slots, first, lengths, cache.device)
        offsets = torch.zeros(len(lengths), dtype=torch.int64, device=cache.device)
        super().__init__([SegmentBucket(index, index, offsets, causal=True)], sum(lengths))

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """Store key and value [1, K, N, D], return the output [1, N, H, D]."""
        for stored, new in ((self._cache.prefix_key, key), (self._cache.prefix_value, value)):
            stored[layer][self._slot_N, :, self._position_N] = new[0].transpose(0, 1).to(stored.dtype)
        return super().attend(layer, query, key, value, scale=scale, window=window)


class ExtendAttention:
    """Causal attention of packed new tokens that follow those stored in prefix slots; it stores theirs, too."""

    def __init__(self, cache: KVCache, slots: list[int], stored: list[int], lengths: list[int]) -> None:
        """Prepare for `lengths` new tokens behind `stored` ones in each of `slots`, which have room for both."""
        device, width = cache.device, max(lengths)
        self._cache, self._slots = cache, torch.tensor(slots, device=device)
        self._query_index_RM, self._slot_N, self._position_N = _places(slots, stored, lengths, device)
        self._output_row_N = torch.tensor(
            [row * width + step for row, length in enumerate(lengths) for step in range(length)], device=device
        )
        self._newest_RM = torch.tensor(stored, device=device)[:, None] + torch.arange(width, device=device)
        self._width = max(first + length for first, length in zip(stored, lengths))

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """Store key and value [1, K, N, D], return the output [1, N, H, D]."""
        seen = []
        for stored, new in ((self._cache.prefix_key, key), (self._cache.prefix_value, value)):
            stored[layer][self._slot_N, :, self._position_N] = new[0].transpose(0, 1).to(stored.dtype)
            seen.append(stored[layer][self._slots, :, : self._width].to(query.dtype))
        positions = torch.arange(self._width, device=self._cache.device)
        mask = positions <= self._newest_RM[..., None]
        if window is not None:
            mask &= self._newest_RM[..., None] - positions < window
        query_RHMD = query[0].transpose(0, 1)[self._query_index_RM].transpose(1, 2)
        output = F.scaled_dot_product_attention(
            query_RHMD, *seen, attn_mask=mask[:, None], scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )
        return output.transpose(1, 2).flatten(0, 1)[self._output_row_N][None]


class DecodeAttention:
    """One new token for each of the B active rows, against the shared prompts and the rows' own tokens."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        device = cache.device
        num_rows, num_groups = len(cache.row_group), len(cache.prefix_length)
        # Rows of a group side by side, so that a group's prompt is read once for all of them: [G, n] grid of rows.
        order = torch.argsort(cache.row_group, stable=True)
        counts = torch.bincount(cache.row_group, minlength=num_groups)
        first = torch.cumsum(counts, 0) - counts
        place = torch.empty_like(order)
        place[order] = torch.arange(num_rows, device=device) - first[cache.row_group[order]]
        self._grid_width = int(counts.max())
        self._cell = cache.row_group * self._grid_width + place
        """[B] position of each row in the flattened grid."""
        grid = torch.zeros(num_groups * self._grid_width, dtype=torch.int64, device=device)
        grid[self._cell] = torch.arange(num_rows, device=device)
        self._grid = grid
        """[G·n] row in each cell; empty cells repeat row 0 and are never read back."""
        self._own_width = int(cache.own_length.max()) + 1
        self._prefix_width = int(cache.prefix_length.max())
        self._rows = torch.arange(num_rows, device=device)
        self._biases: dict[int | None, torch.Tensor] = {}

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """Store key and value [1, K, B, D], return the output [1, B, H, D]."""
        cache, cells = self._cache, self._grid_width
        num_rows, num_groups = len(self._rows), len(cache.prefix_length)
        num_heads, num_key_heads, size = query.shape[1], key.shape[1], query.shape[3]
        repeat = num_heads // num_key_heads
        own_key, own_value = cache.own_key[layer, :num_rows], cache.own_value[layer, :num_rows]
        own_key[self._rows, :, cache.own_length] = key[0].transpose(0, 1).to(own_key.dtype)
        own_value[self._rows, :, cache.own_length] = value[0].transpose(0, 1).to(own_value.dtype)
        prefix_key = cache.prefix_key[layer, :num_groups, :, : self._prefix_width]
        prefix_value = cache.prefix_value[layer, :num_groups, :, : self._prefix_width]
        own_key, own_value = own_key[:, :, : self._own_width], own_value[:, :, : self._own_width]

        query_BKrD = (query[0].transpose(0, 1) * scale).reshape(num_rows, num_key_heads, repeat, size).to(own_key.dtype)
        # [G, n, K, r, D] → [G, K, n·r, D]: one product a group and key head.
        query_grid = (
            query_BKrD[self._grid].view(num_groups, cells, num_key_heads, repeat, size).transpose(1, 2).flatten(2, 3)
        )
        prefix_scores = torch.matmul(query_grid, prefix_key.transpose(2, 3))
        prefix_scores = (
            prefix_scores.view(num_groups, num_key_heads, cells, repeat, -1).transpose(1, 2).flatten(0, 1)[self._cell]
        )
        own_scores = torch.matmul(query_BKrD, own_key.transpose(2, 3))
        scores = torch.cat([prefix_scores, own_scores], dim=-1).float() + self._bias(window)
        weights = scores.softmax(dim=-1).to(own_value.dtype)
        prefix_weights, own_weights = weights.split([self._prefix_width, self._own_width], dim=-1)
        grid_weights = (
            prefix_weights[self._grid].view(num_groups, cells, num_key_heads, repeat, -1).transpose(1, 2).flatten(2, 3)
        )
        prefix_output = torch.matmul(grid_weights, prefix_value)
        prefix_output = (
            prefix_output.view(num_groups, num_key_heads, cells, repeat, size).transpose(1, 2).flatten(0, 1)[self._cell]
        )
        output = prefix_output + torch.matmul(own_weights, own_value)
        return output.reshape(1, num_rows, num_heads, size).to(query.dtype)

    def _bias(self, window: int | None) -> torch.Tensor:
        """[B, 1, 1, prefix + own] additive mask: 0 where a key is seen, −inf elsewhere."""
        if window not in self._biases:
            cache = self._cache
            prefix_length = cache.prefix_length[cache.row_group][:, None]
            prefix_at = torch.arange(self._prefix_width, device=cache.device)
            own_at = torch.arange(self._own_width, device=cache.device)
            seen_prefix = prefix_at < prefix_length
            seen_own = own_at <= cache.own_length[:, None]
            if window is not None:
                newest = prefix_length + cache.own_length[:, None]
                seen_prefix &= newest - prefix_at < window
                seen_own &= cache.own_length[:, None] - own_at < window
            seen = torch.cat([seen_prefix, seen_own], dim=1)
            self._biases[window] = torch.where(seen, 0.0, float("-inf"))[:, None, None]
        return self._biases[window]


def _grow(tensor: torch.Tensor, rows: int, tokens: int) -> torch.Tensor:
    """Return `tensor` [S, rows, K, tokens, D] with at least the given rows and tokens, contents kept."""
    rows, tokens = max(rows, tensor.shape[1]), max(tokens, tensor.shape[3])
    if (rows, tokens) == (tensor.shape[1], tensor.shape[3]):
        return tensor
    grown = tensor.new_zeros((tensor.shape[0], rows, tensor.shape[2], tokens, tensor.shape[4]))
    grown[:, : tensor.shape[1], :, : tensor.shape[3]] = tensor
    return grown
