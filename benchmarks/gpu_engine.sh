#!/usr/bin/env bash
# What a release says about the engine on one GPU: its tests, the guard, two minutes of load, speculation, GLM-5's layers, serving.
#
#   benchmarks/gpu_engine.sh OUT [engine] [guard] [speculation] [glm5] [layer] [start] [serving]   # no stage named: all
#   TRY=1 benchmarks/gpu_engine.sh OUT ...                                             # small and on a CPU, to try this script
#
# engine and guard decide about right and wrong, not about times: they run side by side, and beside them the checkpoint for serving
# is written. The others have the machine for themselves, one after the other. OUT gets, as they come: load-tiny-glm-h200.json,
# load-tiny-glm-h200-default.json, speculation-h200.csv, glm5-stack-h200.csv, decode-layer-h200.json, start-h200.csv,
# serving-h200.csv, and logs.tgz after every stage.
#
# Wanted beside torch, triton and `uncast[torch,server]`: pytest, pytest-xdist, httpx, transformers (for small test models). For
# vLLM's rows VLLM_PATH names folders for PYTHONPATH that hold it (SERVERS=uncast leaves it out). MODEL: folder of the checkpoint,
# LAYERS and WRITE_S bound it. ENGINE_S, GUARD_S, SPECULATION_S, GLM5_S, LAYER_S, START_S and SERVING_S bound the stages in
# seconds. Exit status 1 if a stage failed.
set -u
out=${1:?"usage: benchmarks/gpu_engine.sh OUT [engine] [guard] [speculation] [glm5] [layer] [start] [serving]"}
shift
stages=${*:-engine guard speculation glm5 layer start serving}
for stage in $stages; do
  case $stage in
    engine | guard | speculation | glm5 | layer | start | serving) ;;
    *) echo "stage $stage is not known: allowed are engine, guard, speculation, glm5, layer, start and serving" >&2; exit 2 ;;
  esac
done
mkdir -p "$out" && out=$(cd "$out" && pwd) || exit 2
cd "$(dirname "$0")/.." || exit 2
python=${PYTHON:-python3} logs=$(mktemp -d) model=${MODEL:-${TMPDIR:-/tmp}/glm-4.7-flash-random} try=${TRY:-}
export PYTHONPATH="$PWD/src:$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1
began=$(date +%s)
failed=0
say() { echo "[$(($(date +%s) - began)) s] $*"; }
wants() { case " $stages " in *" $1 "*) ;; *) return 1 ;; esac }
bad() { failed=1; say "$1 FAILED: $(tail -n "${3:-1}" "$logs/$2" | cut -c1-400)"; }
keep_logs() { tar czf "$out/logs.tgz" -C "$logs" . ; }
limited() { # seconds, log, command: at most so long, with nothing left behind
  local seconds=$1 log=$2
  shift 2
  timeout -k 10 "$seconds" "$@" > "$logs/$log" 2>&1
}
gpu_tests() { # seconds, log, folders or files of tests; others of a folder may need packages that are not there
  local seconds=$1 log=$2 more="-n ${XDIST:-4}"
  shift 2
  [ -n "$try" ] && more="--collect-only"
  limited "$seconds" "$log" "$python" -m pytest -o addopts="" -p no:cacheprovider --tb=short -q -m gpu $more \
    $(grep -rlE 'mark\.gpu' "$@" --include='test_*.py')
  local status=$?
  say "$log: $(grep -E '(passed|failed|error|collected|deselected)' "$logs/$log" | tail -1 | cut -c1-200)"
  grep -hE "^(FAILED|ERROR) |^E  " "$logs/$log" | cut -c1-240 | head -10
  [ $status = 0 ] || [ $status = 5 ]
}

engine() { gpu_tests "${ENGINE_S:-180}" engine.log tests/engine tests/models tests/quant tests/server || echo engine >> "$logs/failed"; }

guard() {
  local mode name small=() pids=""
  [ -n "$try" ] && small=(--streams 24 --pool-tokens 256 --distinct 4)
  for mode in deterministic default; do
    name=load-tiny-glm-h200$([ $mode = default ] && echo -default).json
    limited "${GUARD_S:-260}" "load-$mode.log" "$python" benchmarks/load_test.py --mode $mode \
      --minutes "${LOAD_MINUTES:-2}" --distinct 48 --note "two load tests and the GPU tests on one GPU" --out "$out/$name" "${small[@]}" &
    pids="$pids $!"
  done
  gpu_tests "${GUARD_S:-260}" guard.log tests/verify/test_guard_engine_gpu.py || echo guard >> "$logs/failed"
  for pid in $pids; do wait "$pid" || echo guard >> "$logs/failed"; done
  for mode in deterministic default; do
    say "load, $mode: $(tail -1 "$logs/load-$mode.log" | cut -c1-300)"
    grep -hE "^(completed|left|wrong_texts|completion_tokens_per_s|preemptions|end) " "$logs/load-$mode.log" | tr -s ' ' | tr '\n' ';' | cut -c1-300
    echo
  done
}

checkpoint() {
  [ -f "$model/config.json" ] && return 0
  limited $((${WRITE_S:-40} + 60)) checkpoint.log "$python" benchmarks/random_checkpoint.py "$model" --layers "${LAYERS:-16}" \
    --seconds "${WRITE_S:-40}" ${try:+--toy}
  say "checkpoint: $(tail -1 "$logs/checkpoint.log" | cut -c1-200)"
}

speculation() {
  limited "${SPECULATION_S:-100}" speculation.log "$python" benchmarks/speculation.py --csv "$out/speculation-h200.csv" \
    $([ -n "$try" ] && echo "--prompts 3 --max-tokens 8" || echo "--prompts 200 --device cuda") || bad speculation speculation.log
  cut -d, -f3-5,9,12-15 "$out/speculation-h200.csv"
}

glm5() {
  limited "${GLM5_S:-120}" glm5.log "$python" benchmarks/glm5_stack.py --out "$logs" \
    $([ -n "$try" ] && echo "--tiny --steps 1x63,2x2100" || echo "--steps 1x2047,32x2047,1x16383") || bad glm5 glm5.log
  [ -f "$logs/glm5-stack.csv" ] || return
  cp "$logs/glm5-stack.csv" "$out/glm5-stack-h200.csv" && cut -d, -f1-12 "$out/glm5-stack-h200.csv"
}

layer() { # where a decode step's time goes
  if [ -n "$try" ]; then
    limited 60 layer.log "$python" benchmarks/decode_layer.py --help || bad layer layer.log
    return
  fi
  limited "${LAYER_S:-60}" layer.log "$python" benchmarks/decode_layer.py --out "$out/decode-layer-h200.json" || bad layer layer.log
  cut -c1-150 "$logs/layer.log" | tail -n 14
}

start() { # first answers after a cold and a warm start
  limited "${START_S:-130}" start.log "$python" benchmarks/start_times.py --repeats 1 --timeout 100 --csv "$out/start-h200.csv" \
    || bad start start.log
  cut -c1-200 "$logs/start.log" | tail -n 4
}

serving() {
  local small=() servers=${SERVERS:-uncast,vllm}
  checkpoint
  [ -n "$try" ] && small=(--contexts 64,256 --batches 1,4 --tokens 24 --repeats 1) && servers=uncast
  PYTHONPATH="$PYTHONPATH${VLLM_PATH:+:$VLLM_PATH}" limited "${SERVING_S:-200}" serving.log "$python" benchmarks/serving_h200.py \
    "$model" --out "$logs/serving" --servers "$servers" "${small[@]}" || bad serving serving.log 2
  grep -vE "^ *$|^\{" "$logs/serving.log" | cut -c1-300 | head -12
  [ -f "$logs/serving/serving-h200.csv" ] || return
  cp "$logs/serving/serving-h200.csv" "$out/" && cut -d, -f1,2,5- "$out/serving-h200.csv" | cut -c1-160
}

if wants engine || wants guard; then
  pids=""
  wants engine && { engine & pids="$pids $!"; }
  wants guard && { guard & pids="$pids $!"; }
  wants serving && { checkpoint & pids="$pids $!"; }
  for pid in $pids; do wait "$pid"; done
  [ -f "$logs/failed" ] && failed=1
  keep_logs
fi
for stage in speculation glm5 layer start serving; do
  wants $stage || continue
  say "$stage"
  $stage
  keep_logs
done
say "done: $([ $failed = 0 ] && echo passed || echo FAILED)"
exit $failed
