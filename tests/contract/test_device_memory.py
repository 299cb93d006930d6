"""Weights that an engine reads on the trainer's GPU, as far as the machine has one, and what they need of PyTorch."""

import subprocess
import sys
from inspect import signature
from pathlib import Path

import pytest
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from pellucid.config import load_config
from pellucid.engines import check_engine
from pellucid.errors import UserError
from pellucid.rollout.device_memory import DeviceMemory, DeviceWeights
from pellucid.rollout.transports import parse_handle
from pellucid.training.common.buckets import tensor_digest
from pellucid.training.protocol import WeightBucket

DEMO = Path(__file__).parents[2] / "recipes" / "demo.yaml"
READ = """
import sys
from pellucid.rollout.transports import parse_handle
from pellucid.training.common.buckets import tensor_digest
for bucket in parse_handle(sys.stdin.read()).buckets():
    for name, tensor in bucket.tensors.items():
        print(name, tensor_digest(tensor), bucket.digests[name])
"""


def test_pytorch_opens_a_tensor_with_these_arguments():
    needed = {"tensor_cls", "storage_cls", "storage_device", "dtype", "storage_handle", "event_handle"}
    assert needed < signature(rebuild_cuda_tensor).parameters.keys()


def test_a_gpu_that_is_not_here_is_out_of_reach():
    handle = DeviceWeights("another", [])
    assert parse_handle(handle.to_json()) == handle
    assert not handle.is_in_reach()


def test_a_run_without_gpu_cannot_ask_for_it():
    overrides = ["actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.weight_transport=cuda_ipc"]
    config = load_config(DEMO, [*overrides, "trainer.device=cpu"]).config
    with pytest.raises(UserError, match="this run is on a cpu"):
        check_engine(config)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_another_process_reads_the_tensors_where_they_are():
    tensors = {"half": torch.randn(7, 5).cuda().bfloat16()[2:], "int": torch.arange(9).cuda()}
    digests = {name: tensor_digest(tensor) for name, tensor in tensors.items()}
    with DeviceMemory().send([WeightBucket(tensors, digests)]) as handle:
        command = [sys.executable, "-c", READ]
        read = subprocess.run(command, input=handle.to_json(), capture_output=True, text=True, check=True)
    assert read.stdout.split() == [word for name, digest in digests.items() for word in (name, digest, digest)]
