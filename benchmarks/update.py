"""Actor update: arithmetic rate against the GEMM peak and plain `transformers`, and the memory of log-probabilities.

The rate counts 6 × parameters × tokens, tokens being what a pass over every sequence on its own would process. Rows:
`packed` trains on sequences without a common prompt; `groups of 8` on the same lengths with each prompt shared by eight.

    python benchmarks/update.py
"""

import subprocess
import sys

import torch
from transformers import AutoModelForCausalLM

from common import Setup, best_seconds, gemm_gflops, parser, report
from pellucid.training.common.heads import LogProbHead
from pellucid.training.common.packing import TokenSequence
from pellucid.training.protocol import TokenScores

PROMPT_TOKENS, RESPONSE_TOKENS = 45, 48


def sequences(num: int, group_size: int) -> list[TokenSequence]:
    """Return `num` random sequences of 45 + 48 tokens in groups that share their prompt."""
    draw = torch.Generator().manual_seed(0)
    prompts = torch.randint(10, 40000, (num // group_size, PROMPT_TOKENS), generator=draw).tolist()
    responses = torch.randint(10, 40000, (num, RESPONSE_TOKENS), generator=draw).tolist()
    return [TokenSequence(prompts[index // group_size], response, index // group_size) for index, response in enumerate(responses)]


def pellucid_update(setup: Setup, batch: list[TokenSequence]) -> None:
    """One optimizer step on a policy-gradient loss."""
    def loss(rows: list[int], scores: TokenScores) -> torch.Tensor:
        return -scores.logp.sum() / (len(batch) * RESPONSE_TOKENS)

    setup.engine.train_mini_batch(batch, LogProbHead(1.0, with_entropy=True), loss)


def transformers_update(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: list[TokenSequence], micro: int) -> None:
    """The same step as people write it: whole sequences, `output.logits`, log_softmax."""
    optimizer.zero_grad()
    for start in range(0, len(batch), micro):
        ids = torch.tensor([s.prompt_ids + s.response_ids for s in batch[start:start + micro]])
        logits = model(input_ids=ids).logits[:, PROMPT_TOKENS - 1:-1]
        logp = logits.log_softmax(-1).gather(-1, ids[:, PROMPT_TOKENS:, None])
        (-logp.sum() / (len(batch) * RESPONSE_TOKENS)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def update_rows(setup: Setup, num: int, repeats: int) -> list[dict]:
    """Return one row a system, each beside the GEMM peak measured just before it."""
    tokens = num * (PROMPT_TOKENS + RESPONSE_TOKENS)
    flops = 6 * setup.num_parameters * tokens
    plain = AutoModelForCausalLM.from_pretrained(setup.model_path, dtype=torch.float32)
    adamw = torch.optim.AdamW(plain.parameters(), lr=1e-6)
    jobs = {"pellucid packed": lambda: pellucid_update(setup, sequences(num, 1)),
            "pellucid, groups of 8": lambda: pellucid_update(setup, sequences(num, 8)),
            "transformers": lambda: transformers_update(plain, adamw, sequences(num, 1), 8)}
    rows = []
    for name, job in jobs.items():
        peak = gemm_gflops()
        seconds = best_seconds(job, repeats)
        peak = max(peak, gemm_gflops())
        rows.append({"system": name, "tokens": tokens, "seconds": seconds, "gflops": flops / seconds / 1e9, "gemm_gflops": peak,
                     "share_of_gemm": flops / seconds / 1e9 / peak})
    return rows


MEMORY_SCRIPT = """
import resource, sys, torch
from pellucid.training.common.logprobs import token_log_probs
torch.manual_seed(0)
hidden = torch.randn(4096, 576, requires_grad=True)
weight = torch.randn(49152, 576, requires_grad=True)
targets = torch.randint(0, 49152, (4096,))
warm = torch.mm(torch.randn(64, 64), torch.randn(64, 64))
base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
if sys.argv[1] == "chunked":
    logp, entropy, _ = token_log_probs(hidden, weight, targets, with_entropy=True)
else:
    logits = hidden @ weight.T
    distribution = logits.log_softmax(-1)
    logp = distribution.gather(1, targets[:, None])[:, 0]
logp.sum().backward()
sys.stdout.write(str((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base) / 1024))
"""


def memory_rows() -> list[dict]:
    """Return peak extra resident memory, forward and backward, of 4096 tokens × 49152 words; one process each."""
    peaks = {name: float(subprocess.run([sys.executable, "-c", MEMORY_SCRIPT, name], capture_output=True, text=True, check=True).stdout)
             for name in ("chunked", "unchunked")}
    return [{"log-probs": name, "peak_extra_mib": peak, "share_of_unchunked": peak / peaks["unchunked"]} for name, peak in peaks.items()]


def main() -> None:
    options_parser = parser(__doc__)
    options_parser.add_argument("--sequences", type=int, default=32)
    options = options_parser.parse_args()
    report("log-probability memory", memory_rows(), options.json)
    report("actor update", update_rows(Setup(options.model, options.micro_tokens), options.sequences, options.repeats), options.json)


if __name__ == "__main__":
    main()
