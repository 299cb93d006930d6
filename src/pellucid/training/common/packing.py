"""Packing of ragged sequences: which go into a micro-batch, and how a micro-batch becomes model input.

Sequences of a group lie side by side and share their prompt: it is in the pack once, each response attends to it.
The engine feeds `ModelInput` to the model and scatters per-token results back to [B, T] with `scatter`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch

from pellucid.stages import TokenSpan
from pellucid.training.common.attention import PackedAttention, SegmentBucket
from pellucid.types import Rollout

# Segments of one attention call differ in length by at most this factor, which bounds the padding inside attention.
MAX_LENGTH_SPREAD = 1.34


@dataclass(slots=True)
class TokenSequence:
    """A prompt and the response to be scored or trained on."""

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    group: int
    """Sequences with the same group have the same prompt, which is then computed once."""
    name: str = ""
    """Which sample it is, for people."""
    prompt_name: str = ""
    """Which prompt that is an answer to."""
    sampled: Sequence[bool] | None = None
    """[L] which response tokens are predicted; None: all. The others are context that tools or users gave."""


@dataclass(slots=True)
class ModelInput:
    """One micro-batch as the model takes it: N input tokens, M response tokens to predict."""

    input_ids: torch.Tensor
    """[1, N], or more where it is padded."""
    position_ids: torch.Tensor
    """[1, N]: positions restart with every sequence; a response continues its prompt's."""
    layout: PackedAttention
    predict_index: torch.Tensor
    """[M] rows of the flattened hidden states that predict the sampled response tokens."""
    target_ids: torch.Tensor
    """[M] those tokens, sequence after sequence."""
    row: torch.Tensor
    """[M] sequence index of each response token within the micro-batch."""
    column: torch.Tensor
    """[M] its position in the response."""
    num_tokens: int
    """N."""

    def padded(self, num_tokens: int) -> "ModelInput":
        """Return the same with tokens at the end that count for nothing, so that the row has `num_tokens`."""
        missing = num_tokens - self.input_ids.shape[1]
        ids, positions = (torch.nn.functional.pad(row, (0, missing)) for row in (self.input_ids, self.position_ids))
        return replace(self, input_ids=ids, position_ids=positions, layout=self.layout.padded(missing))

    def scatter(self, values: torch.Tensor, num_rows: int, width: int) -> torch.Tensor:
        """Place [M] per-token values into a right-padded [num_rows, width] tensor of zeros, keeping the gradient."""
        return values.new_zeros(num_rows, width).index_put((self.row, self.column), values)


def sequences_of(rollouts: list[Rollout]) -> list[TokenSequence]:
    """Return the engine's view of `rollouts`; groups are the distinct prompts."""
    group_of: dict[str, int] = {}
    return [
        TokenSequence(
            r.prompt.token_ids,
            r.token_ids,
            group_of.setdefault(r.prompt.name, len(group_of)),
            r.name,
            r.prompt.name,
            None if r.num_sampled == len(r.token_ids) else r.sampled,
        )
        for r in rollouts
    ]


def split_micro_batches(
    sequences: list[TokenSequence], *, max_tokens: int | None, max_sequences: int | None
) -> list[list[int]]:
    """Split into micro-batches, keeping groups together so that a prompt is packed as few times as possible.

    Args:
        sequences: what to split, in batch order.
        max_tokens: token budget of one micro-batch, or None.
        max_sequences: most sequences in one micro-batch, or None.

    Returns:
        Row indices of each micro-batch; every row appears once.

    Raises:
        ValueError: one sequence alone is over the token budget.
    """
    order = sorted(range(len(sequences)), key=lambda row: sequences[row].group)
    batches: list[list[int]] = []
    tokens, last_group = 0, -1
    for row in order:
        sequence = sequences[row]
        alone = num_input_tokens(sequence, with_prompt=True)
        if max_tokens is not None and alone > max_tokens:
            raise ValueError(f"a sequence of {alone} tokens is over the micro-batch budget of {max_tokens} tokens")
        cost = num_input_tokens(sequence, with_prompt=sequence.group != last_group)
        full = (
            not batches
            or (max_tokens is not None and tokens + cost > max_tokens)
            or (max_sequences is not None and len(batches[-1]) >= max_sequences)
        )
        if full:
            batches.append([])
            tokens, cost = 0, alone
        batches[-1].append(row)
        tokens, last_group = tokens + cost, sequence.group
    return batches


def num_input_tokens(sequence: TokenSequence, *, with_prompt: bool) -> int:
    """Return how many tokens of `sequence` the model is fed: not the last response token, which predicts nothing."""
    return max(len(sequence.response_ids) - 1, 0) + (len(sequence.prompt_ids) if with_prompt else 0)


def pack(sequences: list[TokenSequence], device: torch.device) -> ModelInput:
    """Lay `sequences` end to end as one row of N tokens; prompts of a group appear once.

    Args:
        sequences: the micro-batch; a group's sequences must be neighbours to share their prompt.
        device: where the tensors go.
    """
    ids: list[int] = []
    positions: list[int] = []
    segments: list[tuple[range, list[int]]] = []
    predict: list[int] = []
    for group in _groups(sequences):
        prompt = group[0].prompt_ids
        prompt_at = range(len(ids), len(ids) + len(prompt))
        ids += prompt
        positions += range(len(prompt))
        alone = len(group) == 1
        if not alone:
            segments.append((prompt_at, list(prompt_at)))
        for sequence in group:
            fed = sequence.response_ids[:-1]
            at = range(len(ids), len(ids) + len(fed))
            ids += fed
            positions += range(len(prompt), len(prompt) + len(fed))
            if alone:
                whole = range(prompt_at.start, at.stop)
                segments.append((whole, list(whole)))
            elif fed:
                segments.append((at, [*prompt_at, *at]))
            if sequence.response_ids:
                predict += [prompt_at.stop - 1, *at]
    targets = [token for s in sequences for token in s.response_ids]
    rows = [row for row, s in enumerate(sequences) for _ in s.response_ids]
    columns = [column for s in sequences for column in range(len(s.response_ids))]
    drawn = [one for s in sequences for one in s.sampled or [True] * len(s.response_ids)]
    predicted = torch.tensor([predict, targets, rows, columns], dtype=torch.int64, device=device)
    return ModelInput(
        torch.tensor([ids], device=device),
        torch.tensor([positions], device=device),
        PackedAttention(_bucket(segments, device), len(ids)),
        *predicted[:, torch.tensor(drawn, dtype=torch.bool, device=device)],
        num_tokens=len(ids),
    )


def _groups(sequences: list[TokenSequence]) -> list[list[TokenSequence]]:
    """Return the sequences that share a prompt in the pack: neighbours of one group."""
    return [list(group) for _, group in groupby(sequences, key=lambda sequence: sequence.group)]


def packed_spans(sequences: list[TokenSequence]) -> list[TokenSpan]:
    """Return whose tokens lie where on the token axis that `pack` makes."""
    spans: list[TokenSpan] = []
    at = 0
    for group in _groups(sequences):
        num_prompt = len(group[0].prompt_ids)
        spans.append(TokenSpan(group[0].prompt_name, "prompt", at, num_prompt, 0))
        at += num_prompt
        for sequence in group:
            num_fed = len(sequence.response_ids[:-1])
            spans.append(TokenSpan(sequence.name, "response", at, num_fed, num_prompt))
            at += num_fed
    return spans


def _bucket(segments: list[tuple[range, list[int]]], device: torch.device) -> list[SegmentBucket]:
    """Group segments of like kind and length, longest first."""
    buckets: list[SegmentBucket] = []
    for shared in (False, True):
        kind = sorted(
            (s for s in segments if (len(s[1]) > len(s[0])) == shared),
            key=lambda s: (len(s[1]), len(s[0])),
            reverse=True,
        )
        members: list[tuple[range, list[int]]] = []
        for segment in kind:
            if members and len(members[0][1]) > MAX_LENGTH_SPREAD * len(segment[1]) + 8:
                buckets.append(make_bucket(members, device))
                members = []
            members.append(segment)
        if members:
            buckets.append(make_bucket(members, device))
    return buckets


def make_bucket(members: list[tuple[range, list[int]]], device: torch.device) -> SegmentBucket:
    """Return segments, each the positions of its queries and of its keys, of which the last are its queries."""
    width_q, width_k = max(len(query) for query, _ in members), max(len(keys) for _, keys in members)
    query_index = torch.tensor([[*query, *[0] * (width_q - len(query))] for query, _ in members], device=device)
    key_index = torch.tensor([keys + [0] * (width_k - len(keys)) for _, keys in members], device=device)
    offset = torch.tensor([len(keys) - len(query) for query, keys in members], device=device)
    return SegmentBucket(query_index, key_index, offset, causal=not bool(offset.any()))
