"""Captures by msprobe (package mindstudio-probe): one session for each stage, around its real `PrecisionDebugger`.

The precision debugger opens a session when a stage begins and closes it when the stage ends; msprobe writes the files.
It is made for one debugger in a process that does nothing else, hence the care taken here to leave no trace of a
session behind.
"""

import atexit
import functools
import importlib
import logging
import sys
import threading
import types
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version
from torch import nn
from torch.nn.modules._functions import BackwardHookFunction
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils.hooks import BackwardHook

from pellucid.config.schema.msprobe_json import read_json
from pellucid.errors import MissingExtraError, UserError

log = logging.getLogger("pellucid.observe")

_SECTION = "global_profiler.global_tool_config.precision_debugger"
_BACKEND, _CONFIG_PATH = f"{_SECTION}.backend", f"{_SECTION}.config_path"
_PACKAGE, _OLDEST = "mindstudio-probe", "26.2"
_LOG_LEVELS = {"DEBUG": logging.DEBUG, "INFO": logging.DEBUG, "WARNING": logging.WARNING, "ERROR": logging.ERROR}

_session = threading.Lock()
"""Held by the session that is open in this process."""


def check(config_path: str | Path, level: str | None) -> None:
    """Find out, before any model is loaded, whether msprobe can work here, and what it makes of its config.

    The form of the file, and what is the run's to decide, the rules on the run's config have judged already.

    Args:
        config_path: msprobe's JSON config.
        level: L0, L1 or mix; None: the file's, else L0.

    Raises:
        UserError: the file cannot be read, msprobe refuses what it says, or the installed release is none of those
            known; if there is none, a `MissingExtraError`.
    """
    msprobe, content = _internals(), read_json(config_path)
    if "load" in content:
        reason = f"'{config_path}' has 'load', which replaces what modules are given; the run would train on that."
        raise UserError(_CONFIG_PATH, reason, "Remove 'load' from it.")
    task, level = content.get("task") or "statistics", level or content.get("level") or "L0"
    try:
        with _explained(msprobe):
            common, of_task = msprobe.CommonConfig(content), msprobe.parse_task_config(task, content)
            config = msprobe.DebuggerConfig(common, of_task, task, "set by the run", level)
            msprobe.ScopeFactory(config).build_scope()
    except RuntimeError as error:
        raise UserError(_CONFIG_PATH, f"msprobe refuses '{config_path}': {error}", "Mend the file.") from error


class MsprobeSession:
    """One capture of one stage, by msprobe. Only one is open at a time in a process, and of its thread alone.

    What the thread runs between `begin` and `end` is captured, also after an exception: operators, and the backward
    passes that autograd may run on threads of its own.

    Args:
        models: the modules that the stage runs, every chunk; several are told apart by their number in the entries'
            names.
        folder: where the files go, in `step<k>/rank<R>`; k is the first that this rank has not used.
        config_path: msprobe's JSON config, as `check` has seen it.
        level: L0 modules, L1 operators, mix both; None: the file's, else L0.
        rank: this process's, R in the path.
    """

    def __init__(
        self, models: list[nn.Module], folder: Path, *, config_path: Path, level: str | None, rank: int
    ) -> None:
        self._models, self._folder, self._rank = models, folder, rank
        self._config_path, self._config = config_path, read_json(config_path)
        self.level = level or self._config.get("level") or "L0"
        """L0, L1 or mix."""
        self.target = Path()
        """Folder of the files, once begun."""
        self._undo: ExitStack | None = None
        """Takes back all that `begin` did; None: not open."""

    def begin(self) -> None:
        """Begin to capture what this thread runs.

        Raises:
            UserError: the installed msprobe is not one of those known.
            RuntimeError: a capture is open in this process, or a `PrecisionDebugger` that is not the profiler's; or
                msprobe cannot begin.
        """
        if not _session.acquire(blocking=False):
            raise RuntimeError("msprobe captures one stage at a time, and another's capture is open in this process")
        with ExitStack() as undo:
            undo.callback(_session.release)
            msprobe = _internals()
            if msprobe.PrecisionDebugger._instance is not None:
                raise RuntimeError("msprobe's PrecisionDebugger is in use in this process already")
            call = next(k for k in range(sys.maxsize) if not self._target(k).exists())
            self.target = self._target(call)
            undo.enter_context(_left_as_found(msprobe, self._models, self._config))
            undo.callback(setattr, msprobe.PrecisionDebugger, "_instance", None)
            with _without_megatron(), _explained(msprobe):
                debugger = msprobe.PrecisionDebugger(
                    config_path=str(self._config_path), dump_path=str(self._folder), level=self.level
                )
                undo.callback(_retire, msprobe, debugger.service)
                _confine(debugger.service.hook_manager, threading.get_ident())
                debugger.set_init_step(call)
                with _verl_hidden_from(msprobe.module_processor):
                    debugger.start(model=self._models if len(self._models) > 1 else self._models[0], rank_id=self._rank)
            self._undo = undo.pop_all()

    def end(self) -> list[Path]:
        """End the capture, take msprobe out of the process and return the files.

        What can be written is, also of a stage that raised; and whatever goes wrong here, msprobe is taken out.

        Raises:
            OSError, RuntimeError: msprobe could not write the files.
        """
        undo, self._undo = self._undo, None
        assert undo is not None
        msprobe = _internals()
        with undo, _explained(msprobe):
            msprobe.PrecisionDebugger.stop()
        return sorted(path for path in self.target.rglob("*") if path.is_file())

    def _target(self, call: int) -> Path:
        return self._folder / f"step{call}" / f"rank{self._rank}"


# What follows knows msprobe from the inside.


@functools.cache
def _internals() -> Any:
    """Return the parts of msprobe that are used here, by their own names.

    Raises:
        UserError: it is not installed (a `MissingExtraError`), too old, or has no longer those parts.
    """
    try:
        found = version(_PACKAGE)
    except PackageNotFoundError as error:
        raise MissingExtraError(_BACKEND, _PACKAGE, "msprobe") from error
    remedy = f"Install a known one: pip install '{_PACKAGE}=={_OLDEST}.*', or use backend: native."
    if Version(found) < Version(_OLDEST):
        raise UserError(_BACKEND, f"{_PACKAGE} {found} is too old; releases from {_OLDEST} on are known.", remedy)
    parts = {
        "msprobe.pytorch": ["PrecisionDebugger"],
        "msprobe.pytorch.dump.debugger.debugger_config": ["DebuggerConfig"],
        "msprobe.pytorch.dump.pt_config": ["parse_task_config"],
        "msprobe.pytorch.dump.api_dump.api_register": ["_api_types"],
        "msprobe.pytorch.dump.api_dump.hook_module": ["HOOKModule"],
        "msprobe.pytorch.dump.api_dump.script_wrapper": ["unpatch_dynamo_compile", "unpatch_triton_jitfunction_run"],
        "msprobe.pytorch.dump.module_dump.module_processor": ["ModuleProcessor"],
        "msprobe.core.dump.common_config": ["CommonConfig"],
        "msprobe.core.dump.data_dump.scope": ["ScopeFactory"],
        "msprobe.core.dump.hook_manager": ["BaseHookManager"],
        "msprobe.core.common.const": ["FileCheckConst"],
        "msprobe.core.common.exceptions": ["CodedException"],
        "msprobe.core.common.log": ["BaseLogger"],
    }
    tensorflow = {name: sys.modules.get(name) for name in ("tensorflow", "tensorflow.python")}
    try:
        modules = {name: importlib.import_module(name) for name in parts}
        internals = types.SimpleNamespace(
            **{part: vars(modules[name])[part] for name, names in parts.items() for part in names},
            api_register=modules["msprobe.pytorch.dump.api_dump.api_register"],
            module_processor=modules["msprobe.pytorch.dump.module_dump.module_processor"],
        )
    except (ImportError, KeyError) as error:
        reason = f"{_PACKAGE} {found} cannot be used: {error} is missing."
        raise UserError(_BACKEND, reason, remedy) from error
    finally:  # it puts a stub of TensorBoard's there, which other libraries would take for TensorFlow
        for name, module in tensorflow.items():
            if module is None:
                sys.modules.pop(name, None)
    internals.BaseLogger._print_log = _print_log
    return internals


def _print_log(_logger: object, level: str, message: str, **_: object) -> None:
    """Log what msprobe would print."""
    log.log(_LOG_LEVELS[level], "msprobe: %s", message)


@contextmanager
def _explained(msprobe: Any) -> Iterator[None]:
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
    except msprobe.CodedException as error:
        raise RuntimeError("; ".join(messages) or str(error).rpartition("：")[2].strip()) from error
    finally:
        log.removeFilter(collect)


@contextmanager
def _left_as_found(msprobe: Any, models: list[nn.Module], config: dict[str, Any]) -> Iterator[None]:
    """Take back at exit what msprobe replaces and adds: functions of torch, hooks and attributes of modules."""
    modules = {id(module): module for model in models for module in model.modules()}.values()
    places = _places(msprobe, config)
    functions = [(place, dict(vars(place))) for place in places]
    hooks: list[MutableMapping[Any, Any]] = [
        _global_optimizer_pre_hooks,
        _global_optimizer_post_hooks,
        *(hooks for module in modules for hooks in (module._forward_pre_hooks, module._forward_hooks)),
    ]
    forwards = [(module, vars(module).get("forward")) for module in modules]
    call, pattern = msprobe.HOOKModule._call_func, msprobe.FileCheckConst.FILE_VALID_PATTERN
    msprobe.HOOKModule._call_func = _surviving(call, msprobe.BaseHookManager)
    msprobe.FileCheckConst.FILE_VALID_PATTERN = ""  # it refuses folders with a blank or an equals sign in their names
    try:
        yield
    finally:
        msprobe.HOOKModule._call_func, msprobe.FileCheckConst.FILE_VALID_PATTERN = call, pattern
        msprobe.unpatch_dynamo_compile()
        msprobe.unpatch_triton_jitfunction_run()
        for place, before in functions:
            for name in [name for name, value in vars(place).items() if _is_of_msprobe(value)]:
                if name in before:
                    setattr(place, name, before[name])
                else:
                    delattr(place, name)
        for mapping in hooks:
            for key in [key for key, value in mapping.items() if _is_of_msprobe(value)]:
                del mapping[key]
        for module, forward in forwards:
            _clean(module, forward)


def _places(msprobe: Any, config: dict[str, Any]) -> list[Any]:
    """Return the modules and classes in which msprobe replaces functions."""
    places = [torch.linalg, torch.jit, nn.utils, BackwardHook, BackwardHookFunction]
    if torch.distributed.is_available():
        places.append(torch.distributed.Work)
    groups = msprobe.api_register._api_types["pytorch"].values()
    places += [place for read_and_replaced in groups for side in read_and_replaced for place in side]
    places += [getattr(torch.ops, name) for name in config.get("custom_op_namespaces") or ["_C_ascend"]]
    return list({id(place): place for place in places}.values())


def _is_of_msprobe(value: object) -> bool:
    """Tell whether a function is defined in msprobe; names and modules of wrappers are those of what they wrap."""
    return type(value) is types.FunctionType and value.__globals__["__name__"].partition(".")[0] == "msprobe"


def _clean(module: nn.Module, forward: Callable[..., Any] | None) -> None:
    """Take msprobe's attributes off a module; `forward` is the one that the instance itself had."""
    attributes = vars(module)
    for name in [name for name in attributes if name.startswith("msprobe_")]:
        del attributes[name]
    if _is_of_msprobe(attributes.get("forward")):
        del attributes["forward"]
        if forward is not None:
            attributes["forward"] = forward
    for hooks, flags in (
        (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
        (module._forward_hooks, module._forward_hooks_with_kwargs),
    ):
        for key in flags.keys() - hooks.keys():
            del flags[key]


def _surviving(call: Callable[..., Any], state: Any) -> Callable[..., Any]:
    """Return msprobe's call of a wrapped operator, without its habit to record nothing more once one has raised."""

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


def _retire(msprobe: Any, service: Any) -> None:
    """Put an ended debugger out of service, so that the next one starts afresh."""
    service.reset_status()
    atexit.unregister(service.data_collector.write_json_at_exit)
    service.hook_manager.data_collector = None  # graphs that outlive the stage still hold its hooks
    for handle in msprobe.BaseHookManager.hook_handle_dict.values():
        handle.remove()
    msprobe.BaseHookManager.hook_handle_dict.clear()
    msprobe.ModuleProcessor.module_with_backward_hook.clear()
    msprobe.api_register.api_register = None


@contextmanager
def _without_megatron() -> Iterator[None]:
    """Keep msprobe from importing Megatron, which no model here is of, and whose schedules it would wrap for good."""
    loaded = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "megatron"}
    hidden: dict[str, Any] = dict.fromkeys(["megatron", *loaded])  # None is the import system's word for: there is none
    sys.modules.update(hidden)
    try:
        yield
    finally:
        del sys.modules["megatron"]
        sys.modules.update(loaded)


@contextmanager
def _verl_hidden_from(module_processor: Any) -> Iterator[None]:
    """Keep msprobe from leaving out the first and the last module, as it does where verl is imported."""
    module_processor.sys = types.SimpleNamespace(modules={k: v for k, v in sys.modules.items() if k != "verl"})
    try:
        yield
    finally:
        module_processor.sys = sys
