"""Wrong numbers planted into real runs, one a run, and whether the precision debugger names where: a table.

A fault is 1% more, or NaN, in what one module computes, in the gradient that comes back to it, or in what the optimizer makes of its
weight: in one stage of step 2, of all samples or of one, in all passes or one, on all ranks or one. The 1% are to be found by
`pellucid precision compare` with a run that is healthy, NaN by `trainer.nan_sentinel`, engines that sample with other weights than the
trainer's by `compare --rollout`. Found means: module, stage, step, rank and sample are exactly those planted, and nothing else is named.

    python benchmarks/planted_faults.py                  # all
    python benchmarks/planted_faults.py --only local     # without those that need two ranks under Ray
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common import report

RECIPE = """
data: {train_files: "task:arithmetic?level=2&size=60", train_batch_size: 4, max_prompt_length: 16, max_response_length: 8}
algorithm: {adv_estimator: gae}
actor_rollout_ref:
  model: {path: builtin}
  actor:
    strategy: fsdp2
    ppo_mini_batch_size: 2
    use_dynamic_bsz: true
    ppo_max_token_len_per_gpu: 64
    use_kl_loss: true
    optim: {lr: 0.0001}
    policy_loss: {loss_mode: "fault_plugin.py:loss"}
    profiler: {enable: true, all_ranks: true}
  rollout: {n: 4, ignore_eos: true}
critic:
  optim: {lr: 0.0001}
  profiler: {enable: true, all_ranks: true}
trainer: {default_local_dir: run, total_training_steps: 3, save_freq: -1, logger: [console]}
global_profiler: {tool: precision_debugger, steps: [1, 2, 3]}
"""
RANKS = ("trainer.placement=ray", "trainer.n_gpus_per_node=2")
SENTINEL = ("trainer.nan_sentinel=true", "global_profiler.steps=null")
PELLUCID = [sys.executable, "-c", "from pellucid.cli.main import main; main()"]
STEP = 2


@dataclass(frozen=True)
class Fault:
    """One wrong number; None leaves a choice to all."""

    what: str
    """output, gradient, optimizer; stale, bf16: the engine's weight."""
    module: str
    stage: str
    how: str = "more"
    """more: 1% more; nan."""
    call: int | None = None
    """Pass of the stage, or mini-batch of an update."""
    sample: int | None = None
    """Which of the samples of the pass."""
    rank: int | None = None
    ranks: int = 1
    step: int = STEP


LAYER = "model.layers"
FAULTS = [
    Fault("output", f"{LAYER}.0.self_attn.q_proj", "actor_compute_log_prob"),
    Fault("output", f"{LAYER}.1.mlp.down_proj", "actor_compute_log_prob", call=1),
    Fault("output", f"{LAYER}.2.self_attn.o_proj", "actor_compute_log_prob", call=0, sample=2),
    Fault("output", f"{LAYER}.1.mlp.act_fn", "ref_compute_log_prob"),
    Fault("output", f"{LAYER}.3.input_layernorm", "ref_compute_log_prob", call=1, sample=1),
    Fault("output", f"{LAYER}.2.mlp.up_proj", "compute_values"),
    Fault("output", "model.norm", "compute_values", call=0, sample=0),
    Fault("output", f"{LAYER}.0.mlp.gate_proj", "critic_update", call=1),
    Fault("output", f"{LAYER}.3.self_attn.v_proj", "actor_update", call=1),
    Fault("output", f"{LAYER}.1.post_attention_layernorm", "actor_update", call=0, sample=3),
    Fault("output", f"{LAYER}.2.mlp.down_proj", "rollout_generate", call=0),
    Fault("output", f"{LAYER}.1.self_attn.k_proj", "rollout_generate", call=3),
    Fault("output", f"{LAYER}.3.mlp.down_proj", "rollout_generate", call=5, sample=6),
    Fault("gradient", f"{LAYER}.2.mlp.down_proj", "actor_update", call=0),
    Fault("gradient", f"{LAYER}.1.self_attn.o_proj", "actor_update", call=1),
    Fault("gradient", f"{LAYER}.3.self_attn.q_proj", "actor_update", call=0, sample=1),
    Fault("gradient", f"{LAYER}.0.mlp.up_proj", "critic_update", call=0),
    Fault("optimizer", f"{LAYER}.1.mlp.up_proj", "actor_update", call=0),
    Fault("optimizer", f"{LAYER}.2.self_attn.k_proj", "actor_update", call=1),
    Fault("optimizer", f"{LAYER}.0.self_attn.o_proj", "critic_update", call=1),
    Fault("output", f"{LAYER}.2.self_attn.v_proj", "actor_compute_log_prob", "nan", call=1, sample=1),
    Fault("output", f"{LAYER}.0.mlp.down_proj", "ref_compute_log_prob", "nan", call=0, sample=0),
    Fault("output", f"{LAYER}.3.mlp.gate_proj", "compute_values", "nan", call=0, sample=2),
    Fault("output", f"{LAYER}.1.self_attn.o_proj", "actor_update", "nan", call=1, sample=0),
    Fault("output", f"{LAYER}.2.mlp.act_fn", "critic_update", "nan", call=0, sample=3),
    Fault("output", f"{LAYER}.1.mlp.up_proj", "rollout_generate", "nan", call=1, sample=5),
    Fault("gradient", f"{LAYER}.1.mlp.down_proj", "actor_update", "nan"),
    Fault("gradient", f"{LAYER}.2.self_attn.k_proj", "critic_update", "nan", call=0, sample=1),
    Fault("optimizer", f"{LAYER}.3.mlp.down_proj", "actor_update", "nan", call=0),
    Fault("stale", f"{LAYER}.2.mlp.up_proj", "rollout_generate"),
    Fault("bf16", f"{LAYER}.1.self_attn.q_proj", "rollout_generate"),
    Fault("output", f"{LAYER}.2.mlp.down_proj", "actor_compute_log_prob", rank=1, ranks=2),
    Fault("output", f"{LAYER}.1.self_attn.o_proj", "compute_values", call=0, sample=1, rank=1, ranks=2),
    Fault("output", f"{LAYER}.0.self_attn.v_proj", "rollout_generate", call=2, rank=1, ranks=2),
    Fault("gradient", f"{LAYER}.3.mlp.up_proj", "actor_update", call=0, rank=1, ranks=2),
    Fault("output", f"{LAYER}.3.mlp.down_proj", "actor_update", "nan", call=0, sample=1, rank=1, ranks=2),
    Fault("output", f"{LAYER}.1.mlp.act_fn", "ref_compute_log_prob", "nan", call=0, sample=0, rank=0, ranks=2),
]


def train(folder: Path, fault: dict[str, Any], overrides: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """Run the recipe with a fault in it."""
    folder.mkdir(parents=True)
    shutil.copy(Path(__file__).with_name("fault_plugin.py"), folder)
    (folder / "recipe.yaml").write_text(RECIPE)
    if fault:
        (folder / "fault.json").write_text(json.dumps(fault))
    return pellucid(folder, "train", "recipe.yaml", *overrides)


def pellucid(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PELLUCID, *arguments], cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)


class Study:
    """Runs faults below a folder, beside one healthy run for each number of ranks."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._healthy = folder, dict[int, Path]()

    def healthy(self, ranks: int) -> Path:
        """Return the folder of the healthy run, made at first use."""
        if ranks not in self._healthy:
            folder = self._folder / f"healthy_{ranks}"
            done = train(folder, {}, RANKS if ranks > 1 else ())
            assert done.returncode == 0, done.stdout
            self._healthy[ranks] = folder
        return self._healthy[ranks]

    def sample_name(self, fault: Fault) -> str | None:
        """Return the sample that the fault means, from the healthy run's capture of the same pass."""
        if fault.sample is None:
            return None
        name = f"step_{fault.step}/{fault.stage}/step0/rank{fault.rank or 0}/capture.json"
        [path] = (self.healthy(fault.ranks) / "run" / "profile").glob(f"**/{name}")
        content = json.loads(path.read_text())
        spans = content["passes"][fault.call or 0]["spans"]
        names = [content["samples"][span[0]] for span in spans if span[1] == "response" and span[3] > 0]
        return names[fault.sample]

    def run(self, number: int, fault: Fault) -> dict[str, Any]:
        """Plant a fault and return what was found of it."""
        healthy, sample = self.healthy(fault.ranks), self.sample_name(fault)
        folder, overrides = self._folder / f"fault_{number}", RANKS if fault.ranks > 1 else ()
        began = time.monotonic()
        nan = fault.how == "nan"
        done = train(folder, asdict(fault) | {"sample": sample}, (*overrides, *(SENTINEL if nan else ())))
        if nan:
            named = self._sentinel(folder, fault)
        elif fault.what in ("stale", "bf16"):
            assert done.returncode == 0, done.stdout
            named = self._compared(folder, "run", "--rollout", "--step", str(fault.step + 1))
        else:
            assert done.returncode == 0, done.stdout
            named = self._compared(folder, str(healthy / "run"), "run")
        row = {"fault": fault.how if fault.what == "output" else f"{fault.what} {fault.how}", "module": fault.module, "stage": fault.stage}
        row |= {"pass": fault.call, "sample": sample, "rank": f"{fault.rank} of {fault.ranks}" if fault.rank is not None else None}
        wrong = self._wrong(fault, sample, named)
        return row | {"found": not wrong, "named_instead": wrong or None, "seconds": round(time.monotonic() - began, 1), "said": named.get("said")}

    def _compared(self, folder: Path, *arguments: str) -> dict[str, Any]:
        done = pellucid(folder, "precision", "compare", *arguments, "--json", "found.json")
        if not (folder / "found.json").exists():
            return {"said": done.stdout[-600:]}
        content = json.loads((folder / "found.json").read_text())
        first = content["first_divergence"]
        return {"said": content["headline"]} if first is None else first | {"said": content["headline"]}

    def _sentinel(self, folder: Path, fault: Fault) -> dict[str, Any]:
        path = folder / "run" / "failures" / f"step_{fault.step:06d}" / "finding.json"
        if not path.exists():
            return {"said": "no finding.json"}
        return json.loads(path.read_text())

    def _wrong(self, fault: Fault, sample: str | None, named: dict[str, Any]) -> dict[str, Any]:
        """Return what differs between what was planted and what was named: {thing: what was named}."""
        expected: dict[str, Any] = {"module": fault.module, "step": fault.step, "stage": fault.stage}
        if fault.how == "nan":
            got = {"module": named.get("place"), "step": named.get("step"), "stage": named.get("stage"), "rank": named.get("rank")}
            got |= {"pass": named.get("index"), "sample": sorted({name.rpartition(" (")[0] for name in named.get("samples", [])})}
            # NaN goes with its sample. Findings count from 1; of a rollout the prefill is no decode step.
            first = (fault.call or 0) + (fault.stage != "rollout_generate")
            expected |= {"rank": fault.rank or 0, "pass": first, "sample": [sample]}
        else:
            got = {name: named.get(name) for name in ("module", "step", "stage")} | {"rank": named.get("ranks")}
            got |= {"pass": named.get("pass_index"), "sample": [name.rpartition(" (")[0] for name in named.get("samples") or []]}
            expected |= {"rank": named.get("all_ranks") if fault.rank is None else [f"rank {fault.rank}"]}
            got["rank"] = [name.removeprefix(f"replica {fault.rank} ") for name in got["rank"] or []] if fault.rank is not None else got["rank"]
            expected |= {"pass": fault.call or 0, "sample": [sample]}
        if fault.what == "optimizer" and fault.how == "nan":
            expected |= {"module": f"{fault.module}.weight", "pass": got["pass"]}
        elif fault.what == "optimizer":
            said = str(named.get("pass"))
            got["pass"], expected["pass"] = said.partition(" of ")[0], f"optimizer step {(fault.call or 0) + 1}"
        if fault.what in ("stale", "bf16"):
            expected |= {"step": fault.step + 1, "stage": "actor_compute_log_prob", "rank": got["rank"], "pass": got["pass"]}
        asked = [name for name in expected if name != "sample" or sample is not None]
        return {name: got[name] for name in asked if got[name] != expected[name]}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", help="local, ranks, or numbers of faults, e.g. 0,5,7")
    options.add_argument("--folder", type=Path, help="keep the runs here")
    options.add_argument("--json", type=Path)
    arguments = options.parse_args()
    chosen = dict(enumerate(FAULTS))
    if arguments.only in ("local", "ranks"):
        chosen = {number: fault for number, fault in chosen.items() if (fault.ranks > 1) == (arguments.only == "ranks")}
    elif arguments.only:
        chosen = {number: FAULTS[number] for number in map(int, arguments.only.split(","))}
    rows = []
    with tempfile.TemporaryDirectory() as name:
        study = Study((arguments.folder or Path(name)).absolute())
        for number, fault in chosen.items():
            rows.append({"number": number} | study.run(number, fault))
            sys.stderr.write(f"{len(rows)} of {len(chosen)}: {json.dumps(rows[-1])}\n")
    report("planted_faults", rows, arguments.json)


if __name__ == "__main__":
    main()
