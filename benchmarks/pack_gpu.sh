#!/usr/bin/env bash
# Packs HEAD, and the wheels that it needs, for a GPU machine without network that has Python 3.12, torch and transformers.
#
#   benchmarks/pack_gpu.sh FOLDER             # FOLDER gets tree.tgz, whl/ and run.sh
#   benchmarks/pack_gpu.sh FOLDER PYTHON      # and tries them with PYTHON, a 3.12 that has what that machine has
#
# There, in a checkout of any commit (the bundled model's weights are taken from it, they are not in the pack):
#   bash FOLDER/run.sh gpu_engine.sh OUT engine guard
# MAX_MIB: what FOLDER may weigh (default 12; beside it the checkout and, for some runs, other packages travel).
set -u
folder=${1:?"usage: benchmarks/pack_gpu.sh FOLDER [PYTHON]"}
mkdir -p "$folder/whl" && folder=$(cd "$folder" && pwd) || exit 2
python=${2:-}
cd "$(dirname "$0")/.." || exit 2
wheels="msgspec pydantic pydantic_core annotated_types typing_inspection typing_extensions starlette uvicorn python-multipart watchfiles
 prometheus_client pytest pytest-xdist execnet pluggy iniconfig packaging pygments allpairspy"

git archive HEAD src tests docs benchmarks pyproject.toml README.md ':(exclude)benchmarks/results' ':(exclude)tests/doctor/data' \
  ':(exclude)src/uncast/checkpoints/tiny_glm/model.safetensors' | gzip -9 > "$folder/tree.tgz" || exit 1
git rev-parse HEAD > "$folder/commit"
platforms=""
for number in 28 27 17 12 5; do platforms="$platforms --platform manylinux_2_${number}_x86_64"; done
for name in $wheels; do
  ls "$folder"/whl/"${name//-/_}"-[0-9]*.whl > /dev/null 2>&1 && continue
  want=$name
  core=$(ls "$folder"/whl/pydantic-[0-9]*.whl 2> /dev/null | head -1)
  [ "$name" = pydantic_core ] && want=$(unzip -p "$core" '*/METADATA' | sed -n 's/^Requires-Dist: \(pydantic-core==[^ ;]*\).*/\1/p')
  python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp $platforms --platform manylinux2014_x86_64 \
    --platform manylinux1_x86_64 -d "$folder/whl" "$want" || { echo "no wheel of $want" >&2; exit 1; }
done
cat > "$folder/run.sh" <<'R'
# run.sh SCRIPT OUT ...: unpacks what lies beside this file and runs benchmarks/SCRIPT of it. Once a machine: later calls only run.
set -u
here=$(cd "$(dirname "$0")" && pwd) tree=${TREE:-/tmp/uncast-pack}
if [ "$(cat "$tree/commit" 2> /dev/null)" != "$(cat "$here/commit")" ]; then
  rm -rf "$tree" && mkdir -p "$tree/site" && tar xzf "$here/tree.tgz" -C "$tree" || exit 2
  for wheel in "$here"/whl/*.whl; do "${PYTHON:-python3}" -m zipfile -e "$wheel" "$tree/site" || exit 2; done
  cp src/uncast/checkpoints/tiny_glm/model.safetensors "$tree/src/uncast/checkpoints/tiny_glm/" || exit 2
  cp "$here/commit" "$tree/"
fi
export PYTHONPATH="$tree/site${PYTHONPATH:+:$PYTHONPATH}" UNCAST_CACHE_DIR=${UNCAST_CACHE_DIR:-/tmp/uncast-cache} PYTHONWARNINGS=ignore
export UNCAST_COMMIT=$(cut -c1-7 "$here/commit")
script=$1
shift
exec bash "$tree/benchmarks/$script" "$@"
R
size=$(du -sk "$folder" | cut -f1)
echo "$(git rev-parse --short HEAD): $((size / 1024)) MiB in $folder, $(ls "$folder/whl" | wc -l) wheels"
[ $((size / 1024)) -le "${MAX_MIB:-12}" ] || { echo "more than ${MAX_MIB:-12} MiB" >&2; exit 1; }
[ -z "$python" ] && exit 0

work=$(mktemp -d)
try() { # name, seconds, command
  local name=$1 seconds=$2
  shift 2
  timeout -k 2 "$seconds" "$@" > "$work/$name.log" 2>&1 && echo "$name: ok" || { echo "$name: FAILED: $(tail -3 "$work/$name.log" | cut -c1-300)"; failed=1; }
}
failed=0
export PYTHON=$python TREE=$work/tree UNCAST_CACHE_DIR=$work/cache TRY=1 LOAD_MINUTES=0.12 MODEL=$work/model OMP_NUM_THREADS=1
try engine "${TRY_S:-900}" bash "$folder/run.sh" gpu_engine.sh "$work/out"
try two 200 bash "$folder/run.sh" gpu_two.sh "$work/two"
export PYTHONPATH="$TREE/src:$TREE:$TREE/site"
cd "$TREE" || exit 1
try generate 120 "$python" -m uncast generate "The whale" --max-tokens 12 --speculate 2
try collect 300 "$python" -m pytest -o addopts="" -p no:cacheprovider -q --collect-only -m gpu $(grep -rlE "mark\.gpu" tests --include="test_*.py")
for script in benchmarks/*.py; do
  case $script in *glm5_weights* | *load_targets* | *random_schemas*) continue ;; esac
  try "$(basename "$script")" 90 "$python" "$script" --help
done
tail -1 "$work/collect.log"
echo "logs in $work"
exit $failed
