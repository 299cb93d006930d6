"""From files, the hub or a task to tokenised prompts, and a loader that deals them out in a resumable order."""

from pellucid.data.loader import PromptLoader
from pellucid.data.prompts import PromptSet, build_prompts, encode_text, render, uses_template
from pellucid.data.sources import load_rows

__all__ = ["PromptLoader", "PromptSet", "build_prompts", "encode_text", "load_rows", "render", "uses_template"]
