"""`EngineProcess`: the native engine in a process of its own answers as it does in this one, and ends with this one."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import psutil
import pytest
import torch
from tiny import CPU, EOS

from pellucid.errors import RunFailedError
from pellucid.rollout.engine_process import EngineProcess
from pellucid.rollout.native import NativeRolloutEngine
from pellucid.rollout.native.copied import CopiedPolicy
from pellucid.rollout.requests import Request, SampleStream, SamplingParams, WeightUpdate, generate_all, run_sync
from pellucid.rollout.transports import WeightsDifferError, WeightStore
from pellucid.training.common.mini_batch import MicroBatching
from pellucid.training.common.models import load_model, load_tokenizer
from pellucid.training.fsdp import FsdpEngine

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("engine process")]
LONG = SamplingParams(max_tokens=200, ignore_eos=True)


def make_engine() -> NativeRolloutEngine:
    policy = CopiedPolicy(load_model("builtin", device=CPU), CPU, torch.float32)
    options = {"seed": 0, "max_num_seqs": 8, "max_num_batched_tokens": 64, "take_weights": policy.take_weights}
    return NativeRolloutEngine(policy, load_tokenizer("builtin"), [EOS], **options)


def trainer() -> FsdpEngine:
    return FsdpEngine(load_model("builtin", device=CPU), None, MicroBatching(None, None), device=CPU, dtype=torch.float32)


def requests(count: int, params: SamplingParams) -> list[Request]:
    return [Request([5, 14, 6, 16 + place], params, SampleStream(("rollout", 1), f"p{place}", 0)) for place in range(count)]


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineProcess]:
    engine = EngineProcess(make_engine)
    yield engine
    engine.close()
    assert not [one for one in psutil.Process().children() if "pellucid.rollout.engine_process" in one.cmdline()]


def test_it_answers_as_in_this_process(engine):
    asked, done = requests(5, SamplingParams(max_tokens=12, temperature=0.7)), []
    here = run_sync(generate_all(make_engine(), asked))
    there = run_sync(generate_all(engine, [replace(one, on_progress=done.append) for one in asked]))
    assert [(one.token_ids, one.logprobs, one.text) for one in there] == [(one.token_ids, one.logprobs, one.text) for one in here]
    assert sum(done) == 5 and engine.stats().sampled_tokens >= sum(len(one.token_ids) for one in there)


def test_many_requests_at_once_are_more_than_the_pipe_holds(engine):
    asked = [replace(one, token_ids=[5] * 1000) for one in requests(40, SamplingParams(max_tokens=1))]
    answers = run_sync(generate_all(engine, asked))
    assert len(answers) == 40 and all(len(one.token_ids) == 1 for one in answers)


def test_weights_change_on_the_way_and_aborted_requests_tell_what_they_drew(engine):
    actor = trainer()
    with torch.no_grad():
        actor.model.model.norm.weight.mul_(1.5)

    async def update_then_abort():
        task = asyncio.create_task(engine.generate(requests(1, LONG)[0]))
        drawn = engine.stats().sampled_tokens + 20
        while engine.stats().sampled_tokens < drawn:
            await asyncio.sleep(0.02)
        with WeightStore().send(actor.weights(1 << 14)) as handle:
            await engine.load_weights(WeightUpdate(7, handle, verify=True))
        answer = await task
        late = [asyncio.create_task(engine.generate(one)) for one in requests(2, LONG)]
        await asyncio.sleep(0.2)
        await engine.pause("abort")
        parts = await asyncio.gather(*late)
        await engine.resume()
        return answer, parts

    answer, parts = run_sync(update_then_abort())
    old = answer.versions.count(0)
    assert answer.versions == [0] * old + [7] * (200 - old) and 0 < old < 200
    assert all(part.finish_reason == "aborted" and set(part.versions) <= {7} for part in parts)
    others = (replace(bucket, digests=dict.fromkeys(bucket.digests, "0")) for bucket in actor.weights(1 << 14))
    with WeightStore().send(others) as handle, pytest.raises(WeightsDifferError, match="digest"):
        run_sync(engine.load_weights(WeightUpdate(8, handle, verify=True)))


def test_it_ends_with_the_trainer():
    code = (
        "import sys, time; sys.path.insert(0, 'tests/contract'); from test_engine_process import make_engine\n"
        "from pellucid.rollout.engine_process import EngineProcess\n"
        "engine = EngineProcess(make_engine); print(engine._process.pid, flush=True); time.sleep(60)"
    )
    trainer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=dict(os.environ))
    assert trainer.stdout is not None
    child = psutil.Process(int(trainer.stdout.readline()))
    trainer.kill()
    trainer.wait()
    child.wait(10)


def test_what_making_it_raises_is_raised_here():
    with pytest.raises(ZeroDivisionError):
        EngineProcess(partial(divmod, 1, 0))


def test_a_dead_process_is_said_to_those_who_wait(engine):

    async def kill_it():
        task = asyncio.create_task(engine.generate(requests(1, LONG)[0]))
        await asyncio.sleep(0.1)
        engine._process.kill()
        with pytest.raises(RunFailedError, match=r"process has died \(exit status -9\)"):
            await task
        with pytest.raises(RunFailedError, match="has died"):
            await engine.resume()

    run_sync(kill_it())
