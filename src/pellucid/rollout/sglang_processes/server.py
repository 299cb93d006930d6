"""SGLang's server with what Pellucid adds to it: in the process that `OwnSglang` starts, which reads its arguments from
its input and ends with it, or in that of `pellucid serve`.

SGLang's engine ends all children of the process that it is in, and that process itself when one of its own dies; so it
is never in the trainer's.
"""

import json
import os
import signal
import sys
import threading
from typing import Any

from pellucid.rollout.joining import shape_of
from pellucid.rollout.serving import TokenGuard
from pellucid.rollout.sglang_processes.scheduler_hooks import LOADER
from pellucid.rollout.transports import parse_handle

ARGUMENTS = {
    "load_format": "dummy",  # the trainer's weights follow at once
    "custom_weight_loader": [LOADER],
    "enable_priority_scheduling": True,
    "incremental_streaming_output": True,
    "sampling_backend": "pytorch",  # others do not read the seeds of requests
    "skip_server_warmup": True,
    "sleep_on_idle": True,  # or its scheduler takes a core from the trainer, always
    "stream_interval": 16,  # tokens; each piece of an answer is a message between four processes
    "log_level": "error",
}
"""What Pellucid needs of SGLang."""
DESCRIBE = "/pellucid"
"""Where a server tells runs that would join it what it has."""


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


def run_server(options: dict[str, Any], *, host: str, port: int, token: str) -> None:
    """Serve a model with fields of SGLang's `ServerArgs`, as `ServerKind` says."""
    os.environ["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"  # by the tokens that it keeps for itself
    if options["device"] == "cpu":
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    from sglang.srt.entrypoints import http_server
    from sglang.srt.server_args import ServerArgs

    arguments = ARGUMENTS | options

    @http_server.app.post(DESCRIBE)
    def describe(asked: dict[str, Any]) -> dict[str, Any]:
        """Tell a run its arguments in `names`, its model, and whether the weights of `handle` reach it."""
        model = http_server.get_global_state().tokenizer_manager.model_config.hf_config
        return {
            "arguments": {name: str(arguments.get(name)) for name in asked["names"]},
            "model": shape_of(model),
            "sees": parse_handle(asked["handle"]).is_in_reach(),
        }

    http_server.app.add_middleware(TokenGuard, token=token)
    server = {"host": host, "port": port, "api_key": token}
    http_server.launch_server(ServerArgs(**arguments, **server), run_scheduler_process_func=run_scheduler)


def _end_with_input() -> None:
    sys.stdin.read()
    os.killpg(os.getpgrp(), signal.SIGKILL)


def main() -> None:
    """Serve until standard input is closed; its first line has what `run_server` is given, as JSON."""
    arguments = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_input, daemon=True).start()
    run_server(**arguments)


if __name__ == "__main__":
    main()
