#!/bin/sh
# Training on samples of any length: the same losses on every layout, with packing, micro-batches of variable length and
# dynamic context parallelism; experts; documents; resuming; epochs; refusals.
set -u
. tests/suite.sh
export OMP_NUM_THREADS=1
launch=''
[ -n "${HAVE_MPI:-}" ] && command -v mpirun >/dev/null && launch=$(mpirun_here)

small='--num-layers 4 --hidden-size 32 --num-attention-heads 4 --swiglu --normalization RMSNorm --disable-bias-linear
    --position-embedding-type rope --seq-length 128 --vocab-size 61 --mock-data --sft --lr 1e-2
    --lr-decay-style constant --hidden-dropout 0 --attention-dropout 0 --device cpu'
steps='--global-batch-size 8 --train-iters 3 --eval-iters 1'

# run RANKS ARGUMENTS...: trains; the output is in $work/out.
run() {
    ranks=$1
    shift
    # shellcheck disable=SC2086
    if [ "$ranks" = 1 ]; then
        "$train" $small "$@"
    else
        $launch -np "$ranks" "$train" $small "$@"
    fi >"$work/out" 2>"$work/err" </dev/null
}

# refuses PATTERN ARGUMENTS...: one rank refuses the options with one line.
refuses() {
    pattern=$1
    shift
    # shellcheck disable=SC2086
    refused "$pattern" "$train" $small "$@"
}

# numbers FILE: prints the loss and the gradient norm of each step; with experts also the auxiliary loss, the z-loss and
# the imbalance of loads.
numbers() {
    n=': \([-+.0-9e]*\),.*'
    step="s/.*\"lm_loss\"$n\"grad_norm\"$n"
    sed -n -e "$step\"seq_load_balancing_loss\"$n\"z_loss\"$n\"load_imbalance\"$n/\1 \2 \3 \4 \5/p" -e t \
        -e "$step/\1 \2/p" "$1"
}

# near FILE FILE: the numbers of two runs agree to 1e-5.
near() {
    numbers "$1" >"$work/one"
    numbers "$2" >"$work/other"
    [ "$(wc -l <"$work/one")" = "$(wc -l <"$work/other")" ] && [ -s "$work/one" ] || return 1
    paste "$work/one" "$work/other" | awk '
        { for (i = 1; i <= NF / 2; i++) if (($i - $(i + NF / 2)) ^ 2 > (1e-5 * $i) ^ 2) { print; bad = 1 } }
        END { exit bad }'
}

# same NAME RANKS ARGUMENTS...: trains on the rows of the reference, with the same losses and gradient norms.
same() {
    ranks=$1
    shift
    rm -f "$work/layout.jsonl"
    # shellcheck disable=SC2086
    run "$ranks" $steps $rows "$@" --metrics "$work/layout.jsonl" && near "$work/$reference.jsonl" "$work/layout.jsonl"
}

# ---- layouts

for reference in packed alone; do
    rows=
    [ $reference = packed ] && rows=--sequence-packing
    # shellcheck disable=SC2086
    check "$reference, one rank" run 1 $steps $rows --metrics "$work/$reference.jsonl"
    check "$reference, variable lengths" same 1 --variable-seq-lengths
    check "$reference, two rows a micro-batch" same 1 --micro-batch-size 2 --variable-seq-lengths
    [ -n "$launch" ] || continue
    check "$reference, data-parallel" same 2
    check "$reference, data-parallel, variable lengths" same 4 --variable-seq-lengths
    check "$reference, pipeline, variable lengths" same 2 --variable-seq-lengths --pipeline-model-parallel-size 2
    check "$reference, interleaved pipeline, variable lengths" same 2 --variable-seq-lengths \
        --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2
    check "$reference, tensor-parallel, variable lengths" same 2 --variable-seq-lengths \
        --tensor-model-parallel-size 2 --sequence-parallel
    check "$reference, context-parallel, variable lengths" same 2 --variable-seq-lengths --context-parallel-size 2
    for layout in '2 --context-parallel-size 2' '4 --context-parallel-size 4' '4 --context-parallel-size 2' \
        '2 --context-parallel-size 2 --max-seqlen-per-dp-cp-rank 80' \
        '4 --context-parallel-size 4 --min-dynamic-context-parallel-size 2' \
        '4 --context-parallel-size 2 --pipeline-model-parallel-size 2' \
        '4 --context-parallel-size 2 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2' \
        '4 --context-parallel-size 2 --pipeline-model-parallel-size 2 --micro-batch-size 8
            --max-seqlen-per-dp-cp-rank 80' \
        '4 --context-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel' \
        '4 --context-parallel-size 2 --data-parallel-sharding-strategy optim_grads_params' \
        '2 --context-parallel-size 2 --cp-comm-type all_gather' '2 --context-parallel-size 2 --cp-comm-type a2a'; do
        # shellcheck disable=SC2086
        check "$reference, dynamic, $layout" same $layout --dynamic-context-parallel
    done
done

# ---- pairs, whose rows have twice --seq-length

reference=pairs
rows='--stage rm'
# shellcheck disable=SC2086
if [ -n "$launch" ]; then
    check 'pairs, one rank' run 1 $steps $rows --metrics "$work/pairs.jsonl"
    check 'pairs, dynamic' same 2 --context-parallel-size 2 --dynamic-context-parallel
fi

# ---- experts: padding of rows is in no load and no loss of the router; the reference has none

reference=experts
rows='--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 16 --moe-router-score-function sigmoid
    --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.02 --moe-router-load-balancing-type seq_aux_loss
    --moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3'
# shellcheck disable=SC2086
check 'experts without padding' run 1 $steps $rows --variable-seq-lengths --metrics "$work/experts.jsonl"
check 'experts, padded rows' same 1
if [ -n "$launch" ]; then
    check 'experts, padded rows, expert-parallel' same 2 --expert-model-parallel-size 2
    check 'experts, padded rows, context-parallel' same 2 --context-parallel-size 2 --expert-model-parallel-size 2
    check 'experts, padded rows, tensor-parallel' same 4 --tensor-model-parallel-size 2 --sequence-parallel \
        --expert-model-parallel-size 2 --moe-token-dispatcher-type allgather
    check 'experts, variable lengths, pipeline' same 4 --variable-seq-lengths --pipeline-model-parallel-size 2 \
        --expert-model-parallel-size 2 --moe-token-dispatcher-type flex
    # rows of many samples of one token, which some ranks have: every rank ends with the reason
    awk 'BEGIN { for (i = 0; i < 700; i++) {
        printf "{\"tokens\": [1"
        for (t = 0; t < (i % 10 ? 1 : 100); t++) printf ", 2"
        print "]}"
    } }' >"$work/short.jsonl"
    too_many_sequences() {
        # shellcheck disable=SC2086
        $launch -np 4 "$train" --num-layers 1 --hidden-size 16 --num-attention-heads 2 --vocab-size 8 $rows \
            --position-embedding-type rope --sft --sequence-packing --data-path "$work/short.jsonl" --split 1,0,0 \
            --seq-length 100 --train-iters 20 --lr 1e-3 --global-batch-size 4 --eval-iters 0 --device cpu \
            --context-parallel-size 2 --expert-model-parallel-size 4 --distributed-timeout-seconds 20 \
            >"$work/out" 2>"$work/err" && return 1
        says '^error: .*100 sequences, and .* for 50, the tokens of a rank; take aux_loss' "$work/err"
    }
    check 'more sequences than tokens of a rank' too_many_sequences
    too_many_pairs() { # in place of the data are sequences of twice --seq-length
        # shellcheck disable=SC2086
        run 2 $rows --stage rm --sequence-packing --seq-length 64 --global-batch-size 4 --train-iters 4 --eval-iters 0 \
            --context-parallel-size 2 --expert-model-parallel-size 2 --distributed-timeout-seconds 20 && return 1
        says '^error: a micro-batch has .* sequences, and .* tokens of a rank; take aux_loss' "$work/err"
    }
    check 'more pairs than tokens of a rank' too_many_pairs
fi

# ---- documents of a text end anywhere, also between the parts of context ranks

# documents RANKS ARGUMENTS...
documents() {
    ranks=$1
    shift
    rm -f "$work/layout.jsonl"
    set -- --num-layers 2 --hidden-size 32 --num-attention-heads 4 --position-embedding-type rope --vocab-size 257 \
        --tokenizer-type ByteLevel --data-path "$work/text_text_document" --split 1,0,0 --seq-length 128 \
        --global-batch-size 4 --train-iters 2 --eval-iters 0 --lr 1e-3 --reset-attention-mask --reset-position-ids \
        --device cpu --metrics "$work/layout.jsonl" "$@"
    # shellcheck disable=SC2086
    if [ "$ranks" = 1 ]; then "$train" "$@"; else $launch -np "$ranks" "$train" "$@"; fi >"$work/out" 2>"$work/err" &&
        if [ "$ranks" = 1 ]; then cp "$work/layout.jsonl" "$work/documents.jsonl"; fi &&
        near "$work/documents.jsonl" "$work/layout.jsonl"
}
cp README.md "$work/text.txt"
"$(dirname "$train")/data/preprocess" --input "$work/text.txt" --output-prefix "$work/text" \
    --tokenizer-type ByteLevel --append-eod --documents lines >"$work/out" 2>"$work/err"
check 'documents' documents 1
if [ -n "$launch" ]; then
    for layout in '2 --context-parallel-size 2' '4 --context-parallel-size 4 --cp-comm-type a2a' \
        '2 --context-parallel-size 2 --dynamic-context-parallel --dataloader-type single' \
        '4 --context-parallel-size 4 --hybrid-context-parallel --max-seqlen-per-dp-cp-rank 32' \
        '4 --context-parallel-size 2 --pipeline-model-parallel-size 2 --dynamic-context-parallel'; do
        # shellcheck disable=SC2086
        check "documents, $layout" documents $layout
    done
    # the documents of a text are cut as those of static ranks are; whole sequences, and ends without loss
    dynamic_as_static() {
        for how in '--eod-mask-loss --reset-position-ids --reset-attention-mask' \
            '--reset-position-ids false --reset-attention-mask false'; do
            # shellcheck disable=SC2086
            documents 1 $how && documents 2 $how --context-parallel-size 2 --dynamic-context-parallel || return 1
        done
    }
    check 'documents, dynamic as static' dynamic_as_static
    unreadable_document() { # every rank ends, with the reason of the one that cannot read
        # shellcheck disable=SC2086
        $launch -np 4 "$train" --num-layers 1 --hidden-size 16 --num-attention-heads 2 --vocab-size 60 \
            --data-path "$work/text_text_document" --split 1,0,0 --seq-length 128 \
            --global-batch-size 4 --train-iters 2 --eval-iters 0 --lr 1e-3 --device cpu --context-parallel-size 2 \
            --dynamic-context-parallel --distributed-timeout-seconds 60 >"$work/out" 2>"$work/err" && return 1
        says '^error: .*holds token .* but the vocabulary' "$work/err"
    }
    check 'documents that cannot be read, dynamic' unreadable_document
fi
# samples have attention and positions of their own, and say so
alone_in_any_case() {
    run 1 --train-iters 1 --eval-iters 0 --reset-position-ids --reset-attention-mask &&
        says '^--reset-position-ids has no effect: samples of --sft' "$work/out" &&
        says '^--reset-attention-mask has no effect: samples of --sft' "$work/out"
}
check 'samples and --reset-*' alone_in_any_case
if [ -n "$launch" ]; then
    reference=alone rows=
    check 'samples and --reset-*, dynamic' same 2 --context-parallel-size 2 --dynamic-context-parallel \
        --reset-position-ids --reset-attention-mask --dataloader-type single
fi

# ---- resuming, epochs

# The first run stops in the middle of an epoch, the second goes on into the next one.
resumes() {
    run 1 --sequence-packing --global-batch-size 96 --train-iters 7 --eval-iters 0 --metrics "$work/whole.jsonl" &&
        run 1 --sequence-packing --global-batch-size 96 --train-iters 3 --eval-iters 0 --save "$work/run" &&
        run 1 --sequence-packing --global-batch-size 96 --train-iters 7 --eval-iters 0 --load "$work/run" \
            --save "$work/run" --metrics "$work/rest.jsonl" || return 1
    numbers "$work/whole.jsonl" | tail -n 4 >"$work/one"
    numbers "$work/rest.jsonl" >"$work/other"
    [ "$(wc -l <"$work/other")" = 4 ] && cmp "$work/one" "$work/other" &&
        refuses 'was begun with --sequence-packing 1, not 0' --global-batch-size 96 --train-iters 9 --eval-iters 0 \
            --load "$work/run" --save "$work/run"
}
check 'a resumed run goes on with the next row' resumes

# 4096 samples in rows of about 5 of 128: an epoch's rows fill its steps, and the last one has empty rows.
epochs() {
    run 1 --sequence-packing --global-batch-size 250 --train-epochs 1 --eval-iters 0 --micro-batch-size 25 || return 1
    says '^ *\([0-9]*\)/\1 100%' "$work/out"
}
check 'an epoch is a number of steps' epochs

# ---- drawing

draws() {
    run 1 --sequence-packing --global-batch-size 8 --train-iters 1 --context-parallel-size 4 \
        --dynamic-context-parallel --print-schedule "$work/step.svg" || return 1
    says '^rank 3 .*\[4:1 ' "$work/out" && says '<rect' "$work/step.svg"
}
check 'a step is drawn' draws

# ---- refusals

none='--train-iters 1'
# shellcheck disable=SC2086
{
    check 'tokens file' refuses 'exclude each other' $none --tokens-file x
    check 'documents, positions alone' refuses 'need each other' $none --sft false --context-parallel-size 2 \
        --dynamic-context-parallel --tokenizer-type ByteLevel --vocab-size 257 --reset-position-ids --print-schedule
    check 'documents, cyclic' refuses 'dataloader-type cyclic exclude' $none --sft false --context-parallel-size 2 \
        --dynamic-context-parallel --dataloader-type cyclic --print-schedule
    check 'epochs and steps' refuses '--train-epochs and --train-iters exclude' $none --train-epochs 2
    check 'dynamic without context ranks' refuses 'needs --context-parallel-size' $none --dynamic-context-parallel
    check 'packing without samples' refused '--sequence-packing needs --sft' "$train" $none --sequence-packing \
        --num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --vocab-size 8 --mock-data --lr 1
    dynamic="$none --context-parallel-size 4 --dynamic-context-parallel --print-schedule"
    check 'short micro-batches' refuses 'holds 64 tokens, fewer than --seq-length' $dynamic \
        --max-seqlen-per-dp-cp-rank 16
    check 'short micro-batches of pairs' refuses '128 tokens, fewer than a pair of samples of --seq-length 128' \
        $dynamic --stage rm --max-seqlen-per-dp-cp-rank 32
    check 'small blocks' refuses 'power of two' $dynamic --min-dynamic-context-parallel-size 3
}
exit $failed
