"""From files, the hub or a task to tokenised prompts, and a loader that deals them out in a resumable order."""

from pellucid.data.loader import PromptLoader
from pellucid.data.prompts import build_prompts
from pellucid.data.sources import load_rows

__all__ = ["PromptLoader", "build_prompts", "load_rows"]
