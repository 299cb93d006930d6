"""What Pellucid adds to SGLang's scheduler processes: a loader of weights (`custom_weight_loader`), a look at what is
served once SGLang has packed them, and the seeds of requests, which SGLang by itself reads in deterministic mode only.
"""

import json
from collections.abc import Callable
from typing import Any

import torch

from pellucid.rollout.served_weights import Arrival
from pellucid.rollout.server_connection import said

LOADER = f"{__name__}.load"
MERGED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
"""SGLang's layers that hold several of a checkpoint's."""
_arrivals: list[Arrival | str] = []
"""The weights of the update that is open in this process, or why they were not loaded."""


def load(model: Any, named_tensors: list[tuple[str, Any]]) -> None:
    """Load the weights of the handle that the name of the only, empty tensor is; SGLang calls it in each worker."""
    [(message, _)] = named_tensors
    arrival = Arrival(**json.loads(message))
    try:
        model.load_weights(arrival.tensors())
        _arrivals.append(arrival)
    except (OSError, RuntimeError) as error:  # the run that sends them may have died; this would end SGLang, too
        _arrivals.append(said(error))


def end_weight_update(original: Callable[[Any, Any], Any], updater: Any, request: Any) -> Any:
    """Let SGLang end an update, and answer with why it failed, or the first tensor that is not what was sent."""
    answer = original(updater, request)
    runner = updater.tp_worker.model_runner
    while _arrivals:
        found = _arrivals.pop()
        if isinstance(found, Arrival):
            found = found.difference(
                runner.model,
                MERGED,
                runner.model_config.dtype,
                tied=runner.model_config.hf_text_config.tie_word_embeddings,
                whole=runner.server_args.tp_size == 1,
            )
        if found is not None:
            answer.success, answer.message = False, json.dumps(found)
    return answer


def use_request_seeds(info: Any, _: type, batch: Any, *__: Any, **___: Any) -> None:
    """Let the seed of each request and the position in its sequence be all that its random numbers hang on."""
    seeds = [request.sampling_params.sampling_seed or 0 for request in batch.reqs]
    info.sampling_seed = torch.tensor(seeds, dtype=torch.int64).to(batch.device)
