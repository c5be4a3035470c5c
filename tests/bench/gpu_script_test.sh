#!/usr/bin/env bash
# gpu.sh against programs that stand for the GPU's, so that what it writes is seen without one.
# usage: gpu_script_test.sh GPU.sh
set -euo pipefail
script=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/bin" "$work/path"
program() { cat >"$1"; chmod +x "$1"; }
program "$work/path/nvidia-smi" <<'EOF'
#!/bin/sh
case "$*" in
  -L) echo "GPU 0: Fake (UUID: GPU-1)"; echo "GPU 1: Fake (UUID: GPU-2)" ;;
  *power*) echo "700 W, 1500 MHz, 50" ;;
  *) echo "Fake H200, 580.1, 143771 MiB" ;;
esac
EOF
program "$work/bin/gpu_test" <<'EOF'
#!/bin/sh
echo '[  PASSED  ] 30 tests.'; echo '[  SKIPPED ] 1 test, listed below:'
exit ${FAKE_TEST_FAILS:-0}
EOF
program "$work/bin/bench_layouts_gpu" <<'EOF'
#!/bin/sh
all="$*"
case $all in *gpt2-774m*) echo "needs 200 GiB"; exit 1 ;; esac
case "$all" in *--rows*) ;; *) echo "$all" >>"$CHOSEN"; exit ;; esac
model=$(echo "$all" | sed 's/.*model.preset=\([^ ]*\).*/\1/')
if [ -z "$FAKE_NO_PEER" ]; then
  grep -q "\"model\": \"$model\"" "$(echo "$all" | sed 's/.*--peer \([^ ]*\).*/\1/')" || exit 3
fi
rows=$(echo "$all" | sed 's/.*--rows \([^ ]*\).*/\1/')
echo "| $(echo "$all" | grep -o -- 'any_order\|recompute_blocks=[0-9]*\|recompute=selective\|global_batch=[0-9]*\|zero=[0-9]' | tr '\n' ' ')|" >>"$rows"
echo "    exposed: details, ran in $LD_LIBRARY_PATH" >>"$rows"
sleep 0.6
EOF
program "$work/bin/bench_ops_gpu" <<'EOF'
#!/bin/sh
echo "ops of the GPU"
sleep 0.6
EOF
# No torch is needed here: this stands for its launcher, and prints what the peer would.
mkdir -p "$work/python/torch/distributed"
touch "$work/python/torch/__init__.py" "$work/python/torch/distributed/__init__.py" "$work/peer.py"
cat >"$work/python/torch/distributed/run.py" <<'EOF'
import os, sys
assert "LD_LIBRARY_PATH" not in os.environ, "the peer was given the package's libraries"
value = lambda name: sys.argv[sys.argv.index(name) + 1] if name in sys.argv else ""
print('{"model": "%s", "gpus": %s, "parallel": "%s", "chunked": %d}' % (
    value("--model"), value("--nproc-per-node"), value("--parallel"), "--chunked" in sys.argv))
EOF
export CHOSEN=$work/chosen
export PATH=$work/path:$PATH LD_LIBRARY_PATH=/package/lib PYTHONPATH=$work/python

fail() { echo "FAILED: $1" >&2; cat "$work/out.md" "$work/log" >&2 || true; exit 1; }
run() { "$script" "$work/bin" "$work/out.md" abc123 "$@" >"$work/log" 2>&1; }
run --peer "$work/peer.py" --peer-options --chunked --works gpt2-350m:32:1024:9 \
  --ways "in-order any-order+recompute" --several "llama-1b:4:4096:zero3 gpt2-124m:64:1024:ddp" || fail "it ended with $?"
for text in "Fake H200" "commit abc123" "gpu_test 30 passed, 1 skipped" "^| global_batch=32 |" \
  "^| global_batch=32 any_order recompute=selective recompute_blocks=9 |" "^| global_batch=8 any_order zero=3 |" \
  "^| global_batch=128 any_order |" "700 W, 1500 MHz" "exposed: details, ran in /package/lib" "ops of the GPU" \
  '"llama-1b", "gpus": 2, "parallel": "fsdp", "chunked": 1' '"gpt2-124m", "gpus": 2, "parallel": "ddp"'; do
  grep -q -- "$text" "$work/out.md" || fail "no '$text'"
done
[ "$(grep -c '^| global_batch=32' "$work/out.md")" = 2 ] || fail "not one row for each way"
[ "$(grep -c '"model": "gpt2-350m"' "$work/out.md")" = 1 ] || fail "the peer did not run once for a work"
[ "$(grep -c -- '--steps 1$' "$CHOSEN")" = 4 ] || fail "GEMM algorithms are not chosen ahead, once for each row"
[ "$(grep -c '700 W, 1500 MHz' "$work/out.md")" -ge 5 ] || fail "no power beside steps and ops"

if run --peer "$work/peer.py" --works "gpt2-350m:32:1024 gpt2-774m:64:1024" --ways any-order --several ""; then
  fail "it ended well though a work failed"
fi
for text in "^| global_batch=32 any_order |" "^| gpt2-774m 64 x 1024, any-order | FAILED" "needs 200 GiB" "ops of the GPU"; do
  grep -q -- "$text" "$work/out.md" || fail "no '$text' after a work that failed"
done

FAKE_NO_PEER=1 run --peer none --works gpt2-350m:32:1024 --several "" --no-tests --no-ops || fail "it needs a peer"
grep -q "^| global_batch=32 any_order |" "$work/out.md" || fail "no row without a peer"

rm "$work/out.md"
if FAKE_TEST_FAILS=1 run --works gpt2-350m:32:1024; then fail "it measured after a failed test"; fi
[ ! -e "$work/out.md" ] || fail "it wrote a table after a failed test"
if run --ways; then fail "it took --ways without a value"; fi
printf '#!/bin/sh\nexit 9\n' >"$work/path/nvidia-smi"
run || fail "it failed without a GPU"
grep -q "NO GPU, NOT MEASURED" "$work/log" || fail "it said nothing without a GPU"
echo "1 passed"
