"""The schedule `async`: groups are sampled and scored without end, beside training.

    prompts ─► group under way ─► finished group ─► the oldest ones, a batch ─► learn ─► weights, at once
       ▲             (as many as can be trained on before they are too old)                 │
       └──────────────────────────── groups are let in as others leave, and with new weights┘

A thread with an event loop of its own drives the groups; `take` waits for it in the trainer's thread. Whatever is
started is trained on, the oldest first: a group that would be too old for the next step is waited for, so that long
answers are as likely to be learned from as short ones.
"""

import asyncio
import threading
from bisect import bisect_right
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from time import perf_counter
from typing import Any

from pellucid.agents.llm import Sample
from pellucid.errors import UserError
from pellucid.files.journal import Journal
from pellucid.files.json_lines import write_lines
from pellucid.files.trajectories import read_rollout, read_score, read_turn, rollout_record, score_record
from pellucid.produce import batch, has_spread, num_tokens, sample_metrics, sampling_params
from pellucid.reward.scorer import require_scores
from pellucid.rollout.requests import Completion, PauseMode, Request, RolloutEngine, Trajectory, end_other_tasks
from pellucid.run import Run, step_of_group
from pellucid.run_state import progress_kept
from pellucid.schedules import AHEAD_FILE, Job, Produced, Schedule, overlap_metrics, read_ahead
from pellucid.stages import Stage
from pellucid.types import Prompt, Rollout, Score

POLL_S = 0.2
"""How often a trainer that waits looks whether something went wrong."""
AGAIN_S = 5.0
"""How long to wait for the answers to aborted requests before they are aborted again."""
_DRAWN = ("token_ids", "logprobs", "versions")
"""What was drawn of a sample that was begun."""


@dataclass(slots=True, eq=False)
class Group:
    """The samples of a prompt, on their way to a step."""

    number: int
    """How many groups were started before it; names its random numbers."""
    prompt: Prompt
    version: int
    """Of its oldest token; while it is under way, of the weights when it began: no token can be older."""
    samples: list[Sample]
    rollouts: dict[int, Rollout] = field(default_factory=dict)
    """Those that are finished, by index."""
    scores: list[Score] | None = None
    """One a rollout, when all are scored."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the reward calls."""


class _Valve:
    """The rollout engine as groups see it: it can be closed, and knows how long requests were under way."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine, self._open = engine, asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.num_under_way = 0
        self._busy_s, self._since = 0.0, perf_counter()

    async def generate(self, request: Request) -> Completion:
        """Answer a request, as soon as the valve is open."""
        await self._open.wait()
        self._count(1)
        try:
            return await self._engine.generate(request)
        finally:
            self._count(-1)

    async def release(self, trajectory: Trajectory) -> None:
        """Forget the cache kept for a trajectory."""
        await self._engine.release(trajectory)

    def _count(self, change: int) -> None:
        self.take_busy_s(forget=False)
        self.num_under_way += change
        self._idle.clear() if self.num_under_way else self._idle.set()

    def take_busy_s(self, *, forget: bool = True) -> float:
        """Return the seconds in which requests were under way since they were last forgotten."""
        now = perf_counter()
        self._busy_s, self._since = self._busy_s + (now - self._since) * (self.num_under_way > 0), now
        busy_s = self._busy_s
        if forget:
            self._busy_s = 0.0
        return busy_s

    async def stop(self) -> None:
        """Close, and return when every request under way is answered with what was drawn so far."""
        self._open.clear()
        await self._engine.pause("abort")
        while self.num_under_way:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), AGAIN_S)
            if self.num_under_way:  # a request on its way to another process may have come there after the pause
                await self._engine.pause("abort")

    async def go_on(self) -> None:
        """Open again."""
        await self._engine.resume()
        self._open.set()


class Stream(Schedule):
    """Groups under way and finished, in the order in which they began."""

    def __init__(self, run: Run, job: Job) -> None:
        """Go on with the groups that the checkpoint holds, if the run was resumed from one."""
        self._run, self._job = run, job
        rollout, trainer = run.config.actor_rollout_ref.rollout, run.config.trainer
        self._params = sampling_params(rollout, rollout)
        self._update: PauseMode = rollout.update
        self._batch, self._staleness = run.config.data.train_batch_size, trainer.max_staleness
        self._changed = threading.Condition()
        """Guards what follows, up to the lengths, and is told of all that is heard of groups."""
        self._groups: dict[int, Group] = {}
        self._error: BaseException | None = None
        self._num_beats = self._num_finished = self._num_awaited = 0
        self._prompts: list[Prompt] = []
        """Drawn from the loader, and not begun."""
        self._num_started = 0
        self._num_unanswered = 0
        """Samples of groups that were started, for which the engine has no answer yet."""
        self._places = (rollout.max_num_seqs + rollout.n) * max(1, len(run.rollout_engine.replicas))
        """Samples that the engine decodes at once, and a group to wait at each replica: more would grow old there."""
        self._published = [run.actor.version]
        """The newest versions that the engine was given."""
        self._num_steps = self._staleness + 1
        """Steps for which a group that begins now is new enough: while one is under way, its weights count already."""
        self._left = self._batch * (run.total_steps - run.first_step + 1)
        """Groups that the rest of the run trains on."""
        self._num_dropped = self._num_without_spread = 0
        self._lengths = {"trained": (0, 0), "finished": (0, 0)}
        """Sampled tokens and samples since the start."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._scoring = ThreadPoolExecutor(1, thread_name_prefix="score")
        self._loop = asyncio.new_event_loop()
        self._valve = _Valve(run.rollout_engine)
        self._began = self._taken = perf_counter()
        saved = read_ahead(run)
        self._journal = Journal(run.run_dir.path / "journal", run.actor.version, resumed=bool(saved))
        if saved:
            self._restore(*saved)
        self._thread = threading.Thread(target=self._loop.run_forever, name="produce", daemon=True)
        self._thread.start()
        for group in list(self._groups.values()):
            if group.scores is None:
                self._loop.call_soon_threadsafe(self._start, group)
        self._loop.call_soon_threadsafe(self._fill)

    # In the event loop's thread

    def _fill(self) -> None:
        """Let in as many groups as the engine has places for, and the steps for which its weights are new enough.

        Those that were begun before a kill do not wait for places.
        """
        with self._changed:
            room = min(self._batch * self._num_steps, self._left)
            while len(self._groups) < room and (
                self._num_unanswered < self._places or self._num_started <= self._journal.newest
            ):
                if not self._prompts:
                    self._prompts = self._run.loader.next_batch()
                self._begin(self._prompts.pop(0))

    def _begin(self, prompt: Prompt) -> None:
        number, self._num_started = self._num_started, self._num_started + 1
        samples = [Sample(prompt, index, ("rollout", number)) for index in range(self._params.n)]
        group = self._groups[number] = Group(number, prompt, self._published[-1], samples)
        self._start(group)

    def _start(self, group: Group) -> None:
        if found := self._journal.take(group.number, group.prompt):
            group.rollouts |= {one.sample: one for one in found}
            group.version = min(group.version, _oldest(found))
        self._num_unanswered += len(group.samples) - len(group.rollouts)
        task = self._loop.create_task(self._produce(group))
        self._tasks.add(task)
        task.add_done_callback(self._end)

    def _end(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    async def _produce(self, group: Group) -> None:
        """Sample what is left of a group and score it."""

        async def sample(each: Sample) -> None:
            if each.sample not in group.rollouts:
                rollout = await self._run.loop.roll_out(self._valve, each, self._params, self._progress)
                group.rollouts[each.sample] = rollout
                self._journal.note(group.number, rollout)
                self._num_unanswered -= 1
                self._fill()

        await asyncio.gather(*map(sample, group.samples))
        rollouts = [group.rollouts[index] for index in range(self._params.n)]
        scores, metrics = await self._loop.run_in_executor(self._scoring, self._score, rollouts, group.number)
        with self._changed:
            group.scores, group.metrics = scores, metrics
            group.version = _oldest(rollouts)
            self._count("finished", rollouts)
            filtering = self._run.config.algorithm.filter_groups
            if filtering.enable and not has_spread(list(zip(rollouts, scores)), filtering.metric):
                del self._groups[group.number]
                self._num_without_spread += 1
                self._fill()
            self._num_finished += 1
            if self._num_finished >= self._num_awaited:  # the trainer looks at all groups each time
                self._changed.notify_all()

    def _score(self, rollouts: list[Rollout], number: int) -> tuple[list[Score], dict[str, float]]:
        step = step_of_group(number, self._run.config)
        return self._run.rewards.score(rollouts, lambda *_: nullcontext(lambda _: None), step=step, in_part=True)

    def _progress(self, _: int) -> None:
        self._num_beats += 1  # seen within POLL_S

    async def _snapshot(self) -> list[dict[str, Any]]:
        """Return all that a resumed run goes on from; requests under way are aborted for it, and then go on."""
        await self._valve.stop()
        with self._changed:
            self._journal.begin(self._run.actor.version)
            about = {
                "schedule": "async",
                "num_samples": self._params.n,
                "loader": self._run.loader.state_dict(),
                "prompts": [prompt.uid for prompt in self._prompts],
                "num_started": self._num_started,
                "published": self._published,
                "lengths": self._lengths,
            }
            groups = [_group_record(group) for group in self._groups.values()]
        await self._valve.go_on()
        return [about, *groups]

    async def _take_busy_s(self) -> float:
        return self._valve.take_busy_s()

    # In the trainer's thread

    def take(self, step: int) -> Produced:
        """Return the oldest groups that are finished, as soon as there are enough, and none is left behind too old."""
        self._began = perf_counter()
        with progress_kept(self._run, step, None, self.save):
            groups = self._wait(step)
        self._taken = perf_counter()
        return self._batch_of(groups)

    def _wait(self, step: int) -> list[Group]:
        total, shown, beats = self._batch * self._params.n, 0, -1
        with self._run.stage(Stage.ROLLOUT_GENERATE, step, total) as advance, self._changed:
            while True:
                if self._error is not None:
                    raise self._error
                self._drop_old()
                self._check_spread()
                finished = [group for group in self._groups.values() if group.scores is not None]
                begun = [group for group in self._groups.values() if group.scores is None]
                is_due = any(self._age(group) >= self._staleness for group in begun)
                done = min(len(finished), self._batch) * self._params.n
                if beats != self._num_beats or done != shown:
                    advance(done - shown)
                    shown, beats = done, self._num_beats
                if len(finished) >= self._batch and not is_due:
                    break
                self._num_finished, self._num_awaited = len(finished), max(self._batch, len(finished) + 1)
                self._changed.wait(POLL_S)
            finished.sort(key=lambda group: (group.version, group.number))
            taken = finished[: self._batch]
            require_scores([score for group in taken for score in group.scores or ()])
            for group in taken:
                del self._groups[group.number]
                self._count("trained", list(group.rollouts.values()))
            self._left -= len(taken)
            self._num_steps = self._staleness
        self._loop.call_soon_threadsafe(self._fill)
        return taken

    def _age(self, group: Group) -> int:
        """Return how many updates came after the weights of the group's oldest token."""
        return len(self._published) - bisect_right(self._published, group.version)

    def _drop_old(self) -> None:
        """Drop finished groups that are too old even for the next step, and draw their prompts again."""
        for group in list(self._groups.values()):
            if group.scores is not None and self._age(group) > self._staleness:
                del self._groups[group.number]
                self._num_dropped += 1
                self._prompts.insert(0, group.prompt)
                self._loop.call_soon_threadsafe(self._fill)

    def _check_spread(self) -> None:
        limit = self._run.config.algorithm.filter_groups.max_num_gen_batches
        if limit and self._num_without_spread >= limit * self._batch:
            raise UserError(
                "algorithm.filter_groups.max_num_gen_batches",
                f"{self._num_without_spread} groups in which all samples got the same were dropped for one step: the "
                "problems are too easy or too hard for the policy.",
                "Raise it (0 = no limit), raise rollout.n, or change the data's difficulty.",
            )

    def _count(self, which: str, rollouts: list[Rollout]) -> None:
        tokens, samples = self._lengths[which]
        self._lengths[which] = tokens + sum(one.num_sampled for one in rollouts), samples + len(rollouts)

    def _batch_of(self, groups: list[Group]) -> Produced:
        rollouts = [group.rollouts[index] for group in groups for index in range(self._params.n)]
        scores = [score for group in groups for score in group.scores or ()]
        samples, metrics = batch(self._run, rollouts, scores), dict[str, float]()
        for group in groups:
            metrics = {name: metrics.get(name, 0.0) + value for name, value in group.metrics.items()}
        with self._changed:
            trained, finished = (tokens / samples for tokens, samples in self._lengths.values())
            metrics |= {
                "async/length_bias": trained / finished,
                "async/dropped_groups": float(self._num_dropped),
                "async/waiting_groups": float(sum(group.scores is not None for group in self._groups.values())),
            }
            if self._run.config.algorithm.filter_groups.enable:
                metrics["batch/num_groups_dropped"] = float(self._num_without_spread)
            self._num_dropped = self._num_without_spread = 0
        metrics |= sample_metrics(rollouts, scores, has_turns=self._run.loop.has_turns)
        return samples, metrics | {"perf/total_num_tokens": num_tokens(rollouts)}

    def publish(self, step: int) -> dict[str, float]:
        """Hand over the new weights, at once."""
        learned = perf_counter()
        metrics = self._job.publish(self._run, step, self._update)
        with self._changed:
            self._published = [*self._published, self._run.actor.version][-self._staleness - 2 :]
            self._num_steps = self._staleness + 1
        self._loop.call_soon_threadsafe(self._fill)
        busy_s = asyncio.run_coroutine_threadsafe(self._take_busy_s(), self._loop).result()
        return metrics | overlap_metrics(busy_s, learned - self._taken, perf_counter() - self._began)

    def save(self, folder: Path) -> None:
        """Write all groups, with what was drawn of those under way."""
        lines = asyncio.run_coroutine_threadsafe(self._snapshot(), self._loop).result()
        write_lines(folder / AHEAD_FILE, lines)

    def _restore(self, about: dict[str, Any], *groups: dict[str, Any]) -> None:
        loader = self._run.loader
        loader.load_state_dict(about["loader"])
        self._prompts = [loader.prompt(uid) for uid in about["prompts"]]
        self._num_started, self._published = about["num_started"], about["published"]
        self._lengths = {name: (tokens, samples) for name, (tokens, samples) in about["lengths"].items()}
        if (num_samples := about["num_samples"]) != self._params.n:
            raise UserError(
                "actor_rollout_ref.rollout.n",
                f"is {self._params.n}, but '{self._run.restored}' holds groups of {num_samples} under way.",
                f"Resume with {num_samples}, or start a new run from the weights that `pellucid export` makes of it.",
            )
        for record in groups:
            self._groups[record["number"]] = _read_group(record, loader.prompt(record["uid"]))

    def close(self) -> None:
        """Leave the groups under way."""
        asyncio.run_coroutine_threadsafe(end_other_tasks(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._journal.close()
        self._scoring.shutdown(wait=False, cancel_futures=True)


def _oldest(rollouts: Iterable[Rollout]) -> int:
    """Return the version that drew the oldest token."""
    parts = chain.from_iterable(rollout.parts for rollout in rollouts)
    return min((version for part in parts for version in part.versions if version >= 0), default=0)


def _group_record(group: Group) -> dict[str, Any]:
    """Return a group as plain JSON values."""
    begun = [each for each in group.samples if each.sample not in group.rollouts]
    is_scored = all(score.failure is None for score in group.scores or ())  # a failed call is made again
    return {
        "number": group.number,
        "uid": group.prompt.uid,
        "version": group.version,
        "num_samples": len(group.samples),
        "begun": [
            {"sample": each.sample, "seconds": each.seconds, "turns": list(map(asdict, each.turns))}
            | {name: list(getattr(each, name)) for name in _DRAWN}
            for each in begun
        ],
        "rollouts": [rollout_record(rollout) for rollout in group.rollouts.values()],
        "scores": list(map(score_record, group.scores)) if group.scores and is_scored else None,
        "metrics": group.metrics,
    }


def _read_group(record: dict[str, Any], prompt: Prompt) -> Group:
    """Return the group that `_group_record` described."""
    stream, begun = ("rollout", record["number"]), {each["sample"]: each for each in record["begun"]}
    for each in begun.values():
        each["turns"] = [read_turn(turn) for turn in each["turns"]]
    samples = [
        Sample(prompt, stream=stream, **begun.get(index, {"sample": index})) for index in range(record["num_samples"])
    ]
    rollouts = [read_rollout(each, prompt) for each in record["rollouts"]]
    scores = None if record["scores"] is None else list(map(read_score, record["scores"]))
    by_index = {rollout.sample: rollout for rollout in rollouts}
    return Group(record["number"], prompt, record["version"], samples, by_index, scores, record["metrics"])
