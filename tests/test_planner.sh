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
    "$train" $common --gpu "$gpu" --gpus "$gpus" --explain "$@" >"$work/out" 2>"$work/err"
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

# The machines with other channels differ from those of data/machines in one line.
machines_with_other_channels_differ_in_receives() {
    for gpu in h100 h200; do
        grep -v '"receive_slowdown"' data/machines/$gpu.json >"$work/machine"
        grep -v '"receive_slowdown"' tests/machine_${gpu}_32_blocks.json | cmp - "$work/machine" || return 1
    done
}

# Every training step of tests/bench_gpu.txt is one of tests/measured_gpu.txt, by its name or its arguments.
benchmarks_are_measured() {
    awk -F ' *[|] *' 'NR == FNR { if ($0 !~ /^#/) seen[$2, $3] = seen[$2, $8] = 1; next }
        $1 ~ /^train/ { gpus = $1 == "train" ? 1 : substr($1, 6); rows++
            if (!((gpus, $2) in seen) && !((gpus, $6) in seen)) { print "no figure: " gpus " x " $2; failed = 1 } }
        END { exit failed || rows < 20 }' tests/measured_gpu.txt tests/bench_gpu.txt
}

# value OPTION ARGUMENTS...: the word after the last OPTION.
value() {
    option=$1 found=''
    shift
    while [ $# -gt 1 ]; do
        [ "$1" = "$option" ] && found=$2
        shift
    done
    echo "$found"
}

# teraflops GPUS ARGUMENTS...: of a GPU, as Megatron-LM counts them.
teraflops() {
    gpus=$1
    shift
    awk -v gpus="$gpus" -v tokens="$(tokens)" -v l="$(value --num-layers "$@")" -v h="$(value --hidden-size "$@")" \
        -v s="$(value --seq-length "$@")" -v V="$(value --vocab-size "$@")" \
        -v full="$(value --recompute-granularity "$@")" 'BEGIN {
        per_token = (full == "full" ? 96 : 72) * l * h * h * (1 + s / (6 * h)) + 6 * V * h
        printf "%.1f", per_token * tokens / gpus / 1e12
    }'
}

# tokens_in SECONDS ARGUMENTS...: the tokens per second of such a step.
tokens_in() {
    seconds=$1
    shift
    awk -v seconds="$seconds" -v samples="$(value --global-batch-size "$@")" -v s="$(value --seq-length "$@")" \
        'BEGIN { printf "%.0f", samples * s / seconds }'
}

# published_rows: the rows of tests/published_gpu.txt, each @NAME replaced by its arguments.
published_rows() {
    awk '/^#/ { next }
        /^@/ { name = $1; $1 = ""; set[name] = $0; next }
        /[|]/ { n = split($0, word, " "); row = ""
            for (i = 1; i <= n; i++) row = row " " (word[i] in set ? set[word[i]] : word[i])
            print row }' tests/published_gpu.txt
}

published_rows_are_predicted() {
    good=0 seen=0
    published_rows >"$work/rows"
    while IFS= read -r row; do
        gpus=$(echo "$row" | field 2) figure=$(echo "$row" | field 4) arguments=$(echo "$row" | field 5)
        machine=$(echo "$row" | field 1)
        # NVIDIA's programs have communicators of their own; on 80 GB these layouts leave no room for ours.
        case "$gpus $(echo "$row" | field 3)" in
        '128 NeMo GPT-3 175B' | '1024 NeMo Nemotron-4 340B')
            sed '/"communicator_gib"/s/"value": [0-9.]*/"value": 0/' "$machine" >"$work/published.json"
            machine=$work/published.json
            ;;
        esac
        # shellcheck disable=SC2086
        simulate "$machine" "$gpus" $arguments </dev/null || return 1
        number=${figure% *} unit=${figure#* }
        # shellcheck disable=SC2086
        case $unit in
        s) predicted=$(tokens) published=$(tokens_in "$number" $arguments) unit=tokens/s ;;
        *) predicted=$(teraflops "$gpus" $arguments) published=$number ;;
        esac
        within "$gpus x $(echo "$row" | field 3)" "$predicted" "$published" 15 "$unit" || good=1
        seen=$((seen + 1))
    done <"$work/rows"
    [ $seen = 24 ] && return $good
}

small='--num-layers 4 --hidden-size 512 --num-attention-heads 8 --vocab-size 1000 --seq-length 512 --micro-batch-size 1
    --global-batch-size 8'

# The parts of the time in $work/out add up to the step; each is rounded.
parts_are_the_step() {
    awk '/^  step/ { step = $2 } /^  time/ { gsub(/\([^)]*\)/, ""); for (i = 2; i <= NF; i++) sum += $i }
        END { out = sum - step; most = 0.4 + 0.002 * step; exit !(step > 0 && out < most && out > -most) }' "$work/out"
}

parts_add_up() {
    # shellcheck disable=SC2086
    simulate h200 64 $small --global-batch-size 4096 && says 'tokens/s, [0-9.]* T tokens a day' "$work/out" || return 1
    # shellcheck disable=SC2086
    simulate h200 1 $small --optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d && parts_are_the_step &&
        says '^adamw_step .*  on the host$' "$work/out" &&
        simulate h200 8 $eight --micro-batch-size 1 --global-batch-size 64 --pipeline-model-parallel-size 2 \
            --use-distributed-optimizer --overlap-grad-reduce && parts_are_the_step &&
        simulate h200 2 $eight --seq-length 1024 --micro-batch-size 1 --global-batch-size 10 \
            --data-parallel-sharding-strategy optim_grads --overlap-grad-reduce && parts_are_the_step &&
        simulate h200 4 $small --pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 && parts_are_the_step ||
        return 1
    says 'bubble' "$work/out" && says '^reduce_scatter .*data\|^all_reduce .*tensor of 2' "$work/out"
}

# call OPERATION PATTERN: milliseconds of a call, of the row of $work/out that begins with OPERATION and has PATTERN.
call() {
    sed -n "s/^$1 .*$2 *\([0-9.]*\) *[0-9.]*\( .*\)\{0,1\}$/\1/p" "$work/out" | head -n 1
}

# The times of single operations, from the numbers of data/machines/h200.json by the formulas of notes/28-planner.md.
operations_take_their_times() {
    llama='--hf-config data/configs/llama3-8b.json --num-layers 2 --seq-length 4096 --micro-batch-size 1'
    n=$(awk -F '[":{},]+' '$3 == "value" || $4 == "value" { print "-v " $2 "=" $(($3 == "value") ? 4 : 5) + 0 }' \
        data/machines/h200.json)
    # tiles of 128 x 256: 32 x 501; half of the idle part of the last wave counts
    # shellcheck disable=SC2016,SC2086
    formulas=$(awk $n 'BEGIN {
        tiles = 32 * 501; waves = int((tiles + multiprocessors - 1) / multiprocessors)
        results = 4096 * 128256; padded = (waves * multiprocessors + tiles) / 2 * 128 * 256
        us = 2 * padded * (4096 + product_depth) / bf16_product_tflops * 1e-6
        printf "%.3f ", (us + 2 * results / copy_gbs * 1e-3 + kernel_us) / 1e3
        flops = 2 * 4096 * 4097 * 32 * 128
        printf "%.3f ", flops / attention_128_forward_tflops * (1 + attention_tokens / 4096) * 1e-9 + kernel_us / 1e3
        us = 4 * results / copy_gbs / memory_share * 1e-3 # logits in bf16, read and written
        printf "%.3f ", (us + kernel_us) / 1e3
        sent = 2 * 15 / 16 * 4 * 128256 * 4096 # gradients of the embedding in fp32
        printf "%.3f ", sent / nvlink_reduce_gbs * 1e-6 + (collective_us + 14 * nvlink_us + network_us) / 1e3
        printf "%.3f\n", sent / (2 * network_gbs) * 1e-6 + (collective_us + 8 * nvlink_us + 7 * network_us) / 1e3 }')
    # shellcheck disable=SC2086
    simulate h200 1 $smooth $llama --global-batch-size 1 || return 1
    times="$(call linear_forward 4096x128256x4096) $(call attention_forward 'GFLOP')"
    times="$times $(call cross_entropy_backward 2004)"
    # shellcheck disable=SC2086
    simulate h200 16 $smooth $llama --global-batch-size 16 || return 1
    times="$times $(call all_reduce 'data-context of 16')"
    # shellcheck disable=SC2086
    simulate h200 16 $smooth $llama --global-batch-size 16 --gpus-per-host 2 || return 1
    times="$times $(call all_reduce 'data-context of 16')"
    echo "  by the formulas $formulas, simulated $times ms"
    echo "$formulas $times" | awk 'NF != 10 { exit 1 }
        { for (i = 1; i <= 5; i++) if ($(5 + i) > 1.003 * $i || $(5 + i) < 0.997 * $i) exit 1 }'
}

# slower NUMBER VALUE ARGUMENTS...: with VALUE as its NUMBER, a machine takes longer for a step.
slower() {
    number=$1 value=$2 gpus=$3
    shift 3
    simulate h200 "$gpus" "$@" && before=$(tokens) || return 1
    sed "s/\(\"$number\": {\"value\": \)[0-9.]*/\1$value/" data/machines/h200.json >"$work/slow.json"
    cmp -s "$work/slow.json" data/machines/h200.json && echo "no $number" && return 1
    simulate "$work/slow.json" "$gpus" "$@" && [ "$(tokens)" -lt "$before" ] && return 0
    echo "$number has no effect"
    return 1
}

# Each number of a machine limits some step, which is slower if the number is worse.
every_number_counts() {
    large="$small --num-layers 2 --hidden-size 2048 --seq-length 4096"
    fp8='--fp8-format hybrid --fp8-recipe'
    experts='--num-experts 8 --moe-router-topk 2 --disable-bias-linear'
    shares='--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather'
    # shellcheck disable=SC2086
    for number in bf16_product_tflops attention_64_forward_tflops attention_64_backward_tflops copy_gbs; do
        slower $number 10 1 $small || return 1
    done
    # shellcheck disable=SC2086
    slower multiprocessors 1000 1 $large && # more of them are idle in the last wave
        slower memory_share 0.5 1 $large && slower kernel_us 20 1 $small && slower launch_us 100 1 $small &&
        slower product_depth 300 1 $large && slower attention_tokens 5000 1 $large &&
        slower attention_128_forward_tflops 100 1 $large && slower attention_128_backward_tflops 100 1 $large &&
        slower fp8_product_tflops 300 1 $large $fp8 tensorwise && slower fp8_exact_share 0.3 1 $large $fp8 tensorwise &&
        slower fp8_blocks_share 0.3 1 $large --fp8-format e4m3 --fp8-recipe blockwise &&
        slower grouped_share 0.3 1 $large $experts &&
        slower host_update_gbs 10 1 $small --optimizer-cpu-offload &&
        slower host_copy_gbs 1 1 $small --optimizer-cpu-offload || return 1
    # shellcheck disable=SC2086
    slower nvlink_reduce_gbs 10 4 $small --tensor-model-parallel-size 4 &&
        slower collective_us 200 4 $small --tensor-model-parallel-size 4 &&
        slower nvlink_us 200 4 $small --tensor-model-parallel-size 4 &&
        slower nvlink_gather_gbs 10 4 $small --tensor-model-parallel-size 4 --sequence-parallel &&
        slower nvlink_copy_gbs 10 4 $large --tensor-model-parallel-size 4 --sequence-parallel --tp-comm-overlap &&
        slower nvlink_exchange_gbs 10 4 $small $experts --expert-model-parallel-size 4 &&
        slower nvlink_message_gbs 10 4 $large --context-parallel-size 4 &&
        slower nvlink_message_gbs 0.1 4 $small --pipeline-model-parallel-size 4 &&
        slower collective_slowdown 2 4 $large $shares &&
        slower receive_slowdown 1 4 $small --pipeline-model-parallel-size 4 || return 1
    # shellcheck disable=SC2086
    slower network_gbs 1 4 $small --gpus-per-host 2 && slower network_us 2000 4 $small --gpus-per-host 2 &&
        slower network_us 2000 4 $small --pipeline-model-parallel-size 4 --gpus-per-host 1
}

# Without --gpus: the ranks of the layout, or those of mpirun. Rank 0 prints.
the_run_at_hand_is_explained() {
    run="$train $common $small --tensor-model-parallel-size 2"
    # shellcheck disable=SC2086
    $run --gpus 2 --explain >"$work/two" && $run --explain >"$work/out" && cmp "$work/two" "$work/out" || return 1
    says '^a training step on 2 x NVIDIA H200' "$work/out" && says '^linear_forward .* 512x' "$work/out" || return 1
    # shellcheck disable=SC2086
    $run --plan-explain --gpu h100 >"$work/out" && says '^a training step on 2 x NVIDIA H100' "$work/out" &&
        "$train" $common $small --explain >"$work/out" && says '^a training step on 1 x' "$work/out" || return 1
    [ -n "${HAVE_MPI:-}" ] || return 0
    # shellcheck disable=SC2086
    on_ranks 2 $run --explain && cmp "$work/two" "$work/out" && on_ranks 4 $run --explain &&
        says '^a training step on 4 x' "$work/out" && [ "$(grep -c '^a training step' "$work/out")" = 1 ] || return 1
    # shellcheck disable=SC2086
    on_ranks 3 $run --gpus 2 --explain && cmp "$work/two" "$work/out" || return 1
    # shellcheck disable=SC2086
    ! on_ranks 3 $run --explain && says '^error: the number of ranks 3 must be a multiple' "$work/err"
}

# sums FILE: the seconds of an explained step: products, attention, optimizer, other computation and communication that
# nothing hides; not the messages of the pipeline, which are part of its bubble.
sums() {
    awk '/^operation / { table = 1; next }
        !table || /^channel_/ || /on the host$/ { next }
        / of [0-9]+ / { if ($NF == "exposed") sum["exposed"] += $(NF - 1); next }
        /^(linear|grouped|fp8_product)/ { sum["products"] += $NF; next }
        /^attention_/ { sum["attention"] += $NF; next }
        /^(adamw_step|adamw_amax|squared_norm)/ { sum["optimizer"] += $NF; next }
        { sum["memory-bound"] += $NF }
        END { printf "%.2f %.2f %.2f %.2f %.2f\n", sum["products"], sum["attention"], sum["memory-bound"],
            sum["optimizer"], sum["exposed"] }' "$1"
}

# explained_rank RANK ARGUMENTS...: the step of a pipeline rank, in $work/out; the sums of its operations are the parts
# of its time. The step has four micro-batches, and all are listed.
explained_rank() {
    rank=$1
    shift
    simulate h200 2 "$@" --explain-rank "$rank" && parts_are_the_step || return 1
    sed -n 's/^  time //p' "$work/out" | sed 's/([^)]*)//g' >"$work/time"
    says "^Operations of pipeline rank $rank of 2; shape" "$work/out" || return 1
    sums "$work/out" | awk 'NR == FNR { found = split($0, sum); next }
        { for (i = 1; i <= NF; i++) if ($i + 0 == $i) of[name] = $i; else name = $i
          n = split("products attention memory-bound optimizer communication", names)
          for (i = 1; i <= n; i++) {
              out = sum[i] - of[names[i]]
              if (out > 0.1 || out < -0.1) { print names[i] ": sum " sum[i] ", part " of[names[i]]; exit } }
          good = sum[1] > 100 && sum[3] > 10 }
        END { exit found != 5 || !good }' - "$work/time"
}

# With two pipeline ranks: the embedding is on rank 0, head and loss on rank 1, and what one sends the other receives.
each_pipeline_rank_is_explained() {
    pair="$smooth --hf-config data/configs/llama3-8b.json --num-layers 8 --seq-length 4096 --micro-batch-size 2
        --global-batch-size 8 --pipeline-model-parallel-size 2"
    # a micro-batch's activations: 2 x 4096 x 4096 in bf16, 64 MiB
    # shellcheck disable=SC2086
    explained_rank 1 $pair && says '^linear_forward  *4  8192x128256x4096 ' "$work/out" &&
        says '^cross_entropy_forward ' "$work/out" && says ' ms (pipeline rank 1 of 2)$' "$work/out" &&
        says '^channel_recv  *4  activations  *64  pipeline of 2 .*% behind backward$' "$work/out" &&
        says '^channel_send  *4  gradients  *64  pipeline of 2 .*% behind forward$' "$work/out" &&
        ! grep '^embedding' "$work/out" || return 1
    # shellcheck disable=SC2086
    explained_rank 0 $pair && says '^embedding_forward ' "$work/out" && says '^embedding_backward ' "$work/out" &&
        says '^channel_send  *4  activations  *64  pipeline of 2 ' "$work/out" &&
        says '^channel_recv  *4  gradients  *64  pipeline of 2 ' "$work/out" &&
        says ' ms (pipeline rank 0 of 2, the last to end)$' "$work/out" &&
        says ", bubble [0-9.]*% of all ranks' work$" "$work/out" &&
        ! grep 'cross_entropy\|x128256x' "$work/out" || return 1
    # the last to end is the default; both names of the option are one
    cp "$work/out" "$work/zero"
    # shellcheck disable=SC2086
    simulate h200 2 $pair && cmp "$work/out" "$work/zero" || return 1
    # shellcheck disable=SC2086
    "$train" $common $pair --gpus 2 --plan-explain --plan-explain-rank 0 >"$work/out" && cmp "$work/out" "$work/zero" &&
        refused '--explain-rank 2: .* ranks are 0 to 1' "$train" $common $pair --gpus 2 --explain --explain-rank 2 &&
        refused '--explain-rank 1: .* ranks are 0 to 0' "$train" $common $small --explain --explain-rank 1 &&
        refused '--plan-explain-rank needs --explain' "$train" $common $small --plan-explain-rank 0 &&
        refused '--explain-rank needs --explain' "$train" --bf16 $small --plan --gpus 2 --explain-rank 0
}

# With two stages a rank, both ranks send and receive both; one boundary between stages wraps around.
messages_of_several_stages_are_explained() {
    # shellcheck disable=SC2086
    simulate h200 2 $smooth $eight --micro-batch-size 2 --global-batch-size 16 --pipeline-model-parallel-size 2 \
        --num-virtual-stages-per-pipeline-rank 2 --explain-rank 1 || return 1
    says '^Operations of pipeline rank 1 of 2 in 4 of 8 micro-batches' "$work/out" &&
        [ "$(awk '/^channel_/ { print $1, $2, $3 }' "$work/out" | sort | tr '\n' ' ')" = \
            'channel_recv 4 gradients channel_recv 8 activations channel_send 4 activations channel_send 8 gradients ' ]
}

# machine KEY VALUE: data/machines/h200.json with another value, in $work/other.json.
machine() {
    sed "s/\(\"$1\": {\"value\": \)[0-9.]*/\1$2/" data/machines/h200.json >"$work/other.json"
    ! cmp -s "$work/other.json" data/machines/h200.json
}

# On a GPU that has nothing but communicators of 10 GiB beside the model, what is needed beside it counts them.
communicators_are_counted() {
    sed -e '/"memory_gib"/s/"value": [0-9.]*/"value": 10000/' -e '/context_gib"/s/"value": [0-9.]*/"value": 0/' \
        -e '/"communicator_gib"/s/"value": [0-9.]*/"value": 10/' data/machines/h200.json >"$work/other.json"
    while IFS='|' read -r gpus count options; do
        # shellcheck disable=SC2086
        simulate "$work/other.json" "$gpus" $small $options </dev/null || return 1
        sed -n 's/^  memory .* in all \([0-9.]*\) GiB.* libraries \([0-9.]*\) of.*/\1 \2/p' "$work/out" |
            awk -v count="$count" -v name="$gpus x $options" '{ found = ($2 - $1) / 10; seen = 1
                if (found - count > 0.02 || count - found > 0.02) { print name ": " found ", not " count; exit 1 } }
                END { exit !seen }' || return 1
    done <<'END'
1|0|
2|1|
4|3|--tensor-model-parallel-size 2
2|2.67|--pipeline-model-parallel-size 2
2|4.33|--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2
8|5.33|--context-parallel-size 4
8|2.5|--context-parallel-size 4 --cp-comm-type all_gather
16|3|--expert-model-parallel-size 8 --num-experts 8 --disable-bias-linear --global-batch-size 16
END
}

# Every number of a machine has a range, and rates have the peak. Each error names the file, the number and its bounds.
implausible_machines_are_refused() {
    base="$train $common $small --explain --gpus 1 --gpu $work/other.json"
    keys=$(sed -n 's/^ *"\([a-z0-9_]*\)": {.*/\1/p' data/machines/h200.json)
    [ "$(echo "$keys" | wc -l)" = 35 ] || return 1
    for key in $keys; do
        for value in -1 -0.001 1e9 1e300; do
            # shellcheck disable=SC2086
            machine "$key" $value &&
                refused "other.json: \"$key\" is .*; it must be a .*number from " $base || return 1
        done
        for value in '"5"' null true '[1]'; do
            # shellcheck disable=SC2086
            machine "$key" "$value" && refused "other.json: \"$key\" must be {\"value\": number" $base || return 1
        done
        for value in NaN Infinity -Infinity 1e999; do
            # shellcheck disable=SC2086
            machine "$key" "$value" && refused 'other.json' $base || return 1
        done
    done
    for key in multiprocessors memory_gib bf16_peak_tflops bf16_product_tflops copy_gbs network_gbs grouped_share; do
        # shellcheck disable=SC2086
        machine $key 0 && refused "\"$key\" is 0; it must be" $base || return 1
    done
    # shellcheck disable=SC2086
    machine multiprocessors 132.7 &&
        refused '"multiprocessors" is 132.7; it must be a whole number from 1 to 1000' $base &&
        machine fp8_product_tflops 150000 && refused '"fp8_product_tflops" is 150000; it must be a number' $base &&
        machine fp8_product_tflops 1979 &&
        refused 'is 1979; it must be at most 1978.8, twice "bf16_peak_tflops"' $base &&
        machine attention_128_forward_tflops 64000 &&
        refused '"attention_128_forward_tflops" is 64000; it must be at most 989.4, "bf16_peak_tflops"' $base ||
        return 1
    for key in bf16_product attention_64_forward attention_64_backward attention_128_backward; do
        # shellcheck disable=SC2086
        machine ${key}_tflops 990 && refused "\"${key}_tflops\" is 990; it must be at most 989.4" $base || return 1
    done
    # shellcheck disable=SC2086
    sed 's/"context_gib": {"value": 0.7/"context_gib": {"value": 90/' data/machines/h100.json >"$work/other.json" &&
        refused '"context_gib" is 90; it must be at most 79.1, "memory_gib"' $base || return 1
    # shellcheck disable=SC2086
    sed 's/"copy_gbs": {/&"unit": "TB", /' data/machines/h200.json >"$work/other.json" &&
        refused '"copy_gbs" must be {' $base || return 1
    # shellcheck disable=SC2086
    sed 's/"name": .*/"name": 5,/' data/machines/h200.json >"$work/other.json" &&
        refused '"name" must be a text' $base || return 1
    # shellcheck disable=SC2086
    sed 's/.*"copy_gbs": .*/&&/' data/machines/h200.json >"$work/other.json" && refused 'other.json.*copy_gbs' $base
}

# Modules that the model does not have are named, by --explain as by a run.
modules_without_a_layer_are_named() {
    # shellcheck disable=SC2086
    simulate h200 1 $small --recompute-granularity selective --recompute-modules moe_act layernorm &&
        says '^--recompute-modules moe_act has no effect: no layer has experts$' "$work/out" &&
        simulate h200 1 $small --fine-grained-activation-offloading --offload-modules moe_act &&
        says '^--offload-modules expert_fc1, moe_act has no effect: no layer has experts$' "$work/out" || return 1
    set -- --disable-bias-linear --num-experts 4 --moe-token-dispatcher-type allgather --tensor-model-parallel-size 2
    # shellcheck disable=SC2086
    simulate h200 2 $small "$@" --expert-tensor-parallel-size 1 --sequence-parallel &&
        says '^--moe-token-dispatcher-type has no effect: --expert-model-parallel-size and --expert-tensor-' \
            "$work/out" && simulate h200 2 $small "$@" --expert-tensor-parallel-size 2 --sequence-parallel &&
        ! grep 'no effect' "$work/out" || return 1
    # shellcheck disable=SC2086
    simulate h200 1 $small --recompute-granularity selective --recompute-modules layernorm --deterministic-mode \
        --optimizer-cpu-offload && ! grep 'no effect' "$work/out" # the step is that of a GPU
}

refusals_name_the_reason() {
    base="$train $common $small --explain"
    grep -v '"copy_gbs"' data/machines/h200.json >"$work/missing.json"
    sed 's/"copy_gbs"/"copy_rate"/' data/machines/h200.json >"$work/unknown.json"
    # shellcheck disable=SC2086
    refused 'needs --gpus' "$train" $common $small --plan &&
        refused '--gpu none: there is no data/machines/none.json; take a name' $base --gpus 1 --gpu none &&
        refused '--plan and --explain exclude each other' $base --plan --gpus 1 &&
        refused '"copy_gbs" is missing' $base --gpus 1 --gpu "$work/missing.json" &&
        refused '"copy_rate" is not a number of a machine' $base --gpus 1 --gpu "$work/unknown.json" &&
        refused 'data/machines/none.json' "$train" $common $small --gpu none --print-launch 2 &&
        refused 'data/machines/none.json' "$train" $common $small --gpu none &&
        refused '--gpus starts no ranks: .* mpirun -np 2' "$train" $common $small --gpus 2 &&
        refused 'take --bf16' "$train" --mock-data --train-iters 1 --lr 1 $small --explain --gpus 1 &&
        refused 'is not timed' $base --gpus 1 --rerun-mode validate_results &&
        refused 'is not timed, as its time depends on the samples; leave it out' $base --gpus 2 --sft \
            --context-parallel-size 2 --dynamic-context-parallel &&
        refused 'number of ranks' $base --gpus 3 --tensor-model-parallel-size 2 &&
        refused 'a step is timed in bf16' "$train" $eight --global-batch-size 8 --plan --gpus 2 &&
        ! grep -q 'the last one' "$work/err" &&
        refused 'needs --global-batch-size' "$train" --bf16 $eight --plan --gpus 2 &&
        refused 'no layout of 11 GPUs is legal: --global-batch-size 8 is not a multiple of' "$train" --bf16 $small \
            --plan --gpus 11 &&
        refused 'no layout of 8 GPUs is legal: .* parallel sizes that are given need a multiple of 16' "$train" --bf16 \
            $small --plan --gpus 8 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 2 &&
        refused 'no layout of 6 GPUs is legal: .* parallel sizes that are given need a multiple of 4' "$train" --bf16 \
            $small --plan --gpus 6 --tensor-model-parallel-size 2 --context-parallel-size 2 --tp-comm-overlap &&
        refused '--num-layers, 4, must be a multiple of 8 pipeline ranks' "$train" --bf16 $small --plan --gpus 8 \
            --pipeline-model-parallel-size 8 &&
        refused '--num-layers, 4, must be a multiple of 2 pipeline ranks times 3' "$train" --bf16 $small --plan \
            --gpus 2 --num-virtual-stages-per-pipeline-rank 3 && [ "$(wc -l <"$work/err")" = 1 ] &&
        refused '--print-schedule exclude' "$train" $common $small --plan --gpus 2 --print-schedule &&
        refused '--print-schedule exclude' $base --gpus 2 --print-schedule &&
        refused 'no layout fits' "$train" --bf16 --hf-config data/configs/llama3-70b.json --seq-length 4096 \
            --global-batch-size 8 --plan --gpus 2 &&
        refused 'exclude' $base --plan --gpus 1 &&
        refused '--gpus must be in' "$train" --bf16 $small --plan --gpus 99999999999 &&
        refused '--tensor-model-parallel-size must be in' "$train" --bf16 $small --plan --gpus 2 \
            --tensor-model-parallel-size 0 &&
        refused 'at most 1048576' "$train" --bf16 $small --plan --gpus 2 --global-batch-size 2000000 &&
        refused 'unfused is not timed' $base --gpus 1 --attention-backend unfused &&
        refused 'cudnn is not timed' $base --gpus 1 --attention-backend cudnn --attention-dropout 0 &&
        refused 'at most 256 channels' $base --gpus 1 --kv-channels 320 &&
        refused 'no layout of 2 GPUs is legal: .* at most 256 channels' "$train" --bf16 $small --plan --gpus 2 \
            --kv-channels 320 &&
        refused 'choose at most 32 experts per token' "$train" --bf16 $small --plan --gpus 2 --num-experts 64 \
            --moe-router-topk 33 --disable-bias-linear &&
        refused 'mxfp8 is not timed' $base --gpus 1 --gpu b200 --fp8-format e4m3 --fp8-recipe mxfp8 &&
        refused '--gpus-per-host must be in' "$train" --bf16 $small --plan --gpus 2 --gpus-per-host 2000 &&
        refused 'auto: needs a --pipeline' $base --gpus 3 --pipeline-model-parallel-layout auto \
            --pipeline-model-parallel-size 2 &&
        refused 'a GPU needs .* GiB' "$train" $common --hf-config data/configs/llama3-70b.json --seq-length 4096 \
            --micro-batch-size 1 --global-batch-size 1 --explain --gpus 1
}

# A limit makes a smaller GPU of the machine: --explain compares with it, and --plan takes layouts that need less.
a_memory_limit_counts_as_the_memory_of_a_gpu() {
    # shellcheck disable=SC2086
    set -- "$train" $common --hf-config data/configs/gpt2-124m.json --seq-length 1024 --micro-batch-size 8 \
        --global-batch-size 8 --gpus 1
    "$@" --explain --memory-limit 15GiB >"$work/out" 2>"$work/err" && says ' of 15.0 GiB$' "$work/out" &&
        refused 'a GPU needs .* GiB, .* and the .* has 4.0 GiB by --memory-limit;' "$@" --explain \
            --memory-limit 4GiB &&
        refused 'no layout fits: .* more than 1.0 GiB of a GPU (--memory-limit)' "$@" --plan --memory-limit 1GiB &&
        refused '--memory-limit 15: give a number' "$@" --plan --memory-limit 15 &&
        "$@" --explain --gpu rtx3060 --memory-limit 15GiB >"$work/out" 2>"$work/err" &&
        says ' of 1[01].[0-9] GiB$' "$work/out"
}

# Blocks of 128 are multiplied on compute capability 9.0 alone, and there are no times of them for other GPUs.
fp8_by_blocks_is_planned_for_hopper_alone() {
    # shellcheck disable=SC2086
    set -- "$train" $common --hf-config data/configs/gpt2-124m.json --seq-length 1024 --micro-batch-size 2 \
        --global-batch-size 2 --explain --gpus 1 --fp8-format hybrid
    for gpu in b200 rtx4090 rtx5090; do
        refused 'blockwise needs a GPU of compute capability 9.0' "$@" --gpu $gpu --fp8-recipe blockwise &&
            "$@" --gpu $gpu --fp8-recipe tensorwise >"$work/out" 2>"$work/err" || return 1
    done
    "$@" --gpu h100 --fp8-recipe blockwise >"$work/out" 2>"$work/err"
}

# Without a GPU, `make calibrate` writes no file and says why.
calibration_needs_a_gpu() {
    nvidia-smi -L >"$work/out" 2>&1 && return 0
    refused 'CUDA' "${MT_TESTS:-$MT_BIN/../tests}/bench_calibrate" data/machines/h200.json "$work/machine.json" &&
        ! [ -e "$work/machine.json" ]
}

rows_of_samples_are_named() {
    # shellcheck disable=SC2086
    simulate h100 1 $small --sft --sequence-packing &&
        says '^each row is timed as one sample of --seq-length' "$work/out" || return 1
    # shellcheck disable=SC2086
    plan $small --stage sft --gpus 1 && says '^each row is timed as one sample of --seq-length' "$work/plan"
}

# plan ARGUMENTS...: the fastest layouts, in $work/plan.
plan() {
    "$train" --bf16 --plan "$@" >"$work/plan" 2>"$work/err"
}

eight="--hf-config data/configs/llama3-8b.json --num-layers 8 --seq-length 4096"

# lines_run GPU GPUS ARGUMENTS...: each printed line is a layout that train accepts and simulates with the same step.
lines_run() {
    sed -n 's/^[0-9]*\. //p' "$work/plan" >"$work/lines"
    sed -n 's/^   step *\([0-9.]*\) ms.*/\1/p' "$work/plan" >"$work/steps"
    [ -s "$work/lines" ] || { echo "no layout" && return 1; }
    while read -r line && read -r step <&3; do
        eval "simulate \"\$@\" $line" </dev/null && says "step  *$step ms" "$work/out" ||
            { echo "$*: $line" && return 1; }
    done <"$work/lines" 3<"$work/steps"
}

# The best layouts are in order, and their lines run.
plan_prints_layouts_that_run() {
    # shellcheck disable=SC2086
    plan $eight --global-batch-size 16 --gpus 2 --gpu h200 || return 1
    # shellcheck disable=SC2086
    lines_run h200 2 $eight --global-batch-size 16 || return 1
    sort -g "$work/steps" | cmp -s - "$work/steps" || { echo "not in order" && return 1; }
    [ "$(wc -l <"$work/lines")" = 10 ]
}

gpt2='--num-layers 12 --hidden-size 768 --num-attention-heads 12 --vocab-size 50304 --seq-length 1024'

# Micro-batches are all divisors of the batch: the whole batch of a GPU may be the fastest.
every_micro_batch_is_listed() {
    # shellcheck disable=SC2086
    plan $gpt2 --gpus 1 --gpu h100 --global-batch-size 60 || return 1
    for size in 1 2 3 4 5 6 10 12 15 20 30 60; do
        # shellcheck disable=SC2086
        simulate h100 1 $gpt2 --global-batch-size 60 --micro-batch-size $size || return 1
        echo "$size $(tokens)"
    done | sort -rg -k 2 | head -n 10 | cut -d ' ' -f 1 >"$work/sizes"
    sed -n 's/^[0-9]*\. .*--micro-batch-size \([0-9]*\).*/\1/p' "$work/plan" | cmp - "$work/sizes" &&
        [ "$(head -n 1 "$work/sizes")" = 60 ] && says '^36 layouts: .* 0 not legal' "$work/plan"
}

# Options that need ranks of a kind choose layouts that have them; the lines run with these options.
options_without_sizes_choose_layouts() {
    base="$gpt2 --global-batch-size 32"
    while read -r options; do
        # shellcheck disable=SC2086
        plan $base --gpus 4 --gpu h100 $options && lines_run h100 4 $base $options || return 1
    done <<'END'
--sequence-parallel
--tp-comm-overlap
--num-virtual-stages-per-pipeline-rank 3
--num-layers-per-virtual-pipeline-stage 2
--microbatch-group-size-per-virtual-pipeline-stage 8
--pipeline-schedule zb-h1
--pipeline-model-parallel-layout auto
--decoder-first-pipeline-num-layers 2
--account-for-loss-in-pipeline-split --num-layers 11
--cp-comm-type a2a --context-parallel-size 2
--window-size 256 --cp-comm-type all_gather
--recompute-method uniform --recompute-num-layers 2
END
    # shellcheck disable=SC2086
    plan $base --gpus 4 --gpu h100 --disable-bias-linear --num-experts 4 --moe-router-topk 2 \
        --expert-tensor-parallel-size 2
}

# Models and numbers of GPUs that divide little: what the plan prints, train accepts.
unusual_plans_run() {
    while IFS='|' read -r gpus options; do
        # shellcheck disable=SC2086
        plan $options --gpus $gpus --gpu h100 && lines_run h100 $gpus $options || return 1
    done <<'END'
7|--num-layers 5 --hidden-size 448 --num-attention-heads 7 --vocab-size 1000 --seq-length 512 --global-batch-size 21
13|--num-layers 13 --hidden-size 64 --num-attention-heads 2 --vocab-size 50 --seq-length 8 --global-batch-size 26
4|--hf-config data/configs/llama3-8b.json --num-layers 7 --seq-length 4096 --window-size 1024 --global-batch-size 12
4|--hf-config data/configs/llama3-8b.json --num-layers 6 --seq-length 4096 --mtp-num-layers 1 --global-batch-size 8
4|--hf-config data/configs/llama3-70b.json --seq-length 2048 --global-batch-size 4 --lora-rank 8 --lora-target q_proj
16|--hf-config data/configs/deepseek-v3.json --num-layers 5 --seq-length 4096 --global-batch-size 16
4|--hf-config data/configs/qwen1.5-moe-a2.7b.json --num-layers 6 --seq-length 2048 --global-batch-size 12
2|--hf-config data/configs/qwen3-0.6b.json --seq-length 2048 --global-batch-size 8 --fp8-format hybrid --sft
END
}

# Sizes that are given are kept; layouts that do not fit are not printed.
plan_keeps_what_is_given() {
    # shellcheck disable=SC2086
    plan --hf-config data/configs/llama3-8b.json --seq-length 4096 --global-batch-size 32 --gpus 8 --gpu h100 \
        --pipeline-model-parallel-size 4 --micro-batch-size 1 --context-parallel-size 1 || return 1
    says '^1\. .*--tensor-model-parallel-size' "$work/plan" &&
        ! grep '^[0-9]*\. .*\(pipeline-model-parallel-size\|micro-batch\)' "$work/plan" &&
        says 'with CUDA and libraries [0-9.]* of 79.1' "$work/plan" &&
        awk '/libraries/ { if ($(NF - 3) > $(NF - 1)) exit 1 }' "$work/plan"
}

# most_are_legal: at most 4% of the layouts of $work/plan were refused.
most_are_legal() {
    awk '/ layouts: / { if ($8 > $1 / 25) { print; exit 1 } seen = 1 } END { exit !seen }' "$work/plan"
}

# An option that is given and needs another one, or is needed, does not exclude layouts.
given_options_leave_most_layouts_legal() {
    while IFS='|' read -r model batch options; do
        # shellcheck disable=SC2086
        plan --hf-config "data/configs/$model.json" --num-layers 4 --seq-length 4096 --global-batch-size "$batch" \
            --gpus 8 --gpu h100 $options && most_are_legal || { echo "$options" && return 1; }
    done <<'END'
llama3-8b|64|--overlap-grad-reduce=false
llama3-8b|64|--data-parallel-sharding-strategy no_shard
llama3-8b|64|--use-distributed-optimizer=false
llama3-8b|64|--sequence-parallel=false
llama3-8b|64|--recompute-granularity selective --recompute-modules mlp
qwen3-30b-a3b|8|--no-moe-grouped-gemm
END
    # shellcheck disable=SC2086
    plan $eight --global-batch-size 64 --gpus 8 --recompute-modules mlp && says 'granularity selective$' "$work/plan" &&
        ! grep '^[0-9].*--recompute-modules' "$work/plan" || return 1
    # shellcheck disable=SC2086
    plan $small --gpus 4 --distribute-saved-activations && says '^[0-9]*\. .*tensor-model-parallel-size' "$work/plan" &&
        ! grep '^[0-9].*--sequence-parallel' "$work/plan"
}

# The host reads zeros as the results of a step, whichever models were simulated before.
layouts_of_small_experts_are_legal() {
    plan --hidden-size 512 --num-attention-heads 8 --vocab-size 1000 --seq-length 512 --num-layers 24 --gpus 1 \
        --global-batch-size 8 --num-experts 8 --moe-router-topk 2 --disable-bias-linear --moe-layer-freq 3 &&
        most_are_legal
}

# Sizes are any that divide the ranks, the layers and the experts.
sizes_are_no_powers_of_two() {
    odd='--num-layers 10 --hidden-size 384 --num-attention-heads 6 --vocab-size 1000 --seq-length 512
        --micro-batch-size 1 --global-batch-size 4'
    # shellcheck disable=SC2086
    plan $odd --gpus 3 && says '^[0-9]*\. --tensor-model-parallel-size 3' "$work/plan" || return 1
    # shellcheck disable=SC2086
    plan $odd --gpus 2 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 2 &&
        says '^[0-9]*\. --num-virtual-stages-per-pipeline-rank 5' "$work/plan" || return 1
    # shellcheck disable=SC2086
    plan $odd --gpus 3 --pipeline-model-parallel-size 3 &&
        says "^1\. .*--pipeline-model-parallel-layout 'Et" "$work/plan" || return 1
    # shellcheck disable=SC2086
    plan $odd --gpus 3 --num-experts 6 --moe-router-topk 2 --disable-bias-linear --tensor-model-parallel-size 1 \
        --pipeline-model-parallel-size 1 --global-batch-size 9 &&
        says '^[0-9]*\. --expert-model-parallel-size 3' "$work/plan"
}

# More than 16 context ranks are listed where each has at least 2,048 tokens.
context_ranks_are_limited_by_their_tokens() {
    long='--num-layers 2 --hidden-size 512 --num-attention-heads 8 --vocab-size 1000 --global-batch-size 2 --gpus 32
        --gpu h100 --micro-batch-size 1 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --seq-length'
    # shellcheck disable=SC2086
    plan $long 65536 && says '^[0-9]*\. .*--context-parallel-size 32' "$work/plan" || return 1
    # shellcheck disable=SC2086
    plan $long 65472 && says '^1\. .*--context-parallel-size 16' "$work/plan" &&
        ! grep -e '--context-parallel-size 32' "$work/plan" || return 1
    # shellcheck disable=SC2086
    plan $long 65472 --context-parallel-size 32 && says '^1\. ' "$work/plan" # it is legal
}

# Three tensor ranks nest in hosts of six GPUs; of eight, ranks 6 to 8 are on two hosts, and all others wait for them.
groups_of_two_hosts_are_slow() {
    three="$small --num-attention-heads 6 --hidden-size 768 --seq-length 4096 --global-batch-size 32
        --tensor-model-parallel-size 3 --gpus-per-host"
    # shellcheck disable=SC2086
    simulate h100 24 $three 6 && nested=$(tokens) && simulate h100 24 $three 8 && across=$(tokens) || return 1
    echo "  hosts of 6: $nested, of 8: $across tokens/s"
    [ "$across" -lt $((nested * 3 / 4)) ]
}

# Four ranks that share an expert's width receive the same rows in all dispatchers.
rows_of_split_experts_are_planned() {
    # shellcheck disable=SC2086
    for dispatcher in alltoall allgather flex; do
        simulate h200 8 --hf-config data/configs/qwen3-30b-a3b.json --num-layers 4 --seq-length 2048 \
            --micro-batch-size 1 --global-batch-size 8 --tensor-model-parallel-size 4 --sequence-parallel \
            --expert-model-parallel-size 2 --expert-tensor-parallel-size 4 --moe-token-dispatcher-type $dispatcher ||
            return 1
        sed -n 's/.* expert rows \([0-9.]*\) .*/\1/p' "$work/out"
    done >"$work/rows"
    # alltoall also keeps the rows as they are sent
    awk '{ gib[NR] = $1 } END { print "  expert rows", gib[1], gib[2], gib[3], "GiB"
        exit !(gib[2] > 0.8 * gib[1] && gib[2] < gib[1] && gib[3] == gib[2]) }' "$work/rows"
}

# With 8 experts of a token, two and four expert ranks gather tokens, and eight do not.
fewer_bytes_choose_the_dispatcher() {
    # shellcheck disable=SC2086
    for ranks in 2 4 8; do
        plan --hf-config data/configs/qwen3-30b-a3b.json --num-layers 4 --seq-length 2048 --global-batch-size 16 \
            --tensor-model-parallel-size 1 --expert-model-parallel-size $ranks --gpus 8 --gpu h200 || return 1
        grep '^1\. ' "$work/plan" | grep -c -e '--moe-token-dispatcher-type allgather'
    done | tr '\n' ' ' >"$work/gathers"
    [ "$(cat "$work/gathers")" = '1 1 0 ' ]
}

# With everything sharded, parameters and gradients move beside the computation of other layers, experts' too: less than
# 3% of a step is exposed.
sharded_layers_hide_their_communication() {
    everything='--data-parallel-sharding-strategy optim_grads_params --overlap-grad-reduce --overlap-param-gather'
    for model in llama3-8b qwen3-30b-a3b; do
        # shellcheck disable=SC2086
        simulate h200 4 --hf-config data/configs/$model.json --num-layers 6 --seq-length 4096 --micro-batch-size 4 \
            --global-batch-size 64 $everything || return 1
        awk -v model=$model '
            $1 == "step" { step = $2 }
            match($0, /exposed communication [0-9.]+/) { exposed = substr($0, RSTART + 22, RLENGTH - 22) }
            END {
                print "  " model ": " exposed " of " step " ms exposed"
                exit !(step > 0 && exposed > 0 && exposed < 0.03 * step)
            }
        ' "$work/out" || return 1
    done
}

# Copies into other ranks' memory need one host: tensor ranks of several hosts have no --tp-comm-overlap, experts no
# flex.
copies_stay_within_hosts() {
    three="$small --num-attention-heads 6 --hidden-size 768 --global-batch-size 24 --tensor-model-parallel-size 3"
    # shellcheck disable=SC2086
    plan $three --gpus 24 --gpu h100 && says '^1\. --sequence-parallel' "$work/plan" &&
        ! grep -e '--tp-comm-overlap' "$work/plan" && lines_run h100 24 $three &&
        plan $three --gpus 24 --gpu h100 --gpus-per-host 6 && says '^1\. .*--tp-comm-overlap' "$work/plan" || return 1
    # shellcheck disable=SC2086
    refused 'overlap is not possible: 3 ranks of the tensor group are on 2 hosts of 8 GPUs; leave it out' "$train" \
        $common $three --gpus 24 --explain --sequence-parallel --tp-comm-overlap || return 1
    experts="$small --num-experts 16 --moe-router-topk 2 --disable-bias-linear --global-batch-size 16
        --moe-token-dispatcher-type flex"
    # shellcheck disable=SC2086
    refused 'flex is not possible: 16 ranks of the expert-exchange group are on 2 hosts of 8 GPUs; take allgather' \
        "$train" $common $experts --gpus 16 --explain --expert-model-parallel-size 16 &&
        simulate h100 16 $experts --expert-model-parallel-size 16 --gpus-per-host 16 || return 1
    # shellcheck disable=SC2086
    plan $experts --gpus 16 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 &&
        says '^[0-9]*\. .*--expert-model-parallel-size 8' "$work/plan" &&
        ! grep -e '--expert-model-parallel-size 16' "$work/plan"
}

# The divisors of a prime batch are 1 and the batch, whose bytes are counted and whose step is not simulated.
large_micro_batches_are_only_counted() {
    # shellcheck disable=SC2086
    timeout $hang "$train" --bf16 --plan --hf-config data/configs/llama3-8b.json --seq-length 8192 --gpus 8 \
        --gpu h100 --global-batch-size 10007 >"$work/plan" 2>"$work/err" &&
        says '^1\. .*--micro-batch-size 1\( \|$\)' "$work/plan"
}

# Where a slow network limits layers that are sharded in full, recomputation may be faster, although there is room
# without it: the best layout is that of searches of each granularity.
useful_recomputation_is_listed() {
    slow='--hf-config data/configs/llama3-70b.json --num-layers 32 --seq-length 4096 --global-batch-size 32 --gpus 16
        --gpu h100 --gpus-per-host 2 --pipeline-model-parallel-size 1'
    for recompute in 'full' 'selective --recompute-modules layernorm mlp'; do
        # shellcheck disable=SC2086
        plan $slow --recompute-granularity $recompute || return 1
        sed -n 's/^   step *\([0-9.]*\) ms.*/\1/p' "$work/plan"
    done >"$work/steps"
    best=$(sort -g "$work/steps" | head -n 1)
    # shellcheck disable=SC2086
    plan $slow && grep -A 1 '^1\. ' "$work/plan" >"$work/out" && says "^   step *$best ms" "$work/out"
}

# 1,024 GPUs and a model of 405B parameters: all layouts of eight tensor ranks, by a part of the simulations that a
# search may take.
a_large_plan_leaves_nothing_out() {
    plan --num-layers 126 --hidden-size 16384 --ffn-hidden-size 53248 --num-attention-heads 128 --swiglu \
        --group-query-attention --num-query-groups 8 --normalization RMSNorm --position-embedding-type rope \
        --disable-bias-linear --untie-embeddings-and-output-weights --vocab-size 128256 --seq-length 8192 \
        --global-batch-size 1024 --gpus 1024 --gpu h100 --tensor-model-parallel-size 8 --context-parallel-size 1 \
        || return 1
    sed -n 's/^[0-9]* layouts: [0-9]* simulated/  &/p; 4p' "$work/plan"
    ! grep 'left out' "$work/plan"
}

# The same with 128 experts in each layer, and tensor ranks that do not split them.
a_large_plan_of_experts_leaves_nothing_out() {
    plan --num-layers 64 --hidden-size 6144 --ffn-hidden-size 16384 --num-attention-heads 64 --swiglu \
        --group-query-attention --num-query-groups 8 --normalization RMSNorm --position-embedding-type rope \
        --disable-bias-linear --untie-embeddings-and-output-weights --vocab-size 128256 --seq-length 8192 \
        --global-batch-size 1024 --num-experts 128 --moe-router-topk 4 --moe-ffn-hidden-size 2560 --gpus 1024 \
        --gpu h100 --tensor-model-parallel-size 4 --context-parallel-size 1 --pipeline-model-parallel-size 2 || return 1
    sed -n 's/^[0-9]* layouts: [0-9]* simulated/  &/p; 4p' "$work/plan"
    says '^1\. .*--expert-tensor-parallel-size 1' "$work/plan" && ! grep 'left out' "$work/plan"
}

# The ten best of a search, which simulates few of its layouts, are the best of searches of single sizes, which simulate
# more.
slower_layouts_are_left_out() {
    experts='--hf-config data/configs/qwen3-30b-a3b.json --num-layers 8 --seq-length 4096 --micro-batch-size 2
        --global-batch-size 32 --gpus 4 --gpu h200'
    # shellcheck disable=SC2086
    plan $experts && says 'simulated, .* [1-9][0-9]* slower by their least time' "$work/plan" || return 1
    sed -n 's/^   step *\([0-9.]*\) ms.*/\1/p' "$work/plan" >"$work/steps"
    simulated=$(sed -n 's/.*layouts: \([0-9]*\) simulated.*/\1/p' "$work/plan") apart=0
    : >"$work/parts"
    for sizes in '1 1 1' '1 2 1' '1 4 1' '2 1 1' '2 2 1' '4 1 1' '1 1 2' '1 2 2' '2 1 2'; do
        # shellcheck disable=SC2086
        set -- $sizes
        for experts_ranks in 1 2 4; do
            [ $((experts_ranks * $2)) -le 4 ] || continue
            # shellcheck disable=SC2086
            plan $experts --tensor-model-parallel-size "$1" --pipeline-model-parallel-size "$2" \
                --context-parallel-size "$3" --expert-model-parallel-size $experts_ranks || continue
            sed -n 's/^   step *\([0-9.]*\) ms.*/\1/p' "$work/plan" >>"$work/parts"
            apart=$((apart + $(sed -n 's/.*layouts: \([0-9]*\) simulated.*/\1/p' "$work/plan")))
        done
    done
    echo "  simulated: $simulated in one search, $apart in searches of single sizes"
    [ "$simulated" -lt "$apart" ] && [ "$(wc -l <"$work/steps")" = 10 ] &&
        sort -g "$work/parts" | head -n 10 | cmp - "$work/steps"
}

# The head of Llama 3 weighs as much as two layers: stages of equal time have 5 and 3 of 8 layers.
stages_are_balanced() {
    pair="$eight --micro-batch-size 2 --global-batch-size 16 --pipeline-model-parallel-size 2"
    # shellcheck disable=SC2086
    simulate h200 2 $pair && equal=$(tokens) &&
        simulate h200 2 $pair --pipeline-model-parallel-layout auto && balanced=$(tokens) || return 1
    echo "  equal stages $equal, balanced ones $balanced tokens/s"
    [ "$balanced" -gt $((equal * 11 / 10)) ] || return 1
    # shellcheck disable=SC2086
    "$train" $common $pair --pipeline-model-parallel-layout 'auto*2' --print-schedule >"$work/out" || return 1
    says '^rank 0: a embedding layers 0-1; b layers 5-7' "$work/out" &&
        says '^rank 1: a layers 2-4; b loss' "$work/out"
}

# A layout of stages of so many layers each.
letters() {
    for count in "$@"; do printf '|%*s' "$count" '' | tr ' ' t; done | sed 's/^|/E/; s/$/L/'
}

# No step is shorter after one more move of a layer from any stage to any other. The first number is that of tokens/s
# before layers were moved.
no_moved_layer_makes_a_balanced_step_shorter() {
    while read -r before layout arguments; do
        # shellcheck disable=SC2086
        "$train" $common --gpu h200 $arguments --pipeline-model-parallel-layout "$layout" --print-schedule \
            >"$work/out" &&
            counts=$(grep '^rank' "$work/out" | grep -o 'layers* [0-9-]*' | tr '-' ' ' | sort -n -k 2 |
                awk '{ print NF == 3 ? $3 - $2 + 1 : 1 }') || return 1
        # shellcheck disable=SC2086
        simulate h200 "$(value --pipeline-model-parallel-size $arguments)" $arguments \
            --pipeline-model-parallel-layout "$layout" && best=$(tokens) || return 1
        # shellcheck disable=SC2086
        echo $counts | awk '{ for (a = 1; a <= NF; a++) for (b = 1; b <= NF; b++) if (a != b && $a > 1) {
            for (i = 1; i <= NF; i++) printf "%d ", $i - (i == a) + (i == b); print "" } }' >"$work/moves"
        while read -r moved; do
            # shellcheck disable=SC2086
            simulate h200 "$(value --pipeline-model-parallel-size $arguments)" $arguments \
                --pipeline-model-parallel-layout "$(letters $moved)" || return 1
            [ "$(tokens)" -gt $((best + best / 5000)) ] && echo "  layers $moved: $(tokens) tokens/s" && return 1
        done <"$work/moves"
        # shellcheck disable=SC2086
        echo "  layers" $counts: "$best tokens/s, before $before; $(wc -l <"$work/moves") other cuts"
        [ "$(wc -l <"$work/moves")" -ge 2 ] && [ "$best" -gt "$before" ] || return 1
    done <<END
37818 auto --hf-config data/configs/qwen1.5-moe-a2.7b.json --num-layers 6 --seq-length 1024 --micro-batch-size 1 \
--global-batch-size 2 --pipeline-model-parallel-size 2 --pipeline-schedule zb-h1
376955 auto --hf-config data/configs/gpt2-1558m.json --num-layers 12 --seq-length 1024 --micro-batch-size 2 \
--global-batch-size 16 --pipeline-model-parallel-size 4
27364 auto*2 --hf-config data/configs/llama3-8b.json --num-layers 24 --seq-length 4096 --micro-batch-size 1 \
--global-batch-size 8 --pipeline-model-parallel-size 2
END
}

# The first of eight ranks holds eight micro-batches. A second layer on it shortens the step and needs more memory.
unknown_gpus_need_no_more_memory() {
    deep='--hf-config data/configs/llama3-70b.json --num-layers 12 --seq-length 4096 --micro-batch-size 1
        --global-batch-size 32 --pipeline-model-parallel-size 8 --pipeline-model-parallel-layout auto --print-schedule'
    # shellcheck disable=SC2086
    "$train" $common $deep --gpu h200 >"$work/out" && says '^rank 0: embedding layers 0-1$' "$work/out" &&
        "$train" $common $deep >"$work/out" && says '^rank 0: embedding layer 0$' "$work/out"
}

# Layers with experts take several times as long as others: a rank with dense layers only has more of them. Stages of a
# rank are balanced one by one where that is faster than equal ranks.
stages_of_unequal_layers_are_balanced() {
    mixed="$small --num-layers 12 --hidden-size 1024 --ffn-hidden-size 2048 --num-experts 8 --moe-router-topk 4
        --moe-ffn-hidden-size 4096 --disable-bias-linear --seq-length 4096 --pipeline-model-parallel-size 2
        --moe-layer-freq ([0]*6+[1]*6)"
    # shellcheck disable=SC2086
    simulate h200 2 $mixed && equal=$(tokens) &&
        simulate h200 2 $mixed --pipeline-model-parallel-layout auto && balanced=$(tokens) || return 1
    echo "  equal stages $equal, balanced ones $balanced tokens/s"
    [ "$balanced" -gt $((equal * 5 / 4)) ] || return 1
    large='--hf-config data/configs/qwen3-0.6b.json --seq-length 4096 --micro-batch-size 1 --global-batch-size 16
        --pipeline-model-parallel-size 4 --pipeline-model-parallel-layout'
    # shellcheck disable=SC2086
    simulate h200 4 $large auto && one=$(tokens) && simulate h200 4 $large 'auto*2' && two=$(tokens) || return 1
    echo "  one stage a rank $one, two $two tokens/s"
    [ "$two" -gt "$one" ]
}

# launch.sh starts as many ranks as the experts and the memory of a GPU allow.
ranks_to_launch_are_planned() {
    experts='--num-experts 8 --moe-router-topk 2 --disable-bias-linear --tensor-model-parallel-size 2
        --sequence-parallel --expert-model-parallel-size 2'
    # shellcheck disable=SC2086
    "$train" $common $small $experts --global-batch-size 6 --print-launch 8 >"$work/out" || return 1
    says '^ranks 6' "$work/out" || return 1
    # shellcheck disable=SC2086
    refused '--ffn-hidden-size 256 must be a multiple of' "$train" $common $small --hidden-size 768 \
        --num-attention-heads 6 --ffn-hidden-size 256 --tensor-model-parallel-size 3 --print-launch 8 || return 1
    sharded='--hf-config data/configs/llama3-8b.json --seq-length 4096 --micro-batch-size 1 --global-batch-size 8
        --use-distributed-optimizer --gpu h100 --print-launch'
    # shellcheck disable=SC2086
    "$train" $common $sharded 8 >"$work/out" && says '^ranks 8' "$work/out" &&
        refused 'a GPU needs .* H100' "$train" $common $sharded 2 &&
        refused 'a GPU needs .* H100' "$train" $common $sharded 31 --num-layers 600 --tensor-model-parallel-size 8 \
            --sequence-parallel || return 1
    # shellcheck disable=SC2086
    "$train" $common $sharded 2 --bf16=false >"$work/out" 2>"$work/err" && says '^ranks 2' "$work/out" &&
        says '^warning: --gpu h100: whether it has room is not checked: .* take --bf16' "$work/err"
}

# An error that no number of ranks mends does not wait for a million numbers, each with its layers balanced.
numbers_to_launch_divide_the_batch() {
    # shellcheck disable=SC2086
    refused 'trace-last-step 1 comes before' timeout "$hang" "$train" $common $small --num-layers 48 --gpu h100 \
        --global-batch-size 1000000 --pipeline-model-parallel-size 4 --pipeline-model-parallel-layout auto \
        --trace "$work/t" --trace-first-step 5 --trace-last-step 1 --print-launch 1000000 &&
        "$train" $common $small --global-batch-size 999983 --print-launch 999982 >"$work/out" &&
        says '^ranks 1$' "$work/out"
}

# A plan saves nothing, so a signal ends it at once.
a_signal_ends_a_plan() {
    # shellcheck disable=SC2086
    "$train" $common --hf-config data/configs/qwen3-30b-a3b.json --seq-length 4096 --global-batch-size 4096 --plan \
        --gpus 1024 >"$work/out" 2>"$work/err" &
    sleep 0.3 # a search of so many layouts takes a hundred times as long
    kill -TERM $!
    wait $!
    [ $? = 143 ]
}

# A check of many searches or runs, which takes minutes with memory checked.
large() {
    if [ -n "${SANITIZE:-}" ]; then echo "skipped: $1 with sanitizers"; else check "$@"; fi
}

check measured_rows_are_predicted measured_rows_are_predicted
check benchmarks_are_measured benchmarks_are_measured
check machines_with_other_channels_differ_in_receives machines_with_other_channels_differ_in_receives
large published_rows_are_predicted published_rows_are_predicted
check parts_add_up parts_add_up
check operations_take_their_times operations_take_their_times
check every_number_counts every_number_counts
check plan_prints_layouts_that_run plan_prints_layouts_that_run
check every_micro_batch_is_listed every_micro_batch_is_listed
large options_without_sizes_choose_layouts options_without_sizes_choose_layouts
large unusual_plans_run unusual_plans_run
check plan_keeps_what_is_given plan_keeps_what_is_given
large given_options_leave_most_layouts_legal given_options_leave_most_layouts_legal
check layouts_of_small_experts_are_legal layouts_of_small_experts_are_legal
check sizes_are_no_powers_of_two sizes_are_no_powers_of_two
check groups_of_two_hosts_are_slow groups_of_two_hosts_are_slow
check rows_of_split_experts_are_planned rows_of_split_experts_are_planned
check context_ranks_are_limited_by_their_tokens context_ranks_are_limited_by_their_tokens
large a_large_plan_leaves_nothing_out a_large_plan_leaves_nothing_out
large a_large_plan_of_experts_leaves_nothing_out a_large_plan_of_experts_leaves_nothing_out
check fewer_bytes_choose_the_dispatcher fewer_bytes_choose_the_dispatcher
check sharded_layers_hide_their_communication sharded_layers_hide_their_communication
check copies_stay_within_hosts copies_stay_within_hosts
check large_micro_batches_are_only_counted large_micro_batches_are_only_counted
check useful_recomputation_is_listed useful_recomputation_is_listed
large slower_layouts_are_left_out slower_layouts_are_left_out
check stages_are_balanced stages_are_balanced
check no_moved_layer_makes_a_balanced_step_shorter no_moved_layer_makes_a_balanced_step_shorter
check unknown_gpus_need_no_more_memory unknown_gpus_need_no_more_memory
check stages_of_unequal_layers_are_balanced stages_of_unequal_layers_are_balanced
check ranks_to_launch_are_planned ranks_to_launch_are_planned
check numbers_to_launch_divide_the_batch numbers_to_launch_divide_the_batch
check the_run_at_hand_is_explained the_run_at_hand_is_explained
check each_pipeline_rank_is_explained each_pipeline_rank_is_explained
check messages_of_several_stages_are_explained messages_of_several_stages_are_explained
check communicators_are_counted communicators_are_counted
large implausible_machines_are_refused implausible_machines_are_refused
check modules_without_a_layer_are_named modules_without_a_layer_are_named
check a_signal_ends_a_plan a_signal_ends_a_plan
check a_memory_limit_counts_as_the_memory_of_a_gpu a_memory_limit_counts_as_the_memory_of_a_gpu
check fp8_by_blocks_is_planned_for_hopper_alone fp8_by_blocks_is_planned_for_hopper_alone
check calibration_needs_a_gpu calibration_needs_a_gpu
check rows_of_samples_are_named rows_of_samples_are_named
check refusals_name_the_reason refusals_name_the_reason
exit $failed
