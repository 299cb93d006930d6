"""Where NaN or Inf first appeared, as data: what a replay found, and the sentence that people read.

`locate.py` makes findings; ranks send theirs to the controller, and `finding.json` keeps the earliest. No torch here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from pellucid.stages import TokenSpan

LOSS = "the loss"
MAX_SHOWN = 8
"""How many tokens of a sample, and how many samples, a finding names one by one."""
_NOT_REPRODUCED = (
    "the same passes, repeated at once, gave finite numbers: it is not reproducible (failing hardware, or a race)"
)
_FIRST_FLAG = ", and this is the first module whose flag was raised"


@dataclass(frozen=True, slots=True)
class BadTokens:
    """Tokens of one sample at which values are not finite."""

    sample: str
    """`<uid> sample <n>`; of a prompt that its group shares, `<uid>`."""
    part: Literal["prompt", "response"]
    positions: tuple[int, ...]
    """Positions of the first few, counted from 0 over prompt and response together."""
    token_ids: tuple[int, ...]
    """Their ids; empty where the pass did not know them."""
    count: int
    """How many tokens there are."""

    def __str__(self) -> str:
        shown = [
            f"{position} (id {self.token_ids[index]})" if self.token_ids else str(position)
            for index, position in enumerate(self.positions)
        ]
        more = f" and {self.count - len(shown)} more" if self.count > len(shown) else ""
        return f"sample '{self.sample}', {self.part} token{'s' * (self.count > 1)} {', '.join(shown)}{more}"


@dataclass(slots=True)
class Finding:
    """The first place of a pass at which a value is not finite."""

    place: str
    """A module's name in the model (`model.layers.3.mlp.down_proj`), a parameter's, or `the loss`."""
    kind: str
    """The module's class; empty for what is no module."""
    direction: Literal["forward", "backward", "optimizer"]
    what: str
    """`NaN`, `Inf` or `NaN and Inf`."""
    cause: str
    """A clause on what is and what is not in order there, e.g. `its inputs and weights are finite`."""
    operator: str | None = None
    """The operator that made it, where one could be told."""
    num_bad: int = 0
    """How many values of the tensor in which it was seen are not finite."""
    num_values: int = 0
    """How many values that tensor has."""
    tokens: list[BadTokens] = field(default_factory=list)
    """Whose tokens they belong to; empty where the tensor has no token axis."""
    unit: str = ""
    """What the pass is: `micro-batch`, `prefill` or `decode step`; empty outside of passes."""
    index: int = 0
    """The pass's number among those of its kind, from 1."""
    num_units: int = 0
    """How many of them there are on this rank; 0 where the rest was not run."""
    order: int = 0
    """Smaller is earlier; comparable between ranks that run the same stage."""
    reproduced: bool = True
    """False where repeating the same passes gave finite numbers."""
    quantity: str = ""
    """What gave it away, e.g. `actor/loss is nan`."""
    stage: str = ""
    step: int = 0
    rank: int = 0
    num_ranks: int = 1

    def sentence(self) -> str:
        """Return all of it in one sentence."""
        at = [f"{self.place} ({self.kind})" if self.kind else self.place, self.direction]
        if self.operator:
            at.append(f"operator {self.operator}")
        if self.stage:
            at.append(f"of {self.stage}, step {self.step}")
        if self.num_ranks > 1:
            at.append(f"rank {self.rank}")
        if self.unit:
            of = f" of {self.num_units}" if self.num_units else ""
            at.append(f"{self.unit} {self.index}{of}")
        if self.tokens:
            at.append(str(self.tokens[0]))
            if len(self.tokens) > 1:
                at.append(f"and {len(self.tokens) - 1} more")
        share = f" {self.num_bad} of {self.num_values} values are {self.what}." if self.num_values else ""
        if not self.reproduced:
            return f"{self.what} in {', '.join(at)}; {self.cause}."
        return f"{self.what} first in {', '.join(at)}; {self.cause}.{share}"

    def as_json(self) -> dict[str, Any]:
        """Return what `finding.json` holds: the fields, and the sentence."""
        return {"sentence": self.sentence(), **asdict(self)}


def unexplained(place: tuple[str, str] | None = None, unit: str = "", index: int = 0) -> Finding:
    """Return the finding of a flag that the replay does not explain; without a `place` it names no module.

    Args:
        place: name and class of the first module whose flag was raised.
        unit: what its pass is called.
        index: the pass's number.
    """
    if place is None:
        return Finding("an unknown place", "", "forward", "NaN or Inf", _NOT_REPRODUCED, reproduced=False)
    cause = _NOT_REPRODUCED + _FIRST_FLAG
    return Finding(*place, "forward", "NaN or Inf", cause, unit=unit, index=index, order=index, reproduced=False)


def earliest(findings: Iterable[Finding | None]) -> Finding | None:
    """Return the earliest of the ranks' findings, and of equals the lowest rank's; reproduced ones come first."""
    found = [finding for finding in findings if finding is not None]
    return min(found, key=lambda one: (not one.reproduced, not one.index, one.order, one.rank), default=None)


def tokens_at(indices: Sequence[int], spans: Sequence[TokenSpan], token_ids: Sequence[int]) -> list[BadTokens]:
    """Return whose tokens lie at ascending `indices` of a pass's flattened token axis; padding is nobody's.

    Args:
        indices: where values are not finite.
        spans: of the pass.
        token_ids: [N] of the pass, or empty.
    """
    found = []
    for span in spans:
        mine = [index - span.start for index in indices if span.start <= index < span.start + span.length]
        if mine:
            found.append(_bad_tokens(span, mine, token_ids))
    return found


def response_tokens_at(
    places: Iterable[tuple[int, int]], spans: Sequence[TokenSpan], token_ids: Sequence[int]
) -> list[BadTokens]:
    """Return whose tokens lie at (row, position in the response) of a micro-batch.

    Args:
        places: where per-token results are not finite.
        spans: of the pass; its rows are those of the responses among them. A response's last token is not fed to the
            model.
        token_ids: [N] of the pass, or empty.
    """
    columns_of: dict[int, list[int]] = {}
    for row, column in places:
        columns_of.setdefault(row, []).append(column)
    responses = [span for span in spans if span.part == "response"]
    found = []
    for row, columns in columns_of.items():
        if row < len(responses) and (mine := [column for column in columns if column <= responses[row].length]):
            found.append(_bad_tokens(responses[row], mine, token_ids))
    return found


def _bad_tokens(span: TokenSpan, offsets: Sequence[int], token_ids: Sequence[int]) -> BadTokens:
    shown = offsets[:MAX_SHOWN]
    known = bool(token_ids) and shown[-1] < span.length
    ids = tuple(token_ids[span.start + offset] for offset in shown) if known else ()
    return BadTokens(span.sample, span.part, tuple(span.position + offset for offset in shown), ids, len(offsets))
