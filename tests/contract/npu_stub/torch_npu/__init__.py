"""Stub: what `import torch_npu` does, as far as the profiler needs it; `set_env.sh` of CANN included."""

import os
from pathlib import Path

import torch
from torch_npu import _C, npu
from torch_npu.version import __version__

_CANN = Path(__file__).parents[1] / "cann"
os.environ["ASCEND_HOME_PATH"] = str(_CANN)
os.environ["PATH"] = os.pathsep.join([str(_CANN / "tools" / "profiler" / "bin"), os.environ["PATH"]])
torch.npu = npu

from torch_npu import profiler  # noqa: E402

__all__ = ["_C", "__version__", "npu", "npu_fusion_attention", "profiler"]


def npu_fusion_attention(*args: object, **kwargs: object) -> None:
    """Attention of NPUs, which transformers imports wherever there is an NPU."""
    raise RuntimeError("nothing runs on the stub")
