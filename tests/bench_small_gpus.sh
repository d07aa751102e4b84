#!/bin/sh
# Speed with the code of small GPUs, beside PyTorch on the same GPU in the same call: GPT-2 124M at 16 x 1024 with the
# PTX of compute capability 7.5 in fp16 and of 8.0 in bf16, which the driver translates for the GPU that answers, and
# PyTorch with scaled_dot_product_attention, eager and compiled (tests/bench_small_gpus.py).
#
#   usage: tests/bench_small_gpus.sh [DIR]      from the root of the project
#
# Builds train for 75-virtual and 80-virtual in DIR/75 and DIR/80 (build/small-gpus), unless it is there, and runs each
# twice. MICRO_BATCH and STEPS change the case; MT_PYTHON names a Python that has torch, without which only this program
# is measured. Exits with 1 if a run of it fails, or none could be made.
set -u
directory=${1:-build/small-gpus}
micro_batch=${MICRO_BATCH:-16} length=1024 steps=${STEPS:-40}
python=${MT_PYTHON:-python3}
failed=0
mkdir -p "$directory"

if ! nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
    echo "bench-small-gpus: no GPU answers" >&2
    exit 1
fi
for arch in 75 80; do
    [ -x "$directory/$arch/train" ] && continue
    echo "building for PTX of $arch (log: $directory/$arch.log)"
    if ! make CUDA_ARCH=$arch-virtual B="$directory/$arch" BIN="$directory/$arch/" "$directory/$arch/train" \
        >"$directory/$arch.log" 2>&1; then
        tail -n 5 "$directory/$arch.log" >&2
        exit 1
    fi
done

# rate FILE: the median of tokens/s in the last half of a run.
rate() {
    sed -n 's/.*"tokens_per_second": \([0-9.e+]*\).*/\1/p' "$1" 2>/dev/null | tail -n $((steps / 2)) | sort -g |
        awk '{ rate[NR] = $1 } END { if (NR) printf "%.0f", rate[int((NR + 1) / 2)] }'
}

# ours ARCH PRECISION OPTIONS...: a line of the table.
ours() {
    arch=$1 precision=$2
    shift 2
    log=$directory/$arch-$precision
    rm -f "$log.jsonl"
    "$directory/$arch/train" --hf-config data/configs/gpt2-124m.json --mock-data --seq-length $length \
        --micro-batch-size "$micro_batch" --global-batch-size "$micro_batch" --train-iters "$steps" --lr 1e-5 \
        --weight-decay 0.1 --clip-grad 1 --hidden-dropout 0 --attention-dropout 0 --eval-iters 0 --device cuda \
        --metrics "$log.jsonl" "--$precision" "$@" >"$log.log" 2>&1
    status=$?
    measured=$(rate "$log.jsonl")
    if [ $status != 0 ] || [ -z "$measured" ]; then
        tail -n 2 "$log.log" >&2
        failed=1 measured=failed
    fi
    echo "PTX of $arch|$precision|$measured" | tee -a "$directory/rows"
}

# peer MODE PRECISION
peer() {
    log=$directory/torch-$1-$2.log
    "$python" tests/bench_small_gpus.py "$1" "$2" "$micro_batch" $length "$steps" >"$log" 2>&1
    measured=$(sed -n 's/.* \([0-9]*\) tokens\/s$/\1/p' "$log")
    [ -n "$measured" ] || tail -n 1 "$log" >&2
    echo "PyTorch, $1|$2|${measured:-failed}" | tee -a "$directory/rows"
}

: >"$directory/rows"
has_torch=no
"$python" -c 'import torch' 2>/dev/null && has_torch=yes
[ $has_torch = yes ] || echo "$python has no torch: its rows are left out; MT_PYTHON names another one"
for pass in 1 2; do
    echo "pass $pass"
    ours 80 bf16
    [ $has_torch = no ] || { peer eager bf16 && peer compile bf16; }
    ours 75 fp16 --initial-loss-scale 65536
    [ $has_torch = no ] || { peer eager fp16 && peer compile fp16; }
done

echo
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | head -n 1
echo "GPT-2 124M, $micro_batch x $length, tokens/s, the faster of two passes"
awk -F '|' '
    { name = $1 " in " $2; if (!(name in best)) order[++count] = name; if ($3 + 0 >= best[name]) best[name] = $3 + 0 }
    END {
        for (i = 1; i <= count; i++) {
            split(order[i], word, " in ")
            eager = best["PyTorch, eager in " word[2]]
            ratio = eager ? sprintf("%.2f of eager", best[order[i]] / eager) : ""
            printf "%-28s %10d  %s\n", order[i], best[order[i]], ratio
        }
    }' "$directory/rows"
exit $failed
