"""Tools: what an agent's policy may call, and what it is told of a call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that a policy wrote."""

    id: str
    """Nine letters and digits, as Mistral's chat templates want them."""
    name: str
    arguments: dict[str, Any]
    error: str = ""
    """What was malformed in it, told to the policy instead of a result; empty where nothing was."""
