"""The training engine over several ranks must do what it does in one process, with FSDP and with FSDP2.

`sharded.py` has what each rank runs, `ranks.py` the processes that run it.
"""

import errno
import math
import os
import subprocess
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import sharded
import torch
from ranks import Ranks
from sharded import Setup, State, Trace
from tiny import plain_copy
from transformers import AutoModelForCausalLM

from pellucid.errors import RunFailedError, UserError
from pellucid.files.checkpoint_store import CheckpointStore
from pellucid.precision.dump import TensorStats, find_dumps, leaves, read_dump
from pellucid.precision.sentinel import earliest
from pellucid.training.sharding import ShardingPlan

TOLERANCE = 1e-5
"""A float32 sum in another order differs by a few roundings of 6e-8, of norms over whole matrices a hundred times less than this."""
NUM_UPDATES = 2
"""The first moves the weights, the second trains on weights and moments that have moved."""

pytestmark = pytest.mark.processes


@pytest.fixture(scope="session")
def ranks(tmp_path_factory):
    pool = Ranks(tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.close()


@pytest.fixture
def plan() -> ShardingPlan:
    return ShardingPlan()


@pytest.fixture
def small_disk(tmp_path):
    """A disk with room for one checkpoint."""
    mount = tmp_path / "disk"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=700k", "tmpfs", mount]
    if os.getuid() != 0 or subprocess.run(command, check=False).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield mount
    subprocess.run(["umount", "--lazy", mount], check=True)


@cache
def in_one_process(setup: Setup, number: int = NUM_UPDATES) -> Trace:
    """Return what updates give in one process, computed once for all that compare with it."""
    return sharded.run_updates(setup, number)


@cache
def over_ranks(ranks: Ranks, num_ranks: int, setup: Setup, number: int = 3) -> list[Trace]:
    """Return what updates give on each of several ranks, computed once as well."""
    return ranks.run(num_ranks, sharded.run_updates, setup, number)


def relative(value: torch.Tensor, expected: torch.Tensor) -> float:
    return float((value.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-12))


def vector(state: State, kind: str) -> torch.Tensor:
    """The tensors of a kind as one: moments, matrices or biases."""
    # A bias of the keys has no gradient but rounding, which AdamW scales up to whole steps.
    named = [name for name in sorted(state) if name.endswith(kind) and not name.endswith("query_key_value.bias")]
    return torch.cat([state[name].flatten() for name in named] or [torch.zeros(1)])


def assert_close(state: State, expected: State, tolerance: float) -> None:
    assert state.keys() == expected.keys()
    for name in expected:
        assert relative(state[name], expected[name]) < tolerance, name


def assert_equal(state: State, expected: State) -> None:
    assert state.keys() == expected.keys()
    assert not [name for name in expected if not torch.equal(state[name], expected[name])]


def assert_agree(traces: list[Trace], expected: Trace, tolerance: float = TOLERANCE) -> None:
    """Every rank has the same results; they, and the weights and moments, are those of one process."""
    for trace in traces:
        assert trace.numbers == traces[0].numbers
        for one, other, alone in zip(trace.results, traces[0].results, expected.results, strict=True):
            assert torch.equal(one, other)
            assert relative(one, alone) < tolerance
        for one, alone in zip(trace.kl, expected.kl, strict=True):
            assert relative(one, alone) < 10 * tolerance  # a small difference of large numbers
        for one, alone in zip(trace.numbers, expected.numbers, strict=True):
            assert one == pytest.approx(alone, rel=tolerance)
    for kind in (".exp_avg", ".exp_avg_sq", ".weight", ".bias"):
        assert relative(vector(traces[0].state, kind), vector(expected.state, kind)) < tolerance, kind


# --- results, losses, gradients ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_updates_agree_with_one_process(ranks, plan, num_ranks):
    expected = in_one_process(Setup(), 3)
    assert expected.numbers[0][0] > 2 * expected.numbers[2][0] > 0  # training moves far
    assert_agree(over_ranks(ranks, num_ranks, Setup(plan)), expected)


VARIANTS = {
    "tied": (2, Setup(architecture="llama_tied")),
    "gpt_neox": (2, Setup(architecture="gpt_neox")),
    "critic": (2, Setup(role="critic")),
    "lora": (2, Setup(role="lora")),
    "kl": (2, Setup(exact_kl=True)),
    "lora-kl": (2, Setup(role="lora", exact_kl=True)),
    "lora-checkpointing": (2, Setup(role="lora", gradient_checkpointing=True)),
    "checkpointing": (2, Setup(gradient_checkpointing=True)),
    "clipped": (2, Setup(grad_clip=0.5)),
    "unlike-numbers-of-micro-batches": (4, Setup(max_tokens=29)),
    "fewer-sequences-than-ranks": (4, Setup(num_sequences=3)),
    "batch-order": (2, Setup(balance_ranks=False)),
    "one-sequence": (2, Setup(num_sequences=1)),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_agree_with_one_process(ranks, plan, variant):
    num_ranks, setup = VARIANTS[variant]
    expected = in_one_process(setup)
    assert expected.numbers[0][1] > 0.1
    assert_agree(ranks.run(num_ranks, sharded.run_updates, replace(setup, plan=plan), NUM_UPDATES), expected)


@pytest.mark.parametrize(
    ("num_ranks", "options"), [(4, {"fsdp_size": 2}), (2, {"fsdp_size": 1}), (2, {"reshard_after_forward": False})], ids=str
)
def test_meshes_agree_with_one_process(ranks, plan, num_ranks, options):
    setup = Setup(replace(plan, **options))
    assert_agree(ranks.run(num_ranks, sharded.run_updates, setup, NUM_UPDATES), in_one_process(Setup()))


def test_an_update_tells_how_even_the_ranks_were(ranks, plan):
    # Tokens fed by whole groups: 7 + 8 + 0 + 5 = 20, 3 + 16 = 19 and 12 + 3 + 10 + 0 + 11 = 36. Four samples each in batch
    # order are 49 and 45 tokens; whole groups 39 and 36.
    for balance, after in [(True, 39 / 37.5), (False, 49 / 47)]:
        setup = Setup(plan, balance_ranks=balance)
        for found in ranks.run(2, sharded.rank_balance, setup):
            assert found is not None
            assert (found.before, found.after) == pytest.approx((49 / 47, after))
    assert ranks.run(1, sharded.rank_balance, Setup(plan)) == [None]
    assert sharded.rank_balance(Setup()) is None


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_offloading_changes_nothing_on_a_cpu(ranks, plan, num_ranks, tmp_path):
    """The ranks' memory is the processor's already; on one rank sharding exists for offloading alone."""
    setup = Setup(replace(plan, param_offload=True), optimizer_offload=True)
    offloaded, plain = over_ranks(ranks, num_ranks, setup)[0], over_ranks(ranks, num_ranks, Setup(plan))[0]
    assert offloaded.numbers == plain.numbers
    assert_equal(offloaded.state, plain.state)
    saved = ranks.run(num_ranks, sharded.save_now, setup, tmp_path)[0]
    assert_equal(ranks.run(num_ranks, sharded.load_and_train, setup, tmp_path, 0)[0][1], saved)


def test_gradients_can_be_added_up_in_bf16(ranks, plan):
    exact = in_one_process(Setup(lr=0.0), 1).state
    trace = ranks.run(2, sharded.run_updates, Setup(replace(plan, reduce_dtype=torch.bfloat16), lr=0.0), 1)[0]
    assert all(tensor.dtype == torch.float32 for tensor in trace.state.values())
    moments = [name for name in exact if name.endswith(".exp_avg")]
    for name in moments:  # outside the layers too: embeddings, norm and head
        assert 1e-4 < relative(trace.state[name], exact[name]) < 1e-2, name


def test_a_rank_holds_its_share_only(ranks, plan):
    whole = sharded.local_bytes(Setup())
    assert whole[1] == 2 * whole[0]
    for num_ranks, fsdp_size in [(2, -1), (4, -1), (4, 2)]:
        holders = num_ranks if fsdp_size == -1 else fsdp_size
        sizes = ranks.run(num_ranks, sharded.local_bytes, Setup(replace(plan, fsdp_size=fsdp_size)))
        for part in (0, 1):
            assert sum(size[part] for size in sizes) == whole[part] * num_ranks / holders
            assert max(size[part] for size in sizes) < 1.2 * whole[part] / holders


def test_bf16_layers_compute_close_to_one_process(ranks, plan):
    exact, half = in_one_process(Setup(lr=0.0), 1), in_one_process(Setup(lr=0.0, dtype=torch.bfloat16), 1)
    setup = Setup(replace(plan, param_dtype=torch.bfloat16), lr=0.0, dtype=torch.bfloat16)
    trace = ranks.run(2, sharded.run_updates, setup, 1)[0]
    assert all(tensor.dtype == torch.float32 for tensor in trace.state.values())
    rounding = relative(half.results[1], exact.results[1])
    assert 0 < relative(trace.results[1], exact.results[1]) < 2 * rounding
    moments = [name for name in exact.state if name.endswith(".exp_avg")]
    gradients = [torch.cat([one.state[name].flatten() for name in moments]) for one in (exact, half, trace)]
    assert relative(gradients[2], gradients[0]) < 3 * relative(gradients[1], gradients[0])


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_what_breaks_on_one_rank_stops_all(ranks, plan, where):
    single = sharded.run_broken(Setup(), where)
    answers = ranks.run(2, sharded.run_broken, Setup(plan), where)
    for caught, unchanged, version, after in answers:
        assert caught == answers[0][0]
        assert caught[0] == single[0][0] and (where == "gradient" or 3 in caught[2])
        assert unchanged and version == 1
        assert after == answers[0][3] == pytest.approx(single[3], rel=TOLERANCE)


# --- the state on disk ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setup", [Setup(architecture="llama_tied"), Setup(role="lora")], ids=["tied", "lora"])
def test_a_checkpoint_is_read_by_any_number_of_ranks(ranks, plan, setup, tmp_path):
    setup = replace(setup, plan=plan)
    saved = ranks.run(2, sharded.save_now, setup, tmp_path)[0]
    for num_ranks in (1, 4):
        version, loaded, _ = ranks.run(num_ranks, sharded.load_and_train, setup, tmp_path, 0)[0]
        assert version == 1
        assert_equal(loaded, saved)
    version, loaded, _ = sharded.load_and_train(replace(setup, plan=None), tmp_path, 0)
    assert version == 1
    assert_equal(loaded, saved)


def test_a_checkpoint_of_one_process_is_read_by_ranks(ranks, plan, tmp_path):
    saved = sharded.save_now(Setup(architecture="llama_tied"), tmp_path)
    version, loaded, _ = ranks.run(2, sharded.load_and_train, Setup(plan, "llama_tied"), tmp_path, 0)[0]
    assert version == 1
    assert_equal(loaded, saved)


def test_a_resumed_run_continues_bitwise(ranks, plan, tmp_path):
    straight = over_ranks(ranks, 2, Setup(plan))[0].state
    ranks.run(2, sharded.save_now, Setup(plan), tmp_path)
    _, _, resumed = ranks.run(2, sharded.load_and_train, Setup(plan), tmp_path, 2)[0]
    assert_equal(resumed, straight)


def test_loaded_weights_are_those_that_score(ranks, plan, tmp_path):
    expected = ranks.run(2, sharded.run_updates, Setup(plan), 1)[0].results[-1]
    ranks.run(2, sharded.save_now, Setup(plan), tmp_path)
    assert torch.equal(ranks.run(2, sharded.score_after_loading, Setup(plan), tmp_path)[0], expected)


def test_a_checkpoint_before_the_first_update_continues_bitwise(ranks, plan, tmp_path):
    straight = ranks.run(2, sharded.save_untrained, Setup(plan), tmp_path)[0]
    version, _, resumed = ranks.run(2, sharded.load_and_train, Setup(plan), tmp_path, 1)[0]
    assert version == 0
    assert_equal(resumed, straight)


def test_training_goes_on_while_a_checkpoint_is_written(ranks, plan, tmp_path):
    saved = ranks.run(2, sharded.save_in_background, Setup(plan), tmp_path)[0]
    version, loaded, _ = ranks.run(2, sharded.load_and_train, Setup(plan), tmp_path, 0)[0]
    assert version == 1
    assert_equal(loaded, saved)


@pytest.mark.parametrize("how", ["now", "background"])
def test_a_rank_that_cannot_write_stops_the_save_on_all(ranks, plan, how, tmp_path):
    (tmp_path / "sharded").mkdir()
    (tmp_path / "sharded/__1_0.distcp").symlink_to("/dev/full")
    answers = ranks.run(2, sharded.save_error, Setup(plan), tmp_path, how)
    assert answers == 2 * [("OSError", errno.ENOSPC, answers[0][2])]
    assert answers[0][2] == pytest.approx(in_one_process(Setup()).numbers[1][0], rel=TOLERANCE)


@pytest.mark.parametrize("how", ["now", "background"])
def test_a_full_disk_leaves_the_earlier_checkpoint_of_ranks(ranks, how, small_disk):
    setup, store, save = Setup(ShardingPlan()), CheckpointStore(small_disk), sharded.save_now
    saved: list[State] = []
    store.save(1, lambda folder: saved.extend(ranks.run(2, save, setup, folder)))
    write = sharded.save_now if how == "now" else sharded.save_in_background
    with pytest.raises(RunFailedError, match="the one of step 1 is whole"):
        store.save(2, lambda folder: (ranks.run(2, write, setup, folder), None)[1])
    assert_equal(ranks.run(2, sharded.load_and_train, setup, store.verify(1), 0)[0][1], saved[0])


@pytest.mark.parametrize("setup", [Setup(architecture="llama_tied"), Setup(role="lora")], ids=["tied", "lora"])
def test_one_process_writes_the_same_files_in_the_background(setup, tmp_path):
    for name, save in {"now": sharded.save_now, "background": sharded.save_in_background}.items():
        (tmp_path / name).mkdir()
        save(setup, tmp_path / name)
    files = [{path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("now", "background")]
    assert files[0].keys() == {"model.safetensors", "optimizer.safetensors"}
    assert files[0] == files[1]


def test_a_checkpoint_of_another_model_is_refused(ranks, tmp_path):
    plan = ShardingPlan()
    ranks.run(2, sharded.save_now, Setup(plan), tmp_path)
    for answer in ranks.run(2, sharded.load_error, Setup(plan, "gpt_neox"), tmp_path):
        assert "trainer.resume_mode" in answer and "another model" in answer
    assert "lora_rank 0, and this one has 3" in ranks.run(1, sharded.load_error, Setup(plan, role="lora"), tmp_path)[0]


@pytest.mark.parametrize("saved", [["model"], ["optimizer"]], ids=str)
def test_a_part_that_was_not_saved_is_named(ranks, saved, tmp_path):
    setup, (missing,) = Setup(ShardingPlan()), [part for part in sharded.WHOLE_STATE if part not in saved]
    ranks.run(2, sharded.save_now, setup, tmp_path, saved)
    for answer in ranks.run(2, sharded.load_error, setup, tmp_path):
        assert "load_contents" in answer and f"asks for '{missing}'" in answer
    assert ranks.run(2, sharded.load_error, setup, tmp_path, saved) == 2 * ["no error"]
    assert f"asks for '{missing}'" in sharded.load_error(Setup(), tmp_path)


@pytest.mark.parametrize("role", ["policy", "lora", "critic"])
def test_trained_weights_load_into_a_plain_model_whoever_wrote_them(ranks, plan, role, tmp_path):
    setup = Setup(role=role, architecture="llama_tied" if role == "policy" else "llama")
    for name, saved in (
        ("alone", sharded.save_now(setup, tmp_path / "alone")),
        ("ranks", ranks.run(2, sharded.save_now, replace(setup, plan=plan), tmp_path / "ranks")[0]),
    ):
        loaded = sharded.loaded_weights(setup, tmp_path / name)
        weights = [part for part in saved if part in loaded]
        assert weights and not [part for part in weights if not torch.equal(loaded[part], saved[part])]
        assert len(weights) == len([part for part in loaded if role != "lora" or ".lora_" in part])


def test_a_checkpoint_without_weights_is_told(ranks, tmp_path):
    setup = Setup(ShardingPlan())
    ranks.run(2, sharded.save_now, setup, tmp_path / "ranks", ["optimizer"])
    sharded.save_now(Setup(), tmp_path / "alone", ["optimizer"])
    for name in ("alone", "ranks"):
        with pytest.raises(UserError, match="holds no weights"):
            sharded.loaded_weights(setup, tmp_path / name)


@pytest.mark.parametrize("setup", [Setup(architecture="llama_tied"), Setup(role="lora")], ids=["tied", "lora"])
def test_the_export_is_a_hugging_face_model(ranks, plan, setup, tmp_path):
    alone = sharded.export(setup, tmp_path / "alone")
    whole, rest = ranks.run(2, sharded.export, replace(setup, plan=plan), tmp_path / "ranks")
    assert not rest  # rank 0 has them
    assert_close(whole, alone, TOLERANCE)
    files = [sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("alone", "ranks")]
    assert files[0] == files[1]
    assert (tmp_path / "alone/config.json").read_text() == (tmp_path / "ranks/config.json").read_text()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ranks")
    model = sharded.tiny_model(setup.architecture)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            tensor.copy_(whole[name])
    ids = torch.tensor([sharded.tokens(9, 4)])
    torch.testing.assert_close(loaded(ids).logits, plain_copy(setup.architecture, model)(ids).logits)


GATHERED = {
    "tied": Setup(architecture="llama_tied"),
    "lora": Setup(role="lora"),
    "bf16-layers": Setup(dtype=torch.bfloat16),
}


@pytest.mark.parametrize("variant", GATHERED)
def test_every_rank_gathers_the_whole_weights_into_a_plain_model(ranks, plan, variant, tmp_path):
    setup, updated = GATHERED[variant], tmp_path / "updated"
    sharded.save_now(setup, tmp_path)
    expected = [sharded.loaded_weights(setup, tmp_path)]
    plan = replace(plan, param_dtype=setup.dtype)
    answers = ranks.run(2, sharded.gather_copies, replace(setup, plan=plan), tmp_path, updated)
    expected.append(sharded.loaded_weights(setup, updated))
    assert any(not torch.equal(expected[0][name], expected[1][name]) for name in expected[0])
    for copies in answers:
        for copy, alone in zip(copies, expected, strict=True):
            assert_equal(copy, alone)


# --- precision captures -----------------------------------------------------------------------------------------------

WEIGHT = "Module.model.layers.1.mlp.down_proj.Linear"


def dump_of(folder: Path, rank: int) -> dict[str, dict[str, TensorStats]]:
    dump = read_dump(folder / "step_1" / "actor_update" / "step0" / f"rank{rank}")
    assert dump.about.complete and dump.about.num_ranks == len(find_dumps(folder))
    return {entry.name: dict(leaves(entry)) for entry in dump.entries}


def test_each_ranks_capture_has_its_shards_and_changes_no_bit(ranks, plan, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert sharded.run_captured(Setup(), whole) == 0
    assert ranks.run(2, sharded.run_captured, Setup(plan), parts) == [0, 0]
    alone, both = dump_of(whole, 0), [dump_of(parts, 0), dump_of(parts, 1)]
    modules = {name.rpartition(".")[0] for name in alone if name.startswith("Module.") and name.endswith((".forward.0", ".backward.0"))}
    for dump in both:
        assert modules <= {name.rpartition(".")[0] for name in dump}
        assert [name for name in dump if name.startswith("Functional.linear.")]
    for entry, path in ((f"{WEIGHT}.forward.0", "parameters.weight"), (f"{WEIGHT}.optimizer.0", "input.0.weight"),
                        (f"{WEIGHT}.optimizer.0", "output.0.weight")):  # fmt: skip
        shards = [dump[entry][path] for dump in both if path in dump[entry]]
        assert {shard.shard for shard in shards} == {(0, 2), (1, 2)}
        norm = math.hypot(*(shard.norm for shard in shards if not math.isnan(shard.norm)))
        assert norm == pytest.approx(alone[entry][path].norm, rel=1e-4)


@pytest.mark.parametrize("place", ["weight", "token", "gradient"])
def test_the_first_nan_of_the_ranks_is_named_with_its_rank(ranks, plan, place):
    finding = earliest(ranks.run(2, sharded.first_nan, Setup(plan=plan), place))
    assert finding is not None and finding.reproduced and finding.num_ranks == 2
    assert finding.direction == ("backward" if place == "gradient" else "forward")
    if place == "weight":
        found = (finding.place, finding.rank)
        assert found == ("model.layers.1.mlp.up_proj", 1), "the rank whose shard holds it, though all gather it"
    else:
        assert finding.place == "model.layers.0.mlp" and finding.samples == ["row 3 (response)"]
