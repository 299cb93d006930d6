"""From a validated config to a `Run`: the parts that the loop drives, made in the order in which mistakes are cheapest.

Data and reward are checked before the plan is printed, the plan before the model is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from rich.table import Table
from transformers import PreTrainedTokenizerBase

from pellucid import devices
from pellucid.agents.llm import AgentLoop
from pellucid.algo.advantages import Estimator
from pellucid.algo.kl import KLControl
from pellucid.algo.policy_loss import PolicyLoss
from pellucid.build import Roles, check_roles, choose_estimator, choose_policy_loss, leave_loaded_alone, needed_roles
from pellucid.config import RunConfig, build_plan, read_model_facts
from pellucid.config.plan import plan_rows
from pellucid.console import console, notice
from pellucid.data import PromptLoader, build_prompts
from pellucid.errors import UserError
from pellucid.failures import Given, failure_kept
from pellucid.files.checkpoint_store import CheckpointStore
from pellucid.files.rundir import RunDir
from pellucid.loading import run_loop, run_tokenizer
from pellucid.metrics.alerts import Alerts, post
from pellucid.metrics.best import KeepBest
from pellucid.metrics.display import StepDisplay
from pellucid.metrics.trackers import Trackers, read_metrics
from pellucid.observe.captures import RunProfiler, controller_request
from pellucid.observe.process import ProcessProfiler
from pellucid.observe.replica_tracks import ReplicaTracks
from pellucid.observe.spans import SpanRecorder
from pellucid.observe.watchdog import Watchdog
from pellucid.ranks.placement import Placement, place_roles
from pellucid.reward import Scorer, make_scorer
from pellucid.reward.rewards import Rewards
from pellucid.roles.actor import Actor
from pellucid.rollout.requests import RolloutEngine, RunStream
from pellucid.stages import Stage
from pellucid.training.common.models import TokenPieces, model_folder
from pellucid.types import Prompt

WRITE_LIMIT_S = 3600.0
"""How long writing captures may take without a sign of life before that is a stall."""


@dataclass
class Run:
    """What a run consists of."""

    config: RunConfig
    run_dir: RunDir
    store: CheckpointStore
    placement: Placement
    """The roles, and the processes they run in."""
    tokenizer: PreTrainedTokenizerBase
    token_pieces: TokenPieces
    """What token ids look like, for the rollout dump."""
    loop: AgentLoop
    """The agent that makes trajectories."""
    loader: PromptLoader
    val_prompts: list[Prompt]
    rewards: Rewards
    estimator: Estimator
    kl_control: KLControl
    profiler: RunProfiler
    tracks: ReplicaTracks
    """What the rollout engine says of itself."""
    display: StepDisplay
    trackers: Trackers
    alerts: Alerts
    callbacks: Sequence[Callback]
    """What is asked after each step, beside the alerts."""
    total_steps: int
    first_step: int = 1
    """The next step to run; later than 1 after a resume."""
    restored: Path | None = None
    """The checkpoint that the run goes on from."""

    @property
    def spans(self) -> SpanRecorder:
        """The spans of the controller's process."""
        return self.profiler.process.spans

    @contextmanager
    def stage(
        self, stage: Stage, step: int, num_units: int | None = None, given: Given | None = None
    ) -> Iterator[Callable[[int], None]]:
        """Enclose a stage, for the display, watchdog, timeline and profiler; gives what counts finished units.

        What it is `given` to work on is saved when NaN or Inf ends it.
        """
        with (
            self.display.stage(stage, num_units) as advance,
            failure_kept(self, stage, step, given, advance),
            self.profiler.process.stage(stage, step),
        ):
            yield advance

    @property
    def roles(self) -> Roles:
        """The roles, or their proxies."""
        return self.placement.roles

    @property
    def actor(self) -> Actor:
        """The policy being trained."""
        assert self.roles.actor is not None
        return self.roles.actor

    @property
    def rollout_engine(self) -> RolloutEngine:
        """Samples what is trained on; under `rollout.simulate_mismatch` not quite from the trained policy."""
        return self.roles.engine_of(Stage.ROLLOUT_GENERATE)

    @property
    def stateful(self) -> dict[str, PromptLoader | KLControl]:
        """What a resumed run goes on from beside weights and optimizer, by its name in a checkpoint."""
        return {"loader": self.loader, "kl_control": self.kl_control}

    def log(self, step: int, metrics: dict[str, float]) -> set[str]:
        """Hand a finished step's metrics to the trackers and the console, and return what its alerts ask for."""
        self.trackers.log(step, metrics)
        self.display.finish_step(step, metrics)
        begun = self.alerts.hear(step, metrics)
        for alert in begun:
            console.print(str(alert), style="bold red", markup=False)
            self.run_dir.note_alert(asdict(alert))
            if alert.url is not None:
                post(str(self.run_dir.path), alert)
        answers = [(callback, callback(self, step, metrics)) for callback in self.callbacks]
        for callback, answer in answers:
            if answer not in (None, "checkpoint", "end"):
                reason = f"{callback} returned {answer!r}."
                raise UserError("callbacks", reason, "Let it return None, 'checkpoint' or 'end'.")
        return {alert.action for alert in begun} | {answer for _, answer in answers if answer}

    def close(self) -> None:
        """End captures, the ranks and the timeline; scorer and trackers belong to who opened them."""
        with ExitStack() as parts:  # each in turn, whatever happens in the others
            parts.callback(self.spans.close)
            parts.callback(self.placement.close)
            parts.callback(self.profiler.process.flush)
            parts.callback(self.tracks.close)
            parts.callback(self.loop.close)


Callback = Callable[[Run, int, dict[str, float]], Literal["checkpoint", "end"] | None]
"""Is shown the run, a finished step (0: the validation before the first) and its metrics; may ask for a checkpoint, or
that the run ends after this step, with one."""


@dataclass
class Inputs:
    """What a run reads, checked before any model is touched."""

    tokenizer: PreTrainedTokenizerBase
    loop: AgentLoop
    train_prompts: list[Prompt]
    val_prompts: list[Prompt]
    scorer: Scorer
    policy_loss: PolicyLoss
    estimator: Estimator


VERIFIED_AGENTS = ("single_turn", "tools")
"""Those that give no rewards themselves."""

ReadPrompts = Callable[[RunConfig, PreTrainedTokenizerBase, Literal["train", "val"], AgentLoop], list[Prompt]]


def read_prompts(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, split: Literal["train", "val"], loop: AgentLoop
) -> list[Prompt]:
    """Return the prompts of a split, and print what was read."""
    read = build_prompts(config.data, tokenizer, split, tools=loop.schemas, keep_messages=loop.has_turns)
    console.print(f"{'train' if split == 'train' else 'validation'} data: {read.describe()}", markup=False)
    return read.prompts


def load_inputs(config: RunConfig, read: ReadPrompts = read_prompts) -> Inputs:
    """Load tokenizer, prompts, reward function and plug-ins.

    Raises:
        UserError: a file, column, model folder or function is missing or wrong.
    """
    tokenizer = run_tokenizer(config)
    check_roles(config, tokenizer)
    scorer = make_scorer(config.reward_model)
    estimator, policy_loss = choose_estimator(config), choose_policy_loss(config)
    with ExitStack() as opened:
        loop = opened.enter_context(closing(run_loop(config, tokenizer)))
        train = read(config, tokenizer, "train", loop)
        val = read(config, tokenizer, "val", loop) if config.data.val_files else []
        verified = config.reward_model.rule_weight and config.actor_rollout_ref.rollout.agent.name in VERIFIED_AGENTS
        if read is read_prompts and verified:
            scorer.require_verifiers(prompt.task for prompt in [*train, *val])
        opened.pop_all()  # the tools stay
    return Inputs(tokenizer, loop, train, val, scorer, policy_loss, estimator)


def print_plan(config: RunConfig, num_train_prompts: int) -> None:
    """Print what the run will do, with the arithmetic spelled out.

    Raises:
        UserError: the batch sizes do not fit together.
    """
    plan = build_plan(config, num_train_prompts, read_model_facts(model_folder(config.actor_rollout_ref.model.path)))
    table = Table.grid(padding=(0, 2, 0, 0))
    table.title, table.title_justify, table.title_style = "plan", "left", "bold"
    for name, value in plan_rows(plan):
        table.add_row(name, value)
    console.print(table)


def build_run(
    config: RunConfig,
    run_dir: RunDir,
    inputs: Inputs,
    trackers: Trackers,
    first_step: int,
    watchdog: Watchdog,
    callbacks: Sequence[Callback] = (),
) -> Run:
    """Place the roles that the algorithm needs and assemble the run, as it starts anew until `restore` is called."""
    alerts = Alerts(config.trainer.alerts)
    store = CheckpointStore(run_dir.checkpoints, config.trainer.max_actor_ckpt_to_keep)
    rows = read_metrics(run_dir.metrics) if first_step > 1 else []
    keep_best = [KeepBest(config.trainer, rows, store)] if config.trainer.keep_best else []
    seed = config.trainer.seed if config.data.seed is None else config.data.seed
    loader = PromptLoader(inputs.train_prompts, config.data.train_batch_size, config.data.shuffle, seed)
    total_steps = num_steps(config, loader.steps_per_epoch)
    roles, is_local = needed_roles(config), config.trainer.placement == "local"
    device = devices.choose_device(config.trainer.device if is_local else "cpu").type
    profiler = ProcessProfiler(
        SpanRecorder(run_dir.timeline / "controller.json"),
        controller_request(config, run_dir.path, roles if is_local else (), device),
        lambda line: notice(line, style="red"),
        on_write=lambda: watchdog.put_off(WRITE_LIMIT_S),
    )
    placement = place_roles(
        config, run_dir, roles, inputs.tokenizer, inputs.policy_loss, total_steps, watchdog.renew, profiler
    )
    leave_loaded_alone()
    model, control = placement.roles.reward_model, config.algorithm.kl_ctrl
    target_kl = control.target_kl if control.type == "adaptive" else None
    rewards = Rewards(
        config.reward_model,
        inputs.scorer,
        None if model is None else model.score,
        config.actor_rollout_ref.rollout.response_length,
        profiler.spans.record_call,
    )
    engine = placement.roles.engine_of(Stage.ROLLOUT_GENERATE)
    profiler.replicas = engine.replicas
    is_seen = bool(engine.modules or engine.replicas)  # ranks show what they sample themselves
    return Run(
        config=config,
        run_dir=run_dir,
        store=store,
        placement=placement,
        tokenizer=inputs.tokenizer,
        token_pieces=TokenPieces(inputs.tokenizer),
        loop=replace(inputs.loop, show=_show_on(profiler.spans, config)) if inputs.loop.has_turns else inputs.loop,
        loader=loader,
        val_prompts=inputs.val_prompts,
        rewards=rewards,
        estimator=inputs.estimator,
        kl_control=KLControl(control.kl_coef, target_kl, control.horizon),
        profiler=RunProfiler(config, run_dir.path, profiler, placement, first_step, total_steps),
        tracks=ReplicaTracks(profiler.spans, engine.replica_stats, show=is_seen),
        display=StepDisplay(total_steps, first_step - 1, watch=watchdog.stage),
        trackers=trackers,
        alerts=alerts,
        callbacks=[*keep_best, *callbacks],
        total_steps=total_steps,
        first_step=first_step,
    )


def step_of_group(number: int, config: RunConfig) -> int:
    """Return the step that the asynchronous schedule samples a group for, where none is dropped on the way."""
    return number // config.data.train_batch_size + 1


def _show_on(spans: SpanRecorder, config: RunConfig) -> Callable[..., None]:
    """Return what shows turns and calls of tools on the timeline, in training under the step that they are for."""

    def show(stream: RunStream, name: str, wall_us: int, duration_s: float, **about: str | int) -> None:
        if stream[0] != "validate":
            number = int(stream[1])
            about["step"] = step_of_group(number, config) if config.trainer.schedule == "async" else number
        spans.record_call(name, wall_us, duration_s, **about)

    return show


def num_steps(config: RunConfig, steps_per_epoch: int) -> int:
    """Return the run's length in steps: `total_training_steps`, else `total_epochs` over the data."""
    return config.trainer.total_training_steps or config.trainer.total_epochs * steps_per_epoch
