"""The Megatron engine on real ranks over gloo: every layout does what one FSDP process does.

Everything runs megatron-core itself; what it needs of CUDA comes from `training/megatron/cpu_adapter.py`.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import sharded
import torch
from ranks import Ranks
from safetensors.torch import load_file
from sharded import Setup, State, Trace
from transformers import AutoModelForCausalLM

from pellucid.errors import UserError
from pellucid.training.common.value_models import as_classifier
from pellucid.training.megatron.layout import ParallelSizes

pytest.importorskip("megatron.core", reason="needs the extra [megatron]")

import megatron_ranks
from megatron_ranks import Spread

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("megatron")]
TOLERANCE = 1e-5
NUM_UPDATES = 10


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    pool = Ranks(tmp_path_factory.mktemp("groups"))
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Return a function to the folder of a tiny model."""
    root = tmp_path_factory.mktemp("models")

    @cache
    def folder(setup: Setup) -> Path:
        model = sharded.make_model(setup)
        path = root / f"{setup.architecture}-{setup.role}-{setup.seed}"
        (as_classifier(model) if setup.role == "critic" else model).save_pretrained(path)
        return path

    return lambda setup: folder(Setup(architecture=setup.architecture, role=setup.role, seed=setup.seed))


@cache
def in_one_process(setup: Setup) -> Trace:
    return sharded.run_updates(setup, NUM_UPDATES)


def relative(value: torch.Tensor, expected: torch.Tensor) -> float:
    return float((value.double() - expected.double()).norm() / expected.double().norm())


def norm_of(state: State, names) -> torch.Tensor:
    return torch.cat([state[name].flatten() for name in sorted(names)])


def assert_agree(traces: list[Trace], expected: Trace) -> None:
    """Results, loss and gradient norm of the same weights to 1e-5; those after updates, and the weights, to 1e-4.

    Every rank has the same bits.
    """
    kinds = len(traces[0].results) // len(expected.results)
    for trace in traces:
        for index, (mine, theirs) in enumerate(zip(trace.results[::kinds], expected.results, strict=True)):
            assert relative(mine, theirs) < (TOLERANCE if index < 2 else 1e-4)
        for index, (mine, theirs) in enumerate(zip(trace.numbers, expected.numbers, strict=True)):
            assert mine == pytest.approx(theirs, rel=1e-4 if index else TOLERANCE)
        names = [name for name in trace.state if name in expected.state]
        assert len(names) >= len(trace.state) - 1  # of a critic the head is called otherwise
        assert relative(norm_of(trace.state, names), norm_of(expected.state, names)) < 1e-4
        assert all(torch.equal(trace.state[name], traces[0].state[name]) for name in trace.state)


LAYOUTS = {
    "one": (1, "llama", ParallelSizes()),
    "data": (2, "llama", ParallelSizes()),
    "tensor": (2, "llama", ParallelSizes(tensor=2)),
    "tensor-tied": (2, "llama_tied", ParallelSizes(tensor=2)),
    "tensor-padded": (2, "llama_odd", ParallelSizes(tensor=2)),
    "pipeline-tied": (2, "llama_tied", ParallelSizes(pipeline=2)),
    "interleaved": (2, "llama_deep", ParallelSizes(pipeline=2, virtual_pipeline=2)),
    "context": (2, "llama", ParallelSizes(context=2)),
    "context-past-the-heads": (4, "mistral", ParallelSizes(context=4)),
    "tensor-pipeline": (4, "qwen3", ParallelSizes(tensor=2, pipeline=2)),
    "tensor-context": (4, "qwen2", ParallelSizes(tensor=2, context=2)),
    "tensor-data": (4, "qwen2", ParallelSizes(tensor=2)),
    "pipeline-context": (4, "llama_tied", ParallelSizes(pipeline=2, context=2)),
    "pipeline-data": (4, "llama_tied", ParallelSizes(pipeline=2)),
}


RARER = ("tensor-tied", "tensor-data", "context-past-the-heads", "pipeline-context")
"""Layouts that run with `make test-long` alone; others have their parts."""
CRITICS = ("one", "tensor", "pipeline-tied", "tensor-context", "pipeline-data")
"""Layouts that always run with a value head, too; the others with `make test-long`."""


@pytest.mark.parametrize(
    ("layout", "role"),
    [
        *(pytest.param(layout, "policy", marks=pytest.mark.long if layout in RARER else []) for layout in LAYOUTS),
        *(pytest.param(layout, "critic", marks=[] if layout in CRITICS else pytest.mark.long) for layout in LAYOUTS),
    ],
)
def test_layouts_agree_with_one_process(ranks, folders, layout, role):
    num_ranks, architecture, sizes = LAYOUTS[layout]
    setup = Setup(architecture=architecture, role=role, lr=1e-3)
    assert_agree(
        ranks.run(num_ranks, megatron_ranks.run_updates, Spread(folders(setup), setup, sizes), NUM_UPDATES),
        in_one_process(setup),
    )


EXPERTS = {
    "one": (1, ParallelSizes()),
    "expert": (2, ParallelSizes(expert=2)),
    "tensor": (2, ParallelSizes(tensor=2)),
    "expert-tensor": (4, ParallelSizes(tensor=2, expert=2, expert_tensor=1)),
    "divided-experts": (4, ParallelSizes(tensor=2, expert=2)),
    "pipeline": (2, ParallelSizes(pipeline=2)),
}


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=pytest.mark.long if name in ("tensor", "pipeline") else []) for name in EXPERTS]
)
def test_mixtures_of_experts_agree_with_one_process(ranks, folders, layout):
    num_ranks, sizes = EXPERTS[layout]
    setup = Setup(architecture="qwen3_moe", lr=1e-3)
    expected, traces = (
        in_one_process(setup),
        ranks.run(num_ranks, megatron_ranks.run_updates, Spread(folders(setup), setup, sizes), NUM_UPDATES),
    )
    fused = {name: tensor for name, tensor in expected.state.items() if ".experts." not in name}
    for trace in traces:
        trace.state = {name: tensor for name, tensor in trace.state.items() if ".experts." not in name}
    assert_agree(traces, replace(expected, state=fused))


@pytest.mark.parametrize(
    "options", [{"max_tokens": 29}, {"num_sequences": 1}, {"grad_clip": 0.5}, {"balance_ranks": False}], ids=str
)
def test_cuts_and_clipping_agree_with_one_process(ranks, folders, options):
    setup = Setup(architecture="llama_tied", lr=1e-3, **options)
    spread = Spread(folders(setup), setup, ParallelSizes(pipeline=2))
    assert_agree(ranks.run(4, megatron_ranks.run_updates, spread, NUM_UPDATES), in_one_process(setup))


@pytest.mark.parametrize(
    "options",
    [
        {"recompute": True},
        {"sequence_parallel": False},
        {"overrides": {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]}},
    ],
    ids=str,
)
def test_what_saves_memory_changes_nothing(ranks, folders, options):
    setup = Setup(lr=1e-3)
    spread = Spread(folders(setup), setup, ParallelSizes(tensor=2), options=options)
    assert_agree(ranks.run(2, megatron_ranks.run_updates, spread, NUM_UPDATES), in_one_process(setup))


def test_stages_need_not_have_as_many_layers_each(ranks, folders):
    setup = Setup(architecture="llama_deep", lr=1e-3)
    uneven = {"overrides": {"num_layers_in_first_pipeline_stage": 1}}
    spread = Spread(folders(setup), setup, ParallelSizes(pipeline=2), options=uneven)
    assert_agree(ranks.run(2, megatron_ranks.run_updates, spread, NUM_UPDATES), in_one_process(setup))


def test_bf16_computes_close_and_keeps_float32_masters(ranks, folders):
    """Steps of 1e-3 beside weights of size one: without masters three of them would be rounded away."""
    exact = in_one_process(Setup(lr=1e-3))
    setup = Setup(lr=1e-3, dtype=torch.bfloat16)
    trace = ranks.run(2, megatron_ranks.run_updates, Spread(folders(setup), setup, ParallelSizes(tensor=2)), NUM_UPDATES)[0]
    assert trace.results[0].dtype == torch.float32
    assert 0 < relative(trace.results[0], exact.results[0]) < 0.02
    assert trace.numbers[-1][0] == pytest.approx(exact.numbers[-1][0], rel=0.02)


def test_ranks_cut_the_vocabulary_into_the_same_chunks(ranks, folders):
    """Of 25 tokens the first rank has 13 rows of the head, the second 12 and one of padding."""
    setup = Setup(lr=1e-3)
    spread = Spread(folders(setup), setup, ParallelSizes(tensor=2))
    assert_agree(ranks.run(2, megatron_ranks.run_in_small_chunks, spread, NUM_UPDATES, 240), in_one_process(setup))


@pytest.mark.parametrize(
    "fields", [{"num_key_value_heads": 4}, {"num_attention_heads": 2, "head_dim": 8}, {"intermediate_size": 24}, {"vocab_size": 30}], ids=str
)
def test_a_config_that_is_not_that_of_the_weights_is_refused(ranks, folders, fields):
    (error,) = ranks.run(1, megatron_ranks.load_other_config, folders(Setup()), fields)
    assert error.startswith("model:") and "in its files, and by its config" in error


def test_the_exact_kl_is_that_of_one_process(ranks, folders):
    setup = Setup(exact_kl=True)
    engine = sharded.make_engine(setup)
    expected = engine.forward(sharded.sequences(), sharded.make_head(setup, engine)).kl
    for sizes in (ParallelSizes(), ParallelSizes(tensor=2)):
        spread = Spread(folders(Setup()), Setup(), sizes)
        for found in ranks.run(2, megatron_ranks.exact_kl, spread, folders(Setup(seed=9))):
            assert relative(found, expected) < TOLERANCE


def test_what_breaks_on_some_ranks_stops_all(ranks, folders):
    answers = ranks.run(4, megatron_ranks.run_broken, Spread(folders(Setup()), Setup(), ParallelSizes(pipeline=2)))
    expected = in_one_process(Setup()).numbers[0][0]
    for caught, changed, loss in answers:
        assert caught == answers[0][0] and caught[0] == "loss" and 3 in caught[1]
        assert not changed and loss == pytest.approx(expected, rel=TOLERANCE)


# --- what observers see -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [None, 2])
def test_a_capture_of_a_pipeline_knows_whose_tokens_each_backward_pass_has(ranks, folders, chunks):
    """The first stage begins its second micro-batch before it runs the first one backward."""
    setup = Setup(architecture="llama_deep", max_tokens=29)
    spread = Spread(folders(setup), setup, ParallelSizes(pipeline=2, virtual_pipeline=chunks))
    for found in ranks.run(2, megatron_ranks.captured_spans, spread):
        forward = [name for name in found if ".TransformerLayer.forward." in name]
        assert chunks is None or {name.split(".")[1] for name in forward} == {"0", "1"}
        assert len({frozenset(found[name]) for name in forward}) > 2  # passes
        for name in forward:
            assert found[name.replace(".forward.", ".backward.")] == found[name]


def test_the_sentinel_names_the_module_and_the_pass_of_the_rank_that_has_it(ranks, folders):
    setup = Setup(max_tokens=29)
    spread = Spread(folders(setup), setup, ParallelSizes(pipeline=2))
    first = ranks.run(2, megatron_ranks.located, spread, 0, "decoder.layers.0.mlp")[0]
    assert first == ("decoder.layers.0.mlp", 1, "NaN")


# --- the state on disk ------------------------------------------------------------------------------------------------

SAVED = {
    "data": (2, "llama", ParallelSizes(), 2, ParallelSizes()),
    "tensor": (2, "qwen3", ParallelSizes(tensor=2), 2, ParallelSizes(tensor=2)),
    "padded-to-whole": (2, "llama_odd", ParallelSizes(tensor=2), 2, ParallelSizes(pipeline=2)),
    "whole-to-padded": (2, "llama_odd", ParallelSizes(pipeline=2), 4, ParallelSizes(tensor=2)),
    "tensor-to-pipeline": (2, "llama_tied", ParallelSizes(tensor=2), 2, ParallelSizes(pipeline=2)),
    "pipeline-to-tensor-data": (2, "llama_tied", ParallelSizes(pipeline=2), 4, ParallelSizes(tensor=2)),
    "interleaved-to-one": (2, "llama_deep", ParallelSizes(pipeline=2, virtual_pipeline=2), 1, ParallelSizes()),
    "context-to-data": (2, "llama", ParallelSizes(context=2), 4, ParallelSizes()),
    "experts": (2, "qwen3_moe", ParallelSizes(expert=2), 2, ParallelSizes(tensor=2)),
}


SAVED_RARELY = ("tensor-to-pipeline", "pipeline-to-tensor-data")


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *(pytest.param(case, torch.float32, marks=pytest.mark.long if case in SAVED_RARELY else []) for case in SAVED),
        *(
            pytest.param(case, torch.bfloat16, marks=[] if case in ("data", "padded-to-whole") else pytest.mark.long)
            for case in SAVED
        ),
    ],
    ids=str,
)
def test_a_checkpoint_is_read_by_any_layout(ranks, folders, case, dtype, tmp_path):
    """Weights come back bit for bit, and so does the next update where the layout is the same."""
    num_ranks, architecture, sizes, num_readers, other = SAVED[case]
    setup = Setup(architecture=architecture, dtype=dtype)
    saved, after = ranks.run(num_ranks, megatron_ranks.save_and_go_on, Spread(folders(setup), setup, sizes), tmp_path)[0]
    elsewhere = Setup(architecture=architecture, dtype=dtype, seed=1)
    reader = Spread(folders(elsewhere), elsewhere, other)
    version, loaded, then = ranks.run(num_readers, megatron_ranks.load_and_go_on, reader, tmp_path)[0]
    assert version == 1
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)
    assert any(not torch.equal(saved[name], after[name]) for name in saved)
    if (num_ranks, sizes) == (num_readers, other):
        assert all(torch.equal(then[name], after[name]) for name in after)
    else:
        assert relative(norm_of(then, then), norm_of(after, then)) < (1e-4 if dtype == torch.float32 else 3e-3)


@pytest.mark.parametrize(
    ("architecture", "role", "dtype", "sizes"),
    [
        ("llama_tied", "policy", torch.float32, ParallelSizes(pipeline=2)),
        ("qwen3", "policy", torch.bfloat16, ParallelSizes(tensor=2)),
        ("llama", "critic", torch.float32, ParallelSizes(tensor=2)),
        ("llama_deep", "policy", torch.float32, ParallelSizes(pipeline=2, virtual_pipeline=2)),
        ("qwen3_moe", "policy", torch.float32, ParallelSizes(expert=2)),
    ],
    ids=["pipeline", "bf16", "critic", "interleaved", "experts"],
)
def test_a_checkpoint_is_read_into_a_transformers_model(ranks, folders, tmp_path, architecture, role, dtype, sizes):
    """As `pellucid export` and `eval` do."""
    setup = Setup(architecture=architecture, role=role, dtype=dtype)
    saved, _ = ranks.run(2, megatron_ranks.save_and_go_on, Spread(folders(setup), setup, sizes), tmp_path)[0]
    other = folders(Setup(architecture=architecture, role=role, seed=1))
    [loaded] = ranks.run(1, megatron_ranks.loaded_into_transformers, other, tmp_path, role)
    assert loaded.keys() == saved.keys() and all(torch.equal(loaded[name], saved[name].float()) for name in saved)


def test_a_checkpoint_that_does_not_fit_is_refused(ranks, folders, tmp_path):
    setup = Setup()
    (tmp_path / "part").mkdir()
    spread = Spread(folders(setup), setup, ParallelSizes())
    ranks.run(1, megatron_ranks.save_and_go_on, spread, tmp_path / "part", ["model"])
    (error,) = ranks.run(1, megatron_ranks.load_error, spread, tmp_path / "part", ["model", "optimizer"])
    assert "trainer.resume_mode" in error
    other = Setup(architecture="llama_deep")
    (error,) = ranks.run(1, megatron_ranks.load_error, Spread(folders(other), other, ParallelSizes()), tmp_path / "part", ["model"])
    assert "trainer.resume_mode" in error


@pytest.mark.parametrize("architecture", ["llama_tied", "llama_odd", "qwen2", "qwen3", "qwen3_moe"])
def test_conversion_there_and_back_is_bitwise(ranks, folders, architecture, tmp_path):
    """A Hugging Face folder, onto four ranks, and a folder again."""
    setup = Setup(architecture=architecture)
    source = folders(setup)
    for name, sizes in {"tensor": ParallelSizes(tensor=2, expert=2, expert_tensor=1), "stages": ParallelSizes(pipeline=2)}.items():
        sizes = replace(sizes, expert=1, expert_tensor=None) if architecture != "qwen3_moe" else sizes
        ranks.run(4, megatron_ranks.export, Spread(source, setup, sizes), tmp_path / name)
        before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / name))
        assert before.keys() == after.keys() and all(torch.equal(before[each], after[each]) for each in before)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32)
        original = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        ids = torch.tensor([[3, 4, 5, 6]])
        assert torch.equal(loaded(ids).logits, original(ids).logits)


def test_large_models_are_written_in_several_files(tmp_path, folders):
    from pellucid.training.common.models import load_tokenizer, read_config
    from pellucid.training.megatron.conversion import open_weights, write_model_folder

    source = folders(Setup())
    model = read_config(str(source), None, trust_remote_code=False, field="model")
    tensors = load_file(source / "model.safetensors")
    write_model_folder(model, load_tokenizer("builtin"), tmp_path / "out", tensors.items(), file_bytes=20_000)
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 2
    with open_weights(tmp_path / "out", "model.path") as again:
        assert all(torch.equal(again[name][:], tensors[name]) for name in tensors)
        with pytest.raises(UserError, match=r"model\.path.*lack the tensor 'lm_tail'"):
            again["lm_tail"]


def test_what_only_a_gpu_asks_for_is_given(ranks):
    """Sequence parallel layers take megatron-core's random state, which is there on a CPU by the adapter alone."""
    assert ranks.run(1, megatron_ranks.seeds_of_layout, "meta") == [[0]]
    assert ranks.run(1, megatron_ranks.seeds_of_layout, "cpu") == [[]]


def test_the_moments_of_an_optimizer_that_counts_steps_by_group_are_there_from_the_start():
    """As of the AdamW of Transformer Engine and Apex, which megatron-core takes where they are installed."""
    from pellucid.training.megatron.megatron_engine import _make_moments

    parameter = torch.nn.Parameter(torch.ones(3))
    fused, plain = torch.optim.SGD([parameter]), torch.optim.AdamW([parameter])
    for optimizer in (fused, plain):
        _make_moments(optimizer)
    assert fused.param_groups[0]["step"] == 0 and set(fused.state[parameter]) == {"exp_avg", "exp_avg_sq"}
    assert set(plain.state[parameter]) == {"step", "exp_avg", "exp_avg_sq"}


def test_what_is_reached_for_in_megatron_core_is_still_there():
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.dist_checkpointing.strategies import torch as torch_strategy
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.tensor_parallel import random

    assert {"_get_write_results_queue", "FileSystemWriterAsync"} <= vars(filesystem_async).keys()
    assert "save_state_dict_async_finalize" in vars(torch_strategy)
    assert {"_get_main_param_and_optimizer_states", "_get_model_param_range_map"} <= vars(DistributedOptimizer).keys()
    assert {"_get_all_rng_states", "_set_all_rng_states", "get_cuda_rng_tracker"} <= vars(random).keys()
