#!/usr/bin/env bash
# Correctness, then speed of the CUDA engine on this machine's GPUs, beside PyTorch in the same run.
# `./dev bench gpu` builds and calls it.
# usage: gpu.sh BINARIES OUT.md COMMIT [--works "MODEL:BATCH:SEQUENCE[:BLOCKS] ..."]
#               [--ways "in-order any-order recompute any-order+recompute"]
#               [--several "MODEL:BATCH:SEQUENCE:ddp|zero1|zero2|zero3 ..."]
#               [--peer PEER.py|none] [--peer-options "..."] [--steps N] [--no-ops] [--no-tests]
# Works run on one GPU, in each of the ways; those that recompute give up the activations of BLOCKS
# blocks, or of all. --several names what runs on all GPUs, with BATCH samples on each. The trainer of
# a rank is what runs (bench_layouts_gpu). The peer runs once for each work, right before ours:
# tests/bench/peers/pytorch.py says what it takes and prints. The default of steps takes a GPU to the
# temperature that it trains at.
set -euo pipefail
usage() { sed -n '2,13s/^# \{0,1\}//p' "$0" >&2; exit 2; }
[ $# -ge 3 ] || usage
bin=$1 out=$2 commit=$3
shift 3
peer=$(dirname "${BASH_SOURCE[0]}")/peers/pytorch.py peer_options='' steps=60 ops=1 tests=1
works='gpt2-124m:64:1024 gpt2-774m:24:1024 llama-1b:4:4096 llama-3b:2:4096:6 llama-3b:1:8192'
ways='any-order any-order+recompute'
several='gpt2-124m:64:1024:ddp gpt2-774m:24:1024:ddp llama-3b:2:4096:zero3'
while [ $# -gt 0 ]; do
  case $1 in
    --peer) peer=${2:?--peer needs a file or none}; [ "$peer" = none ] || [ -e "$peer" ] || { echo "no peer at $peer" >&2; exit 2; } ;;
    --peer-options) peer_options=${2?--peer-options needs them} ;;
    --works) works=${2?--works needs MODEL:BATCH:SEQUENCE[:BLOCKS]} ;;
    --ways) ways=${2:?--ways needs some of in-order, any-order, recompute, any-order+recompute} ;;
    --several) several=${2?--several needs MODEL:BATCH:SEQUENCE:LAYOUT} ;;
    --steps) steps=${2:?--steps needs a number} ;;
    --no-ops) ops=; shift; continue ;;
    --no-tests) tests=; shift; continue ;;
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
sample() { (while sleep 0.25; do query power.draw,clocks.sm,temperature.gpu; done) >"$work/state" & sampler=$!; }
# The sample of the highest power: a run begins and ends idle.
show_sample() {
  kill "$sampler"
  wait "$sampler" 2>/dev/null || true
  sampler=
  printf '    %s\n' "$(sort -rn "$work/state" | head -1)" | tee -a "$1"
}

passed=
if [ -n "$tests" ]; then
  for test in gpu_test gpu_gemm_test gpu_steps_test; do
    [ -x "$bin/$test" ] || continue
    "$bin/$test" --gtest_brief=1 >"$work/test" 2>&1 || { tail -40 "$work/test"; exit 1; }
    passed+="$test $(sed -n 's/^\[  PASSED  \] \([0-9]*\) tests\{0,1\}.*/\1/p' "$work/test") passed, "
    passed+="$(sed -n 's/^\[  SKIPPED \] \([0-9]*\) tests\{0,1\}.*/\1/p' "$work/test" | grep . || echo 0) skipped; "
  done
  echo "${passed:?no test of the GPU in $bin}"
fi

touch "$work/peer" "$work/rows" "$work/errors"
failures=0
# What was measured is kept: one work that does not fit must not cost the others.
failed() {
  echo "| $1 | FAILED, see below |" >>"$work/rows"
  failures=$((failures + 1))
}

# PyTorch brings libraries of its own and does not start with those of our package in front.
run_peer() {  # ranks, arguments
  local ranks=$1
  shift
  [ "$peer" != none ] || return 0
  # shellcheck disable=SC2086  # options are words
  env -u LD_LIBRARY_PATH python3 -m torch.distributed.run --standalone --nproc-per-node "$ranks" "$peer" \
    --steps "$steps" $peer_options "$@" 2>"$work/errors" | tee -a "$work/peer" || tail -3 "$work/errors"
}

ours() {  # ranks, name, overrides
  local arguments=(--ranks "$1" --plans "$MUSTER_PLANS" --bound 300 --work "$2: $3")
  # GEMM algorithms are chosen once for all jobs of a machine, in the first steps of a run. Where this
  # fails the timed run will, and says why.
  "$bin/bench_layouts_gpu" "${arguments[@]}" --steps 1 >/dev/null 2>&1 || true
  # The choice runs first, so that ours does not start the hotter for it.
  [ -z "$4" ] || run_peer "$1" $4
  sample
  "$bin/bench_layouts_gpu" "${arguments[@]}" --steps "$steps" --peer "$work/peer" --rows "$work/rows" \
    2>&1 | tee "$work/log" || { failed "$2"; grep -v '^|--' "$work/log" >>"$work/rows"; }
  show_sample "$work/rows"
}

for item in $works; do
  IFS=: read -r model batch sequence blocks <<<"$item"
  beside="--model $model --batch $batch --seq $sequence"
  for way in $ways; do
    overrides="model.preset=$model model.sequence_length=$sequence training.micro_batch=$batch training.global_batch=$batch"
    case +$way+ in *+any-order+*) overrides+=" training.any_order=true" ;; esac
    case +$way+ in
      *+recompute+*) overrides+=" training.recompute=selective${blocks:+ training.recompute_blocks=$blocks}" ;;
    esac
    ours 1 "$model $batch x $sequence, $way${blocks:+ ($blocks blocks)}" "$overrides" "$beside"
    beside=  # once for a work
  done
done

if [ "$gpus" -gt 1 ]; then
  for item in $several; do
    IFS=: read -r model batch sequence layout <<<"$item"
    overrides="model.preset=$model model.sequence_length=$sequence training.micro_batch=$batch"
    overrides+=" training.global_batch=$((batch * gpus)) parallel.data=$gpus training.any_order=true"
    case $layout in
      ddp) like=ddp ;;
      zero1) like=ddp overrides+=" parallel.zero=1" ;;
      zero2 | zero3) like=fsdp overrides+=" parallel.zero=${layout#zero}" ;;
      *) usage ;;
    esac
    ours "$gpus" "$model $batch x $sequence, $layout on $gpus" "$overrides" \
      "--model $model --batch $batch --seq $sequence --parallel $like"
  done
fi

if [ -n "$ops" ]; then
  sample
  "$bin/bench_ops_gpu" --plans "$MUSTER_PLANS" --runs 15 2>&1 | tee "$work/ops" || failed "single ops"
  show_sample "$work/ops"
fi

{
  echo "# Measured by \`./dev bench gpu\`"
  echo
  echo "$(query name,driver_version,memory.total), $gpus of them, commit $commit, $(date -u +%Y-%m-%d)."
  echo "Correctness first: ${passed:-not run; }median (fastest to slowest) of $steps steps of the trainer after five."
  echo "Memory without the CUDA context, as the peer's allocator counts. docs/benchmarks/method.md says the rest."
  echo
  echo "| work | step | tokens/s | MFU | of n x one | exposed | GiB | predicted | off | peer | ratio, memory |"
  echo "|---|---|---|---|---|---|---|---|---|---|---|"
  grep '^|' "$work/rows" || true
  printf '\n```\n%s\n```\n' "$(grep -v '^|' "$work/rows")"
  [ ! -s "$work/peer" ] || printf '\n```\n%s\n```\n' "$(cat "$work/peer")"
  [ ! -s "$work/ops" ] || printf '\n```\n%s\n```\n' "$(cat "$work/ops")"
} >"$out"
echo "wrote $out"
[ "$failures" = 0 ] || { echo "$failures of the measurements failed" >&2; exit 1; }
