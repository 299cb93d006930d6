"""The process of an SGLang server that `OwnSglang` starts: it reads its arguments from its input, and ends with it.

SGLang's engine ends all children of the process that it is in, and that process itself when one of its own dies; so it
is never in the trainer's.
"""

import json
import os
import signal
import sys
import threading
from typing import Any


def run_scheduler(*args: Any) -> None:
    """Run SGLang's scheduler with what Pellucid adds to it, through SGLang's own registry of hooks."""
    from sglang.srt.managers.scheduler import run_scheduler_process
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from pellucid.rollout.sglang_processes.scheduler_hooks import end_weight_update, use_request_seeds

    updater = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
    HookRegistry.register(f"{updater}.end_weight_update", end_weight_update, HookType.AROUND)
    batch = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch"
    HookRegistry.register(batch, use_request_seeds, HookType.AFTER)
    run_scheduler_process(*args)


def _end_with_input() -> None:
    sys.stdin.read()
    os.killpg(os.getpgrp(), signal.SIGKILL)


def main() -> None:
    """Serve until standard input is closed; its first line has the fields of SGLang's `ServerArgs` as JSON."""
    arguments = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_input, daemon=True).start()
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import ServerArgs

    launch_server(ServerArgs(**arguments), run_scheduler_process_func=run_scheduler)


if __name__ == "__main__":
    main()
