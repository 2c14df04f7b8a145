#!/usr/bin/env bash
# Two GPUs of one machine against one of them: equal logits, times. OUT gets distributed-h200.csv, distributed-h200.json, two.log.
#
#   benchmarks/gpu_two.sh OUT
#   TRY=1 benchmarks/gpu_two.sh OUT        # two processes on a CPU, small
#
# TWO_S bounds it in seconds. Kernels are compiled by processes of their own while float32, which needs none, is compared.
# NVLink multicast stays off: no result needs it, and not every host allows it.
set -u
out=${1:?"usage: benchmarks/gpu_two.sh OUT"}
mkdir -p "$out" && out=$(cd "$out" && pwd) || exit 2
cd "$(dirname "$0")/.." || exit 2
export PYTHONPATH="$PWD/src:$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=${TRY:-4}
export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0} TORCH_SYMM_MEM_DISABLE_MULTICAST=${TORCH_SYMM_MEM_DISABLE_MULTICAST:-1}
work=$(mktemp -d) gpu=0 compilers=
for what in whole:fp8_ds_mla part:fp8_ds_mla whole:bf16 part:bf16; do
  CUDA_VISIBLE_DEVICES=$((gpu++ % 2)) timeout -k 2 60 "${PYTHON:-python3}" benchmarks/record_distributed.py --compile $what ${TRY:+--tiny} \
    > "$work/compile-$what.log" 2>&1 &
  compilers="$compilers $!"
done
timeout -k 5 "${TWO_S:-100}" "${PYTHON:-python3}" -m torch.distributed.run --standalone --nproc-per-node 2 \
  benchmarks/record_distributed.py --out "$work" --after "$work/compiled" ${TRY:+--tiny} > "$out/two.log" 2>&1 &
record=$!
for one in $compilers; do
  wait "$one" || echo "a compiling process ended with $?" >> "$work/failed"
done
touch "$work/compiled"
echo "kernels compiled after $SECONDS s"
wait $record
status=$?
for kind in csv json; do
  [ -f "$work/distributed.$kind" ] && cp "$work/distributed.$kind" "$out/distributed-h200.$kind"
done
[ -f "$work/failed" ] && cat "$work/failed" && tail -n 3 "$work"/compile-*.log | cut -c1-300
echo "status $status after $SECONDS s"
grep -E "^(whole|times)|Error|uncast:" "$out/two.log" | cut -c1-300 | tail -12
[ -f "$out/distributed-h200.csv" ] && cut -d, -f2- "$out/distributed-h200.csv" | sed 's/NVIDIA.*//; s/uncast=.*//' | cut -c1-150
exit $status
