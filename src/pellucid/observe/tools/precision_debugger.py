"""The precision debugger: statistics of all that modules read and compute in a stage, to find the first wrong number.

A capture is a folder, `<save_path>/step_<N>/<stage>/step<k>/rank<R>`, for `pellucid precision compare|report|digest`
and msprobe's own tools.
"""

import importlib
import time
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from typing_extensions import override

from pellucid.config.schema.msprobe_json import read_json
from pellucid.errors import MissingExtraError
from pellucid.observe.tools.base import Capture, KeptInPartError, TensorTool, ToolSettings
from pellucid.precision.capture import NativeSession, class_name
from pellucid.precision.dump import About
from pellucid.precision.statistics import Measurer
from pellucid.stages import TokenSpans


class PrecisionDebuggerTool(TensorTool):
    """Measures what a stage computes, with our own hooks or msprobe's."""

    def __init__(self, settings: ToolSettings) -> None:
        self._options, self._device = settings.global_options.precision_debugger, settings.device
        path = self._options.config_path
        self._level = self._options.level or (read_json(path).get("level") if path else None) or "L0"
        self._session: NativeSession | Any = None
        """What captures a stage at this moment; an `MsprobeSession` does the same."""
        self._folder = Path()
        if self._options.backend == "native":  # compiled once on a machine, and loaded once in a process
            Measurer(torch.device(settings.device)).warm_up((torch.float32, torch.bfloat16, torch.int64, torch.bool))

    @classmethod
    @override
    def check(cls, settings: ToolSettings) -> None:
        """Find out whether the backend works here.

        Raises:
            UserError: msprobe is asked for, and refuses its config; a `MissingExtraError` where it is not installed.
        """
        options = settings.global_options.precision_debugger
        if options.backend == "msprobe":
            _msprobe().check(str(options.config_path), options.level)

    @override
    def start(self, capture: Capture) -> None:
        assert capture.stage is not None and capture.models, "captures are of stages, and those have models"
        folder = capture.folder / f"step_{capture.step}" / capture.stage
        # Dynamic sampling runs stages again, windows cut them up, and a resumed run may repeat a step.
        number = next(k for k in count() if not (folder / f"step{k}" / f"rank{capture.rank}").exists())
        about = About(
            backend=self._options.backend,
            level=self._level,
            stage=str(capture.stage),
            step=capture.step,
            role=capture.role,
            call=number,
            rank=capture.rank,
            num_ranks=capture.num_ranks,
            device=self._device,
            dtype=str(next(capture.models[0].parameters()).dtype),
            model=class_name(capture.models[0]),
            started_at=time.time(),
        )
        self._folder = folder / f"step{number}" / f"rank{capture.rank}"
        if self._options.backend == "msprobe":
            path = Path(str(self._options.config_path))
            session = _msprobe().MsprobeSession(capture.models, folder, path, about)
        else:
            modules, operators = self._level != "L1", self._level != "L0"
            session = NativeSession(capture.models, about, modules=modules, operators=operators)
        session.begin()
        self._session = session

    @override
    def begin_pass(self, spans: TokenSpans, unit: str) -> None:
        if self._session is not None:
            self._session.begin_pass(spans, unit)

    @override
    def results(self, tensors: dict[str, torch.Tensor]) -> None:
        if self._session is not None:
            self._session.results(tensors)

    @override
    def end_mini_batch(self) -> None:
        if self._session is not None:
            self._session.end_mini_batch()

    @override
    def stop(self) -> list[Path]:
        session, self._session = self._session, None
        assert session is not None
        files = session.save(self._folder)
        if session.error is not None:
            raise KeptInPartError(session.error, files) from session.error
        return files


def _msprobe() -> ModuleType:
    """Return the adapter to msprobe.

    Raises:
        MissingExtraError: the package is not installed, or has no longer what is used of it.
    """
    try:
        return importlib.import_module("pellucid.precision.msprobe")
    except ImportError as error:
        field = "global_profiler.global_tool_config.precision_debugger.backend"
        raise MissingExtraError(field, "mindstudio-probe", "msprobe") from error
