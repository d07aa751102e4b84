#!/bin/sh
# Options of Megatron-LM's training scripts: each one's effect on steps, learning rates, reports or ranks.
# Sections of megatron.c: §13 §14
set -u
. tests/suite.sh
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

preprocess=$(cd "${MT_BIN:-.}" && pwd)/data/preprocess

tidy() {
    rm -rf "$work"/*
}

# metric FILE NAME: prints the values of a metric, one line per iteration.
metric() {
    sed -n "s/.*\"$2\": \([-+.0-9e]*\).*/\1/p" "$1" | grep . || echo "$2 missing in $1"
}

small='--num-layers 2 --hidden-size 32 --num-attention-heads 4 --max-position-embeddings 16 --seq-length 16
    --vocab-size 128 --mock-data --lr 1e-2 --eval-iters 0 --device cpu --hidden-dropout 0 --attention-dropout 0'

# run ARGUMENTS...: trains a small GPT.
run() {
    # shellcheck disable=SC2086
    "$train" $small "$@" >"$work/out" 2>"$work/err"
}

# run_on RANKS ARGUMENTS...: the same on several ranks.
run_on() {
    ranks=$1
    shift
    # shellcheck disable=SC2046,SC2086
    timeout $hang $(mpirun_here) -np "$ranks" "$train" $small "$@" >"$work/out" 2>"$work/err"
}

exit_interval_saves_and_ends_the_run() {
    run --train-iters 10 --exit-interval 3 --save "$work/s" --metrics "$work/m" &&
        says 'stopped early after iteration 3$' "$work/out" &&
        [ "$(cat "$work/s/latest_checkpointed_iteration.txt")" = 3 ] || return 1
    # a run that continues at a multiple does another three; the last step is no early end
    run --train-iters 5 --exit-interval 3 --load "$work/s" --save "$work/s" --metrics "$work/m" || return 1
    ! grep 'stopped early' "$work/out" && [ "$(metric "$work/m" lm_loss | wc -l)" = 5 ] &&
        [ "$(cat "$work/s/latest_checkpointed_iteration.txt")" = 5 ]
}
check exit_interval_saves_and_ends_the_run exit_interval_saves_and_ends_the_run

# Weights of deviation 0, gains of 1 and a rate that changes nothing: the squared norm counts the gains, 2 layers x 2
# norms and the last one, of 32 channels. Of the word embedding only the row of the one token has a gradient, and the
# products before attention and MLP, whose weights are 0, have none at all.
norm_and_zeros_are_those_of_the_definition() {
    run --init-method-std 0 --train-iters 1 --lr 1e-30 --log-params-norm --metrics "$work/m" --disable-bias-linear &&
        metric "$work/m" params_norm | awk '{ d = $1 * $1 - 160; exit !(d * d < 1e-6) }' || return 1
    run --init-method-std 0.02 --train-iters 1 --metrics "$work/n" && ! grep -q 'params_norm\|num_zeros' "$work/n" ||
        return 1
    for _ in $(seq 17); do printf '\005\000\000\000'; done >"$work/tokens"
    # shellcheck disable=SC2086
    "$train" $(echo $small | sed 's/--mock-data//') --tokens-file "$work/tokens" --global-batch-size 1 --train-iters 1 \
        --untie-embeddings-and-output-weights --disable-bias-linear --log-num-zeros-in-grad --log-params-norm \
        --metrics "$work/z" >"$work/out" 2>"$work/err" || return 1
    says '  num zeros 4064  params norm ' "$work/out" && [ "$(metric "$work/z" num_zeros)" = 4064 ] # 127 rows of 32
}
check norm_and_zeros_are_those_of_the_definition norm_and_zeros_are_those_of_the_definition

# Elements that several ranks hold count once.
norm_and_zeros_do_not_depend_on_the_layout() {
    logs='--train-iters 2 --global-batch-size 4 --make-vocab-size-divisible-by 64 --log-params-norm
        --log-num-zeros-in-grad'
    # shellcheck disable=SC2086
    run $logs --metrics "$work/one" || return 1
    for layout in '--tensor-model-parallel-size 2' '' '--use-distributed-optimizer' \
        '--data-parallel-sharding-strategy optim_grads_params' '--pipeline-model-parallel-size 2'; do
        # shellcheck disable=SC2086
        run_on 2 $logs $layout --metrics "$work/two" || return 1
        for key in params_norm num_zeros; do
            metric "$work/one" $key >"$work/a"
            metric "$work/two" $key >"$work/b"
            paste "$work/a" "$work/b" | awk -v name="$key $layout" '
                { d = $1 - $2; if (d < 0) d = -d; if (!(d <= 1e-5 * $1)) { print name ": " $0; bad = 1 } }
                END { exit bad || NR != 2 }' || return 1
        done
        rm "$work/two"
    done
}

timing_log_has_the_times_of_the_parts() {
    run --train-iters 2 --timing-log-level 1 --metrics "$work/m" && says '^     1  min, max time in ms:$' "$work/out" &&
        says '^    forward-backward   ([0-9.]*, [0-9.]*)$' "$work/out" && says '^    optimizer ' "$work/out" &&
        ! grep -q 'forward-compute' "$work/out" && [ "$(metric "$work/m" forward_backward_ms | wc -l)" = 2 ] &&
        metric "$work/m" forward_backward_ms | awk '{ if (!($1 > 0)) bad = 1 } END { exit bad }' || return 1
    run --train-iters 1 --timing-log-level 2 --timing-log-option max &&
        says '^    forward-compute    [0-9.]*$' "$work/out" &&
        says '^    backward-compute  ' "$work/out" && says '^    batch-generator ' "$work/out" || return 1
    run --train-iters 1 --timing-log-level 0 && ! grep -q 'time in ms' "$work/out"
}
check timing_log_has_the_times_of_the_parts timing_log_has_the_times_of_the_parts

memory_in_use_is_logged() {
    run --train-iters 1 --log-memory-to-tensorboard --metrics "$work/m" --tensorboard-dir "$work/t" &&
        metric "$work/m" memory_bytes | awk '{ exit !($1 + 0 > 1e6) }' &&
        grep -q 'mem-allocated-bytes' "$work"/t/events* && run --train-iters 1 --metrics "$work/n" &&
        ! grep -q '"memory_bytes"' "$work/n"
}
check memory_in_use_is_logged memory_in_use_is_logged

# 4 sequences of 2 a step, then 8 of 4, then 6: 16 tokens a sequence, thresholds in tokens. Samples end within a step.
the_batch_has_the_sizes_of_its_schedule() {
    run --step-batch-size-schedule '0:2 0.064K:4,192:6' --train-samples 25 --metrics "$work/m" || return 1
    [ "$(metric "$work/m" consumed_samples | tr '\n' ' ')" = '2 4 8 12 18 24 30 ' ] || return 1
    # a run that continues has the size of its samples
    run --step-batch-size-schedule '0:2 0.064K:4 192:6' --train-samples 25 --exit-interval 3 --save "$work/s" &&
        run --step-batch-size-schedule '0:2 0.064K:4 192:6' --train-samples 25 --load "$work/s" --save "$work/s" \
            --metrics "$work/n" &&
        [ "$(metric "$work/n" consumed_samples | tr '\n' ' ')" = '12 18 24 30 ' ] || return 1
    for bad in '16:2' '0:2 16' '0:2 16:4 8:6' '0:2 8:4' '0:x' '' '0:2 16:0'; do
        # shellcheck disable=SC2086
        refused 'step-batch-size-schedule' "$train" $small --train-samples 25 --step-batch-size-schedule "$bad" ||
            return 1
    done
    # shellcheck disable=SC2086
    refused 'exclude each other' "$train" $small --train-samples 25 --step-batch-size-schedule 0:2 --global-batch-size 2
}
check the_batch_has_the_sizes_of_its_schedule the_batch_has_the_sizes_of_its_schedule

rates() {
    metric "$1" learning_rate | tr '\n' ' '
}

# The second part gives another rate, minimum and style; with the option the first part's hold, without it its own.
a_checkpoint_keeps_its_schedule() {
    schedule='--lr 1e-2 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 2 --lr-decay-iters 8'
    other='--lr 5e-2 --min-lr 1e-3 --lr-decay-style linear --lr-warmup-iters 1 --lr-decay-iters 20'
    # shellcheck disable=SC2086
    run --train-iters 6 $schedule --metrics "$work/whole" && run --train-iters 6 $schedule --exit-interval 3 \
        --save "$work/s" || return 1
    cp -r "$work/s" "$work/r"
    # shellcheck disable=SC2086
    run --train-iters 6 $other --load "$work/s" --save "$work/s" --metrics "$work/kept" \
        --use-checkpoint-opt-param-scheduler || return 1
    # shellcheck disable=SC2086
    run --train-iters 6 $other --load "$work/r" --save "$work/r" --metrics "$work/own" --override-opt_param-scheduler ||
        return 1
    metric "$work/whole" learning_rate | tail -n 3 >"$work/a"
    metric "$work/kept" learning_rate >"$work/b"
    metric "$work/own" learning_rate >"$work/c"
    [ "$(wc -l <"$work/b")" = 3 ] && cmp "$work/a" "$work/b" && ! cmp -s "$work/a" "$work/c" || return 1
    metric "$work/whole" lm_loss | tail -n 3 >"$work/a"
    metric "$work/kept" lm_loss >"$work/b"
    cmp "$work/a" "$work/b" || return 1
    # a checkpoint of an older version, without checksums
    sed -i 's/"opt_param_scheduler"/"other"/; s/"version": 2/"version": 1/' "$work/r/latest/trainer.json"
    rm "$work/r/latest/checksums.json"
    # shellcheck disable=SC2086
    refused 'has no schedule of learning rate and weight decay for --use-checkpoint-opt' "$train" $small \
        --train-iters 9 --load "$work/r" --save "$work/r" --use-checkpoint-opt-param-scheduler
}
check a_checkpoint_keeps_its_schedule a_checkpoint_keeps_its_schedule

vocabulary_files_are_a_tokenizer() {
    files=tests/golden/tokenizer/gpt2
    bare=$(echo "$small" | sed 's/--vocab-size 128//')
    # shellcheck disable=SC2086
    "$train" $bare --train-iters 1 --vocab-file $files/vocab.json --merge-file $files/merges.txt --save "$work/s" \
        >"$work/out" 2>"$work/err" || return 1
    cmp $files/vocab.json "$work/s/latest/vocab.json" && cmp $files/merges.txt "$work/s/latest/merges.txt" || return 1
    # shellcheck disable=SC2086
    "$train" $bare --train-iters 1 --tokenizer-type GPT2BPETokenizer --tokenizer-model $files --save "$work/t" \
        >"$work/out" 2>"$work/err" && cmp "$work/s/latest/model.safetensors" "$work/t/latest/model.safetensors" ||
        return 1
    # shellcheck disable=SC2086
    refused 'vocab-file needs --merge-file' "$train" $small --train-iters 1 --vocab-file $files/vocab.json
}
check vocabulary_files_are_a_tokenizer vocabulary_files_are_a_tokenizer

# The first update of Adam is the rate in each element, so the difference of two runs shows whose rate has changed.
rates_of_embedding_and_head_are_decoupled() {
    fixed='--train-iters 3 --lr-decay-style linear --min-lr 1e-3 --untie-embeddings-and-output-weights'
    # shellcheck disable=SC2086
    run $fixed --metrics "$work/plain" &&
        run $fixed --decoupled-lr 1e-2 --decoupled-min-lr 1e-3 --metrics "$work/same" &&
        run $fixed --decoupled-lr 2e-2 --metrics "$work/more" &&
        run $fixed --decoupled-lr 1e-2 --decoupled-min-lr 5e-3 --metrics "$work/later" || return 1
    for key in plain same more later; do metric "$work/$key" lm_loss >"$work/$key.losses"; done
    cmp "$work/plain.losses" "$work/same.losses" && ! cmp -s "$work/plain.losses" "$work/more.losses" &&
        ! cmp -s "$work/plain.losses" "$work/later.losses" || return 1
    [ "$(metric "$work/more" learning_rate)" = "$(metric "$work/plain" learning_rate)" ] || return 1
    # shellcheck disable=SC2086
    refused 'decoupled-min-lr' "$train" $small --train-iters 1 --decoupled-lr 1e-3 --decoupled-min-lr 1e-2
}
check rates_of_embedding_and_head_are_decoupled rates_of_embedding_and_head_are_decoupled

# Weights of deviation 0 have no gradient, nor do the gains: only decay changes 2 x 2 norms of 8 channels. SGD's first
# step leaves 1 - 0.01 x 0.5 of each, beside the 160 other gains.
norms_of_heads_may_decay() {
    run --init-method-std 0 --train-iters 1 --optimizer sgd --weight-decay 0.5 --qk-layernorm --normalization RMSNorm \
        --disable-bias-linear --log-params-norm --apply-wd-to-qk-layernorm --metrics "$work/m" &&
        metric "$work/m" params_norm | awk '{ d = $1 * $1 - 160 - 32 * 0.995 ^ 2; exit !(d * d < 1e-6) }' || return 1
    run --init-method-std 0 --train-iters 1 --optimizer sgd --weight-decay 0.5 --qk-layernorm --normalization RMSNorm \
        --disable-bias-linear --log-params-norm --metrics "$work/n" &&
        metric "$work/n" params_norm | awk '{ d = $1 * $1 - 192; exit !(d * d < 1e-6) }' || return 1
    run --train-iters 1 --apply-wd-to-qk-layernorm --save-interval 5 &&
        says '^--apply-wd-to-qk-layernorm has no effect: heads have no norms' "$work/out" &&
        says '^--save-interval has no effect: there is no --save$' "$work/out"
}
check norms_of_heads_may_decay norms_of_heads_may_decay

gradients_in_bf16_are_those_of_their_type() {
    steps='--train-iters 4 --global-batch-size 4 --bf16'
    # shellcheck disable=SC2086
    run $steps --grad-reduce-in-bf16 --metrics "$work/short" &&
        run $steps --use-precision-aware-optimizer --main-grads-dtype bf16 --metrics "$work/typed" &&
        run $steps --accumulate-allreduce-grads-in-fp32 --metrics "$work/long" &&
        run $steps --metrics "$work/plain" || return 1
    for key in short typed long plain; do metric "$work/$key" grad_norm >"$work/$key.norms"; done
    cmp "$work/short.norms" "$work/typed.norms" && cmp "$work/long.norms" "$work/plain.norms" &&
        ! cmp -s "$work/short.norms" "$work/long.norms"
}
check gradients_in_bf16_are_those_of_their_type gradients_in_bf16_are_those_of_their_type

# Values that Megatron-LM ignores too.
values_without_effect_say_so() {
    run --train-iters 1 --sequence-parallel --expert-tensor-parallel-size 2 --split 9,1,0 &&
        says '^--sequence-parallel has no effect: --tensor-model-parallel-size is 1$' "$work/out" &&
        says '^--expert-tensor-parallel-size has no effect: no layer has experts$' "$work/out" &&
        says '^--split has no effect: it needs --data-path$' "$work/out" || return 1
    run --train-iters 1 --multi-latent-attention --kv-channels 64 --normalization RMSNorm --kv-lora-rank 8 \
        --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 8 --position-embedding-type rope --disable-bias-linear &&
        says '^--kv-channels has no effect: heads of latent attention have' "$work/out" || return 1
    run --train-iters 1 --num-experts 2 --moe-router-score-function sigmoid --moe-router-pre-softmax --swiglu \
        --disable-bias-linear && says '^--moe-router-pre-softmax has no effect: ' "$work/out" || return 1
    # Sinkhorn has a sigmoid for one expert, as in Megatron
    sinkhorn='--train-iters 2 --num-experts 2 --swiglu --disable-bias-linear --moe-router-topk 1
        --moe-router-load-balancing-type sinkhorn'
    # shellcheck disable=SC2086
    run $sinkhorn --metrics "$work/a" && run $sinkhorn --moe-router-score-function sigmoid --metrics "$work/b" ||
        return 1
    [ "$(metric "$work/a" lm_loss)" = "$(metric "$work/b" lm_loss)" ]
}
check values_without_effect_say_so values_without_effect_say_so

# The same training where neighbouring ranks are stages; replicas agree on the way.
ranks_may_be_numbered_by_stages_first() {
    layout='--train-iters 2 --global-batch-size 4 --pipeline-model-parallel-size 2
        --check-weight-hash-across-dp-replicas-interval 1'
    # shellcheck disable=SC2086
    run_on 4 $layout --metrics "$work/a" && says '^pipeline  *2  *2  0,2 1,3' "$work/out" || return 1
    # shellcheck disable=SC2086
    run_on 4 $layout --use-tp-pp-dp-mapping --metrics "$work/b" &&
        says '^pipeline  *2  *2  0-1 2-3' "$work/out" || return 1
    metric "$work/a" lm_loss >"$work/a.losses"
    metric "$work/b" lm_loss >"$work/b.losses"
    cmp "$work/a.losses" "$work/b.losses"
}
# Evaluations begin at an iteration, with the first validation samples; a run that resumes goes on with those after the
# samples of the evaluations before.
evaluations_begin_at_an_iteration() {
    steps='--eval-iters 2 --eval-interval 2 --eval-global-batch-size 4 --global-batch-size 2 --lr 1e-30'
    # shellcheck disable=SC2086
    run $steps --train-iters 7 --metrics "$work/all" && run $steps --train-iters 7 --start-eval-at-iter 3 \
        --metrics "$work/late" || return 1
    [ "$(sed -n 's/^{"iteration": \([0-9]*\), "validation.*/\1/p' "$work/late" | tr '\n' ' ')" = '4 6 7 ' ] || return 1
    metric "$work/all" validation_loss | head -n 3 >"$work/first"
    metric "$work/late" validation_loss | cmp - "$work/first" || return 1
    # shellcheck disable=SC2086
    run $steps --train-iters 7 --start-eval-at-iter 3 --exit-interval 5 --save "$work/s" --metrics "$work/part" &&
        run $steps --train-iters 7 --start-eval-at-iter 3 --load "$work/s" --metrics "$work/rest" || return 1
    cat "$work/part" "$work/rest" >"$work/both"
    metric "$work/both" validation_loss | cmp - "$work/first"
}
check evaluations_begin_at_an_iteration evaluations_begin_at_an_iteration

# The batches of an evaluation may have other sizes than those of training, on every layout: the same validation losses
# as a run whose training has these sizes. The rate moves no weight.
evaluations_have_batches_of_their_own() {
    evaluated="--num-layers 4 --eval-iters 3 --eval-interval 2 --lr 1e-30"
    # shellcheck disable=SC2086
    run $evaluated --train-iters 6 --global-batch-size 12 --micro-batch-size 2 --metrics "$work/want" || return 1
    metric "$work/want" validation_loss >"$work/want.losses"
    [ "$(wc -l <"$work/want.losses")" = 3 ] || return 1
    layout=0
    while read -r ranks options; do
        layout=$((layout + 1))
        # shellcheck disable=SC2086
        run_on "$ranks" $evaluated --train-iters 6 --metrics "$work/m$layout" --eval-global-batch-size 12 $options ||
            return 1
        metric "$work/m$layout" validation_loss | paste "$work/want.losses" - |
            awk '{ d = $1 - $2; if (!(d * d < 1e-10)) { print; exit 1 } n++ } END { exit n != 3 }' || return 1
    done <<EOF
1 --global-batch-size 2 --micro-batch-size 1 --eval-micro-batch-size 4
2 --global-batch-size 4 --micro-batch-size 2 --eval-micro-batch-size 1
2 --global-batch-size 4 --micro-batch-size 1 --eval-micro-batch-size 4 --pipeline-model-parallel-size 2
2 --global-batch-size 4 --micro-batch-size 2 --eval-micro-batch-size 12 --pipeline-model-parallel-size 2
2 --global-batch-size 4 --micro-batch-size 1 --eval-micro-batch-size 4 --pipeline-model-parallel-size 2 \
--num-virtual-stages-per-pipeline-rank 2
4 --global-batch-size 2 --micro-batch-size 1 --eval-micro-batch-size 3 \
--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2
4 --global-batch-size 2 --micro-batch-size 1 --eval-micro-batch-size 6 \
--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2
EOF
    run --train-iters 1 --eval-iters 1 --global-batch-size 2 --eval-micro-batch-size 4
    says 'error: --global-batch-size, the batch of evaluations too, 2 must be a multiple of 4' "$work/err" || return 1
    run --train-iters 1 --eval-iters 1 --micro-batch-size 2 --eval-global-batch-size 3
    says 'error: --eval-global-batch-size 3 must be a multiple of 2' "$work/err" || return 1
    run --train-iters 1 --eval-global-batch-size 3 --start-eval-at-iter 2 && says 'eval-global-batch-size' "$work/out" \
        "$work/err"
}

# Filling in the middle: the same losses on every layout and after a resume, for training and validation; tokens that
# the tokenizer lacks are an error.
filling_in_the_middle_does_not_depend_on_the_layout() {
    files=tests/golden/tokenizer/gpt2
    for name in a b; do
        for i in $(seq 60); do
            echo "{\"text\": \"$name$i: the cat sat on the mat, and naïve dogs ran after it\"}"
        done >"$work/$name.jsonl"
        "$preprocess" --input "$work/$name.jsonl" --output-prefix "$work/$name" --tokenizer-type GPT2BPETokenizer \
            --tokenizer-model $files --append-eod >"$work/out" 2>"$work/err" || return 1
    done
    data="--data-path 0.7 $work/a_text_document 0.3 $work/b_text_document --split 8,2,0 --vocab-file $files/vocab.json
        --merge-file $files/merges.txt --eval-iters 1 --eval-interval 2 --train-iters 4 --global-batch-size 4"
    fim='--fim-data --fim-prefix-token ! --fim-middle-token # --fim-suffix-token $ --fim-pad-token %'
    few="$(echo "$small" | sed 's/--vocab-size 128 --mock-data//; s/--eval-iters 0//') $data"
    # shellcheck disable=SC2086
    "$train" $few --metrics "$work/plain" >"$work/out" 2>"$work/err" &&
        "$train" $few $fim --metrics "$work/one" >"$work/out" 2>"$work/err" &&
        timeout $hang $(mpirun_here) -np 2 "$train" $few $fim --micro-batch-size 2 --metrics "$work/dp" >"$work/out" \
            2>"$work/err" && timeout $hang $(mpirun_here) -np 4 "$train" $few $fim --tensor-model-parallel-size 2 \
            --pipeline-model-parallel-size 2 --metrics "$work/tp_pp" >"$work/out" 2>"$work/err" &&
        "$train" $few $fim --exit-interval 3 --save "$work/s" --metrics "$work/begin" >"$work/out" 2>"$work/err" &&
        "$train" $few $fim --load "$work/s" --metrics "$work/end" >"$work/out" 2>"$work/err" || return 1
    cat "$work/begin" "$work/end" >"$work/resumed"
    for run in plain one dp tp_pp resumed; do
        { metric "$work/$run" lm_loss && metric "$work/$run" validation_loss; } >"$work/$run.losses"
        [ "$(wc -l <"$work/$run.losses")" = 6 ] || return 1
    done
    cmp "$work/one.losses" "$work/resumed.losses" || return 1
    for run in dp tp_pp; do
        paste "$work/one.losses" "$work/$run.losses" |
            awk '{ d = $1 - $2; if (!(d * d < 1e-8)) { print; exit 1 } }' || return 1
    done
    paste "$work/one.losses" "$work/plain.losses" | # all six batches are others
        awk '{ d = $1 - $2; if (d * d < 1e-8) { print; exit 1 } }' || return 1
    # shellcheck disable=SC2086
    refused "fim-prefix-token '<fim_prefix>' is no token of the tokenizer" "$train" $few --fim-data
}

if [ -n "${HAVE_MPI:-}" ]; then
    check filling_in_the_middle_does_not_depend_on_the_layout filling_in_the_middle_does_not_depend_on_the_layout
    check evaluations_have_batches_of_their_own evaluations_have_batches_of_their_own
    check norm_and_zeros_do_not_depend_on_the_layout norm_and_zeros_do_not_depend_on_the_layout
    check ranks_may_be_numbered_by_stages_first ranks_may_be_numbered_by_stages_first
else
    echo "skipped: without MPI there is one rank"
fi
exit $failed
