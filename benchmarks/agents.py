"""Trajectories with slow tools, all at once: whether any waits for another's tool.

Each trajectory has four turns of 32 tokens and between them a tool that takes 50 to 2,000 ms (log-uniform, drawn by a name of its own).
`alone_s` is the longest critical path: a trajectory's tools, and its turns at the speed at which the engine answers as many requests at
once without tools, measured in the same run. `wall_s` is what all of them take together; the target is 1.25 times the path.

    python benchmarks/agents.py --trajectories 256
    python benchmarks/agents.py --engine vllm     # in vLLM's environment
"""

import asyncio
import random
import time
from pathlib import Path
from typing import Any

import torch

from common import CPU, parser, report
from pellucid.agents.chat import Chat
from pellucid.agents.llm import AgentLoop, Llm, sample_rollouts
from pellucid.config import load_config
from pellucid.engines import make_local_replicas, make_native_engine
from pellucid.loading import run_tokenizer
from pellucid.rollout.requests import SamplingParams
from pellucid.training.common.models import load_model
from pellucid.training.fsdp import FsdpEngine, MicroBatching
from pellucid.types import Prompt

TURNS, TOKENS, FASTEST_S, SLOWEST_S = 4, 32, 0.05, 2.0


def tool_s(prompt: Prompt, turn: int) -> float:
    """Return how long the tool takes between a trajectory's turn and the next."""
    return FASTEST_S * (SLOWEST_S / FASTEST_S) ** random.Random(f"{prompt.uid} {turn}").random()


async def with_tools(prompt: Prompt, llm: Llm, tools: Any) -> None:
    """Ask for a turn, wait for the tool, and so on."""
    for turn in range(TURNS):
        await llm.complete("" if turn == 0 else "+1=", max_tokens=TOKENS)
        if turn < TURNS - 1:
            await asyncio.sleep(tool_s(prompt, turn))


async def without_tools(prompt: Prompt, llm: Llm, tools: Any) -> None:
    """Ask for the same turns at once."""
    for turn in range(TURNS):
        await llm.complete("" if turn == 0 else "+1=", max_tokens=TOKENS)


def main() -> None:
    """Run the benchmark."""
    options = parser(__doc__)
    options.add_argument("--trajectories", type=int, default=256)
    options.add_argument("--engine", choices=["native", "vllm"], default="native")
    arguments = options.parse_args()
    overrides = [f"actor_rollout_ref.model.path={arguments.model}", "data.max_response_length=160"]
    if arguments.engine == "vllm":
        overrides += ["actor_rollout_ref.rollout.name=vllm", "+actor_rollout_ref.rollout.engine_kwargs.vllm={kv_cache_memory_bytes: 1073741824}"]
    config = load_config(Path(__file__).parents[1] / "recipes" / "demo.yaml", overrides).config
    actor = FsdpEngine(load_model(arguments.model, device=CPU), None, MicroBatching(None, None), device=CPU, dtype=torch.float32)
    tokenizer = run_tokenizer(config)
    engine = make_local_replicas(config, actor) if arguments.engine == "vllm" else make_native_engine(config, actor, None, tokenizer)
    chat = Chat(tokenizer, [tokenizer.eos_token_id], templated=False)
    prompts = [Prompt(f"{index}", tokenizer.encode(f"{index}+{index}="), "", "t") for index in range(arguments.trajectories)]
    params = SamplingParams(max_tokens=TURNS * TOKENS + 3 * 8, ignore_eos=True)

    def seconds(agent: Any, run: int) -> tuple[float, int]:
        loop = AgentLoop(agent, "benchmark", chat, max_turns=TURNS)
        start = time.perf_counter()
        rollouts = sample_rollouts(engine, prompts, params, stream=("benchmark", run), loop=loop)
        return time.perf_counter() - start, sum(rollout.num_sampled for rollout in rollouts)

    seconds(without_tools, 0)
    rows = []
    for run in range(arguments.repeats):
        turns_s, _ = seconds(without_tools, 2 * run + 1)
        longest_s = max(sum(tool_s(prompt, turn) for turn in range(TURNS - 1)) for prompt in prompts)
        wall_s, num_tokens = seconds(with_tools, 2 * run + 2)
        alone_s = turns_s + longest_s
        row = {"engine": arguments.engine, "turns_s": turns_s, "tools_s": longest_s, "alone_s": alone_s, "wall_s": wall_s}
        rows.append(row | {"ratio": wall_s / alone_s, "tokens/s": num_tokens / wall_s})
    engine.close()
    report("agents", rows, arguments.json)


if __name__ == "__main__":
    main()
