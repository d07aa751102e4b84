#!/bin/sh
# Simulated training steps beside measured and published ones: tests/measured_gpu.txt within 10%, its memory within 3%,
# tests/published_gpu.txt within 15%. Every row is printed with its difference.
set -u
. tests/suite.sh

common='--mock-data --bf16 --train-iters 12 --lr 1e-5 --eval-iters 0'
smooth='--hidden-dropout 0 --attention-dropout 0'

# field NUMBER: of the row on standard input.
field() {
    cut -d '|' -f "$1" | sed 's/^ *//; s/ *$//'
}

# rows FILE: without comments.
rows() {
    grep -v '^#' "$1" | grep '|'
}

# simulate GPU GPUS ARGUMENTS...: the table of a step, in $work/out.
simulate() {
    gpu=$1 gpus=$2
    shift 2
    # shellcheck disable=SC2086
    "$train" $common --gpu "$gpu" --gpus "$gpus" --plan-explain "$@" >"$work/out" 2>"$work/err"
}

# tokens, gib: of the simulated step in $work/out.
tokens() {
    sed -n 's/^  step .* \([0-9]*\) tokens\/s,.*/\1/p' "$work/out"
}
gib() {
    sed -n 's/^  memory .* libraries \([0-9.]*\) of.*/\1/p' "$work/out"
}

# within NAME PREDICTED MEASURED MARGIN UNIT: prints the row; fails outside of the margin, in percent.
within() {
    awk -v name="$1" -v p="${2:-0}" -v m="$3" -v margin="$4" -v unit="$5" 'BEGIN {
        out = 100 * (p / m - 1)
        printf "  %-48s %10s predicted, %10s measured %s: %+.1f%%\n", name, p, m, unit, out
        if (out > margin || -out > margin) { print "  out by " out "%"; exit 1 }
    }'
}

# arguments_of GPUS NAME: those of a row of tests/bench_gpu.txt.
arguments_of() {
    kind=train
    [ "$1" = 1 ] || kind=train$1
    awk -F ' *[|] *' -v kind="$kind" -v name="$2" '$1 == kind && $2 == name { print $6 }' tests/bench_gpu.txt
}

measured_rows_are_predicted() {
    good=0 seen=0
    rows tests/measured_gpu.txt >"$work/rows"
    while IFS= read -r row; do
        gpus=$(echo "$row" | field 2) case=$(echo "$row" | field 3) arguments=$(echo "$row" | field 8)
        [ -n "$arguments" ] || arguments=$(arguments_of "$gpus" "$case")
        [ -n "$arguments" ] || { echo "tests/bench_gpu.txt has no row $case of $gpus GPUs" && return 1; }
        # shellcheck disable=SC2086
        simulate "$(echo "$row" | field 1)" "$gpus" $smooth $arguments </dev/null || return 1
        within "$gpus x $case" "$(tokens)" "$(echo "$row" | field 4)" 10 tokens/s || good=1
        mib=$(echo "$row" | field 5)
        [ -z "$mib" ] || within "  its memory" "$(gib)" "$((mib / 1024)).$((mib % 1024 * 10 / 1024))" 3 GiB || good=1
        seen=$((seen + 1))
    done <"$work/rows"
    [ $seen -gt 25 ] && return $good
}

# teraflops GPUS ARGUMENTS: of a GPU, as the paper counts them.
teraflops() {
    awk -v gpus="$1" -v arguments="$2" -v tokens="$(tokens)" 'BEGIN {
        n = split(arguments, a, " ")
        for (i = 1; i < n; i++) value[a[i]] = a[i + 1]
        l = value["--num-layers"]; h = value["--hidden-size"]
        per_token = 96 * l * h * h * (1 + 2048 / (6 * h) + 51200 / (16 * l * h))
        printf "%.0f", per_token * tokens / gpus / 1e12
    }'
}

published_rows_are_predicted() {
    good=0 seen=0
    rows tests/published_gpu.txt >"$work/rows"
    while IFS= read -r row; do
        gpus=$(echo "$row" | field 2) arguments=$(echo "$row" | field 5)
        # shellcheck disable=SC2086
        simulate "$(echo "$row" | field 1)" "$gpus" --vocab-size 51200 --make-vocab-size-divisible-by 1 \
            --seq-length 2048 --recompute-granularity full --hidden-dropout 0.1 --attention-dropout 0.1 $arguments \
            </dev/null || return 1
        within "$gpus x $(echo "$row" | field 3)" "$(teraflops "$gpus" "$arguments")" "$(echo "$row" | field 4)" 15 \
            TFLOP/s || good=1
        seen=$((seen + 1))
    done <"$work/rows"
    [ $seen = 10 ] && return $good
}

small='--num-layers 4 --hidden-size 512 --num-attention-heads 8 --vocab-size 1000 --seq-length 512 --micro-batch-size 1
    --global-batch-size 8'

# The parts of the time add up to the step.
parts_add_up() {
    # shellcheck disable=SC2086
    simulate h200 4 $small --pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 || return 1
    awk '/^  step/ { step = $2 } /^  time/ { gsub(/\([^)]*\)/, ""); for (i = 2; i <= NF; i++) sum += $i }
        END { exit !(step > 0 && sum > 0.98 * step && sum < 1.02 * step) }' "$work/out" || return 1
    says 'bubble' "$work/out" && says '^reduce_scatter .*data\|^all_reduce .*tensor of 2' "$work/out"
}

# More of a resource never makes a step slower: each of these numbers limits some part of it.
faster_machines_are_faster() {
    # shellcheck disable=SC2086
    simulate h200 4 $small --tensor-model-parallel-size 4 || return 1
    before=$(tokens)
    for number in bf16_product_tflops attention_64_forward_tflops copy_gbs nvlink_reduce_gbs; do
        sed "s/\(\"$number\": {\"value\": \)[0-9.]*/\110/" data/machines/h200.json >"$work/slow.json"
        # shellcheck disable=SC2086
        simulate "$work/slow.json" 4 $small --tensor-model-parallel-size 4 || return 1
        [ "$(tokens)" -lt "$before" ] || { echo "$number has no effect" && return 1; }
    done
}

refusals_name_the_reason() {
    base="$train $common $small --plan-explain"
    sed 's/"copy_gbs": {"value": [0-9.]*/"copy_gbs": {"value": -1/' data/machines/h200.json >"$work/negative.json"
    grep -v '"copy_gbs"' data/machines/h200.json >"$work/missing.json"
    sed 's/"copy_gbs"/"copy_rate"/' data/machines/h200.json >"$work/unknown.json"
    # shellcheck disable=SC2086
    refused 'needs --gpus' $base &&
        refused 'data/machines/none.json' $base --gpus 1 --gpu none &&
        refused '"copy_gbs" is -1; it must be' $base --gpus 1 --gpu "$work/negative.json" &&
        refused '"copy_gbs" is missing' $base --gpus 1 --gpu "$work/missing.json" &&
        refused '"copy_gbs" is missing' $base --gpus 1 --gpu "$work/unknown.json" &&
        refused 'add --bf16' "$train" --mock-data --train-iters 1 --lr 1 $small --plan-explain --gpus 1 &&
        refused 'is not timed' $base --gpus 1 --optimizer-cpu-offload &&
        refused 'number of ranks' $base --gpus 3 --tensor-model-parallel-size 2 &&
        refused 'a GPU needs .* GiB' "$train" $common --hf-config data/configs/llama3-70b.json --seq-length 4096 \
            --micro-batch-size 1 --global-batch-size 1 --plan-explain --gpus 1
}

check measured_rows_are_predicted measured_rows_are_predicted
check published_rows_are_predicted published_rows_are_predicted
check parts_add_up parts_add_up
check faster_machines_are_faster faster_machines_are_faster
check refusals_name_the_reason refusals_name_the_reason
exit $failed
