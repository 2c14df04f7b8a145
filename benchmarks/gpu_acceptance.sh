#!/usr/bin/env bash
# Everything a release says about one GPU, in one go: tests on the GPU, random sweeps, memcheck, recorded times, the probe.
#
#   benchmarks/gpu_acceptance.sh OUT [check] [attention] [probe]        # no stage named: all three
#
# OUT gets attention.csv, founding.csv and probe.json as they come, and logs.tgz after every stage. Wanted beside torch and triton:
# pytest, pytest-xdist, allpairspy and msgspec; flashinfer-python and sgl-flash-mla for the peers' rows (rows of what is missing are
# refusals). compute-sanitizer comes with the CUDA toolkit. CHECK_S, ATTENTION_S and PROBE_S bound the stages in seconds. BESIDE is
# a command that runs beside the check, such as "benchmarks/gpu_engine.sh OUT/engine engine guard". Exit status 1 if a check failed.
set -u
out=${1:?"usage: benchmarks/gpu_acceptance.sh OUT [check] [attention] [probe]"}
shift
stages=${*:-check attention probe}
for stage in $stages; do
  case $stage in check | attention | probe) ;; *) echo "stage $stage is not known: allowed are check, attention and probe" >&2; exit 2 ;; esac
done
mkdir -p "$out" && out=$(cd "$out" && pwd) || exit 2
logs=$(mktemp -d)
cd "$(dirname "$0")/.." || exit 2
export PYTHONPATH="$PWD/src:$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1
export FLASHINFER_DISABLE_VERSION_CHECK=1 MAX_JOBS=${MAX_JOBS:-4}
start=$(date +%s)
failed=0
say() { echo "[$(($(date +%s) - start)) s] $*"; }
pytest_gpu() { python3 -m pytest -o addopts="" -p no:cacheprovider --tb=short -m gpu -v "$@"; }

build_peers() { # FlashInfer compiles a module per dtype on first use: before the clock, and side by side
  for peer in "flashinfer fa2 bf16" "flashinfer fa3 bf16" "flashinfer fa3 fp8"; do
    nice python3 -m uncast bench attention --shape 1,256,64 --only "$peer" > /dev/null 2>&1 &
  done
  wait
}

check() {
  local limit=${CHECK_S:-170} pids="" seed kind pid
  timeout -k 1 "$limit" bash -c "$(declare -f pytest_gpu); pytest_gpu tests/kernels tests/backends tests/quant tests/models tests/integrations -n 8" \
    > "$logs/suite.log" 2>&1 &
  pids="$!"
  for seed in 1 2 3 4 5; do
    kind=native && [ $seed -gt 3 ] && kind=native_mma
    timeout -k 1 "$limit" python3 -m tests.kernels.sweep --cases 500 --seconds $((limit - 20)) --seed $seed --backend $kind > "$logs/sweep$seed.log" 2>&1 &
    pids="$pids $!"
  done
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout -k 1 "$limit" compute-sanitizer --tool memcheck --error-exitcode 7 python3 -m pytest -o addopts="" -p no:cacheprovider \
    -v tests/backends/test_native_gpu.py -k "small and 64 and native" > "$logs/memcheck.log" 2>&1 &
  pids="$pids $!"
  case " $stages " in *" attention "* | *" probe "*) build_peers & pids="$pids $!" ;; esac
  if [ -n "${BESIDE:-}" ]; then
    bash -c "$BESIDE" > "$logs/beside.log" 2>&1 &
    pids="$pids $!"
  fi
  for pid in $pids; do wait "$pid" || failed=1; done
  [ -f "$logs/beside.log" ] && tail -n 16 "$logs/beside.log" | cut -c1-300
  say "suite: $(tail -1 "$logs/suite.log")"
  grep -hE "^(FAILED|ERROR) " "$logs/suite.log" | cut -c1-240 | head -20
  tail -qn 1 "$logs"/sweep?.log | cut -c1-200
  grep -h "^case" "$logs"/sweep?.log | cut -c1-300 | head -6
  grep -hE "PASSED|FAILED|ERROR SUMMARY" "$logs/memcheck.log" | cut -c1-120
  say "check: $([ $failed = 0 ] && echo passed || echo FAILED)"
}

attention() {
  case " $stages " in *" check "*) ;; *) build_peers ;; esac
  timeout "${ATTENTION_S:-120}" python3 -m uncast bench attention --csv "$out/attention.csv" > "$logs/attention.log" 2> "$logs/attention.err" || failed=1
  grep -E "native" "$logs/attention.log" | cut -c1-120
  timeout 60 python3 -m uncast bench founding --csv "$out/founding.csv" || failed=1
}

probe() {
  timeout "${PROBE_S:-270}" python3 -m uncast probe --json > "$out/probe.json" 2> "$logs/probe.err" || failed=1
  python3 - "$out/probe.json" <<'P' || failed=1
import collections, json, sys
rows = json.load(open(sys.argv[1]))["rows"]
count = collections.Counter((row["backend"], row["kv_layout"], row["status"]) for row in rows)
for key, number in sorted(count.items()):
    print(*key, number)
P
  timeout -k 1 120 bash -c "$(declare -f pytest_gpu); pytest_gpu tests/verify --ignore tests/verify/test_guard_engine_gpu.py" > "$logs/verify.log" 2>&1 || failed=1
  say "verify: $(tail -1 "$logs/verify.log")"
  grep -hE "^(FAILED|ERROR) |^E  " "$logs/verify.log" | cut -c1-240 | head -8
}

for stage in $stages; do
  say "$stage"
  $stage
  tar czf "$out/logs.tgz" -C "$logs" .
done
say "done, logs in $out/logs.tgz"
exit $failed
