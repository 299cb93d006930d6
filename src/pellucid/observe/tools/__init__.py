"""The tools by name; a class of the user's own comes by import path. Each is imported when it is used."""

import importlib
import os

from pellucid.observe.tools.base import Capture, KeptInPartError, TensorTool, Tool, ToolSettings

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler would print a line at every start and stop
TOOLS: dict[str, str] = {
    "torch": "pellucid.observe.tools.torch_trace:TorchTool",
    "torch_memory": "pellucid.observe.tools.torch_memory:TorchMemoryTool",
    "nsys": "pellucid.observe.tools.nsys:NsysTool",
    "npu": "pellucid.observe.tools.npu:NpuTool",
    "precision_debugger": "pellucid.observe.tools.precision_debugger:PrecisionDebuggerTool",
}


def tool_class(name: str) -> type[Tool]:
    """Return the class of a tool.

    Raises:
        UserError: an import path leads to no class.
    """
    if name not in TOOLS:
        from pellucid.plugins import load_object

        return load_object(name, "global_profiler.tool")
    module, _, attribute = TOOLS[name].partition(":")
    return vars(importlib.import_module(module))[attribute]


__all__ = ["TOOLS", "Capture", "KeptInPartError", "TensorTool", "Tool", "ToolSettings", "tool_class"]
