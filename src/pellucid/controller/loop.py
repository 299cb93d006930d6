"""The training loop: the whole of a run, from the first validation to the last checkpoint.

            prompts                  tokens + log-probs            + rewards
    loader ─────────► rollout engine ──────────────────► rewards ────────────┐
                            ▲                                                ▼
                            │ the actor's current weights  old log-probs (actor), reference log-probs, values (critic)
                            │                                                │
                            │                                                ▼
                      actor.update ◄──── critic.update ◄──── correction ◄── advantages

One step after the other, each stage waiting for the one before: nothing is sampled from weights older than the last update.
`build.py` makes the `Run` this file drives; the stages themselves are in `step.py`.
"""

from pellucid.console import console
from pellucid.controller.build import Run
from pellucid.controller.checkpointing import is_due, save_checkpoint, saves_finished
from pellucid.controller.interrupt import StopRequested, stop_on_signals
from pellucid.controller.step import train_step
from pellucid.controller.step_metrics import speed_metrics
from pellucid.controller.validation import validate
from pellucid.stages import Stage


def train(run: Run) -> None:
    """Train from `run.first_step` to `run.total_steps`.

    Raises:
        StopRequested: Ctrl-C or SIGTERM; the step in hand was finished and its checkpoint written first.
        NonFiniteError: NaN or Inf in an update; the batch was saved.
    """
    trainer = run.config.trainer
    with stop_on_signals() as stop, run.display, saves_finished(run):
        if run.first_step == 1 and trainer.val_before_train and run.val_prompts:
            run.log(0, validate(run, step=0) | run.spans.step_timings())
        for step in range(run.first_step, run.total_steps + 1):
            with run.profiler.step(step):
                metrics = train_step(run, step)
            last = step == run.total_steps
            if run.val_prompts and (last or is_due(step, trainer.test_freq)):
                metrics |= validate(run, step=step)
            # The line goes out before the checkpoint: a kill in between repeats the step and its line, and loses neither.
            run.log(step, metrics | speed_metrics(run, metrics["perf/total_num_tokens"]))
            stopping = stop.requested
            if last or stopping or is_due(step, trainer.save_freq):
                with run.stage(Stage.SAVE_CHECKPOINT, step):
                    save_checkpoint(run, step)
            if stopping and not last:
                console.print(
                    f"stopped after step {step}; checkpoint written. {run.total_steps - step} steps remain: "
                    "start the same command again to continue.",
                    markup=False,
                )
                raise StopRequested(stop.signal_number)
