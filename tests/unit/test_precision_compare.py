"""`pellucid precision compare|report|digest`: planted faults are named where they are, healthy captures are not accused."""

import io
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from precision_dumps import (
    LAYERS,
    Model,
    bf16,
    make_batch,
    packed,
    rollout_dump,
    save,
    scaled,
    stats_of,
    training_dump,
)
from rich.console import Console
from typer.testing import CliRunner

from pellucid.cli.main import app
from pellucid.errors import UserError
from pellucid.precision.calls import Calls, parse_name
from pellucid.precision.capture_table import SAME, Capture, capture_table, join, what_differs, with_errors
from pellucid.precision.compare import RTOL, check_stage, compare_stage, summarise
from pellucid.precision.divergence import Kind
from pellucid.precision.dump import DumpRef, Entry, StageDump, TensorStats
from pellucid.precision.matching import place_of
from pellucid.precision.text import comparison_json, comparison_renderables, explanation, headline, heatmap_page, level

BATCH = make_batch()
MICRO_BATCHES = [BATCH[:2], BATCH[2:]]
RUNNER = CliRunner()


def capture(model: Model | None = None, micro_batches=None, **options):
    return training_dump(model or Model(), micro_batches or MICRO_BATCHES, **options)


def to_inf(values, number):
    return np.full_like(values, np.inf)


def place(a, b, **options):
    refs = [DumpRef(dump.about.step, dump.about.stage, dump.about.call, dump.about.rank, None, Path()) for dump in (a, b)]
    return place_of(refs[0], refs[1], **options)


def stage_of(a, b, **options):
    return compare_stage(place(a, b), [Capture("rank 0", a)], [Capture("rank 0", b)], **options)


def compared(a, b, **options):
    """The comparison of two captures, as the command has it."""
    return summarise([stage_of(a, b, **options)], "a", "b", rtol=1e-5)


def found_in(fault: dict, **options):
    result = compared(capture(**options), capture(Model(faults=fault), **options))
    assert result.divergence is not None
    return result.divergence


def words_of(result) -> str:
    return " ".join([headline(result), *explanation(result)])


# Errors of tensors


def difference(a: TensorStats, b: TensorStats) -> tuple[float, str]:
    """The error between two tensors, and what differs, in words."""
    about = capture().about
    dumps = [StageDump(about, [Entry("Module.a.A.forward.0", None, {"output": [stats]})]) for stats in (a, b)]
    joined = with_errors(join(*(capture_table([Capture("", dump, [])]) for dump in dumps)))
    return joined["error"][0].as_py(), what_differs(joined, 0)


def test_equal_tensors_have_no_error():
    values = np.random.default_rng(0).normal(size=(1, 20, 32)).astype(np.float32)
    assert difference(stats_of(values), stats_of(values))[0] == SAME
    assert difference(stats_of(values, native=False), stats_of(values, native=False))[0] == 0.0


@pytest.mark.parametrize("size", [(1, 20, 32), (576, 576)])
def test_a_bf16_layer_stands_out_and_another_order_of_additions_does_not(size):
    random = np.random.default_rng(0)
    values = random.normal(size=size).astype(np.float32)
    values[0, 0], values[0, 1] = 8.0, -8.0  # exact in bf16: largest and smallest value tell nothing
    noisy = (values * (1 + 1e-7 * random.normal(size=size))).astype(np.float32)
    assert 10 * RTOL < difference(stats_of(values), stats_of(bf16(values)))[0] < 2e-2
    assert 0 < difference(stats_of(values), stats_of(noisy))[0] < 2e-6


def test_what_cannot_be_compared_is_infinitely_wrong():
    values = np.ones((2, 3), dtype=np.float32)
    with_nan = values.copy()
    with_nan[0, 0] = np.nan
    ids, others = np.array([[1, 2, 3]]), np.array([[1, 3, 2]])
    assert difference(stats_of(values), stats_of(with_nan))[0] == np.inf
    assert difference(stats_of(values, native=False), stats_of(with_nan, native=False))[0] == np.inf
    assert difference(stats_of(values), stats_of(values.T))[0] == np.inf
    assert difference(stats_of(ids), stats_of(others))[0] == np.inf  # by checksum alone
    assert "num_nan 1.0 against 0.0" in difference(stats_of(with_nan), stats_of(values))[1]
    assert difference(stats_of(with_nan), stats_of(with_nan))[0] == SAME


# Where captures go apart


def test_equal_captures_are_bitwise_equal():
    result = compared(capture(), capture())
    assert result.divergence is None and result.max_error == SAME and "Bitwise equal" in headline(result)


def test_noise_is_no_divergence():
    result = compared(capture(Model(noise=1e-7)), capture())
    assert result.divergence is None and 0 < result.max_error < 1e-5 and "Equal within" in headline(result)


@pytest.mark.parametrize("children_first", [True, False])
@pytest.mark.parametrize("module", ["embed", "layers.0.attn", "layers.1.norm", "layers.1.mlp", "layers.2.mlp", "norm"])
def test_a_module_that_computes_something_else_is_named(module, children_first):
    found = found_in({module: scaled()}, children_first=children_first)
    assert (found.module, found.kind, found.direction) == (f"model.{module}", Kind.OUTPUT, "forward")
    assert found.base == SAME and not found.grown


def test_a_fault_far_below_the_eye_is_named_among_noise():
    result = compared(capture(Model(noise=1e-7)), capture(Model(seed=0, noise=2e-7, faults={"layers.1.mlp": scaled(1.001)})))
    assert result.divergence is not None and result.divergence.module == "model.layers.1.mlp"


def test_the_first_divergence_is_named_and_not_the_largest():
    result = compared(capture(), capture(Model(faults={"layers.0.mlp": scaled(1.0005), "layers.2.mlp": scaled(3.0)})))
    assert result.divergence is not None and result.divergence.module == "model.layers.0.mlp"
    assert result.largest[0].module != "model.layers.0.mlp"


def test_what_the_forward_pass_kept_goes_into_the_backward_pass():
    result = compared(capture(), capture(Model(faults={"embed": scaled()})))
    bases = [row.base for row in result.largest if row.quantity == "gradients"]
    assert bases and min(bases) > 1e-3


def test_a_layers_own_code_is_told_from_its_modules():
    found = found_in({"layers.1:between": scaled()})
    assert (found.kind, found.module, found.seen_at) == (Kind.INSIDE, "model.layers.1", "model.layers.1.attn")
    own_end = found_in({"layers.1": scaled()})
    assert (own_end.kind, own_end.module) == (Kind.OUTPUT, "model.layers.1")


def test_another_batch_is_not_the_models_fault():
    other = [make_batch(seed=4)[:2], BATCH[2:]]
    result = compared(capture(), capture(micro_batches=other))
    assert result.divergence is not None and result.divergence.kind is Kind.INPUTS
    assert "not at fault" in words_of(result) and "input_ids" in result.divergence.path


def test_passes_with_other_samples_are_said_to_be():
    result = compared(capture(), capture(micro_batches=MICRO_BATCHES[::-1]))
    assert result.divergence is not None and result.divergence.kind is Kind.INPUTS
    assert "--by-sample" in words_of(result) and not result.divergence.num_samples


def test_of_many_modules_with_other_parameters_the_first_is_named_and_they_are_counted():
    result = compared(capture(), capture(Model(faults={f"layers.{layer}.mlp:weight": scaled() for layer in (1, 2)})))
    assert result.divergence is not None
    divergence = result.divergence
    assert (divergence.module, divergence.num_differing, divergence.num_beside) == ("model.layers.1.mlp", 2, 2 * LAYERS + 1)
    assert "It is so in 2 of 7 modules." in words_of(result)


def test_a_wrong_optimizer_step_shows_in_the_parameters_of_the_next_mini_batch():
    options = {"micro_batches": [BATCH[:2], BATCH[2:]], "mini_batches": (0, 1)}
    a, b = capture(**options), capture(Model(faults={"layers.2.mlp:weight": scaled(1.01, of_pass=1)}), **options)
    result = compared(a, b)
    assert result.divergence is not None and result.divergence.kind is Kind.PARAMETERS
    assert result.divergence.pass_index == 1


@pytest.mark.parametrize(("what", "kind"), [("made", Kind.OPTIMIZER), ("clipped", Kind.OPTIMIZER_GRADIENT)])
def test_an_optimizer_step_that_goes_wrong_is_named(what, kind):
    options = {"micro_batches": [BATCH[:2], BATCH[2:]], "mini_batches": (0, 1)}
    fault = {f"layers.2.attn:{what}": scaled(1.5, of_pass=1), f"layers.0.mlp:{what}": scaled(1.01, of_pass=1)}
    result = compared(capture(**options), capture(Model(faults=fault), **options))
    assert result.divergence is not None
    divergence = result.divergence
    assert (divergence.kind, divergence.module) == (kind, "model.layers.2.attn"), "the largest error: clipping spreads it"
    assert result.divergence.pass_label == "optimizer step 2 of 2" and (divergence.num_differing, divergence.num_beside) == (2, 7)


@pytest.mark.parametrize(
    ("fault", "kind", "module"),
    [
        ("layers.1.attn:grad", Kind.OUTPUT, "model.layers.1.attn"),
        ("layers.2.mlp:weight_grad", Kind.PARAMETER_GRADIENT, "model.layers.2.mlp"),
        ("layers.0.attn:incoming", Kind.INSIDE, "model.layers.0"),
    ],
)
def test_a_wrong_gradient_is_named(fault, kind, module):
    divergence = found_in({fault: scaled()})
    assert (divergence.kind, divergence.module, divergence.direction) == (kind, module, "backward")


def test_another_loss_is_not_the_models_fault():
    result = compared(capture(), capture(Model(faults={"loss": scaled(2.0)})))
    assert result.divergence is not None and result.divergence.direction == "backward"
    assert "the gradient that the loss sends back" in headline(result)


def test_the_pass_and_the_sample_are_named():
    _, one = packed(MICRO_BATCHES[1])
    at = next(span for span in one.spans if span.sample == "p1 sample 1")

    def fault(values, number):
        values = values.copy()
        if number == 1:
            values[0, at.start : at.start + at.length] *= np.float32(1.02)
        return values

    result = compared(capture(), capture(Model(faults={"layers.1.mlp": fault})))
    assert result.divergence is not None and result.divergence.pass_label == "micro-batch 2 of 2"
    assert result.divergence.samples == ["p1 sample 1 (response)"] and result.divergence.num_samples == 3
    assert "It shows in 1 of 3 prompts and responses: p1 sample 1 (response)." in words_of(result)


def test_one_decode_step_is_named():
    a = rollout_dump(Model(), BATCH)
    b = rollout_dump(Model(faults={"layers.0.mlp": scaled(1.01, of_pass=3)}), BATCH)
    result = compared(a, b)
    assert result.divergence is not None
    assert result.divergence.module == "model.layers.0.mlp" and result.divergence.pass_label == "decode step 3 of 5"


@pytest.mark.parametrize("broken", [(1,), (0, 1)])
def test_the_ranks_are_named(broken):
    stages = []
    for rank in (0, 1):
        model = Model(faults={"layers.1.mlp": scaled()}) if rank in broken else Model()
        a, b = (capture(one, rank=rank, num_ranks=2) for one in (Model(), model))
        stages.append(stage_of(a, b))
    result = summarise(stages, "a", "b", rtol=1e-5)
    assert result.divergence is not None and result.divergence.ranks == [f"rank {rank}" for rank in broken]
    assert f"{len(broken)} of 2 ranks have it" in words_of(result)


def test_a_bf16_layer_in_a_float32_model_is_named():
    result = compared(capture(), capture(Model(low={"layers.1.attn"})))
    assert result.divergence is not None and result.divergence.module == "model.layers.1.attn"
    assert result.divergence.drift is None and 1e-4 < result.divergence.error < 1e-1


def test_a_model_in_bf16_drifts_and_nothing_is_accused_but_a_real_fault():
    drift = compared(capture(), capture(Model(low={"all"})))
    assert drift.divergence is not None and drift.divergence.drift == "float32 against bfloat16" and drift.divergence.grown
    assert "No module adds more than ten times" in words_of(drift)
    fault = compared(capture(), capture(Model(low={"all"}, faults={"layers.1.mlp": scaled(1.5)})))
    assert fault.divergence is not None and fault.divergence.module == "model.layers.1.mlp" and not fault.divergence.grown


def test_captures_of_msprobe_compare():
    good = compared(capture(native=False), capture(native=False))
    assert good.divergence is None
    bad = compared(capture(native=False), capture(Model(faults={"layers.1.mlp": scaled(1.001)}), native=False))
    assert bad.divergence is not None and bad.divergence.module == "model.layers.1.mlp" and bad.divergence.num_samples == 0
    assert bad.divergence.pass_label == "call 1"


def test_a_bias_whose_gradient_cancels_is_not_judged_by_its_noise():
    a, b = capture(), capture()
    for dump, noise in ((a, 1e-9), (b, -1e-9)):
        entry = next(entry for entry in dump.entries if "layers.1.attn" in entry.name and "parameters_grad.0" in entry.name)
        entry.groups["bias"] = [stats_of(np.full(32, noise, dtype=np.float32))]
    assert compared(a, b).divergence is None


def test_calls_that_one_side_lacks_are_counted():
    a, b = capture(), capture()
    b.entries = [entry for entry in b.entries if "layers.1.norm" not in entry.name]
    result = compared(a, b)
    [stage] = result.stages
    assert stage.divergence is None and stage.max_error == SAME and not result.is_equal
    assert headline(result).startswith("Not all could be compared: step 1, actor_update, rank 0: 2 calls are only in A, e.g. ")
    assert comparison_json(result)["bitwise_equal"] is False


# Trainer against rollout


def by_sample(a, b):
    return compare_stage(place(a[0].dump, b[0].dump, all_ranks=True), a, b, by_sample=True, rtol=1e-4)


def rollout_comparison(trainer: Model, engine: Model, *, ranks: int = 2, replicas: tuple[list, ...] | None = None):
    """Two trainer ranks with a prompt each, and engines with parts of the batch, which is cut quite differently."""
    shares = [BATCH[:2], BATCH[2:]][:ranks] if ranks == 2 else [BATCH]
    a = [
        Capture(f"rank {rank}", training_dump(trainer, [share[:1], share[1:]], stage="actor_compute_log_prob", rank=rank))
        for rank, share in enumerate(shares)
    ]
    parts = replicas or ([(engine, BATCH)],)
    b = [Capture(f"replica {index}", rollout_dump(model, batch)) for index, [(model, batch)] in enumerate(parts)]
    return summarise([by_sample(a, b)], "a", "b", rtol=1e-4)


@pytest.mark.parametrize("ranks", [1, 2])
def test_trainer_and_rollout_agree_over_the_same_tokens(ranks):
    result = rollout_comparison(Model(), Model(noise=1e-7), ranks=ranks)
    assert result.divergence is None and result.max_error < 1e-5
    assert any("2 prompts and 4 responses" in note for note in result.stages[0].notes)


def test_a_weight_left_stale_in_the_engine_is_named():
    result = rollout_comparison(Model(), Model(faults={"layers.1.attn:weight": scaled(1 + 2e-7)}))
    assert result.divergence is not None
    assert (result.divergence.kind, result.divergence.module) == (Kind.PARAMETERS, "model.layers.1.attn")


def test_a_bf16_layer_of_the_engine_is_named():
    result = rollout_comparison(Model(), Model(low={"layers.1.mlp"}))
    assert result.divergence is not None
    assert (result.divergence.kind, result.divergence.module) == (Kind.OUTPUT, "model.layers.1.mlp")
    assert result.divergence.num_samples == 6


def test_what_goes_wrong_in_decoding_alone_is_said_to():
    decoding = {"layers.0.attn": lambda values, number: values * np.float32(1.01) if number > 0 else values}
    result = rollout_comparison(Model(), Model(faults=decoding))
    assert result.divergence is not None and result.divergence.module == "model.layers.0.attn"
    assert all(name.endswith("(response)") for name in result.divergence.samples)


def test_weights_that_are_sharded_in_training_are_put_together():
    def sharded(dump, number, rows):
        for entry in dump.entries:
            for name in entry.groups.get("parameters", {}):
                weight = Model().weights[entry.name.split(".", 2)[2].rpartition(".forward")[0].rpartition(".")[0]]
                entry.groups["parameters"][name] = replace(stats_of(weight[rows]), shard=(number, 2))
        return dump

    shares = [(BATCH[:2], slice(0, 10)), (BATCH[2:], slice(10, None))]
    a = [
        Capture(f"rank {rank}", sharded(training_dump(Model(), [share], stage="actor_compute_log_prob", rank=rank), rank, rows))
        for rank, (share, rows) in enumerate(shares)
    ]
    for engine, is_found in ((Model(), False), (Model(faults={"layers.1.mlp:weight": scaled()}), True)):
        stage = by_sample(a, [Capture("replica 0", rollout_dump(engine, BATCH))])
        assert (stage.divergence is not None and stage.divergence.kind is Kind.PARAMETERS) == is_found
    one_rank = by_sample(a[:1], [Capture("b", rollout_dump(Model(), BATCH))])
    assert any("7 tensors were not compared: their shards differ, or are missing" in note for note in one_rank.notes)


def test_the_engine_that_is_wrong_is_named():
    broken = Model(faults={"layers.2.mlp": scaled()})
    result = rollout_comparison(Model(), Model(), replicas=([(Model(), BATCH[:2])], [(broken, BATCH[2:])]))
    assert result.divergence is not None and result.divergence.module == "model.layers.2.mlp"
    assert result.divergence.ranks == ["replica 1"] and len(result.divergence.all_ranks) == 2
    assert {name[:2] for name in result.divergence.samples} == {"p1"}


def test_other_tokens_of_a_sample_are_not_compared():
    shorter = [*BATCH[:-1], type(BATCH[-1])(BATCH[-1].uid, BATCH[-1].sample, BATCH[-1].prompt, BATCH[-1].response[:3])]
    result = rollout_comparison(Model(), Model(), replicas=([(Model(), shorter)],))
    assert result.divergence is None and any("1 prompts and responses have not the same tokens" in note for note in result.notes)


# NaN in one capture


@pytest.mark.parametrize(
    ("fault", "kind", "module", "direction"),
    [
        ("layers.1.mlp", Kind.OUTPUT, "model.layers.1.mlp", "forward"),
        ("layers.1.mlp:weight", Kind.PARAMETERS, "model.layers.1.mlp", "forward"),
        ("layers.2:between", Kind.INSIDE, "model.layers.2", "forward"),
        ("layers.1.attn:grad", Kind.OUTPUT, "model.layers.1.attn", "backward"),
    ],
)
def test_the_first_nan_is_named(fault, kind, module, direction):
    def plant(values, number):
        values = values.copy()
        if number == 1:
            values.reshape(-1)[-1] = np.nan
        return values

    dump = capture(Model(faults={fault: plant}))
    health = check_stage(place(dump, dump), dump)
    assert health.divergence is not None
    assert (health.divergence.kind, health.divergence.module, health.divergence.direction) == (kind, module, direction)
    assert health.divergence.pass_label == "micro-batch 2 of 2" and "NaN" in health.divergence.what
    if kind is Kind.OUTPUT:
        assert health.divergence.samples == ["p1 sample 1 (response)"]


def test_a_finite_capture_is_healthy():
    dump = capture()
    assert check_stage(place(dump, dump), dump).divergence is None


# Order and names


def test_names_are_taken_apart():
    assert parse_name("Module.model.layers.0.self_attn.LlamaAttention.forward.12").label == "model.layers.0.self_attn"
    assert parse_name("Module.model.norm.LlamaRMSNorm.parameters_grad.1").direction == "parameters_grad"
    operator = parse_name("Functional.linear.3.backward")
    assert (operator.owner, operator.call, operator.direction) == ("Functional.linear", 3, "backward")
    assert operator.label == "Functional.linear.3" and operator.other("forward") == "Functional.linear.3.forward"


@pytest.mark.parametrize("children_first", [True, False])
def test_calls_begin_before_what_is_in_them_and_end_after(children_first):
    calls = Calls(capture(children_first=children_first))
    order = [(calls.entries[index].name, ends) for index, ends in calls.events]
    for index, entry in enumerate(calls.entries):
        if (parent := calls.parents[index]) is not None:
            outer = calls.entries[parent].name
            assert order.index((outer, False)) < order.index((entry.name, False)) < order.index((entry.name, True)) < order.index((outer, True))


# Heat map and command


class WellFormed(HTMLParser):
    VOID = frozenset({"meta", "input", "br", "link"})

    def __init__(self):
        super().__init__()
        self.open: list[str] = []
        self.scripts = 0

    def handle_starttag(self, tag, attrs):
        self.scripts += tag == "script"
        assert not [value for name, value in attrs if name in ("src", "href")], "an external resource"
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def cells_of(page: str) -> dict[str, str]:
    """The class of each cell by its tooltip without the number."""
    found = re.findall(r'<td class="([^"]*)" title="([^"]*)"', page)
    return {title.partition(":")[0]: kind for kind, title in found}


def test_the_heat_map_is_well_formed_and_text_is_escaped():
    evil = "</script><script>alert(1)</script><b>"
    a, b = capture(), capture(Model(faults={"layers.1.mlp": scaled()}))
    for dump in (a, b):
        dump.entries.insert(0, Entry(f"Module.{evil}.Evil.forward.0", None, {"output": [stats_of(np.ones(3, dtype=np.float32))]}))
    result = compared(a, b)
    result.a = result.b = evil
    page = heatmap_page(result)
    parser = WellFormed()
    parser.feed(page)
    assert not parser.open and parser.scripts == 0 and "<b>" not in page and "First divergence" in page
    cells = cells_of(page)
    assert cells["model.layers.1.mlp, step 1"] == "e7 first" and cells["model.embed, step 1"] == "same"


def test_names_of_samples_are_shown_as_they_are():
    renamed = [type(one)(f"arithmetic:train:{one.uid}", one.sample, one.prompt, one.response) for one in BATCH]
    a = Capture("a", training_dump(Model(), [renamed], stage="actor_compute_log_prob"))
    b = Capture("b", rollout_dump(Model(faults={"norm": scaled()}), renamed))
    result = summarise([by_sample([a], [b])], "a", "b", rtol=1e-4)
    console = Console(file=io.StringIO(), width=300)
    console.print(*comparison_renderables(result))
    assert isinstance(console.file, io.StringIO) and "(response), arithmetic:train:p" in console.file.getvalue()


def test_a_cells_colour_goes_by_the_size_of_its_error():
    assert [level(error) for error in (SAME, 0.0, 1e-12, 1e-6, 2e-3, 1.0, 1e3, np.inf)] == ["same", "e0", "e0", "e2", "e6", "e8", "e8", "broken"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Three runs of two steps, two ranks and two stages: good, the same again, and one with a fault on rank 1 from step 2 on."""
    root = tmp_path_factory.mktemp("runs")
    for run in ("good", "again", "bad"):
        for step in (1, 2):
            for rank in (0, 1):
                broken = run == "bad" and step == 2 and rank == 1
                model = Model(faults={"layers.1.mlp": scaled()} if broken else {})
                for stage in ("actor_compute_log_prob", "actor_update"):
                    save(root / run / "profile", capture(model, step=step, rank=rank, stage=stage))
            save(root / run / "profile", rollout_dump(Model(), BATCH, step=step), replica=0)
    return root


def precision(*arguments):
    return RUNNER.invoke(app, ["precision", *map(str, arguments)])


def test_the_command_names_the_fault_and_its_status_says_so(runs, tmp_path):
    done = precision("compare", runs / "good", runs / "bad", "--html", tmp_path / "heat.html", "--json", tmp_path / "out.json")
    said = " ".join(re.sub(r"[│╭╮╰╯─]", " ", done.output).split())
    assert done.exit_code == 1
    assert "First divergence: model.layers.1.mlp (Mlp) in step 2, actor_compute_log_prob, micro-batch 1 of 2, forward." in said
    assert "1 of 2 ranks have it: rank 1." in said
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["first_divergence"]["module"] == "model.layers.1.mlp" and written["first_divergence"]["ranks"] == ["rank 1"]
    cells = cells_of((tmp_path / "heat.html").read_text().partition("<h2>actor_update")[0])
    assert cells["model.layers.1.mlp, step 1"] == "same" and cells["model.layers.1.mlp, step 2"] == "e7 first"


def test_equal_runs_and_a_large_tolerance_have_status_0(runs):
    again = precision("compare", runs / "good", runs / "again")
    assert again.exit_code == 0 and "Bitwise equal" in again.output
    assert precision("compare", runs / "good", runs / "bad", "--step", 1).exit_code == 0
    assert precision("compare", runs / "good", runs / "bad", "--rank", 0).exit_code == 0
    assert precision("compare", runs / "good", runs / "bad", "--rtol", 100).exit_code == 0


def test_two_steps_of_a_run_compare(runs):
    profile = runs / "bad" / "profile"
    done = precision("compare", profile / "step_1", profile / "step_2")
    assert done.exit_code == 1 and "step 1/2" in done.output and "model.layers.1.mlp" in done.output
    ranks = [profile / f"step_{step}" / "actor_update" / "step0" / "rank0" for step in (1, 2)]
    assert precision("compare", *ranks).exit_code == 0


def test_trainer_and_rollout_of_a_run_compare(runs):
    assert precision("compare", runs / "good", "--rollout", "--step", 1).exit_code == 0
    broken = precision("compare", runs / "bad", "--rollout", "--step", 2)
    assert broken.exit_code == 0, "rank 0 shows all of its tokens first, and it is healthy"


def test_all_steps_of_trainer_and_rollout_compare_and_the_earliest_divergence_is_named(tmp_path):
    """Steps 1 to 4: the engine is healthy in step 1, wrong in 2 and 3, and was not captured in 4."""
    faults = {1: {}, 2: {"layers.1.mlp": scaled()}, 3: {"layers.0.attn": scaled(2.0)}}
    for step in (1, 2, 3, 4):
        save(tmp_path, training_dump(Model(), MICRO_BATCHES, stage="actor_compute_log_prob", step=step))
        if step in faults:
            save(tmp_path, rollout_dump(Model(faults=faults[step]), BATCH, step=step), replica=0)
    done = precision("compare", tmp_path, "--rollout", "--html", tmp_path / "heat.html", "--json", tmp_path / "out.json")
    written = json.loads((tmp_path / "out.json").read_text())
    assert done.exit_code == 1 and [stage["step"] for stage in written["stages"]] == [1, 2, 3]
    assert (written["first_divergence"]["module"], written["first_divergence"]["step"]) == ("model.layers.1.mlp", 2)
    cells = cells_of((tmp_path / "heat.html").read_text())
    healthy, wrong = (cells[f"model.layers.1.mlp, step {step}"] for step in (1, 2))
    assert healthy in ("e0 within", "e1 within", "e2 within"), "the two sides add up in other orders, and how far that shows is the processor's"
    assert wrong == "e7 first"
    assert precision("compare", tmp_path, "--rollout", "--step", 1).exit_code == 0


def test_what_one_side_lacks_is_not_called_equal(tmp_path):
    """A run of one step, and the same with a step more; by calls and by samples."""
    for run, steps in (("short", (1,)), ("long", (1, 2))):
        for step in steps:
            for stage in ("actor_compute_log_prob", "actor_update") if run == "long" else ("actor_update",):
                save(tmp_path / run, capture(step=step, stage=stage))
    for options in ((), ("--by-sample",)):
        done = precision("compare", tmp_path / "long", tmp_path / "short", *options)
        said = " ".join(re.sub(r"[│╭╮╰╯─]", " ", done.output).split())
        assert done.exit_code == 1 and "Not all could be compared: only in A: step 1, 2" in said and "Bitwise equal" not in said
        one = precision("compare", tmp_path / "long", tmp_path / "short", "--step", 1, "--stage", "actor_update", *options)
        assert one.exit_code == 0 and "Not all" not in one.output


def test_modules_that_one_run_does_not_call_are_missing_and_an_engine_may_lack_them():
    a, b = (training_dump(Model(), MICRO_BATCHES, stage="actor_compute_log_prob") for _ in range(2))
    engine = rollout_dump(Model(), BATCH)
    for dump in (b, engine):
        dump.entries = [entry for entry in dump.entries if "model.norm" not in entry.name]
        assert dump.samples is not None
        names = [name.replace("model.norm", "model.gone") for name in dump.samples["tensor"].to_pylist()]
        dump.samples = dump.samples.set_column(0, "tensor", pa.array(names).dictionary_encode())
    one_way = by_sample([Capture("a", a)], [Capture("b", b)])
    other_way = by_sample([Capture("b", b)], [Capture("a", a)])
    said = "step 1, actor_compute_log_prob, all ranks: 1 calls are only in {}, e.g. Module.model.norm.forward"
    assert (one_way.missing, other_way.missing) == ([said.format("A")], [said.format("B")])
    rollout = by_sample([Capture("a", a)], [Capture("replica 0", engine)])
    assert not rollout.missing and any("only in A, e.g. Module.model.norm.forward" in note for note in rollout.notes)


def test_captures_that_were_cut_short_alike_are_not_called_equal(tmp_path):
    for run in ("a", "b"):
        dump = training_dump(Model(), MICRO_BATCHES, stage="actor_compute_log_prob")
        dump.about.complete, dump.about.error = False, "out of memory"
        save(tmp_path / run, dump)
    for options in ((), ("--by-sample",)):
        done = precision("compare", tmp_path / "a", tmp_path / "b", *options)
        said = " ".join(re.sub(r"[│╭╮╰╯─]", " ", done.output).split())
        assert done.exit_code == 1 and "rank 0 of A: the capture was cut short (out of memory) and 1 more." in said


def test_equal_digests_of_captures_that_were_cut_short_are_marked(tmp_path):
    for run in ("a", "b"):
        dump = capture()
        dump.about.complete = False
        save(tmp_path / run, dump)
    digests = precision("digest", tmp_path / "a", tmp_path / "b")
    assert digests.exit_code == 0 and "bitwise equal: step 1 " in digests.output and "(cut short)" in digests.output


def test_captures_without_a_call_in_common_have_status_2(runs, tmp_path):
    """Operators alone (L1) against modules alone (L0)."""
    dump = capture()
    dump.entries, dump.samples = [Entry("Functional.linear.0.forward", None, {"output": [stats_of(np.ones(2))]})], None
    done = precision("compare", save(tmp_path, dump), runs / "good", "--step", 1, "--stage", "actor_update", "--rank", 0)
    assert isinstance(done.exception, UserError) and "no call of A is in B" in done.exception.reason
    assert "Functional.linear.0.forward" in done.exception.reason


def test_one_rank_and_two_compare_over_the_same_tokens(runs, tmp_path):
    """A run on one rank with all micro-batches, and one on two ranks, each with a part of them."""
    for run, model in (("one", Model()), ("two", Model()), ("broken", Model(faults={"layers.0.attn": scaled()}))):
        for rank, share in enumerate([BATCH] if run == "one" else [BATCH[2:], BATCH[:2]]):
            save(tmp_path / run, training_dump(model, [share[:1], share[1:]], stage="actor_compute_log_prob", rank=rank))
    assert precision("compare", tmp_path / "one", tmp_path / "two").exit_code == 1
    equal = precision("compare", tmp_path / "one", tmp_path / "two", "--by-sample")
    assert equal.exit_code == 0 and "2 prompts and 4 responses" in equal.output
    broken = precision("compare", tmp_path / "one", tmp_path / "broken", "--by-sample")
    assert broken.exit_code == 1 and "model.layers.0.attn (Attention)" in broken.output


def test_weights_of_two_runs_may_differ_by_noise_and_those_of_the_engine_may_not():
    noisy = Model(faults={f"{name}:weight": scaled(1 + 2e-7) for name in Model().weights})
    a, b = (Capture("rank 0", training_dump(model, MICRO_BATCHES, stage="actor_compute_log_prob")) for model in (Model(), noisy))
    stage = by_sample([a], [b])
    assert stage.divergence is None and 0 < stage.max_error < 1e-5
    engine = rollout_comparison(Model(), noisy)
    assert engine.divergence is not None and engine.divergence.num_differing == 7


def test_shards_of_other_ranks_are_not_compared():
    a, b = capture(), capture(Model(faults={"layers.1.mlp:weight": scaled()}))
    for dump, rank in ((a, 0), (b, 1)):
        for entry in dump.entries:
            parameters = entry.groups.get("parameters", {})
            entry.groups["parameters"] = {name: replace(stats, shard=(rank, 2)) for name, stats in parameters.items()}
    [stage] = compared(a, b).stages
    assert any("their shards differ" in note for note in stage.notes)
    assert stage.divergence is not None and stage.divergence.kind is Kind.OUTPUT


def test_the_report_has_status_1_when_something_is_not_finite(runs, tmp_path):
    assert precision("report", runs / "good").exit_code == 0
    bad = save(tmp_path, capture(Model(faults={"layers.0.mlp": to_inf})))
    done = precision("report", bad, "--json", tmp_path / "report.json")
    assert done.exit_code == 1 and "First NaN or Inf: model.layers.0.mlp (Mlp)" in done.output
    assert json.loads((tmp_path / "report.json").read_text())["first_divergence"]["module"] == "model.layers.0.mlp"


def test_digests_of_two_runs(runs):
    one = precision("digest", runs / "good")
    assert one.exit_code == 0 and len(one.output.strip().splitlines()) == 2
    assert precision("digest", runs / "good", runs / "again").exit_code == 0
    other = precision("digest", runs / "good", runs / "bad")
    assert other.exit_code == 1 and "step 2 differs, first in actor_compute_log_prob" in other.output


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (("compare", "good"), "B"),
        (("compare", "good", "bad", "--rollout"), "B"),
        (("compare", "good", "nowhere"), "nowhere"),
        (("compare", "good", "bad", "--stage", "actor_updat"), "--stage"),
        (("compare", "good", "bad", "--step", "9"), "--step"),
        (("compare", "good", "--rollout", "--stage", "rollout_generate"), "--rollout"),
        (("compare", "good", "--rollout", "--stage", "actor_updat"), "--rollout"),
        (("report", "good", "--rank", "7"), "--rank"),
    ],
)
def test_a_wrong_command_has_status_2_and_says_why(runs, arguments, field, monkeypatch, capsys):
    from pellucid.cli.main import main

    known = ("good", "bad", "nowhere")
    monkeypatch.setattr("sys.argv", ["pellucid", "precision", *(str(runs / one) if one in known else one for one in arguments)])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2 and field in " ".join(capsys.readouterr().err.split())


def test_json_is_plain_where_errors_are_infinite():
    b = capture(Model(faults={"layers.0.mlp": to_inf}))
    text = json.dumps(comparison_json(compared(capture(), b)), allow_nan=False)
    assert json.loads(text)["first_divergence"]["error"] == "inf"
