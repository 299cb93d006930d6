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
ENGINE_TOOLS = {
    "torch": "pellucid.observe.tools.engine_tools:EngineTraceTool",
    "precision_debugger": "pellucid.observe.tools.engine_tools:EnginePrecisionTool",
}
"""What looks into rollout engines that have processes of their own."""


def tool_class(name: str) -> type[Tool]:
    """Return the class of a tool.

    Raises:
        UserError: an import path leads to no class.
    """
    if name not in TOOLS:
        from pellucid.plugins import load_object

        return load_object(name, "global_profiler.tool")
    return _loaded(TOOLS[name])


def engine_tool_class(name: str) -> type[Tool]:
    """Return the class that does what a tool does for an engine in processes of its own."""
    return _loaded(ENGINE_TOOLS[name])


def _loaded(path: str) -> type[Tool]:
    module, _, attribute = path.partition(":")
    return vars(importlib.import_module(module))[attribute]


__all__ = ["TOOLS", "Capture", "KeptInPartError", "TensorTool", "Tool", "ToolSettings", "engine_tool_class"]
__all__ += ["tool_class"]
