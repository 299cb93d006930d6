"""The tools by name; a class of the user's own comes by import path. Each is imported when it is used."""

import os

from pellucid.observe.tools.base import Capture, KeptInPartError, TensorTool, Tool, ToolSettings
from pellucid.plugins import load_object

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler would print a line at every start and stop
TOOLS: dict[str, str] = {
    "torch": "pellucid.observe.tools.torch_trace:TorchTool",
    "torch_memory": "pellucid.observe.tools.torch_memory:TorchMemoryTool",
    "nsys": "pellucid.observe.tools.nsys:NsysTool",
    "npu": "pellucid.observe.tools.npu:NpuTool",
    "precision_debugger": "pellucid.observe.tools.precision_debugger:PrecisionDebuggerTool",
}
ENGINE_TOOLS = {
    "torch": "pellucid.observe.tools.engine_tools:EngineTraceTool",
    "precision_debugger": "pellucid.observe.tools.engine_tools:EnginePrecisionTool",
}
"""What looks into rollout engines that have processes of their own."""


def tool_class(name: str, *, of_engine: bool = False) -> type[Tool]:
    """Return the class of a tool, or what does the same `of_engine`, for one in processes of its own.

    Raises:
        UserError: an import path leads to no class.
    """
    return load_object((ENGINE_TOOLS if of_engine else TOOLS).get(name, name), "global_profiler.tool")


__all__ = ["TOOLS", "Capture", "KeptInPartError", "TensorTool", "Tool", "ToolSettings", "tool_class"]
