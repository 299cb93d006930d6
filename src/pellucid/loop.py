"""The training loop: the whole of a run, from the first validation to the last checkpoint.

              produce                                            learn
    prompts ─► rollout engine ─► rewards ── samples ──► log-probs, values ─► advantages ─► correction ─► updates
                    ▲                                                                                       │
                    └───────────────────────── weights of the new version ◄─────────────────────────────────┘

What waits for what is the schedule's (`schedules.py`); time goes to the right, v1 are the weights after one update:

    sync           produce 1 │ learn 1 ─► v1 │ produce 2 │ learn 2 ─► v2 │ …
    one_step_off   produce 1 │ learn 1 ─► v1 │ learn 2 ─► v2 │ …
                             │ produce 2     │ produce 3     │ …         each batch from the weights at its line's start
    async          produce ─────────────────────────────────────────►    never stops; weights come on the way
                     └─ learn 1 ─► v1 ─ learn 2 ─► v2 ─ …                from the oldest groups that are finished

`take` returns what a step learns from as soon as the schedule allows it, `publish` hands the new weights to the rollout
engine. `run.py` makes the `Run` that this file drives; what a job's parts do is in `produce.py`, `learn.py` and
`validation.py` for reinforcement learning, in `sft.py` for supervised fine-tuning.
"""

from contextlib import closing

from pellucid.console import console
from pellucid.errors import RunFailedError
from pellucid.interrupt import StopRequested, stop_on_signals
from pellucid.run import Run
from pellucid.run_state import is_due, save_checkpoint
from pellucid.schedules import Job, OneStepOff, Sync
from pellucid.stages import ROLE_OF, Stage
from pellucid.stream import Stream

SCHEDULES = {"sync": Sync, "one_step_off": OneStepOff, "async": Stream}
"""By `trainer.schedule`."""


def train(run: Run, job: Job) -> None:
    """Train from `run.first_step` to `run.total_steps`.

    Raises:
        StopRequested: Ctrl-C or SIGTERM; the step in hand was finished and its checkpoint written first.
        NonFiniteError: NaN or Inf in an update; the batch was saved.
        RunFailedError: an alert whose action is to stop; the checkpoint of its step was written first.
    """
    trainer, schedule = run.config.trainer, SCHEDULES[run.config.trainer.schedule]
    with stop_on_signals() as stop, run.display, run.store, closing(schedule(run, job)) as schedule:
        if run.first_step == 1 and trainer.val_before_train and run.val_prompts:
            run.log(0, job.validate(run, 0) | run.spans.step_timings())
        for step in range(run.first_step, run.total_steps + 1):
            epoch = run.loader.epoch
            with run.profiler.step(step):
                payload, metrics = schedule.take(step)
                metrics |= job.learn(run, payload, step)
                metrics |= schedule.publish(step)
            metrics |= {"training/global_step": step, "training/epoch": epoch}
            last = step == run.total_steps
            if run.val_prompts and (last or is_due(step, trainer.test_freq)):
                metrics |= job.validate(run, step)
            # The line goes out before the checkpoint: a kill in between repeats step and line, and loses neither.
            asked = run.log(step, metrics | speed_metrics(run, step, metrics["perf/total_num_tokens"]))
            stopping = bool(stop)
            if last or stopping or is_due(step, trainer.save_freq) or asked & {"checkpoint", "stop", "end"}:
                with run.stage(Stage.SAVE_CHECKPOINT, step):
                    save_checkpoint(run, step, schedule.save)
            if stopping and not last:
                console.print(
                    f"stopped after step {step}; checkpoint written. {run.total_steps - step} steps remain: "
                    "start the same command again to continue.",
                    markup=False,
                )
                raise StopRequested(stop[0])
            if "end" in asked and not last:
                console.print(f"ended after step {step}, as asked, with {run.total_steps - step} left.", markup=False)
                return
            if "stop" in asked and not last:
                raise RunFailedError(f"an alert has stopped the run after step {step}; its checkpoint was written.")


_TRAINING_STAGES = [stage for stage, role in ROLE_OF.items() if role not in ("rollout", "controller")]


def speed_metrics(run: Run, step: int, num_tokens: float) -> dict[str, float]:
    """Return timings since the last call, throughput and utilisation.

    Args:
        run: whose spans and engines are read and reset.
        step: whose spans; those of a batch that is sampled ahead are its own step's.
        num_tokens: prompt and response tokens of the step's samples.
    """
    timings = run.spans.step_timings(step)
    training_s = sum(timings.get(f"timing_s/{stage}", 0.0) for stage in _TRAINING_STAGES)
    flops, placement = run.roles.take_flops(), run.placement
    step_s = timings["timing_s/step"]
    speed = {
        "perf/time_per_step": step_s,
        "perf/throughput": num_tokens / step_s / placement.num_ranks,
        "perf/mfu": flops / training_s / placement.peak_flops() if training_s else 0.0,
    }
    return timings | run.tracks.step_metrics() | speed | placement.memory_gb()
