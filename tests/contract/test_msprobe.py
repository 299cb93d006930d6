"""The real msprobe around a tiny Llama: what its captures hold, and that nothing of it stays in the process."""

import csv
import importlib
import json
import logging
import multiprocessing
import runpy
import sys
import threading

import pytest
import torch
from tiny import plain_copy, tiny_model
from torch.nn import functional
from torch.optim import optimizer
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import BackwardHook

pytest.importorskip("msprobe", reason="needs mindstudio-probe")
from pellucid.errors import UserError
from pellucid.precision.dump import About
from pellucid.precision.msprobe import MsprobeSession, check

pytestmark = [pytest.mark.filterwarnings("ignore:Full backward hook is firing")]
TOKENS = torch.arange(12)[None]
PLACES = (
    *(torch, torch.Tensor, functional, torch.linalg, torch._VF, torch.jit, torch.distributed, torch.distributed.Work),
    *(torch.nn.utils, BackwardHook, torch.nn.modules._functions.BackwardHookFunction),
)


@pytest.fixture
def model():
    return plain_copy("llama", tiny_model("llama")).train()


@pytest.fixture(autouse=True)
def nothing_left(model):
    """Compare, after each test, all that msprobe replaces and adds with what there was before."""
    importlib.import_module("torch._dynamo")  # msprobe would do so; it replaces functions of torch, for good
    before = traces(model)
    yield
    after = traces(model)
    assert after.keys() == before.keys()
    assert not [key for key, value in before.items() if value is not after[key] and value != after[key]]


def traces(model):
    functions = {(place, name): id(value) for place in PLACES for name, value in vars(place).items()}
    functions = {key: value for key, value in functions.items() if key[1] != "__slotnames__"}  # a cache of pickle's
    modules = {
        (name, key): dict(value) if isinstance(value, dict) else value
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if key not in ("_parameters", "_buffers") and not key.endswith("hooks_with_kwargs")  # of hooks that are gone
    }
    hooks = {name: dict(vars(optimizer)[name]) for name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")}
    compiler = importlib.import_module("torch._dynamo.convert_frame")
    inherited = [torch.Tensor.__add__, torch._VF.lstm, compiler._compile, functional.linear]
    return functions | modules | hooks | dict(enumerate(inherited))


def forward_backward(model):
    model(input_ids=TOKENS).logits.logsumexp(-1).mean().backward()


def session(models, folder, *, level="L0", rank=0, **content):
    path = folder / "msprobe.json"
    path.write_text(json.dumps(content))
    call = len(list((folder / "stage").glob("step*"))) if (folder / "stage").is_dir() else 0
    about = About(backend="msprobe", level=level, stage="actor_update", step=1, role="actor", call=call, rank=rank)
    return MsprobeSession(models, folder / "stage", path, about)


def end(opened):
    """End a session; return its folder, and the files in it that msprobe wrote."""
    folder = opened._folder / f"step{opened._about.call}" / f"rank{opened._about.rank}"
    files = opened.save(folder)
    assert opened.error is None and files[-1].name == "capture.json"
    return folder, files[:-1]


def entries_of(folder):
    return json.loads((folder / "dump.json").read_text())["data"]


def capture(models, folder, run=forward_backward, **options):
    """Return the entries of a capture of `run` on the first model."""
    opened = session(models, folder, **options)
    opened.begin()
    run(models[0])
    return entries_of(end(opened)[0])


@pytest.mark.parametrize("level", ["L0", "L1", "mix"])
def test_a_capture_holds_modules_or_operators_with_the_right_numbers(level, model, tmp_path, capfd):
    logits = {}
    handle = model.lm_head.register_forward_hook(lambda *args: logits.update(out=args[2].detach().clone()))
    opened = session([model], tmp_path, level=level, rank=3)
    opened.begin()
    forward_backward(model)
    folder, files = end(opened)
    handle.remove()

    assert folder == tmp_path / "stage" / "step0" / "rank3"
    assert files == sorted(folder / name for name in ("construct.json", "dump.json", "stack.json"))
    entries = entries_of(folder)
    wanted = {"L0": {"Module"}, "L1": {"Functional", "Tensor", "Torch"}, "mix": {"Module", "Functional", "Tensor", "Torch"}}
    assert {name.partition(".")[0] for name in entries} == wanted[level]
    modules = {name for name, _ in model.named_modules() if name}
    heads = {"L0": "Module.lm_head.Linear.forward.0", "L1": "Functional.linear.14.forward"}
    if level != "L1":
        called = {name.split(".", 1)[1].rsplit(".", 3)[0] for name in entries if ".forward." in name and name[0] == "M"}
        assert called == modules - {"model.layers"}  # the list itself is never called
    output = entries[heads.get(level, heads["L0"])]["output"][0]
    values = logits["out"]
    for key, value in {"Max": values.max(), "Min": values.min(), "Mean": values.mean(), "Norm": values.norm()}.items():
        assert output[key] == pytest.approx(value.item(), rel=1e-5)
    assert any(name.endswith("parameters_grad.0") for name in entries) == (level != "L1")
    assert capfd.readouterr().out == ""


def test_whole_tensors_are_kept(model, tmp_path):
    opened = session([model], tmp_path, task="tensor")
    opened.begin()
    logits = model(input_ids=TOKENS).logits
    _, files = end(opened)
    [file] = [path for path in files if path.name == "Module.lm_head.Linear.forward.0.output.0.pt"]
    assert file.parent == tmp_path / "stage" / "step0" / "rank0" / "dump_tensor_data"
    assert torch.equal(torch.load(file), logits)


def test_each_session_holds_its_own_entries_alone(model, tmp_path):
    def backward_too(model):
        forward_backward(model)
        torch.fft.fft(torch.ones(3))

    first = capture([model], tmp_path, backward_too, level="mix")
    second = capture([model], tmp_path, lambda model: model.model.norm(torch.ones(2, 32)), level="mix")
    third = capture([model], tmp_path, forward_backward, level="mix")
    assert sorted(path.name for path in (tmp_path / "stage").iterdir()) == ["step0", "step1", "step2"]
    assert [name for name in second if name.startswith("Module")] == ["Module.model.norm.LlamaRMSNorm.forward.0"]
    # no call of the first is counted on; optional entries of the fft aside, the third is the first again
    assert [*third] == [name for name in first if "fft" not in name and "ones" not in name]


def test_a_stage_that_raises_leaves_what_it_did_and_no_trace(model, tmp_path):
    opened = session([model], tmp_path, level="mix")
    opened.begin()
    handle = model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        forward_backward(model)
    folder, _ = end(opened)
    handle.remove()
    partial = entries_of(folder)
    assert "Module.model.layers.0.LlamaDecoderLayer.forward.0" in partial and "Functional.linear.4.forward" in partial
    assert "Module.lm_head.Linear.forward.0" not in partial
    assert "Module.lm_head.Linear.backward.0" in capture([model], tmp_path)


def test_other_threads_are_not_recorded(model, tmp_path):
    def run(_):
        thread = threading.Thread(target=lambda: functional.softplus(model.model.norm(torch.ones(2, 32))))
        thread.start()
        thread.join()
        functional.silu(torch.ones(2))

    entries = capture([model], tmp_path, run, level="mix", risk_level="ALL")
    assert "Functional.silu.0.forward" in entries
    assert not [name for name in entries if "softplus" in name or name.startswith("Module")]


def test_backward_passes_are_recorded_on_whichever_thread(model, tmp_path):
    def run(model):  # as with accelerators, where autograd has a thread for each device
        thread = threading.Thread(target=model(input_ids=TOKENS).logits.mean().backward)
        thread.start()
        thread.join()

    entries = capture([model], tmp_path, run, level="mix")
    assert {"Module.lm_head.Linear.backward.0", "Functional.linear.0.backward"} <= entries.keys()
    assert "Module.lm_head.Linear.parameters_grad.0" in entries


def test_recomputed_activations_do_not_end_the_recording(model, tmp_path):
    def run(model):
        inputs = torch.ones(2, 32, requires_grad=True)
        checkpoint(model.model.layers[0].mlp, functional.gelu(inputs), use_reentrant=False).sum().backward()
        functional.silu(inputs)

    entries = capture([model], tmp_path, run, level="mix", risk_level="ALL")
    mlp = "Module.model.layers.0.mlp"
    assert {f"{mlp}.LlamaMLP.backward.0", f"{mlp}.up_proj.Linear.forward.1", "Functional.gelu.0.backward"} <= entries.keys()
    assert [*entries][-1] == "Functional.silu.2.forward"  # forward, again for the backward pass, which stops there, and here


def test_every_chunk_is_captured(model, tmp_path):
    chunks = [model.model, torch.nn.Sequential(model.lm_head)]
    entries = capture(chunks, tmp_path, lambda chunk: chunks[1](chunk(input_ids=TOKENS).last_hidden_state))
    assert {"Module.0.layers.1.LlamaDecoderLayer.forward.0", "Module.1.0.Linear.forward.0"} <= entries.keys()


def test_what_outlives_the_stage_is_of_no_capture(model, tmp_path, caplog):
    losses = []
    capture([model], tmp_path, lambda model: losses.append(model(input_ids=TOKENS).logits.mean()), level="mix")

    def old_backward(_):
        losses[0].backward()

    losses[0].backward(retain_graph=True)
    assert capture([model], tmp_path, old_backward, level="mix") == {}
    assert model.lm_head.weight.grad.abs().sum() > 0
    assert "msprobe" not in caplog.text


def test_one_session_at_a_time(model, tmp_path):
    first = session([model], tmp_path)
    first.begin()
    with pytest.raises(RuntimeError, match="in use in this process already"):
        session([model], tmp_path).begin()
    end(first)
    assert capture([model], tmp_path)


def test_a_session_that_cannot_begin_leaves_no_trace(model, tmp_path):
    (tmp_path / "stage").write_text("a file in the way")
    with pytest.raises(RuntimeError, match=r"^Failed to create .*/stage"):
        session([model], tmp_path, level="mix").begin()
    (tmp_path / "stage").unlink()
    assert capture([model], tmp_path)


def run_msprobe(*arguments):
    """Run the command `msprobe` in a fork of this process, which has imported most of it."""

    def main():
        sys.argv[1:] = arguments
        runpy.run_module("msprobe.msprobe", run_name="__main__")

    process = multiprocessing.get_context("fork").Process(target=main)
    process.start()
    process.join(300)
    assert process.exitcode == 0


@pytest.mark.slow
@pytest.mark.processes
def test_msprobe_compares_two_captures(model, tmp_path):
    capture([model], tmp_path)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(2)
    capture([model], tmp_path, lambda model: model(input_ids=TOKENS))
    golden, target = (str(tmp_path / "stage" / f"step{k}" / "rank0" / "dump.json") for k in (0, 1))
    run_msprobe("compare", "-tp", target, "-gp", golden, "-o", str(tmp_path / "table"))
    [table] = (tmp_path / "table").glob("*.csv")
    with table.open(newline="") as file:
        differing = [row["NPU Name"] for row in csv.DictReader(file) if row["L2norm diff"] not in ("0", "0.0", "None", "N/A")]
    assert differing[0] == "Module.model.layers.1.mlp.up_proj.Linear.forward.0.parameters.weight"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"statistics": {"data_mode": ["sideways"]}}, "'sideways' of data_mode"),
        ({"task": "tensor", "async_dump": True}, "the parameters list cannot be empty"),
        ({"statistics": {"scope": ["Module.a"]}}, "scope"),
    ],
)
def test_check_says_what_msprobe_does_not_take(content, said, tmp_path):
    path = tmp_path / "msprobe.json"
    path.write_text(json.dumps({"task": "tensor", "tensor": {"data_mode": ["forward"], "list": ["a"]}}))
    check(str(path), None)
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=said):
        check(str(path), None)


def test_what_msprobe_warns_of_is_logged(model, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "pellucid.observe"):
        capture([model], tmp_path, statistics={"slice": []}, async_dump=True)
    assert "msprobe: async_dump is True" in caplog.text
