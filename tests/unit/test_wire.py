"""What travels between controller and ranks arrives as it left, and large things lie in shared memory once."""

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from test_payloads import ROLLOUTS, SCORES, train_batch

from pellucid.ranks.wire import SENT_WITH_CALL_BYTES, SharedMemory
from pellucid.rollout.requests import Completion
from pellucid.types import LogProbs


class Store:
    """An object store that copies what is put, as Ray's does, and counts it."""

    def __init__(self) -> None:
        self.objects: list[bytes] = []

    def put(self, value: Any) -> int:
        self.objects.append(pickle.dumps(value))
        return len(self.objects) - 1

    def get(self, refs: Any) -> Any:
        return [self.get(ref) for ref in refs] if isinstance(refs, list) else pickle.loads(self.objects[refs])


@pytest.fixture
def store() -> Store:
    return Store()


def sent(parcel: Any) -> Any:
    """The parcel in the process that it went to."""
    return pickle.loads(pickle.dumps(parcel))


def test_a_batch_arrives_whole(store):
    batch = train_batch()
    arrived, number = SharedMemory(store).unpack(sent(SharedMemory(store).pack((batch, 7))))
    assert number == 7 and type(arrived) is type(batch) and arrived.scores == SCORES
    assert arrived.tensors().keys() == batch.tensors().keys()
    assert all(torch.equal(tensor, arrived.tensors()[name]) for name, tensor in batch.tensors().items())
    for one, other in zip(ROLLOUTS, arrived.rollouts):
        for name in ("token_ids", "sampled", "logprobs", "versions"):
            assert list(getattr(other, name)) == list(getattr(one, name)), name
        assert (other.sample, other.turns, other.finish_reason, other.text) == (
            one.sample,
            one.turns,
            one.finish_reason,
            one.text,
        )
        assert (other.prompt.uid, other.prompt.token_ids, other.prompt.messages) == (
            one.prompt.uid,
            one.prompt.token_ids,
            one.prompt.messages,
        )
        assert other.prompt.answer is None, "what only the reward reads stays with the controller"


def test_what_is_there_is_not_put_again(store):
    controller, rank = SharedMemory(store), SharedMemory(store)
    batch = train_batch()
    first = controller.pack(batch)
    num_put = len(store.objects)
    assert num_put == len({id(tensor) for tensor in batch.tensors().values()}) + 2, "tensors, rollouts and scores"
    assert controller.pack(batch).refs == first.refs and len(store.objects) == num_put
    returned = controller.unpack(sent(rank.pack(LogProbs(torch.ones(4, 4)))))
    assert torch.equal(returned.logp, torch.ones(4, 4)) and len(store.objects) == num_put + 1
    controller.pack(replace(batch, old_logp=returned.logp))
    assert len(store.objects) == num_put + 1, "a rank's result goes to the next role without a copy"
    controller.pack(replace(batch, rollouts=batch.rollouts[::-1]))
    assert len(store.objects) == num_put + 2


def test_completions_arrive_as_views_of_arrays(store):
    answers = [Completion([4, 5], [-0.5, -0.25], [3, 4], "stop", "ab"), Completion([], [], [], "aborted", "")]
    parcel = SharedMemory(store).pack(answers)
    arrived = SharedMemory(store).unpack(sent(parcel))
    assert len(parcel.refs) == 1
    for one, other in zip(answers, arrived, strict=True):
        assert [list(other.token_ids), list(other.logprobs), list(other.versions)] == [
            one.token_ids,
            one.logprobs,
            one.versions,
        ]
        assert (other.finish_reason, other.text) == (one.finish_reason, one.text)
        assert isinstance(other.token_ids, memoryview) and np.asarray(other.logprobs).dtype == np.float32


def test_many_bytes_are_put_once_and_few_travel_with_the_call(store):
    few, many = "x" * 100, "x" * SENT_WITH_CALL_BYTES
    assert SharedMemory(store).unpack(sent(SharedMemory(store).pack(few))) == few and not store.objects
    parcel = SharedMemory(store).pack(many)
    assert len(store.objects) == 1 and len(pickle.dumps(parcel)) < 1000
    assert SharedMemory(store).unpack(sent(parcel)) == many
