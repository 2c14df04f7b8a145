#!/usr/bin/env bash
# Two GPUs of one machine against one of them: equal logits, times. OUT gets distributed-h200.csv, distributed-h200.json, two.log.
#
#   benchmarks/gpu_two.sh OUT
#   TRY=1 benchmarks/gpu_two.sh OUT        # two processes on a CPU, small
#
# TWO_S bounds it in seconds. NVLink multicast stays off: no result needs it, and not every host allows it.
set -u
out=${1:?"usage: benchmarks/gpu_two.sh OUT"}
mkdir -p "$out" && out=$(cd "$out" && pwd) || exit 2
cd "$(dirname "$0")/.." || exit 2
export PYTHONPATH="$PWD/src:$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=${TRY:-4}
export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0} TORCH_SYMM_MEM_DISABLE_MULTICAST=${TORCH_SYMM_MEM_DISABLE_MULTICAST:-1}
work=$(mktemp -d)
timeout -k 5 "${TWO_S:-170}" "${PYTHON:-python3}" -m torch.distributed.run --standalone --nproc-per-node 2 \
  benchmarks/record_distributed.py --out "$work" ${TRY:+--tiny} > "$out/two.log" 2>&1
status=$?
for kind in csv json; do
  [ -f "$work/distributed.$kind" ] && cp "$work/distributed.$kind" "$out/distributed-h200.$kind"
done
echo "status $status"
grep -E "^(whole|one|shared|float|bfloat)|Error" "$out/two.log" | cut -c1-420 | tail -24
[ -f "$out/distributed-h200.csv" ] && cut -d, -f1-7 "$out/distributed-h200.csv"
exit $status
