#!/bin/sh
# Distillation: the student comes nearer to its teacher, every layout does the same, a resumed run goes on as if it had
# not stopped, and what is refused.
set -u
. tests/suite.sh
export OMP_NUM_THREADS=1

# Two digits, and their sum.
write_data() {
    awk -v file="$work/data.jsonl" 'BEGIN {
        for (i = 0; i < 100; i++)
            printf "{\"prompt\": \"%d+%d=\", \"response\": \"%d\"}\n", i % 10, int(i / 10), i % 10 + int(i / 10) > file
    }'
}

data="--data-path $work/data.jsonl --split 90,10,0 --chat-template plain --seq-length 16 --global-batch-size 8
    --micro-batch-size 2 --hidden-dropout 0 --attention-dropout 0 --device cpu --lr-decay-style constant
    --vocab-size 257 --tokenizer-type ByteLevel --make-vocab-size-divisible-by 2"
also= # a further key of metrics
large="--num-layers 2 --hidden-size 32 --num-attention-heads 4 --position-embedding-type rope"
small="--num-layers 4 --hidden-size 16 --ffn-hidden-size 48 --num-attention-heads 2 --swiglu --normalization RMSNorm
    --position-embedding-type rope --lr 5e-3 --eval-iters 0"

train_teacher() {
    # shellcheck disable=SC2086
    "$train" --sft $data $large --lr 5e-3 --train-iters 150 --eval-iters 0 --save "$work/teacher" \
        >"$work/out" 2>"$work/err"
}

# distill RANKS METRICS ARGUMENTS...
distill() {
    ranks=$1 metrics=$2
    shift 2
    set -- --stage kd --teacher-load "$work/teacher" --log-interval 1 --metrics "$metrics" "$@"
    # shellcheck disable=SC2086
    on_ranks "$ranks" "$train" $data "$@"
}

# same A B TOLERANCE: two files of metrics agree.
same() {
    same_series "$1" "$2" "$3" 0 lm_loss cross-entropy divergence grad_norm $also
}

# The loss is the weighted sum, and its validation reads the teacher too.
a_student_comes_nearer() {
    # shellcheck disable=SC2086
    distill 1 "$work/long.jsonl" $small --eval-iters 1 --train-iters 80 --distill-loss-weight 0.75 || return 1
    says '^    80/80 .* cross-entropy [0-9.]* .*divergence [0-9.]* ' "$work/out" &&
        says 'validation loss [0-9]' "$work/out" || return 1
    series divergence "$work/long.jsonl" >"$work/divergence"
    series cross-entropy "$work/long.jsonl" >"$work/entropy"
    series lm_loss "$work/long.jsonl" | paste - "$work/entropy" "$work/divergence" | awk '
        { d = $1 - 0.25 * $2 - 0.75 * $3; if (d * d > 1e-12) { print "another sum: " $0; exit 1 } }
        NR == 1 { first = $3 } { last = $3 }
        END { if (!(last < first / 5)) { print "divergence " first " fell to " last; exit 1 } }'
}

# Its own teacher: nothing to learn from it.
a_student_that_is_its_teacher_has_no_divergence() {
    for k in 0 9; do
        distill 1 "$work/self$k.jsonl" --load "$work/teacher" --finetune --lr 1e-3 --eval-iters 0 --train-iters 1 \
            --distill-loss-weight 1 --logits-topk $k || return 1
        [ "$(series divergence "$work/self$k.jsonl")" = 0 ] || {
            series divergence "$work/self$k.jsonl"
            return 1
        }
        series grad_norm "$work/self$k.jsonl" | awk '{ if (!($1 < 1e-6)) { print "gradient " $1; exit 1 } }' || return 1
    done
}

# All labels by their ids, or as the whole vocabulary.
the_greatest_of_all_are_the_vocabulary() {
    for k in 0 257 40; do
        # shellcheck disable=SC2086
        distill 1 "$work/top$k.jsonl" $small --train-iters 4 --logits-topk $k --kd-objective js_divergence || return 1
    done
    same "$work/top0.jsonl" "$work/top257.jsonl" 0 && ! same "$work/top0.jsonl" "$work/top40.jsonl" 1e-4 >/dev/null
}

# objectives: each has its own value.
every_divergence_is_another() {
    : >"$work/values"
    for objective in forward_kl reverse_kl adaptive_kl skewed_forward_kl skewed_reverse_kl js_divergence; do
        # shellcheck disable=SC2086
        distill 1 "$work/$objective.jsonl" $small --train-iters 1 --kd-objective $objective || return 1
        series divergence "$work/$objective.jsonl" >>"$work/values"
    done
    # shellcheck disable=SC2086
    distill 1 "$work/warm.jsonl" $small --train-iters 1 --kd-temperature 2 &&
        distill 1 "$work/skew.jsonl" $small --train-iters 1 --kd-objective skewed_forward_kl --skew-lambda 0.4 &&
        distill 1 "$work/tail.jsonl" $small --train-iters 1 --kd-objective adaptive_kl --adaptive-kl-alpha 0.9 ||
        return 1
    for run in warm skew tail; do series divergence "$work/$run.jsonl" >>"$work/values"; done
    [ "$(sort -u "$work/values" | wc -l)" = 9 ] || {
        cat "$work/values"
        return 1
    }
}

# layout K RANKS ARGUMENTS...: the same as one rank.
layout() {
    k=$1 ranks=$2
    shift 2
    # shellcheck disable=SC2086
    distill "$ranks" "$work/layout.jsonl" --overwrite $small --train-iters 3 --logits-topk "$k" "$@" &&
        same "$work/one$k.jsonl" "$work/layout.jsonl" 1e-5 && return
    echo "on $ranks ranks: $*"
    return 1
}

every_layout_does_the_same() {
    for k in 0 20; do
        # shellcheck disable=SC2086
        distill 1 "$work/one$k.jsonl" $small --train-iters 3 --logits-topk $k || return 1
    done
    layout 20 2 --tensor-model-parallel-size 2 && layout 0 2 --tensor-model-parallel-size 2 --sequence-parallel &&
        layout 0 2 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 &&
        layout 20 2 --pipeline-model-parallel-size 2 --pipeline-schedule zb-h1 &&
        layout 20 2 --context-parallel-size 2 && layout 0 2 --context-parallel-size 2 --cp-comm-type a2a &&
        layout 20 2 --context-parallel-size 2 --dynamic-context-parallel --max-seqlen-per-dp-cp-rank 16 &&
        layout 0 2 && layout 20 2 --data-parallel-sharding-strategy optim_grads_params &&
        layout 20 4 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 &&
        layout 20 4 --tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2 || return 1
    # bf16 rounds logits and their gradients
    # shellcheck disable=SC2086
    distill 2 "$work/bf16.jsonl" $small --train-iters 3 --logits-topk 20 --tensor-model-parallel-size 2 --bf16 &&
        same "$work/one20.jsonl" "$work/bf16.jsonl" 0.02
}

# hidden NAME RANKS ARGUMENTS...: a student as wide as its teacher, which learns hidden states of its last layers.
hidden="--num-layers 2 --hidden-size 32 --num-attention-heads 2 --ffn-hidden-size 48 --swiglu --normalization RMSNorm
    --position-embedding-type rope --lr 5e-3 --eval-iters 0"
pairs="decoder.layers.1:decoder.layers.1 decoder.final_layernorm:decoder.final_layernorm:mse"
learn_hidden() {
    name=$1 ranks=$2
    shift 2
    # shellcheck disable=SC2086
    distill "$ranks" "$work/$name.jsonl" --overwrite $hidden --kd-hidden-layers $pairs "$@"
}

hidden_states_come_nearer() {
    for balance in fixed hidden all; do
        learn_hidden "near-$balance" 1 --train-iters 40 --kd-balance $balance || return 1
        says 'hidden-state loss [0-9]' "$work/out" || return 1
        series hidden-state_loss "$work/near-$balance.jsonl" | awk -v balance=$balance '
            NR == 1 { first = $1 } { last = $1 }
            END { if (!(last < first / 2)) { print balance ": " first " fell to " last; exit 1 } }' || return 1
    done
    # the student that is its teacher: nothing to learn, and no scale
    # shellcheck disable=SC2086
    distill 1 "$work/same.jsonl" --load "$work/teacher" --finetune --lr 1e-3 --eval-iters 0 --train-iters 1 \
        --kd-hidden-layers decoder.layers.0:decoder.layers.0 --kd-balance hidden || return 1
    series hidden-state_loss "$work/same.jsonl" | awk '{ if (!($1 < 1e-6 && $1 > -1e-6)) { print; exit 1 } }'
}

# Pairs on the last stage; the teacher also on a layout of its own. A balance depends on the samples that share a
# micro-batch: one sample each.
hidden_states_do_not_depend_on_the_layout() {
    also=hidden-state_loss
    for balance in fixed all; do
        learn_hidden one 1 --train-iters 3 --micro-batch-size 1 --kd-balance $balance || return 1
        for layout in "2 --tensor-model-parallel-size 2" "2 --tensor-model-parallel-size 2 --sequence-parallel" \
            "2 --pipeline-model-parallel-size 2" "2 --pipeline-model-parallel-size 2 --pipeline-schedule zb-h1" \
            "2 --context-parallel-size 2" "2" "2 --data-parallel-sharding-strategy optim_grads_params" \
            "2 --context-parallel-size 2 --teacher-tensor-model-parallel-size 2" \
            "1 --recompute-granularity full --recompute-method uniform --recompute-num-layers 2"; do
            # shellcheck disable=SC2086
            set -- $layout
            ranks=$1
            shift
            learn_hidden other "$ranks" --train-iters 3 --micro-batch-size 1 --kd-balance $balance "$@" &&
                same "$work/one.jsonl" "$work/other.jsonl" 1e-5 && continue
            echo "$balance, on $ranks ranks: $*"
            return 1
        done
    done
    learn_hidden far 2 --train-iters 1 --pipeline-model-parallel-size 2 \
        --kd-hidden-layers decoder.layers.0:decoder.layers.1 && return 1
    also=
    says 'decoder.layers.0 is not on the pipeline stage with the loss, which has the last 1 layers' "$work/err"
}

# Model Optimizer's names, on samples of pre-training.
megatron_names_mean_the_same() {
    printf '%s\n' 'intermediate_layer_pairs: [["decoder.final_layernorm", "decoder.final_layernorm"]]' \
        'logit_layers: ["output_layer", "output_layer"]' 'skip_lm_loss: false' 'kd_loss_scale: 2.0' \
        'logit_kl_temperature: 2.0' >"$work/kd.yaml"
    text="--mock-data --vocab-size 257 --make-vocab-size-divisible-by 2 --seq-length 16 --global-batch-size 8
        --micro-batch-size 2 --hidden-dropout 0 --attention-dropout 0 --device cpu --lr-decay-style constant
        --train-iters 2 --log-interval 1"
    # shellcheck disable=SC2086
    "$train" $text $hidden --metrics "$work/a.jsonl" --overwrite --export-te-mcore-model \
        --export-kd-teacher-load "$work/teacher" --export-kd-cfg "$work/kd.yaml" >"$work/out" 2>"$work/err" &&
        "$train" $text $hidden --metrics "$work/b.jsonl" --overwrite --stage kd --teacher-load "$work/teacher" \
            --kd-data pretraining --kd-balance all --kd-loss-scale 2 --kd-temperature 2 \
            --kd-hidden-layers decoder.final_layernorm:decoder.final_layernorm >"$work/out" 2>"$work/err" &&
        same "$work/a.jsonl" "$work/b.jsonl" 0 || return 1
    # a teacher of Megatron-LM
    # shellcheck disable=SC2086
    "$train" $(echo "$text" | sed 's/257/100/') --num-layers 1 --hidden-size 8 --num-attention-heads 2 --lr 1e-3 \
        --eval-iters 0 --export-kd-teacher-load tests/golden/megatron_dist/dense --export-kd-cfg "$work/kd.yaml" \
        >"$work/out" 2>"$work/err" && says 'hidden-state loss' "$work/out" || return 1
    # a file that is not there yet stays a name
    # shellcheck disable=SC2086
    "$train" $text $hidden --export-kd-teacher-load none --export-kd-cfg none.yaml --print-config >"$work/out" \
        2>"$work/err" && says 'export-kd-cfg  *none.yaml' "$work/out" && says 'kd-data  *pretraining' "$work/out" &&
        refused 'none.yaml' "$train" $text $hidden --export-kd-teacher-load "$work/teacher" --export-kd-cfg none.yaml &&
        for line in 'criterion: 1' 'logit_layers: [a, b]' 'skip_lm_loss: 3' 'kd_loss_scale: -1' \
            'intermediate_layer_pairs: [[decoder.layers.0.mlp, decoder.layers.0.mlp]]' \
            'intermediate_layer_pairs: [[decoder.layers.0]]'; do
            printf 'skip_lm_loss: false\n%s\n' "$line" >"$work/bad.yaml"
            case $line in skip*) printf '%s\n' "$line" >"$work/bad.yaml" ;; esac
            # shellcheck disable=SC2086
            refused "${line%%:*}\|kd-hidden-layers\|kd-loss-scale" "$train" $text $hidden \
                --export-kd-teacher-load "$work/teacher" --export-kd-cfg "$work/bad.yaml" || return 1
        done
}

a_resumed_run_goes_on() {
    # shellcheck disable=SC2086
    distill 1 "$work/whole.jsonl" $small --train-iters 6 --save "$work/whole" &&
        distill 1 "$work/half.jsonl" $small --train-iters 3 --save "$work/half" &&
        distill 1 "$work/half.jsonl" --lr 5e-3 --eval-iters 0 --train-iters 6 --load "$work/half" --save "$work/half" &&
        same "$work/whole.jsonl" "$work/half.jsonl" 0 || return 1
    [ "$(series lm_loss "$work/half.jsonl" | wc -l)" = 6 ]
}

# refuses PATTERN ARGUMENTS...
refuses() {
    pattern=$1
    shift
    # shellcheck disable=SC2086
    refused "$pattern" "$train" --stage kd $data --train-iters 1 "$@"
}

# A teacher reads the student's tokens.
other_tokenizer_is_refused() {
    cp -r "$work/teacher" "$work/odd" && # a folder of weights, whose files anybody may change
        rm "$work"/odd/iter*/tok* "$work"/odd/iter*/checksums.json "$work"/odd/iter*/trainer.json &&
        printf '%s' '{"version": "1.0", "added_tokens": [], "normalizer": null, "pre_tokenizer": null,' \
            '"post_processor": null, "decoder": null, "model": {"type": "BPE", "vocab": {"a": 98}, "merges": []}}' \
            >"$work/odd.json" || return 1
    for folder in "$work"/odd/iter*/; do cp "$work/odd.json" "$folder/tokenizer.json"; done
    refuses 'teacher-load .*odd: token 98 is another text in .*; take a model with the same tokenizer' $small \
        --teacher-load "$work/odd"
}

others_are_refused() {
    # shellcheck disable=SC2086
    "$train" --sft $data $large --vocab-size 300 --lr 1e-3 --train-iters 1 --eval-iters 0 --save "$work/other" \
        >"$work/out" 2>"$work/err" || return 1
    # shellcheck disable=SC2086
    refuses 'teacher-load .*other: has a vocabulary of 300 tokens and the trained model one of 257' $small \
        --teacher-load "$work/other" &&
        refuses 'needs --teacher-load' $small &&
        other_tokenizer_is_refused &&
        refuses "$work/absent" $small --teacher-load "$work/absent" &&
        refuses 'logits-topk 258 is more than the vocabulary, 257 tokens' $small --teacher-load "$work/teacher" \
            --logits-topk 258 &&
        refuses 'mtp-num-layers 1 is for --stage pt, sft and rl' $small --teacher-load "$work/teacher" \
            --mtp-num-layers 1 &&
        refuses 'teacher-load .*tests/golden/tune/reward: has a value head' $small \
            --teacher-load tests/golden/tune/reward &&
        refuses 'has hidden states of 32 channels and the student of 16' $small --teacher-load "$work/teacher" \
            --kd-hidden-layers decoder.layers.0:decoder.layers.0 &&
        refuses 'decoder.layers.7 is not in a model of 2 layers' $hidden --teacher-load "$work/teacher" \
            --kd-hidden-layers decoder.layers.7:decoder.layers.0 &&
        refuses 'decoder.layers.0.mlp is not supported' $small --teacher-load "$work/teacher" \
            --kd-hidden-layers decoder.layers.0.mlp:decoder.layers.0 &&
        refuses 'expects STUDENT:TEACHER' $small --teacher-load "$work/teacher" --kd-hidden-layers decoder.layers.0 &&
        refuses 'kd-loss-scale .*needs --kd-balance' $small --teacher-load "$work/teacher" --kd-loss-scale 2 &&
        refuses 'rerun-mode' $small --teacher-load "$work/teacher" --rerun-mode validate_results &&
        refuses 'skew-lambda .*needs --kd-objective' $small --teacher-load "$work/teacher" --skew-lambda 0.3 &&
        refused 'teacher-load .*needs --stage kd' "$train" --sft $data $small --train-iters 1 \
            --teacher-load "$work/teacher" || return 1
    [ -n "${HAVE_MPI:-}" ] || return 0
    # shellcheck disable=SC2086
    distill 4 "$work/deep.jsonl" $small --train-iters 1 --pipeline-model-parallel-size 4 && return 1
    says '^error: --teacher-load .*: --num-layers (config.json), 2, must be a multiple of 4 pipeline ranks' "$work/err"
}

write_data
check train_teacher train_teacher
check a_student_comes_nearer a_student_comes_nearer
check a_student_that_is_its_teacher_has_no_divergence a_student_that_is_its_teacher_has_no_divergence
check the_greatest_of_all_are_the_vocabulary the_greatest_of_all_are_the_vocabulary
check every_divergence_is_another every_divergence_is_another
check hidden_states_come_nearer hidden_states_come_nearer
check megatron_names_mean_the_same megatron_names_mean_the_same
check a_resumed_run_goes_on a_resumed_run_goes_on
check others_are_refused others_are_refused
if [ -n "${HAVE_MPI:-}" ] && command -v mpirun >/dev/null; then
    check every_layout_does_the_same every_layout_does_the_same
    check hidden_states_do_not_depend_on_the_layout hidden_states_do_not_depend_on_the_layout
fi
exit $failed
