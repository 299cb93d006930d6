"""Drawing one token a row from logits, by inverting the cumulative distribution at given uniform numbers.

Three uniforms a token, fixed by the sample's own random stream, makes a draw independent of the rest of the batch.
"""

import math

import torch

from pellucid.errors import NORMALISER, NonFiniteError
from pellucid.rollout.requests import SamplingParams


def draw_tokens(
    logits: torch.Tensor, uniforms: torch.Tensor, params: SamplingParams
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the drawn tokens and their log-probabilities.

    Args:
        logits: [B, V] float32; overwritten.
        uniforms: [B, 3] float64 in [0, 1).
        params: temperature, top-p, top-k, greedy.

    Returns:
        `(tokens, logp)`, both [B]. `logp` is under the temperature-scaled distribution over the **full** vocabulary,
        the one the trainer computes, also when top-p or top-k narrow what is drawn.

    Raises:
        NonFiniteError: the logits of a row hold NaN or +Inf.
    """
    if params.temperature != 1:
        logits.div_(params.temperature)
    log_norm = torch.logsumexp(logits, dim=-1)
    if not bool(torch.isfinite(log_norm).all()):
        bad = (~torch.isfinite(log_norm)).nonzero()[:, 0].tolist()
        raise NonFiniteError(NORMALISER, float(log_norm[bad[0]]), bad)
    if not params.do_sample:
        best, tokens = logits.max(dim=-1)
        return tokens, best - log_norm
    tokens = _invert(_filter(logits, params), uniforms)
    return tokens, logits.gather(1, tokens[:, None])[:, 0] - log_norm


def _invert(logits: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Draw from softmax(logits) [B, V] by three small inversions: which block, which sub-block, which token.

    Inverting one cumulative sum over V would let rounding errors of 1e-7 pick a neighbour wherever tokens are that
    improbable; over ∛V entries at a time, in float64, the draw moves only with the probabilities themselves.
    """
    num_rows, vocabulary = logits.shape
    side = math.ceil(vocabulary ** (1 / 3))
    probs = logits.new_zeros(num_rows, side**3)
    torch.sub(logits, logits.amax(dim=-1, keepdim=True), out=probs[:, :vocabulary])
    probs[:, :vocabulary].exp_()
    tokens_BSST = probs.view(num_rows, side, side, side)
    sub_blocks_BSS = tokens_BSST.sum(dim=-1, dtype=torch.float64)
    rows = torch.arange(num_rows, device=logits.device)
    block = _pick(sub_blocks_BSS.sum(dim=-1), uniforms[:, 0])
    sub_block = _pick(sub_blocks_BSS[rows, block], uniforms[:, 1])
    token = _pick(tokens_BSST[rows, block, sub_block].double(), uniforms[:, 2])
    return (block * side + sub_block) * side + token


def _pick(mass: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Return [B] indices into mass [B, n] ≥ 0, each entry as likely as its share of the row."""
    cumulative = mass.cumsum(dim=-1)
    threshold = uniforms[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, threshold, right=True)[:, 0].clamp(max=mass.shape[1] - 1)


def _filter(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Return logits with everything outside top-k and then top-p at −inf; the same tensor when neither is set."""
    kept = logits
    if 0 < params.top_k < logits.shape[1]:
        smallest = kept.topk(params.top_k, dim=-1).values[:, -1:]
        kept = kept.masked_fill(kept < smallest, float("-inf"))
    if params.top_p < 1:
        ordered, index = kept.sort(dim=-1, descending=True)
        probs = ordered.softmax(dim=-1)
        outside = probs.cumsum(dim=-1) - probs >= params.top_p
        kept = kept.masked_fill(outside.gather(1, index.argsort(dim=-1)), float("-inf"))
    return kept
