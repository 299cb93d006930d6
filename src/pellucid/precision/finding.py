"""Where NaN or Inf first appeared, as data: what a replay found, and the sentence that people read.

`locate.py` makes it, `NonFiniteError` carries it over ranks to the controller, `finding.json` keeps it. No torch here.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from pellucid.profiler.probe import TokenSpan

LOSS = "the loss"
MAX_SHOWN = 8
"""Tokens of a sample, and samples, that a finding names one by one."""


@dataclass(frozen=True, slots=True)
class BadTokens:
    """Tokens of one sample at which values are not finite."""

    sample: str
    """`<uid> sample <n>`; of a prompt that its group shares, `<uid>`."""
    part: Literal["prompt", "response"]
    positions: tuple[int, ...]
    """Of the first few, counted from 0 over prompt and response together."""
    token_ids: tuple[int, ...]
    """Their ids; empty where the pass did not know them."""
    count: int
    """How many there are."""

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
    num_values: int = 0
    """Values that are not finite, and values, of the tensor in which it was seen."""
    tokens: list[BadTokens] = field(default_factory=list)
    """Whose tokens they belong to; empty where the tensor has no token axis."""
    unit: str = ""
    """What the pass is: `micro-batch`, `prefill` or `decode step`; empty outside of passes."""
    index: int = 0
    """Its number, from 1."""
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


def tokens_at(indices: Sequence[int], spans: Sequence[TokenSpan], token_ids: Sequence[int]) -> list[BadTokens]:
    """Return whose tokens lie at ascending `indices` of a pass's flattened token axis; padding is nobody's.

    Args:
        indices: where values are not finite.
        spans: of the pass.
        token_ids: [N] of the pass, or empty.
    """
    found = []
    for span in spans:
        mine = [index for index in indices if span.start <= index < span.start + span.length]
        if mine:
            shown = mine[:MAX_SHOWN]
            ids = tuple(token_ids[index] for index in shown) if token_ids else ()
            positions = tuple(index - span.start + span.position for index in shown)
            found.append(BadTokens(span.sample, span.part, positions, ids, len(mine)))
    return found
