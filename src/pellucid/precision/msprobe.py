"""Captures by msprobe (package mindstudio-probe 26.2): one session for each stage, around its real `PrecisionDebugger`.

The precision debugger imports this file where `backend: msprobe` asks for it, opens a session when a stage begins and
closes it when the stage ends; msprobe writes the files. It is made for one debugger in a process that does nothing
else, hence the care taken here to leave no trace of a session behind.
"""

import atexit
import logging
import sys
import threading
import types
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from msprobe.core.common.exceptions import CodedException
from msprobe.core.common.log import BaseLogger
from msprobe.core.dump.common_config import CommonConfig
from msprobe.core.dump.data_dump.scope import ScopeFactory
from msprobe.core.dump.hook_manager import BaseHookManager
from msprobe.pytorch import PrecisionDebugger
from msprobe.pytorch.dump.api_dump import api_register
from msprobe.pytorch.dump.api_dump.hook_module import HOOKModule
from msprobe.pytorch.dump.api_dump.script_wrapper import unpatch_dynamo_compile, unpatch_triton_jitfunction_run
from msprobe.pytorch.dump.debugger.debugger_config import DebuggerConfig
from msprobe.pytorch.dump.module_dump.module_processor import ModuleProcessor
from msprobe.pytorch.dump.pt_config import parse_task_config
from torch import nn
from torch.nn.modules._functions import BackwardHookFunction
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils.hooks import BackwardHook

from pellucid.config.schema.msprobe_json import read_json
from pellucid.errors import UserError
from pellucid.precision.dump import About, Pass, write_about
from pellucid.stages import TokenSpans

log = logging.getLogger("pellucid.observe")

_LOG_LEVELS = {"DEBUG": logging.DEBUG, "INFO": logging.DEBUG, "WARNING": logging.WARNING, "ERROR": logging.ERROR}
_Debugger: Any = PrecisionDebugger
_Operator: Any = HOOKModule
_session = threading.Lock()
"""Held from the beginning of a session until msprobe is out of the process again."""


def _print_log(_logger: object, level: str, message: str, **_: object) -> None:
    """Log what msprobe would print."""
    log.log(_LOG_LEVELS[level], "msprobe: %s", message)


BaseLogger._print_log = _print_log  # pyright: ignore[reportAttributeAccessIssue]


def check(config_path: str, level: str | None) -> None:
    """Find out, before any model is loaded, what msprobe makes of its config.

    Raises:
        UserError: the file cannot be read, or msprobe refuses what it says.
    """
    content = read_json(config_path)
    task, level = content.get("task") or "statistics", level or content.get("level") or "L0"
    try:
        with _explained():
            common, of_task = CommonConfig(content), parse_task_config(task, content)
            ScopeFactory(DebuggerConfig(common, of_task, task, "set by the run", level)).build_scope()
    except RuntimeError as error:
        field = "global_profiler.global_tool_config.precision_debugger.config_path"
        raise UserError(field, f"msprobe refuses '{config_path}': {error}", "Mend the file.") from error


class MsprobeSession:
    """One capture of one stage, by msprobe. Only one is open at a time in a process.

    What the thread runs between `begin` and `save` is captured, and the backward passes that autograd may run on
    threads of its own; files go into `step<call>/rank<rank>` of the stage's `folder`.
    """

    def __init__(self, models: Sequence[nn.Module], folder: Path, config_path: Path, about: About) -> None:
        self._models, self._folder, self._config_path, self._about = list(models), folder, config_path, about
        self.error: Exception | None = None
        """Why msprobe could not write all of its files."""
        self._undo = ExitStack()
        """Takes back all that `begin` did."""

    def begin(self) -> None:
        """Begin to capture what this thread runs.

        Raises:
            RuntimeError: a `PrecisionDebugger` is in use in this process; or msprobe cannot begin.
        """
        if not _session.acquire(blocking=False):
            raise RuntimeError("msprobe's PrecisionDebugger is in use in this process already")
        with ExitStack() as undo:
            undo.callback(_session.release)
            if _Debugger._instance is not None:
                raise RuntimeError("a PrecisionDebugger that is not the run's is in use in this process")
            undo.enter_context(_left_as_found(self._models))
            undo.callback(setattr, _Debugger, "_instance", None)
            with _explained():
                debugger = _Debugger(str(self._config_path), dump_path=str(self._folder), level=self._about.level)
                undo.callback(_retire, debugger.service)
                _confine(debugger.service.hook_manager, threading.get_ident())
                debugger.set_init_step(self._about.call)
                models = self._models if len(self._models) > 1 else self._models[0]
                debugger.start(model=models, rank_id=self._about.rank)
            self._undo = undo.pop_all()

    def begin_pass(self, spans: TokenSpans, unit: str) -> None:
        """A pass through the model begins."""
        self._about.passes.append(Pass(unit, spans()))

    def results(self, tensors: dict[str, torch.Tensor]) -> None:
        """Leave a head's results alone: msprobe knows modules and operators."""

    def end_mini_batch(self) -> None:
        """Leave an optimizer step alone, too."""

    def save(self, folder: Path) -> list[Path]:
        """End the capture, take msprobe out of the process whatever goes wrong, and return the files that there are."""
        cause = sys.exception()
        try:
            with self._undo, _explained():
                _Debugger.stop()
        except (OSError, RuntimeError) as error:
            self.error = cause = error
        self._about.end(cause)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        return [*files, write_about(folder, self._about)]


# What follows knows msprobe from the inside.


@contextmanager
def _explained() -> Iterator[None]:
    """Raise an exception of msprobe with what it logs: the exception itself says little, and partly in Chinese.

    Raises:
        RuntimeError: msprobe raised one.
    """
    messages: list[str] = []

    def collect(record: logging.LogRecord) -> bool:
        if record.levelno < logging.ERROR:
            return True
        messages.append(record.getMessage().removeprefix("msprobe: "))
        return False

    log.addFilter(collect)
    try:
        yield
    except CodedException as error:
        raise RuntimeError("; ".join(messages) or str(error).rpartition("：")[2].strip()) from error
    finally:
        log.removeFilter(collect)


@contextmanager
def _left_as_found(models: list[nn.Module]) -> Iterator[None]:
    """Take back at exit what msprobe replaces and adds: functions of torch, hooks and attributes of modules."""
    modules = list({id(module): module for model in models for module in model.modules()}.values())
    before = [(owner, dict(vars(owner))) for owner in [*_places(), *modules]]
    hooks: list[MutableMapping[Any, Any]] = [_global_optimizer_pre_hooks, _global_optimizer_post_hooks]
    hooks += [hooks for module in modules for hooks in (module._forward_pre_hooks, module._forward_hooks)]
    call, _Operator._call_func = _Operator._call_func, _surviving(_Operator._call_func)
    try:
        yield
    finally:
        _Operator._call_func = call
        unpatch_dynamo_compile()
        unpatch_triton_jitfunction_run()
        for owner, attributes in before:
            for name, value in [*vars(owner).items()]:
                if name in attributes and _is_of_msprobe(value):
                    setattr(owner, name, attributes[name])
                elif name.startswith("msprobe_") or _is_of_msprobe(value):
                    delattr(owner, name)
        for mapping in hooks:
            for key in [key for key, value in mapping.items() if _is_of_msprobe(value)]:
                del mapping[key]


def _places() -> list[Any]:
    """Return the modules and classes in which msprobe replaces functions."""
    places = [torch.linalg, torch.jit, nn.utils, BackwardHook, BackwardHookFunction, torch.ops._C_ascend]
    places += [torch.distributed.Work] if torch.distributed.is_available() else []
    groups = api_register._api_types["pytorch"].values()
    return places + [place for read_and_replaced in groups for side in read_and_replaced for place in side]


def _is_of_msprobe(value: object) -> bool:
    """Tell whether a function is defined in msprobe; names and modules of wrappers are those of what they wrap."""
    return type(value) is types.FunctionType and value.__globals__["__name__"].partition(".")[0] == "msprobe"


def _surviving(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return msprobe's call of an operator, without its habit to record nothing more once one has raised.

    A checkpointed layer's second pass ends in an exception as soon as it has what the backward pass asks for.
    """
    state: Any = BaseHookManager

    def survive(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        thread = threading.get_ident()
        depth, busy = state.inner_api_count[thread], state.inner_switch[thread]
        try:
            return call(module, *args, **kwargs)
        except BaseException:
            state.inner_api_count[thread], state.inner_switch[thread] = depth, busy
            raise

    return survive


def _confine(manager: Any, thread: int) -> None:
    """Let a hook manager record what a thread runs, and backward passes, wherever autograd runs them."""
    wanted = manager._should_execute_hook

    def wanted_here(hook_type: str, hook_thread: int, **options: Any) -> bool:
        mine = hook_thread == thread or torch._C._current_graph_task_id() != -1
        return mine and wanted(hook_type, hook_thread, **options)

    manager._should_execute_hook = wanted_here


def _retire(service: Any) -> None:
    """Put an ended debugger out of service, so that the next one starts afresh."""
    service.reset_status()
    atexit.unregister(service.data_collector.write_json_at_exit)
    service.hook_manager.data_collector = None  # graphs that outlive the stage still hold its hooks
    for handle in BaseHookManager.hook_handle_dict.values():
        handle.remove()
    BaseHookManager.hook_handle_dict.clear()
    ModuleProcessor.module_with_backward_hook.clear()
    api_register.api_register = None
