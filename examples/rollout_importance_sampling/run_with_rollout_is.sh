#!/usr/bin/env bash
# Rollout importance sampling on the built-in model, sampled on purpose from a policy that is not the trained one:
# metrics only, token-level truncation, sequence-level clipping. Usage: bash run_with_rollout_is.sh [STEPS] [FOLDER]
set -euo pipefail

steps=${1:-10}
folder=${2:-outputs/rollout_is}
cd "$(dirname "$0")/../.."
if ! command -v pellucid > /dev/null; then
  echo "pellucid is not on the path: source .venv/bin/activate" >&2
  exit 2
fi

run() { # name, then the keys that differ
  local name=$1
  shift
  echo "== $name: $*"
  pellucid train recipes/mismatch_lab.yaml algorithm.rollout_correction_preset=null \
    actor_rollout_ref.rollout.calculate_log_probs=true trainer.total_training_steps="$steps" \
    trainer.resume_mode=disable trainer.default_local_dir="$folder/$name" "$@"
}

# The gap is measured and nothing is corrected.
run metrics_only algorithm.rollout_is_threshold=2.0 algorithm.rollout_is=false

# Each token's weight, capped at 2: the place to start.
run token_truncate algorithm.rollout_is_threshold=2.0 algorithm.rollout_is=true \
  algorithm.rollout_is_level=token algorithm.rollout_is_mode=truncate

# One weight a sequence, 0 outside of [0.5, 2]: exact for what it keeps, and it keeps less.
run sequence_clip algorithm.rollout_is_threshold=2.0 algorithm.rollout_is=true \
  algorithm.rollout_is_level=sequence algorithm.rollout_is_mode=clip

python examples/rollout_importance_sampling/compare.py "$folder"/{metrics_only,token_truncate,sequence_clip}
cat << EOF
the tokens behind the largest gap:  pellucid rollouts $folder/metrics_only --sort gap --tokens --limit 3
curves side by side:                tensorboard --logdir $folder
what each number means:             docs/correction.md
EOF
