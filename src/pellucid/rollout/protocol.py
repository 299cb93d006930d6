"""What the loop may ask of a rollout engine. `native` implements it in process; others join with the same methods."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from pellucid.profiler.tools.base import Tool
from pellucid.types import Prompt, Rollout

Progress = Callable[[int], None]
"""Called with the number of responses just finished; 0 says that decoding goes on."""


@dataclass(slots=True)
class SamplingParams:
    """How responses are drawn; the same for every prompt of one `generate` call."""

    n: int = 1
    """Responses a prompt."""
    max_tokens: int = 128
    """Most tokens of a response."""
    temperature: float = 1.0
    """Logits are divided by it before sampling; also scales the recorded log-probs."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches this."""
    top_k: int = -1
    """Keep the k most likely tokens; -1 keeps all."""
    do_sample: bool = True
    """False takes the most likely token."""
    ignore_eos: bool = False
    """Run to max_tokens whatever is sampled."""
    stop: list[str] = field(default_factory=list)
    """Strings that end a response; the text is cut before them, the ids stay as sampled."""


class RolloutEngine(Protocol):
    """Samples responses from the current policy."""

    def generate(
        self,
        prompts: list[Prompt],
        params: SamplingParams,
        *,
        stream: tuple[str | int, ...],
        on_done: Progress | None = None,
    ) -> list[Rollout]:
        """Return len(prompts) · n rollouts, prompt by prompt, sample by sample.

        Args:
            prompts: what to answer.
            params: how to draw.
            stream: name of the random stream, e.g. ("rollout", step); each sample derives its own from it, so a result
                does not depend on what else is in the batch.
            on_done: progress callback.
        """
        ...

    def capture_tool(self, tool: Tool) -> Tool:
        """Return what captures this engine: `tool` where it runs in this process, else one that starts and stops the
        engine's own profiler.
        """
        ...

    def sync_weights(self) -> None:
        """Make the engine sample from the trainer's current weights."""
        ...
