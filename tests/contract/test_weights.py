"""Weights on their way from a training engine to a rollout engine: buckets, digests, transports, and who checks them."""

import multiprocessing
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import xxhash
from tiny import CPU, EOS, tiny_model

from pellucid.agents.llm import sample_rollouts
from pellucid.rollout.native import NativeRolloutEngine
from pellucid.rollout.native.copied import CopiedPolicy, GatheredPolicy
from pellucid.rollout.requests import SamplingParams, WeightUpdate, run_sync
from pellucid.rollout.transports import WeightsDifferError, WeightStore, load_buckets, parse_handle
from pellucid.training.common.buckets import tensor_digest
from pellucid.training.common.lora import add_lora
from pellucid.training.common.mini_batch import MicroBatching
from pellucid.training.common.models import load_tokenizer, model_tensors
from pellucid.training.fsdp import FsdpEngine
from pellucid.training.protocol import WeightBucket
from pellucid.types import Prompt

NAME = "model.layers.1.mlp.up_proj.weight"


def trainer(*, seed: int = 0, architecture: str = "llama_tied") -> FsdpEngine:
    return FsdpEngine(tiny_model(architecture, seed=seed), None, MicroBatching(None, None), device=CPU, dtype=torch.float32)


def tensors_of(engine: FsdpEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model_tensors(engine.model).items()}


def altered(buckets, name: str = NAME):
    """Yield the buckets with one bit of one tensor changed on the way."""
    for bucket in buckets:
        tensors = {each: tensor.clone() for each, tensor in bucket.tensors.items()}
        if name in tensors:
            tensors[name].view(torch.int32)[3, 5] ^= 1
        yield WeightBucket(tensors, bucket.digests)


@pytest.mark.parametrize("bucket_bytes", [1, 10_000, 1 << 30])
def test_buckets_hold_each_tensor_once_and_are_no_larger_than_asked_for(bucket_bytes):
    engine = trainer()
    buckets = list(engine.weights(bucket_bytes))
    assert [name for bucket in buckets for name in bucket.tensors] == list(tensors_of(engine))
    for bucket in buckets:
        size = sum(tensor.nbytes for tensor in bucket.tensors.values())
        assert size <= bucket_bytes or len(bucket.tensors) == 1
    assert (len(buckets) == 1) == (bucket_bytes == 1 << 30)


def test_digests_are_those_of_the_bytes():
    tensor = torch.arange(12, dtype=torch.bfloat16).view(3, 4)
    data = tensor.t().contiguous().view(torch.int16).numpy().tobytes()
    assert tensor_digest(tensor.t()) == xxhash.xxh64(data).hexdigest() != tensor_digest(tensor)
    assert tensor_digest(torch.empty(0)) == xxhash.xxh64(b"").hexdigest()


def test_under_lora_the_adapters_alone_travel():
    pytest.importorskip("peft")
    engine = trainer()
    add_lora(engine.model, rank=2, alpha=4, target_modules="all-linear", seed=0)
    [bucket] = engine.weights(1 << 30)
    assert bucket.tensors and all(".lora_" in name for name in bucket.tensors)


def read_and_answer(connection) -> None:
    engine, maps = trainer(), {}
    while handle := connection.recv():
        load_buckets(parse_handle(handle).buckets(maps), model_tensors(engine.model), verify=True)
        connection.send({name: tensor_digest(tensor) for name, tensor in tensors_of(engine).items()})


@pytest.mark.processes
@pytest.mark.parametrize("folder", ["memory", "files"])
def test_another_process_reads_each_update(folder, tmp_path):
    context = multiprocessing.get_context("fork")  # to import torch anew takes seconds
    ours, theirs = context.Pipe()
    process = context.Process(target=read_and_answer, args=(theirs,))
    process.start()
    theirs.close()
    store, seen = WeightStore(None if folder == "memory" else tmp_path), list[tuple[str, ...]]()
    for seed, bucket_bytes in ((3, 10_000), (4, 10_000), (5, 20_000), (6, 10_000)):
        engine = trainer(seed=seed)
        with store.send(engine.weights(bucket_bytes)) as handle:
            assert len(handle.files) > 2 and handle.num_bytes > 20_000
            ours.send(handle.to_json())
            assert ours.recv() == {name: tensor_digest(tensor) for name, tensor in tensors_of(engine).items()}
        seen.append(handle.files)
    ours.send("")
    process.join()
    assert (seen[0] == seen[1]) == (folder == "memory"), "memory is kept, files are new"
    assert not list(tmp_path.iterdir())


@pytest.mark.processes
def test_memory_ends_with_a_sender_that_is_killed():
    code = "import sys, torch\nfrom pellucid.rollout.transports import WeightStore\nfrom pellucid.training.protocol import WeightBucket\n"
    code += "with WeightStore().send([WeightBucket({'a': torch.ones(1)}, {})]) as handle:\n"
    code += "    print(handle.to_json(), flush=True)\n    sys.stdin.read()"
    sender = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    handle = parse_handle(sender.stdout.readline())
    assert [bucket.tensors["a"].item() for bucket in handle.buckets()] == [1.0]
    sender.kill()
    sender.wait()
    assert not Path(handle.files[0]).exists()


def test_a_tensor_that_arrives_changed_is_named():
    sender, receiver = trainer(seed=3), trainer()
    with pytest.raises(WeightsDifferError, match=f"{NAME}.*sent {tensor_digest(sender.model.get_parameter(NAME))}") as error:
        load_buckets(altered(sender.weights(10_000)), model_tensors(receiver.model), verify=True)
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value), "a rank cannot tell the controller"
    load_buckets(altered(sender.weights(10_000)), model_tensors(receiver.model), verify=False)


def test_a_copy_of_another_dtype_is_checked_as_it_arrives():
    sender, receiver = trainer(seed=3), trainer()
    receiver.model.to(torch.bfloat16)
    load_buckets(sender.weights(10_000), model_tensors(receiver.model), verify=True)
    for name, tensor in tensors_of(sender).items():
        assert torch.equal(tensors_of(receiver)[name], tensor.to(torch.bfloat16))
    with pytest.raises(WeightsDifferError, match=NAME):
        load_buckets(altered(sender.weights(10_000)), model_tensors(receiver.model), verify=True)


@pytest.mark.parametrize(("verify", "refused"), [("first", [True, False]), ("always", [True, True]), ("off", [False, False])])
def test_which_updates_are_verified(verify, refused, monkeypatch):
    engine = trainer(seed=3)
    seen = []
    for first_is_whole in (False, True):
        policy = GatheredPolicy(engine, trainer().model, verify)
        if first_is_whole:
            policy.take_weights(WeightUpdate(1))
        with monkeypatch.context() as patch:
            patch.setattr(engine, "weights", lambda size, digests: altered(trainer(seed=3).weights(size, digests=digests)))
            try:
                policy.take_weights(WeightUpdate(2))
                seen.append(False)
            except WeightsDifferError:
                seen.append(True)
    assert seen == refused


def test_an_engine_with_a_copy_samples_from_what_it_was_sent():
    """Tied head and all: the log-probs are those of an engine that reads the trainer's own weights."""
    tokenizer, options = load_tokenizer("builtin"), {"max_num_seqs": 8, "max_num_batched_tokens": 64, "seed": 0}
    prompts = [Prompt(f"p{index}", [4 + index, 9, 2], "", "t") for index in range(3)]
    old, new = trainer(), trainer(seed=3)
    new.version = 5
    policy = CopiedPolicy(trainer().model, old.device, old.dtype)
    engine = NativeRolloutEngine(policy, tokenizer, [EOS], **options, take_weights=policy.take_weights)
    params = SamplingParams(n=2, max_tokens=8)
    before = sample_rollouts(engine, prompts, params, stream=("a",))
    with WeightStore().send(new.weights(10_000)) as handle:
        run_sync(engine.load_weights(WeightUpdate(5, handle, verify=True)))
    after = sample_rollouts(engine, prompts, params, stream=("a",))
    expected = sample_rollouts(NativeRolloutEngine(new, tokenizer, [EOS], **options), prompts, params, stream=("a",))
    for one, other, earlier in zip(after, expected, before):
        assert list(one.logprobs) == list(other.logprobs) != list(earlier.logprobs)
        assert (list(one.token_ids), set(one.versions)) == (list(other.token_ids), {5})


def test_an_alias_is_told_of_the_version_that_the_trainer_has():
    engine = NativeRolloutEngine(trainer(), load_tokenizer("builtin"), [EOS], max_num_seqs=8, max_num_batched_tokens=64, seed=0)
    run_sync(engine.load_weights(WeightUpdate(0)))
    with pytest.raises(AssertionError, match="of another version"):
        run_sync(engine.load_weights(WeightUpdate(1)))
