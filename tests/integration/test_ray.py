"""Runs over several ranks: most join the session's Ray cluster (`ranks`), those about a run's own cluster start one."""

import itertools
import json
import re
import signal
from pathlib import Path

import pytest
from checks import assert_same_samples, assert_trained_alike, but_first_long, checked_metrics, dump
from commands import Server, wait_for
from processes import all_gone, processes_of, steps_done, with_children
from profiles import manifest, ranges

from conftest import NUM_STEPS, RayCluster, Workspace, metrics, on_two_ranks

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.ray]

OWN_CLUSTER = ("trainer.placement=ray", "trainer.n_gpus_per_node=2")
QUIET = ("data.val_files=null", "trainer.save_freq=-1", "trainer.val_before_train=false")


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory, server: Server, cluster: RayCluster) -> Path:
    """The folder of a run over two ranks of which one is captured. Do not write to it."""
    work = Workspace(tmp_path_factory.mktemp("two_ranks"), server)
    work.environment |= cluster.environment
    captured = ("global_profiler.tool=torch", "global_profiler.steps=[2]", "global_profiler.controller=true")
    rank = ("actor_rollout_ref.actor.profiler.enable=true", "actor_rollout_ref.actor.profiler.ranks=[1]")
    work.train(*on_two_ranks(cluster), *QUIET, *captured, *rank)
    return work.run_dir


def test_two_ranks_match_one_process(two_ranks: Path, finished: Path) -> None:
    assert_trained_alike(two_ranks, finished)
    assert_same_samples(two_ranks, finished, (1, NUM_STEPS))
    rows = checked_metrics(two_ranks)
    assert [row["step"] for row in rows] == list(range(1, NUM_STEPS + 1))
    assert all(row["staleness/max"] == 0 for row in rows)
    assert {log.name for log in (two_ranks / "logs").iterdir()} >= {"policy_rank_0.log", "policy_rank_1.log"}
    assert {path.name for path in (two_ranks / "timeline").iterdir()} >= {"controller.json", "policy_rank_1.json"}


def test_ranks_asked_for_are_captured_and_no_others(two_ranks: Path) -> None:
    content = manifest(two_ranks)
    assert content["complete"], content["failures"]
    assert {file["process"] for file in content["files"]} == {"controller", "policy_rank_1"}
    [file] = [file for file in content["files"] if file["process"] == "policy_rank_1"]
    found = ranges(two_ranks / "profile" / file["path"])
    assert {"rollout_generate", "actor_update", "weight_sync", "micro_batch", "mini_batch"} <= set(found)
    assert re.search(r"policy_step_step2_rank1-of-2_pid\d+\.json\.gz", file["path"])


def test_every_other_role_matches_one_process(work: Workspace, ranks: tuple[str, ...], judge: Path) -> None:
    """Adapters, a reference, a reward model that scores greedy answers too, and a checkpoint written in the background.

    In float32 both score the same tokens alike wherever they run; bfloat16 would round another way on other processors.
    """
    same = (
        *QUIET,
        "trainer.total_training_steps=2",
        "algorithm.adv_estimator=remax",
        "reward_model.enable=true",
        f"reward_model.model.path={judge}",
        "actor_rollout_ref.model.lora_rank=4",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.actor.strategy=fsdp",
        "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
        "actor_rollout_ref.actor.checkpoint.async_save=true",
    )
    work.train(*same, "trainer.default_local_dir=local")
    work.train(*same, *ranks)
    assert_trained_alike(work.run_dir, work.folder / "local")
    assert_same_samples(work.run_dir, work.folder / "local", (1, 2))
    assert len({row["reward"] for row in dump(work.run_dir, 1)}) > 4, "the rewards are the model's"
    assert (work.run_dir / "checkpoints" / "global_step_2" / "hf_model" / "model.safetensors").is_file()


PPO = (
    "algorithm.adv_estimator=gae",
    "algorithm.use_kl_in_reward=true",
    "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.actor.kl_loss_coef=0.01",
    "critic.optim.lr=0.001",
)


def test_ppo_with_a_critic_on_ranks_of_its_own_goes_on_in_one_process_and_back(
    work: Workspace, ranks: tuple[str, ...]
) -> None:
    length = "trainer.total_training_steps="
    work.train(*PPO, *QUIET, f"{length}3", "trainer.default_local_dir=local")
    work.train(*PPO, *QUIET, f"{length}1", *ranks, "trainer.n_gpus_per_node=1", "trainer.resource_pools={critic: 1}")
    assert {path.name for path in (work.run_dir / "logs").iterdir()} >= {"policy_rank_0.log", "critic_rank_0.log"}
    work.train(*PPO, *QUIET, f"{length}2")
    work.train(*PPO, *QUIET, f"{length}3", *ranks)
    assert [row["step"] for row in checked_metrics(work.run_dir)] == [1, 2, 3]
    assert_trained_alike(work.run_dir, work.folder / "local")


def test_nan_on_the_ranks_saves_the_batch_and_stops(work: Workspace, ranks: tuple[str, ...]) -> None:
    work.write("nan.py", "def loss(inputs):\n    return -inputs.logp * inputs.advantages * float('nan'), {}\n")
    done = work.train(*ranks, *QUIET, "actor_rollout_ref.actor.policy_loss.loss_mode=nan.py:loss", status=1)
    assert "actor/loss is nan at samples" in done.output and "Traceback" not in done.output
    assert (work.run_dir / "failures" / "step_000001" / "failure.pt").is_file()
    logs = [(work.run_dir / "logs" / f"policy_rank_{rank}.log").read_text() for rank in (0, 1)]
    assert all(log.rstrip().endswith("done") for log in logs), "a rank was killed instead of leaving"


def test_an_interrupt_leaves_a_checkpoint_and_no_process(work: Workspace, ranks: tuple[str, ...]) -> None:
    bfloat16 = "actor_rollout_ref.model.dtype=bfloat16"
    long = ("trainer.total_training_steps=1000", "trainer.test_freq=-1")
    command = work.start("train", work.recipe, *ranks, *long, bfloat16)
    wait_for(lambda: steps_done(work.run_dir) >= 2, command)
    started = with_children(command)
    for process in started:  # as a terminal does: to the whole foreground group
        process.send_signal(signal.SIGINT)
    started += processes_of(work.run_dir).values()
    done = command.wait()
    assert done.status == 130, done.output
    assert "checkpoint written" in done.output
    assert all_gone(started)
    assert (work.run_dir / "checkpoints").is_dir()
    rounding = metrics(work.run_dir)[-1]["mismatch/logp_max_abs_diff"]
    assert 1e-4 < rounding < 0.3, "the ranks computed in bfloat16"


def test_a_killed_controller_leaves_no_process(work: Workspace) -> None:
    command = work.start("train", work.recipe, *OWN_CLUSTER, "trainer.total_training_steps=1000")
    wait_for(lambda: steps_done(work.run_dir) >= 2, command)
    started = with_children(command)
    rank_processes = list(processes_of(work.run_dir).values())
    assert len(rank_processes) == 2
    command.signal(signal.SIGKILL)
    command.wait()
    assert all_gone(rank_processes)
    gone = all_gone(started, within_s=40)
    assert gone, [process.cmdline() for process in started if process.is_running()]


def test_a_killed_rank_is_named_with_its_log_and_restarts_finish_the_run(work: Workspace, ranks: tuple[str, ...]) -> None:
    same = ("trainer.total_training_steps=8", "data.val_files=null")
    command = work.start("train", work.recipe, *ranks, *same, "trainer.max_restarts=1")
    wait_for(lambda: steps_done(work.run_dir) >= 2, command)
    started = list(processes_of(work.run_dir).values())
    processes_of(work.run_dir)["policy_rank_1"].kill()
    done = command.wait()
    assert done.status == 0, done.output
    assert all_gone(started)
    assert "policy rank 1: the process died" in done.output and "policy_rank_1.log" in done.output
    assert re.search(r"the last checkpoint is of step [1-8]", done.output) and "restarting from" in done.output
    assert [row["step"] for row in metrics(work.run_dir)][-1] == 8
    work.train(*same, "trainer.default_local_dir=local")
    assert_trained_alike(work.run_dir, work.folder / "local")
    reasons = [start["exit_reason"] for start in json.loads((work.run_dir / "run.json").read_text())["starts"]]
    assert reasons[-1] == "finished" and "policy rank 1" in reasons[-2]


@pytest.mark.parametrize("between_stages", but_first_long([True, False]))
def test_a_stopped_rank_is_named_within_the_time_out(
    work: Workspace, ranks: tuple[str, ...], between_stages: bool
) -> None:
    command = work.start("train", work.recipe, *ranks, "trainer.total_training_steps=1000", "trainer.stall_timeout_s=6")
    if between_stages:  # the dump is written just before the ranks are asked for their arithmetic peak and memory
        wait_for((work.run_dir / "rollouts" / "step_000001.jsonl.zst").exists, command)
    else:
        wait_for(lambda: steps_done(work.run_dir) >= 2, command)
    started = with_children(command) + list(processes_of(work.run_dir).values())
    processes_of(work.run_dir)["policy_rank_1"].suspend()
    done = command.wait()
    assert done.status == 1, done.output
    assert re.search(r"policy rank 1: no progress in [\w.]+ for \d+ s: it does not answer", done.output)
    assert all_gone(started)


@pytest.mark.long
def test_a_rank_stopped_while_it_saves_in_the_background_is_named(work: Workspace, ranks: tuple[str, ...]) -> None:
    length = ("trainer.total_training_steps=1", "trainer.stall_timeout_s=6")
    saves = ("trainer.save_freq=1", "actor_rollout_ref.actor.checkpoint.async_save=true")
    command = work.start("train", work.recipe, *ranks, *QUIET, *length, *saves)
    # The last checkpoint: nothing but its end is left to wait for.
    wait_for(lambda: list((work.run_dir / "checkpoints").glob("global_step_1.tmp-*/sharded")), command, every_s=0.001)
    processes_of(work.run_dir)["policy_rank_1"].suspend()
    done = command.wait()
    assert done.status == 1, done.output
    assert re.search(r"policy rank 1: no progress in (save|actor.start_saving) for \d+ s: it does not answer", done.output)
    assert "process died" not in done.output and "is stalled" not in done.output


MANY = ("data.train_batch_size=500", "actor_rollout_ref.actor.ppo_mini_batch_size=500", "data.train_files=task:arithmetic?level=2&size=600")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("trainer.n_gpus_per_node=500", *MANY), ["500 ranks", "CPU cores", "trainer.n_gpus_per_node"]),
        (("trainer.ray_address=127.0.0.1:1",), ["no Ray cluster answers at 127.0.0.1:1", "ray start --head"]),
        (("trainer.ray_address=nowhere",), ["'nowhere' is no address", "6379"]),
        (("actor_rollout_ref.actor.ppo_mini_batch_size=1", "trainer.n_gpus_per_node=8"), ["8", "samples"]),
    ],
)
def test_what_cannot_be_placed_is_one_clear_error(work: Workspace, overrides: tuple[str, ...], words: list[str]) -> None:
    done = work.train("trainer.placement=ray", *overrides, status=2)
    text = re.sub(r"[\s│]+", " ", done.output)
    assert not [word for word in words if word not in text], done.output
    assert "Traceback" not in done.output


OVERLAPPED = """
import json, sys, threading
from pathlib import Path
import torch
from pellucid.agents.llm import sample_rollouts
from pellucid.config import load_config
from pellucid.files.rundir import RunDir
from pellucid.metrics.trackers import Trackers
from pellucid.observe.watchdog import Watchdog
from pellucid.produce import produce, sampling_params
from pellucid.run import build_run, load_inputs
from pellucid.stages import Stage

config = load_config(Path("recipe.yaml"), sys.argv[1:]).config
run_dir = RunDir.create(config.trainer.default_local_dir)
inputs = load_inputs(config)
with run_dir.lock(), inputs.scorer:
    run = build_run(config, run_dir, inputs, Trackers({}), 1, Watchdog(None))
    samples, _ = produce(run, 1)
    rollout = config.actor_rollout_ref.rollout
    prompts, params = run.loader.next_batch() * 64, sampling_params(rollout, rollout)

    def sample(step):
        with run.stage(Stage.ROLLOUT_GENERATE, step, len(prompts) * params.n) as advance:
            return [r.token_ids.tolist() for r in sample_rollouts(run.rollout_engine, prompts, params, stream=("s",), on_done=advance)]

    def score(step):
        with run.stage(Stage.ACTOR_COMPUTE_LOG_PROB, step, len(samples)) as advance:
            return run.actor.compute_log_probs(samples, on_done=advance).logp

    alone, logp, overlapped, scored = sample(2), score(2), [], []
    thread = threading.Thread(target=lambda: overlapped.extend(sample(3) for _ in range(4)))
    thread.start()
    while thread.is_alive():
        scored.append(score(3))
    run.close()
assert overlapped == [alone] * 4, "the samples differ"
assert all(torch.equal(one, logp) for one in scored), "the log-probs differ"
"""


def test_a_rank_samples_and_trains_at_once(work: Workspace, ranks: tuple[str, ...]) -> None:
    """Each stage has its own span on the rank, and neither changes what the other computes."""
    work.write("overlapped.py", OVERLAPPED)
    done = work.start(*ranks, *QUIET, script="overlapped.py").wait()
    assert done.status == 0, done.output
    events = [json.loads(line.rstrip(",\n")) for line in (work.run_dir / "timeline" / "policy_rank_0.json").open() if line[:1] == "{"]
    spans = {name: [(e["ts"], e["ts"] + e["dur"]) for e in events if e["name"] == name and e["args"].get("step") == 3]
             for name in ("rollout_generate", "actor_compute_log_prob")}  # fmt: skip
    pairs = itertools.product(spans["rollout_generate"], spans["actor_compute_log_prob"])
    assert any(began < end and start < ended for (began, ended), (start, end) in pairs), spans


TURNS = """
import asyncio, json, sys
from pathlib import Path
from pellucid.agents.llm import AgentLoop, sample_rollouts
from pellucid.config import load_config
from pellucid.files.rundir import RunDir
from pellucid.loading import run_tokenizer
from pellucid.agents.chat import Chat
from pellucid.metrics.trackers import Trackers
from pellucid.observe.watchdog import Watchdog
from pellucid.produce import sampling_params
from pellucid.run import build_run, load_inputs

async def three_turns(prompt, llm, tools):
    beats = 0
    async def beat():
        nonlocal beats
        while True:
            await asyncio.sleep(0.001)
            beats += 1
    beating = asyncio.create_task(beat())
    await llm.complete()
    beating.cancel()
    assert beats or sys.argv[1] == "local", "nothing else went on while the ranks sampled"
    await llm.complete("+1=")
    await llm.complete("+2=")

config = load_config(Path("recipe.yaml"), sys.argv[2:]).config
run_dir = RunDir.create(config.trainer.default_local_dir)
inputs = load_inputs(config)
with run_dir.lock(), inputs.scorer:
    run = build_run(config, run_dir, inputs, Trackers({}), 1, Watchdog(None))
    rollout, engine = config.actor_rollout_ref.rollout, run.rollout_engine
    tokenizer = run_tokenizer(config)
    loop = AgentLoop(three_turns, "three_turns", Chat(tokenizer, [tokenizer.eos_token_id], templated=False), max_turns=3)
    prompts, params = run.loader.next_batch(), sampling_params(rollout, rollout)
    params.max_tokens = 40
    rollouts = sample_rollouts(engine, prompts, params, stream=("s",), loop=loop)
    assert not any(one.outcome.failure for one in rollouts), rollouts[0].outcome
    stats = list(engine.replica_stats().values()) or [engine.stats()]
    assert sum(one.reused_tokens for one in stats) > 0 and not any(one.kept for one in stats), stats
    Path(sys.argv[1]).write_text(json.dumps([list(one.token_ids) for one in rollouts]))
    run.close()
"""


def test_turns_on_ranks_are_those_of_one_process(work: Workspace, ranks: tuple[str, ...]) -> None:
    """Agents go on while ranks sample, and no token of an earlier turn is computed again."""
    work.write("turns.py", TURNS)
    for name, placed in (("local", ()), ("ranks", ranks)):
        done = work.start(name, *placed, *QUIET, f"trainer.default_local_dir=run_{name}", script="turns.py").wait()
        assert done.status == 0, done.output
    local, placed = (json.loads((work.folder / name).read_text()) for name in ("local", "ranks"))
    assert local == placed
