#!/usr/bin/env bash
# Correctness, then speed of the CUDA engine on this machine's GPUs, beside a PyTorch peer in the same
# run. `./dev bench gpu` builds and calls it.
# usage: gpu.sh BINARIES OUT.md COMMIT [--peer PEER.py] [--works "MODEL:BATCH:SEQUENCE[:BLOCKS] ..."]
#               [--ways "in-order any-order recompute any-order+recompute"] [--steps N] [--no-ops]
# PEER.py takes --model, --batch, --seq and --steps and prints a line of JSON with model, batch, seq,
# tokens_per_s and peak_mem_gib; under torchrun, gpus too. It runs once for each work, right before
# ours, which runs in each of the ways; those that recompute give up what BLOCKS blocks would, or all.
# The default of steps takes a GPU to the temperature that it trains at.
# With several GPUs gpt2-124m follows on all of them, by DDP and ZeRO-1, with the peer's DDP.
set -euo pipefail
usage() { sed -n '2,10s/^# \{0,1\}//p' "$0" >&2; exit 2; }
[ $# -ge 3 ] || usage
bin=$1 out=$2 commit=$3
shift 3
peer='' steps=60 ops=1
works='gpt2-124m:64:1024 gpt2-350m:32:1024 gpt2-1558m:16:1024:7 llama-1b:4:4096 llama-3b:2:4096:6'
ways='in-order any-order any-order+recompute'
while [ $# -gt 0 ]; do
  case $1 in
    --peer) peer=${2:?--peer needs a file}; [ -e "$peer" ] || { echo "no peer at $peer" >&2; exit 2; } ;;
    --works) works=${2:?--works needs MODEL:BATCH:SEQUENCE[:BLOCKS]} ;;
    --ways) ways=${2:?--ways needs some of in-order, any-order, recompute, any-order+recompute} ;;
    --steps) steps=${2:?--steps needs a number} ;;
    --no-ops) ops=; shift; continue ;;
    *) usage ;;
  esac
  shift 2
done

if ! nvidia-smi -L >/dev/null 2>&1; then
  echo "NO GPU, NOT MEASURED: nvidia-smi finds none"
  exit 0
fi
gpus=$(nvidia-smi -L | wc -l)
work=$(mktemp -d)
sampler=
trap 'kill $sampler 2>/dev/null || true; rm -rf "$work"' EXIT
mkdir -p "${MUSTER_PLANS:=$work/plans}"
query() { nvidia-smi -i 0 --query-gpu="$1" --format=csv,noheader; }
# PyTorch brings libraries of its own and does not start with those of our package in front.
with_peer() { env -u LD_LIBRARY_PATH "$@"; }
sample() { (while sleep 0.25; do query power.draw,clocks.sm,temperature.gpu; done) >"$work/state" & sampler=$!; }
# The busiest sample: a run begins and ends idle.
show_sample() {
  kill "$sampler"
  wait "$sampler" 2>/dev/null || true
  sampler=
  printf '  %s\n' "$(sort -rn "$work/state" | head -1)" | tee -a "$1"
}

# What was measured before is kept: one work that does not fit must not cost the others.
failures=0
failed() {
  echo "| $2 | FAILED, see below |" >>"$1"
  failures=$((failures + 1))
}

tests=
for test in gpu_test gpu_gemm_test gpu_steps_test; do
  [ -x "$bin/$test" ] || continue
  "$bin/$test" --gtest_brief=1 >"$work/test" 2>&1 || { tail -40 "$work/test"; exit 1; }
  tests+="$test $(sed -n 's/^\[  PASSED  \] \([0-9]*\) tests\{0,1\}.*/\1/p' "$work/test") passed, "
  tests+="$(sed -n 's/^\[  SKIPPED \] \([0-9]*\) tests\{0,1\}.*/\1/p' "$work/test" | grep . || echo 0) skipped; "
done
echo "${tests:?no test of the GPU in $bin}"

touch "$work/peer" "$work/rows" "$work/all_rows" "$work/errors"
# Ways of a work, and the arguments of each: step_arguments WAY
step_arguments() {
  arguments=(--model "$model" --batch "$batch" --sequence "$sequence" --plans "$MUSTER_PLANS")
  case +$1+ in *+any-order+*) arguments+=(--any-order) ;; esac
  case +$1+ in
    *+recompute+*) arguments+=(--recompute ${blocks:+--recompute-blocks "$blocks"}) ;;
  esac
}
for item in $works; do
  IFS=: read -r model batch sequence blocks <<<"$item"
  # Products are chosen once for all jobs of a machine, by seconds at its power limit. The peer
  # compiles meanwhile, with the GPU idle: first, so that ours does not start the hotter for it.
  for way in $ways; do
    step_arguments "$way"
    # Where this fails the timed run will, and says why.
    "$bin/bench_step_gpu" "${arguments[@]}" --steps 1 >/dev/null 2>&1 || true
  done
  if [ -n "$peer" ]; then
    with_peer python3 "$peer" --model "$model" --batch "$batch" --seq "$sequence" --steps "$steps" \
      2>"$work/errors" | tee -a "$work/peer" || tail -3 "$work/errors"
  fi
  for way in $ways; do
    step_arguments "$way"
    sample
    "$bin/bench_step_gpu" "${arguments[@]}" --steps "$steps" --peer "$work/peer" --row "$work/rows" \
      2>&1 | tee -a "$work/steps" || failed "$work/rows" "$model, $batch x $sequence, $way"
    show_sample "$work/steps"
  done
done

if [ "$gpus" -gt 1 ] && [ -x "$bin/bench_layouts_gpu" ]; then
  if [ -n "$peer" ]; then
    with_peer python3 -m torch.distributed.run --nproc-per-node "$gpus" "$peer" --model gpt2-124m \
      --batch 64 --seq 1024 --steps "$steps" 2>"$work/errors" | tee -a "$work/peer" ||
      tail -3 "$work/errors"
  fi
  all="model.preset=gpt2-124m training.micro_batch=64 training.any_order=true"
  sample
  "$bin/bench_layouts_gpu" --ranks "$gpus" --steps "$steps" --plans "$MUSTER_PLANS" \
    --peer "$work/peer" --rows "$work/all_rows" \
    --work "gpt2-124m 64 x 1024, one: $all training.global_batch=64" \
    --work "gpt2-124m 64 x 1024, DDP $gpus: $all training.global_batch=$((64 * gpus)) parallel.data=$gpus" \
    --work "gpt2-124m 64 x 1024, ZeRO-1 $gpus: $all training.global_batch=$((64 * gpus)) parallel.data=$gpus parallel.zero=1" ||
    failed "$work/all_rows" "gpt2-124m on $gpus GPUs"
  show_sample "$work/all_rows"
fi
if [ -n "$ops" ]; then
  sample
  "$bin/bench_ops_gpu" --plans "$MUSTER_PLANS" --runs 15 2>&1 | tee "$work/ops" ||
    failed "$work/rows" "single ops"
  show_sample "$work/ops"
fi

{
  echo "# Measured by \`./dev bench gpu\`"
  echo
  echo "$(query name,driver_version,memory.total), $gpus of them, commit $commit, $(date -u +%Y-%m-%d)."
  echo "Correctness first: ${tests%; }. Median (fastest to slowest) of $steps steps"
  echo "after five; memory without the CUDA context, as the peer's allocator counts. MFU of the dense"
  echo "bf16 peak by the data sheet; causal half of attention. The peer ran once right before the rows"
  echo "of a work; ratio and memory are ours over the peer's. *any order*: the gradient of attention's"
  echo "queries is added up in any order, as the peer does (\`any_order: true\` in a job); the other"
  echo "rows give the same bits every time. *recomputing*: outputs of norms and activations are"
  echo "computed again in backward (\`recompute: selective\`), of N blocks with \`recompute_blocks: N\`:"
  echo "the rows to compare memory with. Below the table, per row: the line of bench_step_gpu, its"
  echo "breakdown, and power, clock and temperature under load."
  echo
  echo "| work | step | tokens/s | MFU | GiB | peer tokens/s | peer GiB | ratio | memory |"
  echo "|---|---|---|---|---|---|---|---|---|"
  cat "$work/rows"
  if [ -s "$work/all_rows" ]; then
    echo
    echo "| all GPUs, any order | step | tokens/s | MFU | of n x one | exposed | GiB | predicted | off | peer | ratio, memory |"
    echo "|---|---|---|---|---|---|---|---|---|---|---|"
    grep '^|' "$work/all_rows"
  fi
  for log in steps all_rows ops; do
    [ -s "$work/$log" ] || continue
    printf '\n```\n%s\n```\n' "$(grep -v '^|' "$work/$log")"
  done
} >"$out"
echo "wrote $out"
[ "$failures" = 0 ] || { echo "$failures of the measurements failed" >&2; exit 1; }
