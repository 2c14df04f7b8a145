#!/usr/bin/env bash
# Sparse attention on one GPU: main and the candidates of benchmarks/sparse_candidates, each checked against float64, then timed.
#
#   OUT=DIR benchmarks/sparse_run.sh        # about a minute, prints at most 40 lines
#
# Trees: main; gather (gather.patch and indexer.patch); wide (wide.patch). Everything runs in copies under a temporary folder.
# DIR gets sparse-h200.csv (rows to append to benchmarks/results/sparse-h200.csv, `note` names the tree) and sparse-checks.log.
# Wanted beside torch and triton: pytest and allpairspy. CHECK_S and TIME_S bound the stages (of all trees, of one). A candidate
# whose checks pass and whose rows are faster is adopted by `git apply benchmarks/sparse_candidates/NAME.patch`, any number of them
# in any order.
set -u
here=$(cd "$(dirname "$0")/.." && pwd)
out=${OUT:?"OUT names the folder for results"}
mkdir -p "$out"
work=$(mktemp -d)
start=$(date +%s)
export PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore OMP_NUM_THREADS=1 TRITON_CACHE_DIR=$work/cache
export UNCAST_COMMIT=${UNCAST_COMMIT:-$(git -C "$here" rev-parse --short HEAD 2> /dev/null || echo unknown)}
extra=${PYTHONPATH:+:$PYTHONPATH}
python=${PYTHON:-python3}

apply() { # whichever of the two is there
  if command -v patch > /dev/null; then patch -p1 -s < "$1"; elif command -v git > /dev/null; then git apply "$1"; else "$python" - "$1"; fi << 'END'
import re, sys
from pathlib import Path
for part in re.split(r"(?m)^--- .*\n(?=\+\+\+ )", Path(sys.argv[1]).read_text())[1:]:
    name, body = part.split("\n", 1)
    path = Path(name.removeprefix("+++ b/"))
    text = path.read_text() if path.exists() else ""
    for hunk in re.split(r"(?m)^(?=@@)", body)[1:]:
        at = int(re.match(r"@@ -\d+(?:,\d+)? \+(\d+)", hunk)[1])
        lines = [line for line in hunk.splitlines(True)[1:] if line[0] in " +-"]
        old = "".join(line[1:] for line in lines if line[0] != "+")
        new = "".join(line[1:] for line in lines if line[0] != "-")
        places = [m.start() for m in re.finditer(re.escape(old), text)] or sys.exit(f"{path}: no place for a hunk")
        best = min(places, key=lambda place: abs(text.count("\n", 0, place) + 1 - at))
        text = text[:best] + new + text[best + len(old) :]
    path.write_text(text)
END
}
tree() { # NAME PATCH...
  local name=$1 patch
  shift
  mkdir "$work/$name" && cp -r "$here/src" "$here/tests" "$here/benchmarks" "$here/pyproject.toml" "$work/$name" || exit 2
  for patch in "$@"; do
    (cd "$work/$name" && apply "benchmarks/sparse_candidates/$patch.patch") || { echo "FAIL $patch.patch does not apply"; exit 2; }
  done
}
bench() { # TREE ARGUMENT...
  local name=$1
  shift
  (cd "$work/$name" && PYTHONPATH="src:.$extra" exec "$python" benchmarks/sparse_bench.py "$@")
}
export -f bench
export work extra python

tree main
tree gather gather indexer
tree wide wide
jobs="main:wide0 main:wide1 main:narrow main:batches gather:wide0 gather:wide1 gather:narrow gather:batches gather:e4m3 gather:index wide:wide0 wide:wide1"
jobs="$jobs main:main.0 main:main.1 gather:gather.0 gather:gather.1 wide:wide.0 wide:wide.1"
for job in $jobs; do
  timeout "${CHECK_S:-45}" bash -c "bench ${job%%:*} check ${job#*:}" > "$work/${job/:/_}.log" 2>&1 &
done
wait
for job in $jobs; do sed "s/^/${job%%:*} /" "$work/${job/:/_}.log"; done > "$out/sparse-checks.log"
for name in main gather wide; do
  mine=$(grep "^$name " "$out/sparse-checks.log")
  echo "$name: ok $(grep -c "^$name ok" <<< "$mine"), FAIL $(grep -c "^$name FAIL" <<< "$mine"), jobs ended $(grep -c "^$name done" <<< "$mine") of $(grep -o "$name:" <<< "$jobs" | wc -l)"
done
grep " FAIL " "$out/sparse-checks.log" | cut -c1-200 | head -8
echo "[$(($(date +%s) - start)) s] checked"
for name in wide main gather; do
  timeout "${TIME_S:-12}" bash -c "bench $name time $name '$out/sparse-h200.csv'" 2>&1 | cut -c1-120 | head -14
done
echo "[$(($(date +%s) - start)) s] timed"
rm -rf "$work"
