"""Section `global_profiler`, and the `profiler` block of every role: what is captured, of whom, with which tool.

`validate/profiling.py` has the rules; `observe/captures.py` turns both into each process's request.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pellucid.config.fields import Alias, Needs, OrImportPath, Range, option

ToolName = Annotated[Literal["torch", "torch_memory", "nsys", "npu", "precision_debugger"], OrImportPath()]
StageName = Literal[
    "rollout_generate",
    "actor_compute_log_prob",
    "ref_compute_log_prob",
    "compute_values",
    "compute_rm_score",
    "critic_update",
    "actor_update",
]
_NSIGHT = {"trace": "cuda,nvtx,cublas,ucx", "cuda-memory-usage": "true", "cuda-graph-trace": "graph"}
PrecisionLevel = Literal["L0", "L1", "mix"]
Count = Annotated[int, Range(ge=0)]
PROFILED_SECTIONS = {
    "actor": "actor_rollout_ref.actor",
    "ref": "actor_rollout_ref.ref",
    "rollout": "actor_rollout_ref.rollout",
    "critic": "critic",
    "reward_model": "reward_model",
}
"""Role → the section that holds its `profiler`."""
_STAGES = Needs(".stages", remedy="Name the stages, e.g. stages: [actor_update]")
ACTOR_FOLLOWERS = ("ref", "rollout")
"""Roles whose `profiler` takes from the actor's what it does not set."""


@dataclass(frozen=True)
class NsysToolConfig:
    """NVIDIA Nsight Systems."""

    discrete: bool = option(False, link="${global_profiler.global_tool_config.nsys.discrete}")
    """One capture for each stage instead of one for each step; null follows the global key."""


@dataclass(frozen=True)
class NpuToolConfig:
    """The profiler of Ascend NPUs (`torch_npu.profiler`)."""

    contents: list[Literal["npu", "cpu", "memory", "shapes", "module", "stack"]] = field(default_factory=list)
    """What is collected; empty means npu and cpu. Without cpu nothing is captured, so it is added. `module` records
    the call stack at less cost than `stack`."""
    level: Literal["level_none", "level0", "level1", "level2"] = "level0"
    """Depth: level0 applications and operators on the NPU, level1 also AscendCL and AI Core metrics, level2 also
    the CANN runtime and AI CPU."""
    analysis: Annotated[Literal["off", "text", "db"], Alias(True, "text"), Alias(False, "off")] = "text"
    """Parse the data as soon as it is collected, to a trace and tables as text, or to a database; off leaves it to
    `torch_npu.profiler.profiler.analyse`. true is text, false is off."""
    discrete: bool = False
    """One capture for each stage instead of one for each step."""


@dataclass(frozen=True)
class TorchToolConfig:
    """PyTorch's own profiler."""

    contents: list[Literal["cpu", "cuda", "memory", "shapes", "module", "stack"]] = field(default_factory=list)
    """What is collected; empty means cpu and, where there is one, cuda."""
    discrete: bool = False
    """One capture for each stage instead of one for each step."""
    step_start: Count = 0
    """First mini-batch of an update that is captured; with `step_end`, short for a schedule of mini-batches."""
    step_end: Annotated[int, Range(ge=1)] | None = None
    """Mini-batch of an update before which the capture ends; null: the last."""


@dataclass(frozen=True)
class TorchMemoryToolConfig:
    """Who holds memory: snapshots of CUDA's allocator, or on a CPU the profiler's memory events."""

    trace_alloc_max_entries: Annotated[int, Range(ge=1)] = 100000
    """Most allocations and frees that are kept on CUDA, the latest; on a CPU all are."""
    stack_depth: Annotated[int, Range(ge=1)] = 32
    """Most frames of an allocation's stack."""


@dataclass(frozen=True)
class RoleToolConfig:
    """Settings of the tools, of which the role's `tool` reads its own."""

    nsys: NsysToolConfig = field(default_factory=NsysToolConfig)
    """NVIDIA Nsight Systems."""
    npu: NpuToolConfig = field(default_factory=NpuToolConfig)
    """The profiler of Ascend NPUs (`torch_npu.profiler`)."""
    torch: TorchToolConfig = field(default_factory=TorchToolConfig)
    """PyTorch's own profiler."""
    torch_memory: TorchMemoryToolConfig = option(
        TorchMemoryToolConfig, follows=("global_profiler.global_tool_config.torch_memory", TorchMemoryToolConfig)
    )
    """Who holds memory; what is not set here follows the global keys."""


@dataclass(frozen=True)
class ScheduleConfig:
    """A window inside a stage: of many like units a few are captured. Stages in it have captures of their own."""

    unit: Literal["micro_batch", "mini_batch", "decode_step", "turn"] = option("micro_batch", needs=_STAGES)
    """What is counted: micro_batch in passes and updates, mini_batch in updates, decode_step in rollout_generate, and
    there turn, with an agent of several."""
    skip_first: Count = option(0, needs=_STAGES)
    """Units before the first cycle."""
    wait: Count = option(0, needs=_STAGES)
    """Units at the start of each cycle that are not captured."""
    warmup: Count = option(0, needs=_STAGES)
    """Units after these in which the tool already runs and its results are thrown away."""
    active: Annotated[int, Range(ge=1)] = option(1, needs=_STAGES)
    """Units after these that are captured, as one file."""
    repeat: Count = option(1, needs=_STAGES)
    """Cycles of wait, warmup and active; 0 goes on to the end of the stage."""
    stages: list[StageName] = field(default_factory=list)
    """Stages of this role that are sampled so, in the actor's block those of ref and rollout too; empty: none."""


@dataclass(frozen=True)
class ProfilerConfig:
    """Profiling of one role."""

    tool: ToolName | None = option(None, link="${global_profiler.tool}")
    """What captures: torch, torch_memory, nsys, npu, precision_debugger, or a class of your own as `file.py:name`; null
    follows the global key."""
    enable: bool = False
    """Profile this role."""
    all_ranks: bool = False
    """On all of its ranks."""
    ranks: list[Count] = field(default_factory=list)
    """Or on these alone; of rollout, the numbers of inference engines. Empty without `all_ranks` means none."""
    save_path: str | None = option(None, link="${global_profiler.save_path}")
    """Folder for the files; null follows the global key."""
    tool_config: RoleToolConfig = field(default_factory=RoleToolConfig)
    """Settings of the tools, of which `tool` reads its own."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """A window inside a stage: of many like units a few are captured. Stages in it have captures of their own."""

    @property
    def collects(self) -> bool:
        """Whether any rank is captured in the steps that are profiled."""
        return self.enable and (self.all_ranks or bool(self.ranks))

    @property
    def discrete(self) -> bool:
        """Whether each stage has a capture of its own; a tool of the user's own goes by torch's setting.

        The precision debugger has no other way: stages run different models.
        """
        options = self.tool_config
        switches = {"nsys": options.nsys.discrete, "npu": options.npu.discrete, "torch_memory": False}
        switches["precision_debugger"] = True
        return switches.get(self.tool or "", options.torch.discrete)

    @property
    def has_torch_window(self) -> bool:
        """Whether torch's own keys choose mini-batches of an update."""
        options = self.tool_config.torch
        return self.tool == "torch" and (options.step_start > 0 or options.step_end is not None)

    @property
    def captures_stages(self) -> bool:
        """Whether captures are of stages, whole (discrete) or windows in them, instead of whole steps (end-to-end)."""
        return self.discrete or bool(self.schedule.stages) or self.has_torch_window


@dataclass(frozen=True)
class GlobalNsysConfig:
    """Nsight Systems: options of `nsys profile`, as a mapping of its long options without the dashes."""

    discrete: bool = False
    """One capture for each stage instead of one for each step."""
    controller_nsight_options: dict[str, str | int | bool] = field(default_factory=lambda: dict(_NSIGHT))
    """Options for the controller's process, which is recorded from start to end."""
    worker_nsight_options: dict[str, str | int | bool | None] = field(
        default_factory=lambda: (
            _NSIGHT | {"capture-range": "cudaProfilerApi", "capture-range-end": None, "kill": "none"}
        )
    )
    """Options for the ranks' processes; `capture-range-end: null` becomes `repeat`, which records every capture."""


@dataclass(frozen=True)
class PrecisionDebuggerConfig:
    """Numbers of every layer, to find the first wrong one: a capture of each stage in `global_profiler.steps`."""

    backend: Literal["native", "msprobe"] = "native"
    """Who measures: native, at little cost and on the rollout too, or msprobe (package mindstudio-probe), which
    also keeps whole tensors. Both write the same files. Unless it is set, a `config_path` means msprobe."""
    config_path: str | None = option(None, needs=Needs(".backend", ("msprobe",)))
    """msprobe's JSON config, which backend msprobe needs. Steps, ranks and folder are the run's."""
    level: PrecisionLevel | None = None
    """What is measured: L0 each module's inputs, outputs, parameters and gradients; L1 each operator's; mix both.
    null: the JSON's `level`, else L0."""
    stages: Annotated[list[StageName], Alias(None, [])] = field(default_factory=list)
    """Stages that are captured, of roles with `profiler.enable: true`; empty: all those that the backend can,
    rollout_generate with native alone."""
    strict: bool = False
    """End the run when a capture fails, instead of going on with what there is of it."""

    def covers(self, stage: str) -> bool:
        """Tell whether a stage is captured where its role is."""
        if stage == "rollout_generate" and self.backend != "native":
            return False
        return not self.stages or stage in self.stages


@dataclass(frozen=True)
class GlobalToolConfig:
    """Settings of tools for all roles."""

    nsys: GlobalNsysConfig = field(default_factory=GlobalNsysConfig)
    """NVIDIA Nsight Systems."""
    torch_memory: TorchMemoryToolConfig = field(default_factory=TorchMemoryToolConfig)
    """Memory snapshots."""
    precision_debugger: PrecisionDebuggerConfig = field(default_factory=PrecisionDebuggerConfig)
    """Numbers of every layer, to find the first wrong one."""


@dataclass(frozen=True)
class GlobalProfilerConfig:
    """Profiling of the run: the tool, the steps, and what is done with the files."""

    tool: ToolName | None = None
    """What captures: torch, torch_memory, nsys, npu, precision_debugger, or a class of your own as `file.py:name`."""
    steps: list[Annotated[int, Range(ge=1)]] | None = None
    """Steps that are profiled, e.g. [1, 2, 5]; null profiles none."""
    save_path: str | None = None
    """Folder for the files; null: `profile` in the run's folder."""
    profile_continuous_steps: bool = False
    """Let neighbouring steps share one capture, where captures are of whole steps."""
    controller: bool | None = option(None, needs=Needs(".tool", ("torch", "torch_memory", "nsys", "npu")))
    """Capture the controller's process too; null: with nsys alone."""
    max_bytes: Annotated[int, Range(ge=1)] = 2 * 1024**3
    """Most bytes of captures a process writes; beyond that it collects no more, and says so."""
    strict: bool = False
    """End the run when profiling fails, instead of going on without."""
    finish_hook_cmd: str | None = None
    """Shell command that runs once, after the last file is in place; PELLUCID_RUN_DIR, PELLUCID_PROFILE_DIR and
    PELLUCID_MANIFEST name what it may want to upload."""
    finish_hook_timeout_s: Annotated[float, Range(gt=0)] = 600.0
    """Seconds after which that command is ended."""
    global_tool_config: GlobalToolConfig = field(default_factory=GlobalToolConfig)
    """Settings of tools for all roles."""
