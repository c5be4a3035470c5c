#!/usr/bin/env bash
# Correctness, then speed of the CUDA engine on this machine's GPU, beside a PyTorch peer in the same
# run. `./dev bench gpu` builds and calls it.
# usage: gpu.sh BINARIES OUT.md COMMIT [PEER.py]   (MUSTER_WORKS="MODEL:BATCH:SEQUENCE ...")
# PEER.py takes --model, --batch, --seq and --steps and prints a line of JSON with model, batch, seq,
# tokens_per_s and peak_mem_gib.
set -euo pipefail
bin=$1 out=$2 commit=$3 peer=${4:-}
works=${MUSTER_WORKS:-gpt2-124m:64:1024 gpt2-350m:32:1024 gpt2-1558m:16:1024 llama-1b:4:4096 llama-3b:2:4096}
steps=${MUSTER_STEPS:-25}

if ! nvidia-smi -L >/dev/null 2>&1; then
  echo "NO GPU, NOT MEASURED: nvidia-smi finds none"
  exit 0
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "${MUSTER_PLANS:=$work/plans}"
query() { nvidia-smi -i 0 --query-gpu="$1" --format=csv,noheader; }

"$bin/gpu_test" >"$work/test" 2>&1 || { tail -40 "$work/test"; exit 1; }
tests=$(sed -n 's/^\[  PASSED  \] //p' "$work/test")

touch "$work/peer" "$work/rows"
for item in $works; do
  IFS=: read -r model batch sequence <<<"$item"
  if [ -n "$peer" ]; then
    python3 "$peer" --model "$model" --batch "$batch" --seq "$sequence" --steps "$steps" \
      2>"$work/errors" | tee -a "$work/peer" || tail -3 "$work/errors"
  fi
  (while sleep 0.25; do query power.draw,clocks.sm,temperature.gpu; done) >"$work/state" &
  sampler=$!
  "$bin/bench_step_gpu" --model "$model" --batch "$batch" --sequence "$sequence" --steps "$steps" \
    --plans "$MUSTER_PLANS" --peer "$work/peer" --row "$work/rows" | tee -a "$work/steps"
  kill "$sampler"
  # The busiest sample: the run begins and ends idle.
  printf '  %s\n' "$(sort -rn "$work/state" | head -1)" | tee -a "$work/steps"
done
"$bin/bench_ops_gpu" --plans "$MUSTER_PLANS" --runs 15 | tee "$work/ops"

{
  echo "# Measured by \`./dev bench gpu\`"
  echo
  echo "$(query name,driver_version,memory.total), commit $commit, $(date -u +%Y-%m-%d)."
  echo "Correctness first: gpu_test, $tests Median (fastest to slowest) of $steps steps after five;"
  echo "memory without the CUDA context, as the peer's allocator counts. Below the table, per work: the"
  echo "line of bench_step_gpu, its breakdown, and power, clock and temperature under load."
  echo
  echo "| work | step | tokens/s | MFU | GiB | peer tokens/s | peer GiB | ratio | memory |"
  echo "|---|---|---|---|---|---|---|---|---|"
  cat "$work/rows"
  echo
  echo '```'
  cat "$work/steps"
  echo '```'
  echo
  echo '```'
  cat "$work/ops"
  echo '```'
} >"$out"
