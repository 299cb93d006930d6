"""Key/value cache of the native engine, and attention against it.

A group's prompt is stored once (`prefix`) and read by all its samples; each sample stores only its own tokens (`own`).
Active groups and active rows are always the first ones: what finishes is replaced by the last, so no row is computed
in vain. What a trajectory that comes back for another turn has stored is copied out, and becomes a prefix of its own.

Shapes: S layers, G prefix slots, R rows, B active rows, K key heads, H query heads, D head size, C capacity in tokens.
"""

import torch
from torch import Tensor

from pellucid.training.common.attention import PackedAttention
from pellucid.training.common.packing import make_bucket

GROWTH_TOKENS = 64


class KVCache:
    """Storage for the prompts of the active groups and the responses of the active rows."""

    def __init__(
        self, num_layers: int, num_key_heads: int, head_size: int, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.device = device
        self.prefix, self.own = (
            torch.empty((2, num_layers, 0, num_key_heads, 0, head_size), device=device, dtype=dtype) for _ in range(2)
        )
        """[2, S, G, K, C, D] and [2, S, R, K, C, D]: keys, then values."""
        self.prefix_length = torch.zeros(0, dtype=torch.int64, device=device)
        """[G] prompt tokens of each active group."""
        self.own_length = torch.zeros(0, dtype=torch.int64, device=device)
        """[B] response tokens stored for each active row."""
        self.row_group = torch.zeros(0, dtype=torch.int64, device=device)
        """[B] prefix slot of each active row."""

    def add_groups(self, lengths: list[int]) -> list[int]:
        """Reserve prefix slots for prompts of the given lengths and return them."""
        first = len(self.prefix_length)
        self.prefix = _grow(self.prefix, first + len(lengths), max(lengths))
        self.prefix_length = torch.cat([self.prefix_length, torch.tensor(lengths, device=self.device)])
        return list(range(first, first + len(lengths)))

    def add_rows(self, groups: list[int]) -> None:
        """Append one active row, without tokens yet, for each given prefix slot."""
        self.own = _grow(self.own, len(self.own_length) + len(groups), GROWTH_TOKENS)
        self.own_length = torch.cat([self.own_length, torch.zeros(len(groups), dtype=torch.int64, device=self.device)])
        self.row_group = torch.cat([self.row_group, torch.tensor(groups, device=self.device)])

    def copy_out(self, row: int) -> Tensor:
        """Return a copy [2, S, K, L, D] of all that is stored of an active row: its group's prompt, its own tokens."""
        group, own = int(self.row_group[row]), int(self.own_length[row])
        prefix = int(self.prefix_length[group])
        return torch.cat([self.prefix[:, :, group, :, :prefix], self.own[:, :, row, :, :own]], dim=3)

    def copy_in(self, slot: int, stored: Tensor) -> None:
        """Put what `copy_out` returned at the beginning of a prefix slot."""
        self.prefix[:, :, slot, :, : stored.shape[3]] = stored

    @property
    def share_in_use(self) -> float:
        """Return the share of the allocated tokens that hold one."""
        capacity = sum(tensor.shape[2] * tensor.shape[4] for tensor in (self.prefix, self.own))
        used = int(self.prefix_length.sum()) + int(self.own_length.sum())
        return used / capacity if capacity else 0.0

    def reserve_token(self) -> None:
        """Make room for one more token in every active row."""
        needed = int(self.own_length.max()) + 1 if len(self.own_length) else 0
        if needed > self.own.shape[4]:
            self.own = _grow(self.own, 0, max(needed, self.own.shape[4] * 3 // 2))

    def keep_rows(self, order: list[int]) -> None:
        """Keep the active rows that `order` names, in that order (`closed_up`)."""
        moved, places = _moves(order, self.device)
        if len(moved):
            length = int(self.own_length[places].max())
            self.own[:, :, moved, :, :length] = self.own[:, :, places, :, :length]
        self.own_length, self.row_group = self.own_length[order], self.row_group[order]

    def drop_unused_groups(self) -> dict[int, int]:
        """Drop prefix slots that no active row reads; return {old slot: new slot} of the others."""
        order = closed_up(self.row_group.unique().tolist())
        moved, places = _moves(order, self.device)
        self.prefix[:, :, moved] = self.prefix[:, :, places]
        self.prefix_length = self.prefix_length[order]
        new_slot = {old: new for new, old in enumerate(order)}
        slots = [new_slot[old] for old in self.row_group.tolist()]
        self.row_group = torch.tensor(slots, dtype=torch.int64, device=self.device)
        return new_slot


def closed_up(kept: list[int]) -> list[int]:
    """Return which of the `kept` places, in ascending order, comes to each of the first ones.

    Those at the back fill the holes, so that at most as many are moved as are not kept.
    """
    stay, movers = {place for place in kept if place < len(kept)}, [place for place in kept if place >= len(kept)]
    return [place if place in stay else movers.pop(0) for place in range(len(kept))]


def _moves(order: list[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the places that get another content, and where it is."""
    moved = [(new, old) for new, old in enumerate(order) if new != old]
    places = torch.tensor(moved, dtype=torch.int64, device=device).reshape(-1, 2)
    return places[:, 0], places[:, 1]


class PrefillAttention(PackedAttention):
    """Causal attention of packed new tokens over what their prefix slots hold before them; it stores theirs, too."""

    def __init__(self, cache: KVCache, slots: list[int], before: list[int], lengths: list[int]) -> None:
        """Prepare for `lengths` new tokens behind the `before` stored ones of each of `slots`, with room for both."""
        self._cache = cache
        num_new, fresh, returning = sum(lengths), [], []
        new: list[tuple[int, int]] = []
        stored: list[tuple[int, int]] = []
        for slot, first, length in zip(slots, before, lengths):
            query = range(len(new), len(new) + length)
            earlier = range(num_new + len(stored), num_new + len(stored) + first)
            new += [(slot, first + step) for step in range(length)]
            stored += [(slot, step) for step in range(first)]
            (returning if first else fresh).append((query, [*earlier, *query]))
        self._slot_N, self._position_N = torch.tensor(new, device=cache.device).T
        self._stored = torch.tensor(stored, device=cache.device).T if stored else None
        """[2, M] slot and position of what is read from the cache; keys of new tokens come first, then those."""
        super().__init__([make_bucket(each, cache.device) for each in (fresh, returning) if each], num_new)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None
    ) -> Tensor:
        """Store key and value [1, K, N, D], return the output [1, N, H, D]."""
        cached = self._cache.prefix[:, layer]
        cached[:, self._slot_N, :, self._position_N] = _by_token(key, value).to(cached.dtype)
        if self._stored is not None:
            slot, position = self._stored
            earlier = cached[:, slot, :, position].permute(1, 2, 0, 3)[:, None].to(key.dtype)
            key, value = (torch.cat(pair, dim=2) for pair in zip((key, value), earlier))
        return super().attend(layer, query, key, value, scale=scale, window=window)


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
        self._grid = torch.zeros(num_groups * self._grid_width, dtype=torch.int64, device=device)
        """[G·n] row in each cell; empty cells repeat row 0 and are never read back."""
        self._grid[self._cell] = torch.arange(num_rows, device=device)
        self._own_width = int(cache.own_length.max()) + 1
        self._prefix_width = int(cache.prefix_length.max())
        self._rows = torch.arange(num_rows, device=device)
        self._biases: dict[int | None, Tensor] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None
    ) -> Tensor:
        """Store key and value [1, K, B, D], return the output [1, B, H, D]."""
        cache, (_, num_heads, num_rows, size) = self._cache, query.shape
        own = cache.own[:, layer, :num_rows]
        own[:, self._rows, :, cache.own_length] = _by_token(key, value).to(own.dtype)
        own_key, own_value = own[:, :, :, : self._own_width]
        prefix_key, prefix_value = cache.prefix[:, layer, : len(cache.prefix_length), :, : self._prefix_width]

        query_BKrD = (query[0].transpose(0, 1) * scale).unflatten(1, (key.shape[1], -1)).to(own.dtype)
        prefix_scores = self._by_row(torch.matmul(self._by_group(query_BKrD), prefix_key.transpose(2, 3)))
        own_scores = torch.matmul(query_BKrD, own_key.transpose(2, 3))
        scores = torch.cat([prefix_scores, own_scores], dim=-1).float() + self._bias(window)
        weights = scores.softmax(dim=-1).to(own.dtype)
        prefix_weights, own_weights = weights.split([self._prefix_width, self._own_width], dim=-1)
        prefix_output = self._by_row(torch.matmul(self._by_group(prefix_weights), prefix_value))
        output = prefix_output + torch.matmul(own_weights, own_value)
        return output.reshape(1, num_rows, num_heads, size).to(query.dtype)

    def _by_group(self, rows: Tensor) -> Tensor:
        """Lay [B, K, r, X] out as [G, K, n·r, X]: one product a group and key head."""
        return rows[self._grid].unflatten(0, (-1, self._grid_width)).transpose(1, 2).flatten(2, 3)

    def _by_row(self, groups: Tensor) -> Tensor:
        """Undo `_by_group`."""
        return groups.unflatten(2, (self._grid_width, -1)).transpose(1, 2).flatten(0, 1)[self._cell]

    def _bias(self, window: int | None) -> Tensor:
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


def _by_token(key: Tensor, value: Tensor) -> Tensor:
    """Return key and value [1, K, N, D] as [N, 2, K, D]."""
    return torch.cat([key, value]).permute(2, 0, 1, 3)


def _grow(tensor: Tensor, rows: int, tokens: int) -> Tensor:
    """Return `tensor` [2, S, rows, K, tokens, D] with at least the given rows and tokens, contents kept."""
    sides, layers, old_rows, heads, old_tokens, size = tensor.shape
    if rows <= old_rows and tokens <= old_tokens:
        return tensor
    grown = tensor.new_zeros((sides, layers, max(rows, old_rows), heads, max(tokens, old_tokens), size))
    grown[:, :, :old_rows, :, :old_tokens] = tensor
    return grown
