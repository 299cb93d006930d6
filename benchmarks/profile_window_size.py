"""How much smaller a window is than its stage: bytes of the torch tool's files, of whole stages and of a few units in them.

Three runs of the built-in model with a critic, alike but for what they capture of step 2: 512 samples of 64 tokens, four mini-batches of
four or more micro-batches.

    python benchmarks/profile_window_size.py
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import parser, report

RECIPE = Path(__file__).parents[1] / "recipes" / "profiling" / "base.yaml"
MAIN = "from pellucid.cli.main import main; main()"
ACTOR, ROLLOUT, CRITIC = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "critic"
SIZES = (
    "algorithm.adv_estimator=gae",
    "data.train_batch_size=32",
    "data.max_response_length=64",
    f"{ACTOR}.ppo_mini_batch_size=8",
    "critic.ppo_mini_batch_size=8",
    f"{ROLLOUT}.n=16",
    f"{ROLLOUT}.max_num_seqs=512",
    "trainer.total_training_steps=2",
    "global_profiler.steps=[2]",
    "global_profiler.tool=torch",
    *(f"{section}.profiler.enable=true" for section in (ACTOR, CRITIC)),
    *(f"{section}.profiler.ranks=[0]" for section in (ACTOR, CRITIC)),
)


def windows(section: str, unit: str, active: int, *stages: str) -> tuple[str, ...]:
    """Return the overrides for a window of `active` units in some stages, after as many that are left out."""
    keys = {"stages": f"[{','.join(stages)}]", "unit": unit, "wait": active, "active": active}
    return tuple(f"{section}.profiler.schedule.{name}={value}" for name, value in keys.items())


RUNS = {
    "whole": tuple(f"{section}.profiler.tool_config.torch.discrete=true" for section in (ACTOR, CRITIC)),
    "micro": (
        *windows(ACTOR, "micro_batch", 1, "actor_compute_log_prob", "ref_compute_log_prob", "actor_update"),
        *windows(CRITIC, "micro_batch", 1, "compute_values", "critic_update"),
        *windows(ROLLOUT, "decode_step", 3, "rollout_generate"),
    ),
    "mini": (
        *windows(ACTOR, "mini_batch", 1, "actor_update"),
        *windows(CRITIC, "mini_batch", 1, "critic_update"),
    ),
}


def captured(folder: Path, name: str, micro_tokens: int) -> list[dict[str, Any]]:
    """Return the manifest's files of a run that captures as `RUNS[name]` says."""
    budget = f"{ACTOR}.ppo_max_token_len_per_gpu={micro_tokens}"
    where = f"trainer.default_local_dir={folder / name}"
    subprocess.run(
        [sys.executable, "-c", MAIN, "train", str(RECIPE), *SIZES, budget, *RUNS[name], where],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    manifest = json.loads((folder / name / "profile" / "manifest.json").read_text())
    assert manifest["complete"], manifest["failures"]
    return manifest["files"]


def main() -> None:
    options = parser(__doc__)
    options.set_defaults(micro_tokens=2048)
    arguments = options.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        files = {name: captured(Path(scratch), name, arguments.micro_tokens) for name in RUNS}
    whole = {file["stage"]: file["bytes"] for file in files["whole"]}
    rows = []
    for file in files["micro"] + files["mini"]:
        units, stage = file["units"], file["stage"]
        rows.append(
            {
                "stage": stage,
                "window": f"{units['count']} {units['unit']} of {units['of']}",
                "window_kB": file["bytes"] / 1e3,
                "stage_kB": whole[stage] / 1e3,
                "share": file["bytes"] / whole[stage],
                "units_share": units["count"] / units["of"],
            }
        )
    report("profile_window_size", rows, arguments.json)


if __name__ == "__main__":
    main()
