#!/usr/bin/env python3
"""Twenty defects planted into a copy of the source, one at a time, and whether the test suite catches each: a table.

A defect is one small edit of the kind that slips into a change, and the tests are those that should see it. Edits name code and
not places, so that the same defects can be planted into checkouts in which files are laid out otherwise; where code reads
otherwise, there are several spellings, of which one must occur exactly once.

    python benchmarks/planted_defects.py                          # this checkout
    python benchmarks/planted_defects.py --checkout ../old --only rloo warmup
    python benchmarks/planted_defects.py --find                   # only check that each can be planted and has its tests
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 1200
MAX_SHOWN = 90


@dataclass(frozen=True)
class Defect:
    """One edit and the tests that should catch it."""

    name: str
    what: str
    edits: tuple[tuple[str, str], ...]
    """Spellings of the code and of what it becomes; the first that occurs exactly once in the source is taken."""
    tests: tuple[str, ...]
    """Files of tests, below `tests/`; those that a checkout lacks are left out."""
    select: str = ""
    """What pytest's `-k` is given."""


DEFECTS = (
    Defect("rloo", "the baseline of RLOO counts the sample itself",
           (("(group_sum(weight, inputs.group) - 1).clamp(min=1)", "group_sum(weight, inputs.group).clamp(min=1)"),),
           ("unit/test_advantages.py",), "rloo"),
    Defect("k3", "the k3 estimator adds what it should subtract",
           (("torch.expm1(x) - x)", "torch.expm1(x) + x)"),), ("unit/test_kl.py",)),
    Defect("value clip", "the value loss takes the smaller of the two squares",
           (("return 0.5 * torch.maximum(unclipped", "return 0.5 * torch.minimum(unclipped"),),
           ("unit/test_value_loss.py", "contract/test_critic.py")),
    Defect("sequence mean", "a mean over sequences counts those without a token",
           (("tokens / lengths.clamp(min=1) / num_sequences", "tokens / lengths.clamp(min=1) / mask.shape[0]"),),
           ("unit/test_aggregation.py",)),
    Defect("lower bound", "a correction in clip mode ignores the lower bound of the ratio",
           (("(log_ratio >= log_bounds[0]) & (log_ratio <= log_bounds[1])", "log_ratio <= log_bounds[1]"),
            ("(excess + 1.0).masked_fill(low | high, 0.0)", "(excess + 1.0).masked_fill(high, 0.0)")),
           ("unit/test_correction.py",)),
    Defect("warmup", "the first step of a warm-up has learning rate 0",
           (("self.lr * (step + 1) / self.warmup_steps", "self.lr * step / self.warmup_steps"),), ("unit/test_optimizer.py",)),
    Defect("positions", "the positions of a packed response begin at 0",
           (("range(len(prompt), len(prompt) + len(fed))", "range(len(fed))"),),
           ("unit/test_packing.py", "contract/test_training_engine.py")),
    Defect("reference temperature", "the exact KL reads the reference's logits without the temperature",
           (("_logits(ref_hidden, ref_weight, temperature)\n    ref_log_norm", "_logits(ref_hidden, ref_weight, 1.0)\n    ref_log_norm"),
            ("_logits(ref_hidden[rows], ref_weight, temperature)", "_logits(ref_hidden[rows], ref_weight, 1.0)")), ("unit/test_logprobs.py",)),
    Defect("rank average", "ranks' gradients are averaged where they should be added up",
           (("micro_loss = micro_loss * self.sharding.num_ranks", "micro_loss = micro_loss * 1"),),
           ("contract/test_sharded_engine.py",), "updates_agree or unlike"),
    Defect("failing rows", "the rows of a failing mini-batch are not translated into rows of the batch",
           (("in_batch = [rows[row] for row in error.rows]", "in_batch = list(error.rows)"),
            ("in_batch = [part.rows[row] for row in error.rows]", "in_batch = list(error.rows)")),
           ("contract/test_training_engine.py", "contract/test_critic.py", "unit/test_sentinel.py")),
    Defect("top-p", "top-p sampling leaves out the token that passes the threshold",
           (("probs.cumsum(dim=-1) - probs >= params.top_p", "probs.cumsum(dim=-1) >= params.top_p"),
            ("probs.cumsum(dim=-1) - probs >= top_p", "probs.cumsum(dim=-1) >= top_p")),
           ("contract/test_rollout_engine.py", "unit/test_sampling.py"), "top or sampl"),
    Defect("loader position", "a checkpoint forgets how far the data loader is in its epoch",
           (('"position": self._position,', '"position": 0,'),), ("unit/test_data.py",)),
    Defect("reward repeat", "a reward call that fails is not repeated",
           (("attempt < _MAX_ATTEMPTS", "attempt < 1"), ("attempt < MAX_ATTEMPTS", "attempt < 1")), ("unit/test_reward.py",)),
    Defect("nearest key", "the nearest key is named only if it is nearly the same",
           (("list(choices), n=1, cutoff=0.6", "list(choices), n=1, cutoff=0.97"),), ("unit/test_config_load.py",)),
    Defect("checksum", "a checkpoint's file that was altered is taken for whole",
           (('if digest != files[name]["sha256"]', "if not digest"),), ("unit/test_checkpoint_store.py",)),
    Defect("exit status", "wrong input ends with the status of a failed run",
           (("border_style=\"red\"))\n        sys.exit(2)", "border_style=\"red\"))\n        sys.exit(1)"),),
           ("integration/test_bad_input.py",), "two_mistakes or missing_or_broken"),
    Defect("window", "a profiler window begins one unit late",
           (("position < window.wait or", "position <= window.wait or"), ("position < self.wait or", "position <= self.wait or")),
           ("unit/test_profiler_window.py", "unit/test_window.py")),
    Defect("norm", "a capture's norm is the square of it",
           (("norm=np.sqrt(found.sums[:, 1]) + unknown", "norm=found.sums[:, 1] + unknown"),
            ("floats[:, 3] = np.sqrt(floats[:, 3])", "floats[:, 3] = floats[:, 3]")),
           ("unit/test_precision_statistics.py",)),
    Defect("ragged", "sequences that travel between ranks are laid one value off",
           (("itertools.pairwise(bounds)]", "itertools.pairwise([bound - (bound > 0) for bound in bounds])]"),
            ("itertools.pairwise(self.offsets.tolist())", "itertools.pairwise([max(0, n - 1) for n in self.offsets.tolist()])")),
           ("integration/test_ray.py", "unit/test_wire.py"), "match or wire or ragged"),
    Defect("staleness", "the age of a token's policy version is counted from the first version",
           (("ages = run.actor.version - np.concatenate", "ages = 0 * run.actor.version - np.concatenate"),
            ("ages = run.actor.version - versions[", "ages = 0 * run.actor.version - versions[")),
           ("integration/test_train.py",), "complete_and_defined"),
)  # fmt: skip


def place_of(defect: Defect, source: Path) -> tuple[Path, str, str]:
    """Return the file and the edit that plant a defect.

    Raises:
        SystemExit: no spelling occurs exactly once.
    """
    texts = {path: path.read_text() for path in sorted(source.rglob("*.py"))}
    counts = []
    for old, new in defect.edits:
        found = [path for path, text in texts.items() for _ in range(text.count(old))]
        if len(found) == 1:
            return found[0], old, new
        counts.append(len(found))
    raise SystemExit(f"{defect.name}: its spellings occur {counts} times in {source}")


def tests_of(defect: Defect, checkout: Path) -> list[str]:
    """Return the defect's test files that the checkout has."""
    found = [f"tests/{name}" for name in defect.tests if (checkout / "tests" / name).exists()]
    if not found:
        raise SystemExit(f"{defect.name}: {checkout} has none of {', '.join(defect.tests)}")
    return found


def run_tests(checkout: Path, files: list[str], select: str) -> subprocess.CompletedProcess[str]:
    """Run tests of a checkout until one fails."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header", "-rfE", *files]
    variables = os.environ | {"PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, *(["-k", select] if select else [])], cwd=checkout, env=variables, capture_output=True, text=True,
        timeout=LIMIT_S, check=False,
    )  # fmt: skip


def plant(defect: Defect, checkout: Path) -> dict[str, str | float]:
    """Plant one defect into a copy of the checkout and return which test caught it."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        skipped = shutil.ignore_patterns(".git", ".venv", "__pycache__", "outputs", "models")
        shutil.copytree(checkout, copy, ignore=skipped)
        path, old, new = place_of(defect, copy / "src")
        path.write_text(path.read_text().replace(old, new))
        done = run_tests(copy, tests_of(defect, copy), defect.select)
    failed = [line.split(" ", 2)[1] for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    answer = {0: "NOT CAUGHT", 1: "caught"}.get(done.returncode, f"pytest ended with {done.returncode}")
    return {"defect": defect.name, "answer": answer, "by": failed[0] if failed else "", "s": time.perf_counter() - started}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, default=ROOT)
    parser.add_argument("--only", nargs="*", default=None, help="names of defects")
    parser.add_argument("--find", action="store_true", help="plant nothing")
    parser.add_argument("--json", type=Path, default=None, help="append each answer to this file, one JSON object a line")
    options = parser.parse_args()
    checkout = options.checkout.resolve()
    num_missed = 0
    for defect in DEFECTS:
        if options.only is not None and defect.name not in options.only:
            continue
        path, _, _ = place_of(defect, checkout / "src")
        if options.find:
            sys.stdout.write(f"{defect.name:22}  {path.relative_to(checkout)}  {' '.join(tests_of(defect, checkout))}\n")
            continue
        row = plant(defect, checkout)
        num_missed += row["answer"] != "caught"
        sys.stdout.write(f"{row['defect']:22}  {row['answer']:10}  {row['s']:5.0f} s  {str(row['by'])[:MAX_SHOWN]}\n")
        sys.stdout.flush()
        if options.json is not None:
            with options.json.open("a") as file:
                file.write(json.dumps({"checkout": str(checkout), **row, "what": defect.what}) + "\n")
    return 1 if num_missed else 0


if __name__ == "__main__":
    sys.exit(main())
