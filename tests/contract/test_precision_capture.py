"""The native capture: every module's call is there once, with the numbers that a look at the tensors themselves gives."""

import os
import subprocess
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny import ARCHITECTURES, CPU, tiny_model

from pellucid.agents.llm import sample_rollouts
from pellucid.config.schema.profiler import GlobalProfilerConfig, GlobalToolConfig, PrecisionDebuggerConfig
from pellucid.observe.manifest import read_journals
from pellucid.observe.process import ProcessProfiler, ProfilerError
from pellucid.observe.request import ProcessRequest, RoleRequest
from pellucid.observe.spans import SpanRecorder
from pellucid.precision.capture import entry_prefix, named_modules
from pellucid.precision.dump import StageDump, TensorStats, find_dumps, leaves, read_dump
from pellucid.rollout.native import NativeRolloutEngine
from pellucid.rollout.requests import SamplingParams
from pellucid.stages import Stage
from pellucid.training.common.heads import LogProbHead
from pellucid.training.common.mini_batch import MicroBatching
from pellucid.training.common.models import BUILTIN_FOLDER, enable_gradient_checkpointing, load_tokenizer
from pellucid.training.common.optimizer import Schedule, ScheduledAdamW
from pellucid.training.common.packing import TokenSequence
from pellucid.training.fsdp import FsdpEngine
from pellucid.training.protocol import TokenScores
from pellucid.types import Prompt

SEQUENCES = [
    TokenSequence([5, 3, 9], [2, 14, 8], 0, "a sample 0", "a"),
    TokenSequence([5, 3, 9], [6], 0, "a sample 1", "a"),
    TokenSequence([7, 7], [4, 12], 1, "b sample 0", "b"),
]


class Bench:
    """A tiny policy with an optimizer, and the profiler that captures it."""

    def __init__(self, folder: Path, architecture: str = "llama", *, strict: bool = False, **options: object) -> None:
        self.folder, self.said = folder, list[str]()
        self.model = tiny_model(architecture)
        optimizer = ScheduledAdamW(dict(self.model.named_parameters()), Schedule(1e-3, 0, 100), 0.01, (0.9, 0.999), 1e9)
        role = RoleRequest("precision_debugger", folder / "profile", discrete=True)
        tools = GlobalToolConfig(precision_debugger=PrecisionDebuggerConfig(**options))  # pyright: ignore[reportArgumentType]
        config = GlobalProfilerConfig(steps=[1, 2], strict=strict, global_tool_config=tools)
        roles = {"actor": role, "rollout": role}
        request = ProcessRequest("controller", "policy", 0, 1, roles, folder / ".journals", config)
        self.profiler = ProcessProfiler(SpanRecorder(), request, self.said.append)
        self.engine = FsdpEngine(
            self.model, optimizer, MicroBatching(None, 2), device=CPU, dtype=torch.float32, probe=self.profiler
        )
        self.profiler.models_of = lambda stage: self.engine.modules

    def stage(self, stage: Stage, run: Callable[[], object], step: int = 1) -> None:
        self.profiler.begin_step(step)
        with self.profiler.stage(stage, step):
            run()
        self.profiler.end_step(step, last=False)

    def forward(self, step: int = 1) -> None:
        self.stage(Stage.ACTOR_COMPUTE_LOG_PROB, lambda: self.engine.forward(SEQUENCES, LogProbHead(1.0)), step)

    def update(self, step: int = 1) -> None:
        self.stage(Stage.ACTOR_UPDATE, lambda: self.engine.train_mini_batch(SEQUENCES, LogProbHead(1.0), loss), step)

    def dumps(self) -> list[StageDump]:
        return [read_dump(found.folder) for found in find_dumps(self.folder / "profile")]

    def dump(self) -> StageDump:
        [dump] = self.dumps()
        return dump


def loss(rows: list[int], scores: TokenScores) -> torch.Tensor:
    return -scores.logp.sum()


def stats(dump: StageDump, entry: str, path: str) -> TensorStats:
    [found] = [entry_ for entry_ in dump.entries if entry_.name == entry]
    return dict(leaves(found))[path]


def agrees(found: TensorStats, tensor: torch.Tensor) -> None:
    tensor = tensor.detach()
    assert found.shape == tuple(tensor.shape) and found.dtype == str(tensor.dtype)
    mine = [found.min, found.max, found.mean, found.norm]
    values = tensor.double()
    assert mine == pytest.approx([float(value) for value in (values.min(), values.max(), values.mean(), values.norm())], rel=1e-6, abs=1e-9)


def test_a_forward_stage_has_each_module_once_a_pass(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    seen: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for path, module in named_modules([bench.model]):
        name = entry_prefix(path, module)
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(
                lambda _, args, output, name=name: seen.setdefault(name, []).append((args[0], output))
            )
    bench.forward()
    dump = bench.dump()
    assert not bench.said and dump.about.complete and [part.unit for part in dump.about.passes] == ["micro_batch"] * 2
    names = [entry.name for entry in dump.entries]
    called = [entry_prefix(path, module) for path, module in named_modules([bench.model]) if path not in ("lm_head", "model.layers")]
    assert sorted(names) == sorted(f"{name}.forward.{call}" for name in [*called, "Module.scores.TokenScores"] for call in (0, 1))
    for name, calls in seen.items():
        for number, (inputs, output) in enumerate(calls):
            agrees(stats(dump, f"{name}.forward.{number}", "input_args.0"), inputs)
            agrees(stats(dump, f"{name}.forward.{number}", "output.0"), output)
            agrees(stats(dump, f"{name}.forward.{number}", "parameters.weight"), bench.model.get_submodule(name[7:-7]).weight)
    # A child ends before its parent, and knows it.
    of = {entry.name: entry for entry in dump.entries}
    child, parent = "Module.model.layers.0.mlp.down_proj.Linear.forward.1", "Module.model.layers.0.mlp.LlamaMLP.forward.1"
    assert of[child].parent == parent and names.index(child) < names.index(parent)


def test_sums_by_sample_are_those_of_the_samples_tokens(tmp_path: Path) -> None:
    bench, outputs = Bench(tmp_path), []
    bench.model.model.norm.register_forward_hook(lambda _, args, output: outputs.append(output[0]))
    bench.forward()
    dump = bench.dump()
    kind = type(bench.model.model.norm).__name__
    assert dump.samples is not None
    sums = dump.samples.to_pylist()
    for number, output in enumerate(outputs):
        found = [one for one in sums if one["tensor"] == f"Module.model.norm.{kind}.forward.{number}|output.0"]
        spans = dump.about.passes[number].spans
        assert [dump.about.spans[one["span"]] for one in found] == spans
        expected = [output[span.start : span.start + span.length].double() for span in spans]
        assert [one["sum"] for one in found] == pytest.approx([float(part.sum()) for part in expected], rel=1e-5, abs=1e-5)
        assert [one["square_sum"] for one in found] == pytest.approx([float(part.square().sum()) for part in expected], rel=1e-5)
    assert {span.sample for part in dump.about.passes for span in part.spans} == {"a", "b", "a sample 0", "a sample 1", "b sample 0"}


def test_an_update_has_gradients_and_what_the_optimizer_made(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    before = {name: value.detach().clone() for name, value in bench.model.named_parameters()}
    weight, used = bench.model.get_parameter("model.layers.1.mlp.down_proj.weight"), list[torch.Tensor]()
    assert bench.engine.optimizer is not None
    bench.engine.optimizer.adamw.register_step_pre_hook(lambda *_: used.append(weight.grad.clone()))  # pyright: ignore[reportOptionalMemberAccess]
    bench.update()
    dump, name = bench.dump(), "Module.model.layers.1.mlp.down_proj.Linear"
    assert not bench.said
    agrees(stats(dump, f"{name}.forward.0", "parameters.weight"), before["model.layers.1.mlp.down_proj.weight"])
    agrees(stats(dump, f"{name}.optimizer.0", "output.0.weight"), weight)
    agrees(stats(dump, f"{name}.optimizer.0", "input.0.weight"), used[0])
    agrees(stats(dump, f"{name}.parameters_grad.1", "weight.0"), used[0])  # summed up; the norm is below the clip
    assert stats(dump, f"{name}.parameters_grad.0", "weight.0").norm != stats(dump, f"{name}.parameters_grad.1", "weight.0").norm
    assert stats(dump, f"{name}.backward.1", "input.0").shape == stats(dump, f"{name}.forward.1", "output.0").shape
    assert stats(dump, f"{name}.backward.1", "output.0").shape == stats(dump, f"{name}.forward.1", "input_args.0").shape
    assert dump.about.mini_batches == [0]


@pytest.mark.parametrize(("architecture", "level"), [*((name, "mix") for name in ARCHITECTURES), ("llama", "L0"), ("llama", "L1")])
def test_a_capture_changes_no_bit_and_leaves_nothing_behind(tmp_path: Path, architecture: str, level: str) -> None:
    plain, bench = Bench(tmp_path / "plain", architecture), Bench(tmp_path / "captured", architecture, level=level)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for step in (1, 3):  # the third is not asked for
            plain.engine.train_mini_batch(SEQUENCES, LogProbHead(1.0), loss)
            bench.update(step)
    assert all(torch.equal(mine, its) for mine, its in zip(plain.model.parameters(), bench.model.parameters()))
    assert not bench.said and len(bench.dumps()) == 1
    for module in bench.model.modules():
        assert not (module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)
    assert torch.overrides._get_current_function_mode() is None
    names = [entry.name for entry in bench.dump().entries]
    assert any(name.startswith("Functional.") for name in names) == (level != "L0")
    assert any("Attention.forward.0" in name for name in names) == (level != "L1")


def test_operators_are_inside_the_modules_that_call_them(tmp_path: Path) -> None:
    bench = Bench(tmp_path, level="mix")
    bench.update()
    dump = bench.dump()
    linear = [entry for entry in dump.entries if entry.name.startswith("Functional.linear.") and entry.name.endswith(".forward")]
    parents = {entry.parent for entry in linear}
    assert "Module.model.layers.0.mlp.down_proj.Linear.forward.0" in parents
    module = stats(dump, "Module.model.layers.0.mlp.down_proj.Linear.forward.0", "output.0")
    [inside] = [entry for entry in linear if entry.parent == "Module.model.layers.0.mlp.down_proj.Linear.forward.0"]
    assert dict(leaves(inside))["output.0"].checksum == module.checksum
    assert any(entry.name == inside.name.replace("forward", "backward") for entry in dump.entries)
    assert not any("resolve_neg" in entry.name or "view_as_real" in entry.name for entry in dump.entries), "of the capture itself"
    weight = "parameters.weight"
    assert stats(dump, "Module.model.norm.LlamaRMSNorm.forward.0", weight).max < 100


def test_stages_and_repeated_calls_have_captures_of_their_own(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.forward()
    bench.forward()
    bench.update(2)
    found = [(dump.about.step, dump.about.stage, dump.about.call) for dump in bench.dumps()]
    assert found == [(1, "actor_compute_log_prob", 0), (1, "actor_compute_log_prob", 1), (2, "actor_update", 0)]
    first, again = bench.dumps()[:2]
    assert [entry.name for entry in first.entries] == [entry.name for entry in again.entries]
    assert dict(leaves(first.entries[5])) == dict(leaves(again.entries[5]))


def test_a_layer_that_is_computed_twice_is_recorded_once(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    enable_gradient_checkpointing(bench.model)
    bench.update()
    names = [entry.name for entry in bench.dump().entries]
    assert len(names) == len(set(names)) and "Module.model.layers.0.mlp.LlamaMLP.backward.1" in names
    assert not any(name.endswith("forward.2") for name in names)


def test_an_exception_in_the_stage_keeps_what_was_captured(tmp_path: Path) -> None:
    bench = Bench(tmp_path)

    def break_off(module: object, args: object) -> None:
        raise ArithmeticError("a fault of the run's own")

    bench.model.model.layers[1].mlp.register_forward_pre_hook(break_off)
    with pytest.raises(ArithmeticError, match="own"):
        bench.forward()
    dump = bench.dump()
    assert not dump.about.complete and dump.about.error == "ArithmeticError: a fault of the run's own"
    names = [entry.name for entry in dump.entries]
    assert "Module.model.layers.0.LlamaDecoderLayer.forward.0" in names
    assert [name for name in names if "layers.1." in name][-1] == "Module.model.layers.1.LlamaDecoderLayer.forward.0"
    assert "output" not in {entry.name: entry for entry in dump.entries}["Module.model.layers.1.LlamaDecoderLayer.forward.0"].groups


@pytest.mark.parametrize("strict", [False, True])
def test_an_error_of_the_capture_ends_the_run_only_under_strict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strict: bool
) -> None:
    bench = Bench(tmp_path, strict=strict)
    measure, calls = torch.Tensor.untyped_storage, []

    def failing(tensor: torch.Tensor) -> object:
        calls.append(tensor)
        if len(calls) == 40:
            raise MemoryError("no room for another row")
        return measure(tensor)

    monkeypatch.setattr(torch.Tensor, "untyped_storage", failing)
    if strict:
        with pytest.raises(ProfilerError, match="no room"):
            bench.update()
    else:
        bench.update()
        assert len(bench.said) == 1 and "MemoryError: no room for another row" in bench.said[0]
        assert bench.engine.version == 1
    dump = bench.dump()
    assert dump.entries and not dump.about.complete
    files, failures = read_journals(tmp_path / ".journals")
    assert {Path(file.path).name for file in files} >= {"dump.json", "capture.json"} and len(failures) == 1


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_hook_that_cannot_be_placed_leaves_none(tmp_path: Path) -> None:
    bench = Bench(tmp_path, level="mix")
    handle = bench.model.model.layers[1].mlp.down_proj.register_backward_hook(lambda *_: None)  # the old kind
    bench.update()
    assert len(bench.said) == 1 and "failed to start" in bench.said[0] and bench.engine.version == 1
    handle.remove()
    for module in bench.model.modules():
        assert not (module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)
    assert torch.overrides._get_current_function_mode() is None


def test_a_weight_as_long_as_a_pass_has_no_samples(tmp_path: Path) -> None:
    """The hidden size is that of the token axis, and still no token is a row of a weight."""
    bench = Bench(tmp_path)
    sequences = [TokenSequence(list(range(2, 22)), list(range(2, 15)), 0, "a sample 0", "a")]
    assert len(sequences[0].prompt_ids) + len(sequences[0].response_ids) - 1 == bench.model.config.hidden_size
    bench.stage(Stage.ACTOR_UPDATE, lambda: bench.engine.train_mini_batch(sequences, LogProbHead(1.0), loss))
    samples = bench.dump().samples
    assert samples is not None
    names = samples["tensor"].to_pylist()
    assert any(name.endswith("|output.0") for name in names) and not [name for name in names if ".optimizer." in name or "parameters" in name]


def test_a_rollout_has_a_pass_for_each_token(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    tokenizer = load_tokenizer(str(BUILTIN_FOLDER))
    engine = NativeRolloutEngine(
        bench.engine, tokenizer, [1], max_num_seqs=4, max_num_batched_tokens=64, seed=0, probe=bench.profiler
    )
    prompts = [Prompt("a", [5, 3, 9], text="", task=""), Prompt("b", [7, 7], text="", task="")]
    params = SamplingParams(n=2, max_tokens=4, ignore_eos=True)
    bench.stage(Stage.ROLLOUT_GENERATE, lambda: sample_rollouts(engine, prompts, params, stream=("rollout", 1)))
    [found] = find_dumps(tmp_path / "profile")
    dump = read_dump(found.folder)
    assert found.replica == 0 and not bench.said
    assert [part.unit for part in dump.about.passes] == ["prefill", *["decode_step"] * 3]
    decoded = {(span.sample, span.position) for part in dump.about.passes[1:] for span in part.spans}
    rows = [("a sample 0", 3), ("a sample 1", 3), ("b sample 0", 2), ("b sample 1", 2)]
    assert decoded == {(sample, first + token) for sample, first in rows for token in range(3)}
    assert stats(dump, "Module.model.layers.0.mlp.down_proj.Linear.forward.3", "output.0").shape[1] == 4


def test_a_full_disk_leaves_the_capture_out_and_the_update_alone(tmp_path: Path) -> None:
    mount = tmp_path / "disk"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", str(mount)]
    if os.getuid() != 0 or subprocess.run(command, check=False).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        bench = Bench(mount)
        bench.update()
        assert any("precision_debugger failed to stop: OSError" in line for line in bench.said) and bench.engine.version == 1
        assert not list((mount / "profile").rglob("capture.json")), "half a capture that looks whole"
    finally:
        subprocess.run(["umount", "--lazy", str(mount)], check=True)
