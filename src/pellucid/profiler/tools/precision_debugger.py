"""The precision debugger: statistics of what every module reads and computes in a stage, to find the first wrong number.

A capture is a folder, `<save_path>/step_<N>/<stage>/step<k>/rank<R>`, for `pellucid precision compare|report|digest` and msprobe's own tools.
"""

import json
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from pathlib import Path

import torch

from pellucid.precision.capture import NativeSession
from pellucid.precision.dump import About
from pellucid.precision.msprobe import MsprobeSession
from pellucid.precision.msprobe import check as check_msprobe
from pellucid.precision.naming import class_name
from pellucid.profiler.probe import TokenSpans
from pellucid.profiler.tools.base import Capture, ToolSettings


class PrecisionDebuggerTool:
    """See `TensorTool`."""

    def __init__(self, settings: ToolSettings) -> None:
        self._options, self._device = settings.global_options.precision_debugger, settings.device
        self._level = self._options.level or _level_in(self._options.config_path) or "L0"
        self._session: NativeSession | MsprobeSession | None = None

    @classmethod
    def check(cls, settings: ToolSettings) -> None:
        """See `Tool.check`.

        Raises:
            UserError: msprobe is asked for and does not work here, or its config does not.
        """
        options = settings.global_options.precision_debugger
        if options.backend == "msprobe":
            assert options.config_path is not None
            check_msprobe(options.config_path, options.level)

    def warm_up(self, capture: Capture) -> None:
        """See `Tool.warm_up`."""

    def start(self, capture: Capture) -> None:
        """See `Tool.start`."""
        assert capture.stage is not None and capture.models, "captures are of stages, and those have models"
        folder = capture.folder / f"step_{capture.step}" / capture.stage
        if self._options.backend == "msprobe":
            assert self._options.config_path is not None
            session = MsprobeSession(
                list(capture.models),
                folder,
                config_path=Path(self._options.config_path),
                level=self._options.level,
                rank=capture.rank,
            )
        else:
            session = self._native(capture, folder)
        session.begin()
        self._session = session

    def _native(self, capture: Capture, folder: Path) -> NativeSession:
        # Dynamic sampling runs stages again, windows cut them up, and a resumed run may repeat a step.
        number = next(k for k in count() if not (folder / f"step{k}" / f"rank{capture.rank}").exists())
        about = About(
            backend="native",
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
        )
        return NativeSession(
            capture.models,
            folder / f"step{number}" / f"rank{capture.rank}",
            about,
            modules=self._level != "L1",
            operators=self._level != "L0",
            gather=self._options.gather,
        )

    def range(self, name: str) -> AbstractContextManager[object]:
        """See `Tool.range`; files of numbers have no time axis to mark."""
        return nullcontext()

    def begin_pass(self, spans: TokenSpans, unit: str) -> None:
        """See `TensorTool.begin_pass`."""
        if isinstance(self._session, NativeSession):
            self._session.begin_pass(spans, unit)

    def results(self, tensors: dict[str, torch.Tensor]) -> None:
        """See `TensorTool.results`."""
        if isinstance(self._session, NativeSession):
            self._session.results(tensors)

    def end_mini_batch(self) -> None:
        """See `TensorTool.end_mini_batch`."""
        if isinstance(self._session, NativeSession):
            self._session.end_mini_batch()

    def stop(self) -> list[Path]:
        """See `Tool.stop`."""
        session, self._session = self._session, None
        assert session is not None
        return session.end()


def _level_in(config_path: str | None) -> str | None:
    """Return the level in msprobe's JSON config, whose form the config's rules have checked."""
    return None if config_path is None else json.loads(Path(config_path).read_text(encoding="utf-8")).get("level")
