"""`ReplicaSet`: where requests go, and what every replica gets; with native engines over copies of the built-in model."""

from dataclasses import replace

import pytest
import torch
from tiny import CPU, EOS

from pellucid.rollout.native import NativeRolloutEngine
from pellucid.rollout.native.copied import CopiedPolicy
from pellucid.rollout.replicas import ReplicaSet
from pellucid.rollout.requests import Request, SampleStream, SamplingParams, WeightUpdate, generate_all, run_sync
from pellucid.rollout.transports import WeightsDifferError, WeightStore
from pellucid.training.common.mini_batch import MicroBatching
from pellucid.training.common.models import load_model, load_tokenizer
from pellucid.training.fsdp import FsdpEngine

TOKENIZER = load_tokenizer("builtin")


def trainer() -> FsdpEngine:
    return FsdpEngine(load_model("builtin", device=CPU), None, MicroBatching(None, None), device=CPU, dtype=torch.float32)


def replica() -> NativeRolloutEngine:
    policy = CopiedPolicy(load_model("builtin", device=CPU), CPU, torch.float32)
    options = {"seed": 0, "max_num_seqs": 8, "max_num_batched_tokens": 64, "take_weights": policy.take_weights}
    return NativeRolloutEngine(policy, TOKENIZER, [EOS], **options)


def two_replicas(actor: FsdpEngine) -> ReplicaSet:
    engines = {"replica 0": replica(), "replica 1": replica()}
    return ReplicaSet(engines, lambda digests: WeightStore().send(actor.weights(1 << 12, digests=digests)))


def group(uid: str, count: int) -> list[Request]:
    params = SamplingParams(max_tokens=6)
    return [Request([5, 14, 6, 16], params, SampleStream(("rollout", 1), uid, sample)) for sample in range(count)]


def test_groups_are_spread_and_each_stays_on_its_replica():
    engines = two_replicas(trainer())
    requests = [one for uid in ("a", "b", "c", "d") for one in group(uid, 3)]
    answers = run_sync(generate_all(engines, requests))
    of_each = [engine.stats() for engine in engines.replicas.values()]
    assert [one.computed_tokens for one in of_each] == [8, 8], "each prompt is read once, on one of the two"
    again = run_sync(generate_all(replica(), requests))
    assert [one.token_ids for one in answers] == [one.token_ids for one in again], "where it runs changes no number"
    assert engines.stats().sampled_tokens == sum(len(one.token_ids) for one in answers)


def test_every_replica_gets_the_weights_and_one_left_out_is_named():
    actor = trainer()
    engines = two_replicas(actor)
    with torch.no_grad():
        actor.model.lm_head.weight.mul_(3.0)
    actor.version = 4
    run_sync(engines.load_weights(WeightUpdate(4)))
    assert engines.stats().version == 4 and engines.stats().weight_bytes > 0
    for engine in engines.replicas.values():
        [model] = engine.modules
        assert all(torch.equal(mine, own) for mine, own in zip(model.parameters(), actor.model.parameters(), strict=True))

    async def forget(update: WeightUpdate) -> None:
        """Keep the old weights."""

    engines.replicas["replica 1"].load_weights = forget
    with pytest.raises(WeightsDifferError, match="replica 1's 'policy version' has 4, and the trainer has sent 5"):
        run_sync(engines.load_weights(WeightUpdate(5)))


def test_a_tensor_that_arrives_changed_is_named_with_its_replica():
    actor, lost = trainer(), "model.layers.0.mlp.up_proj.weight"

    def altered():
        for bucket in actor.weights(1 << 12):
            tensors = {name: tensor.clone() for name, tensor in bucket.tensors.items()}
            if lost in tensors:
                tensors[lost][3, 5] += 1
            yield replace(bucket, tensors=tensors)

    engines = ReplicaSet({"replica 0": replica()}, lambda digests: WeightStore().send(altered()))
    with pytest.raises(WeightsDifferError, match=f"replica 0's '{lost}'"):
        run_sync(engines.load_weights(WeightUpdate(1)))
