"""Weights by a broadcast, to replicas in processes of their own; what goes wrong on the way is said, and at once."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace

import psutil
import pytest
import torch
from test_engine_process import make_engine, requests, trainer

from pellucid.errors import RunFailedError
from pellucid.rollout.collective import Broadcaster, address_towards
from pellucid.rollout.engine_process import EngineProcess
from pellucid.rollout.replicas import ReplicaSet
from pellucid.rollout.requests import SamplingParams, WeightUpdate, generate_all, run_sync
from pellucid.rollout.transports import WeightHandle, WeightsDifferError, parse_handle
from pellucid.training.protocol import WeightBucket

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("engine process")]
NORM = "model.norm.weight"


class Sent:
    """Two replicas, and what goes to them."""

    def __init__(self) -> None:
        self.actor = trainer()
        self.spoil: Callable[[Iterator[WeightBucket]], Iterator[WeightBucket]] = iter
        self.processes = [EngineProcess(make_engine) for _ in range(2)]
        broadcaster = Broadcaster("127.0.0.1", 2, "gloo")
        replicas = {f"replica {index}": one for index, one in enumerate(self.processes)}

        def send(digests: bool) -> AbstractContextManager[WeightHandle]:
            return broadcaster.send(self.spoil(self.actor.weights(1 << 14, digests=digests)))

        self.engines = ReplicaSet(replicas, send, "always")

    def update(self, version: int) -> None:
        with torch.no_grad():
            self.actor.model.model.norm.weight.mul_(1.5)
        self.actor.version = version
        run_sync(self.engines.load_weights(WeightUpdate(version)))


@pytest.fixture(scope="module")
def sent() -> Iterator[Sent]:
    sent = Sent()
    yield sent
    sent.engines.close()


def logprobs_of(engine) -> list[list[float]]:
    return [one.logprobs for one in run_sync(generate_all(engine, requests(3, SamplingParams(max_tokens=8))))]


def test_each_replica_samples_from_each_update(sent: Sent):
    seen = []
    for version in (1, 2):
        sent.update(version)
        here = make_engine()
        here.modules[0].load_state_dict(sent.actor.model.state_dict())
        seen.append(logprobs_of(here))
        assert all(logprobs_of(replica) == seen[-1] for replica in sent.processes)
    assert seen[0] != seen[1]
    assert sent.engines.stats().weight_bytes >= 2 * sum(one.nbytes for one in sent.actor.model.parameters())


def test_a_bucket_that_arrives_changed_is_named_and_the_next_update_goes_on(sent: Sent):
    def altered(buckets: Iterator[WeightBucket]) -> Iterator[WeightBucket]:
        for bucket in buckets:
            yield replace(bucket, tensors={name: one + (name == NORM) for name, one in bucket.tensors.items()})

    sent.spoil = altered
    with pytest.raises(WeightsDifferError, match=f"replica .'s '{NORM}'"):
        sent.update(3)
    sent.spoil = iter
    sent.update(4)
    assert sent.engines.stats().version == 4


def test_what_the_trainer_raises_on_the_way_is_raised(sent: Sent):
    def torn(buckets: Iterator[WeightBucket]) -> Iterator[WeightBucket]:
        yield next(buckets)
        raise ZeroDivisionError("no more")

    sent.spoil = torn
    with pytest.raises(ZeroDivisionError, match="no more"):
        sent.update(5)
    sent.spoil = iter
    sent.update(6)


def test_a_replica_that_dies_in_the_middle_is_said_at_once(sent: Sent):
    def deadly(buckets: Iterator[WeightBucket]) -> Iterator[WeightBucket]:
        for index in itertools.count():
            if index == 2:
                sent.processes[1]._process.kill()
                sent.processes[1]._process.wait()
            yield next(buckets)

    sent.spoil = deadly
    with pytest.raises(RunFailedError, match=r"process has died|no weights come from 127.0.0.1:\d+ any more"):
        sent.update(7)


def test_more_workers_than_the_run_counts_are_told_what_to_set():
    broadcaster = Broadcaster("127.0.0.1", 0, "gloo")
    with broadcaster.trial() as handle, pytest.raises(RunFailedError, match=r"more than the 0 .* set tensor_model_parallel_size"):
        next(parse_handle(handle.to_json()).buckets())


def test_it_listens_on_one_address_alone():
    broadcaster = Broadcaster(address_towards("127.0.0.1"), 1, "gloo")
    with broadcaster.trial() as handle:
        listening = [one.laddr for one in psutil.Process().net_connections("inet") if one.status == psutil.CONN_LISTEN]
        assert [one.ip for one in listening if one.port == handle.port] == ["127.0.0.1"]
        assert handle.is_in_reach() and not replace(handle, port=1).is_in_reach()
