#!/bin/sh
# --full-validation and --multiple-validation-sets: the loss of each set is the mean over all of its samples, once each,
# on every layout. The reference is infer --score of the same sequences.
set -u
. tests/suite.sh
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive
length=16

# text NAME LENGTH STEP: a dataset of one document, whose samples are its tokens in order, and file NAME.i32 of them.
text() {
    awk -v n="$2" -v step="$3" 'BEGIN { for (i = 0; i < n; i++) printf "%c", 97 + (i * i * step + i) % 26 }' \
        >"$work/$1.txt"
    "$(dirname "$train")/data/preprocess" --input "$work/$1.txt" --documents file --output-prefix "$work/$1" \
        --tokenizer-type ByteLevel >"$work/out" 2>"$work/err" || return 1
    od -An -v -tu1 -w1 "$work/$1.txt" | awk -v length_of="$length" -v n="$2" '
        { token[NR - 1] = $1 }
        END {
            for (first = 0; first + length_of < n; first += length_of)
                for (i = 0; i <= length_of; i++)
                    printf "\\0%03o\\0000\\0000\\0000%s", token[first + i], i == length_of ? "\n" : ""
        }' | while IFS= read -r bytes; do printf '%b' "$bytes"; done >"$work/$1.i32"
}

# expect NAME: the mean loss of a model on the samples of $work/NAME.i32.
expect() {
    "$infer" --load "$work/model" --device cpu --score "$work/$1.i32" --seq-length $length --out "$work/$1.f32" \
        >"$work/out" 2>"$work/err" &&
        od -An -v -tf4 -w4 "$work/$1.f32" | awk '{ sum -= $1 } END { printf "%.7f\n", sum / NR }'
}

# runs RANKS WORDS...: one step at a rate of nearly nothing, with an evaluation behind it.
runs() {
    ranks=$1
    shift
    rm -f "$work/metrics"
    on_ranks "$ranks" "$train" --load "$work/model" --finetune --device cpu --seq-length $length --train-iters 1 \
        --lr 1e-30 --min-lr 0 --train-data-path "$work/train_text_document" --metrics "$work/metrics" "$@"
}

# loss NAME VALUE: the metrics have this loss.
loss() {
    series "$1" "$work/metrics" | awk -v e="$2" -v name="$1" '
        { d = $1 - e; if (d < 0) d = -d; found = 1; if (d > 2e-6 * e) { print name ": " $1 ", not " e; exit 1 } }
        END { if (!found) { print "no " name; exit 1 } }'
}

prepare() {
    text train 2000 3 && text a 700 5 && text b 150 7 && text c 60 11 || return 1
    "$train" --num-layers 1 --hidden-size 16 --num-attention-heads 2 --position-embedding-type rope --vocab-size 257 \
        --device cpu --seq-length $length --micro-batch-size 2 --global-batch-size 8 --train-iters 20 --lr 1e-2 \
        --data-path "$work/train_text_document" --split 1,0,0 --eval-iters 0 --save "$work/model" \
        >"$work/out" 2>"$work/err" || return 1
    a=$(expect a) b=$(expect b) c=$(expect c)
}

the_whole_set_is_read_once() {
    prepare || return 1
    for words in '--micro-batch-size 1 --global-batch-size 4' '--micro-batch-size 4 --global-batch-size 64' \
        '--micro-batch-size 3 --global-batch-size 6 --eval-iters 0' '--num-workers 0 --eval-iters 1'; do
        # shellcheck disable=SC2086
        runs 1 --full-validation --valid-data-path "$work/a_text_document" $words && loss validation_loss "$a" ||
            return 1
    done
    runs 1 --full-validation --valid-data-path "$work/a_text_document" --eval-interval 1 --train-iters 3 &&
        [ "$(series validation_loss "$work/metrics" | sort -u | wc -l)" = 1 ] && loss validation_loss "$a"
}

each_set_has_a_loss() {
    set -- --full-validation --multiple-validation-sets --valid-data-path "$work/a_text_document" \
        "$work/b_text_document" "$work/c_text_document" --micro-batch-size 1 --global-batch-size 8
    runs 1 "$@" && loss validation-0_loss "$a" && loss validation-1_loss "$b" && loss validation-2_loss "$c" &&
        says '  validation-1 loss ' "$work/out" &&
        runs 1 "$@" --validation-set-names wiki code 'c c' && loss validation-wiki_loss "$a" &&
        loss 'validation-c c_loss' "$c" && says '  validation-code loss ' "$work/out" || return 1
    refused 'two sets are named a' runs_here 1 "$@" --validation-set-names a b a &&
        refused 'up to 80 characters of ASCII' runs_here 1 "$@" --validation-set-names a b "$(printf 'c\001')" ||
        return 1
    refused 'validation-set-names has 2 names, and --valid-data-path 3 sets' runs_here 1 "$@" \
        --validation-set-names a b
}

# Layouts of ranks give the same losses; samples that no rank has count nothing.
layouts_do_not_matter() {
    set -- --full-validation --multiple-validation-sets --valid-data-path "$work/a_text_document" \
        "$work/c_text_document"
    for words in '2 --micro-batch-size 2 --global-batch-size 8' '4 --micro-batch-size 3 --global-batch-size 12' \
        '4 --tensor-model-parallel-size 2 --global-batch-size 8' '2 --context-parallel-size 2 --global-batch-size 8'; do
        # shellcheck disable=SC2086
        runs $words "$@" && loss validation-0_loss "$a" && loss validation-1_loss "$c" || return 1
    done
}

# As runs, for `refused`.
runs_here() {
    shift
    "$train" --load "$work/model" --finetune --device cpu --seq-length $length --train-iters 1 --lr 1e-3 \
        --train-data-path "$work/train_text_document" "$@"
}

other_data_are_refused() {
    refused 'full-validation reads whole data: leave out the weights' runs_here 1 --full-validation \
        --valid-data-path 1 "$work/a_text_document" 2 "$work/b_text_document" &&
        refused 'multiple-validation-sets: leave out the weights' runs_here 1 --full-validation \
            --multiple-validation-sets --valid-data-path 1 "$work/a_text_document" 2 "$work/b_text_document" &&
        refused 'multiple-validation-sets needs --full-validation' runs_here 1 --multiple-validation-sets \
            --valid-data-path "$work/a_text_document" &&
        refused 'full-validation and --dataloader-type cyclic exclude' runs_here 1 --full-validation \
            --dataloader-type cyclic --valid-data-path "$work/a_text_document" &&
        refused 'validation-set-names needs --multiple' runs_here 1 --validation-set-names a --full-validation \
            --valid-data-path "$work/a_text_document"
}

check the_whole_set_is_read_once the_whole_set_is_read_once
check each_set_has_a_loss each_set_has_a_loss
if [ -n "${HAVE_MPI:-}" ] && command -v mpirun >/dev/null; then
    check layouts_do_not_matter layouts_do_not_matter
fi
check other_data_are_refused other_data_are_refused
exit $failed
