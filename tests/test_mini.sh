#!/bin/sh
# notes/mini.c trains like ./train, from the same weights on the same tokens, on layouts of all parallelisms; and on
# each of them like itself on one rank, except for rounding in float64. MT_MINI is its program.
set -u
. tests/suite.sh
needs_mpi
if ! command -v mpicc >/dev/null; then
    echo "skipped: mpicc is absent"
    exit 77
fi
mini=${MT_MINI:-${MT_BIN:-.}/../notes/mini}
golden=tests/golden/hf
export OMP_NUM_THREADS=1
export ASAN_OPTIONS="${ASAN_OPTIONS:-}:detect_leaks=0" # mini.c leaves its memory to the end of the process

TP=--tensor-model-parallel-size
SP=--sequence-parallel
PP=--pipeline-model-parallel-size
VP=--num-virtual-stages-per-pipeline-rank
CP=--context-parallel-size
EP=--expert-model-parallel-size

# The options of a family that ./train finds in config.json.
shape() {
    [ "$1" != mixtral ] || echo '--num-experts 4 --ffn-hidden-size 32 --rotary-base 1000000'
}

# on RANKS NAME PROGRAM ARGUMENTS...: writes $work/out.NAME.
on() {
    ranks=$1 name_of_run=$2
    shift 2
    # shellcheck disable=SC2046
    [ "$ranks" = 1 ] || set -- $(mpirun_here) -np "$ranks" "$@"
    "$@" >"$work/out.$name_of_run" 2>&1 </dev/null && return
    cat "$work/out.$name_of_run"
    return 1
}

# run_mini RANKS FAMILY ARGUMENTS...: leaves a line "LOSS NORM" for each step in $work/mini.
run_mini() {
    ranks=$1 family=$2
    shift 2
    # shellcheck disable=SC2046
    on "$ranks" mini "$mini" --load $golden/"$family" --tokens-file $golden/"$family"/tokens.i32 $(shape "$family") \
        --adam-beta2 0.95 --weight-decay 0.1 --lr 1e-3 "$@" &&
        sed -n 's/^step.* loss \([0-9.]*\)  grad norm \([0-9.]*\)$/\1 \2/p' "$work/out.mini" >"$work/mini"
}

# run_train RANKS FAMILY ARGUMENTS...: the same in $work/train.
run_train() {
    ranks=$1 family=$2
    shift 2
    on "$ranks" train "$train" --load $golden/"$family" --tokens-file $golden/"$family"/tokens.i32 --seq-length 32 \
        --adam-beta2 0.95 --weight-decay 0.1 --lr 1e-3 --lr-decay-style constant --micro-batch-size 1 --device cpu \
        --metrics "$work/m.jsonl" --overwrite "$@" &&
        sed -n 's/.*"lm_loss": \([-+.0-9e]*\),.*"grad_norm": \([-+.0-9e]*\).*/\1 \2/p' "$work/m.jsonl" >"$work/train"
}

# agree STEPS TOLERANCE FILE FILE: losses and norms of all steps, relative.
agree() {
    [ "$(wc -l <"$3")" = "$1" ] && [ "$(wc -l <"$4")" = "$1" ] || return 1
    paste "$3" "$4" | awk -v tolerance="$2" -v what="$3 and $4" '
        { for (i = 1; i < 3; i++) {
              d = ($i - $(i + 2)) / $(i + 2); if (d < 0) d = -d
              if (d > worst) worst = d
              if (!(d <= tolerance)) bad = bad "step " NR ": " $i " and " $(i + 2) "\n" } }
        END { if (bad) printf "%s differ:\n%s", what, bad
              if (ENVIRON["VERBOSE"]) printf "# largest difference %.1e\n", worst
              exit bad != "" }'
}

steps='--global-batch-size 8 --train-iters 5'

one_rank_equals_pytorch() {
    for family in llama mixtral; do
        run_mini 1 $family --global-batch-size 4 --train-iters 10 || return 1
        awk '/"losses"/ { n = 0; into = 1 } /"grad_norms"/ { n = 0; into = 2 } /\]/ { into = 0 }
            into && /^ *[0-9]/ { gsub(/[ ,]/, ""); value[into, ++n] = $0 }
            END { for (i = 1; i <= n; i++) print value[1, i], value[2, i] }' $golden/$family/expected.json \
            >"$work/pytorch"
        agree 10 1e-6 "$work/mini" "$work/pytorch" || return 1
    done
}

# layout RANKS FAMILY TRAIN'S_OWN_OPTIONS OPTIONS...: both programs run at the same time.
layout() {
    ranks=$1 family=$2 more=$3
    shift 3
    # shellcheck disable=SC2086
    run_train "$ranks" "$family" $steps $more "$@" &
    # shellcheck disable=SC2086
    run_mini "$ranks" "$family" $steps "$@"
    ran=$?
    wait $! && [ $ran = 0 ] && agree 5 1e-5 "$work/mini" "$work/train" && agree 5 1e-10 "$work/mini" "$work/one.$family"
}

refuses_what_does_not_fit() {
    refused '--nix: unknown option; --help lists them' "$mini" --nix 1 &&
        refused "--num-layers: needs a whole number from 1 to 2^20, not '3.5'" "$mini" --num-layers 3.5 &&
        refused "--lr: needs a number from 0 to 2^20, not ''" "$mini" --lr &&
        refused 'the ranks must divide by --tensor-' "$mini" $TP 2 &&
        refused 'too large a model: lower --num-layers' "$mini" --num-layers 100000 &&
        refused '--num-attention-heads must divide by --num-query-groups' "$mini" --num-query-groups 3 &&
        refused 'model.safetensors: cannot be read; check the path' "$mini" --load "$work" &&
        refused 'has no model.embed_tokens.weight of 160 x 64 numbers.*; give its shape' "$mini" \
            --load $golden/llama --hidden-size 64 &&
        refused 'tokens.i32: holds 40 sequences of 33 tokens, training needs 48' "$mini" --train-iters 6 \
            --tokens-file $golden/llama/tokens.i32
}

# shellcheck disable=SC2086
for family in llama mixtral; do run_mini 1 $family $steps && cp "$work/mini" "$work/one.$family"; done
check one_rank_equals_pytorch one_rank_equals_pytorch
check tensor_parallel layout 2 llama '' $TP 2
check tensor_and_sequence_parallel layout 2 llama '' $TP 2 $SP
check interleaved_pipeline layout 2 llama '' $PP 2 $VP 2
check context_parallel layout 2 llama '' $CP 2
check sharded_optimizer layout 2 llama --use-distributed-optimizer
check expert_parallel layout 2 mixtral '' $EP 2
check ring_of_four layout 4 llama '' $CP 4
check tensor_pipeline_4 layout 4 llama '' $TP 2 $SP $PP 2
check experts_tensor_4 layout 4 mixtral '--expert-tensor-parallel-size 1' $TP 2 $SP $EP 4
check tensor_context_pipeline_8 layout 8 llama '' $TP 2 $SP $CP 2 $PP 2 $VP 2
check experts_context_pipeline_data_8 layout 8 mixtral --use-distributed-optimizer $EP 2 $CP 2 $PP 2 $VP 2
check wrong_options_are_refused refuses_what_does_not_fit
exit $failed
