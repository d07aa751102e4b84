#!/bin/sh
# The paragraph with which train begins, infer's line, and the warnings about data that is too small.
set -u
. tests/suite.sh
export OMP_NUM_THREADS=1
preprocess=$(cd "${MT_BIN:-.}" && pwd)/data/preprocess
shape='--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --micro-batch-size 2
    --global-batch-size 4 --train-iters 3 --lr 1e-3 --eval-iters 1 --eval-interval 2 --device cpu'

# trains ARGUMENTS...: a short run must end well; its output is in $work/out and $work/err.
trains() {
    # shellcheck disable=SC2086
    "$train" $shape "$@" >"$work/out" 2>"$work/err" </dev/null || return 1
}

# begins FILE LINE...: the first lines of a file are these.
begins() {
    file=$1
    shift
    printf '%s\n' "$@" >"$work/want"
    head -n $# "$file" | diff "$work/want" - >"$work/difference" && return 0
    cat "$work/difference"
    return 1
}

# prepares NAME LINES HOW: a text of so many lines, divided into documents.
prepares() {
    awk -v lines="$2" 'BEGIN { for (i = 0; i < lines; i++) print "the quick brown fox jumps over the lazy dog" }' \
        >"$work/$1.txt"
    "$preprocess" --input "$work/$1.txt" --output-prefix "$work/$1" --tokenizer-type ByteLevel --append-eod \
        --documents "$3" --workers 1 >"$work/out" 2>"$work/err"
}

trains_on() {
    data=$1
    shift
    trains --tokenizer-type ByteLevel --data-path "$work/${data}_text_document" "$@"
}

train_says_what_it_will_do() {
    trains --mock-data --vocab-size 64 --save "$work/run" --save-interval 2 &&
        begins "$work/out" \
            'gpt2 model: 2 layers, hidden size 32, 28.0 thousand parameters, random weights.' \
            'Device: CPU in fp32, 1 rank with 1 thread.' \
            'Data: 192 tokens in 3 iterations: synthetic.' \
            "Checkpoints: $work/run, every 2 iterations and at the end." || return 1
    trains --mock-data --load "$work/run" --finetune &&
        begins "$work/out" "gpt2 model: 2 layers, hidden size 32, 28.0 thousand parameters, loaded from $work/run." \
            'Device: CPU in fp32, 1 rank with 1 thread.' \
            'Data: 192 tokens in 3 iterations: synthetic.' \
            'Checkpoints: none, because there is no --save.'
}

# An OpenBLAS with kernels of an older processor is reported. Where oneDNN computes large products and the compiler knew
# AVX, the losses are the same.
an_old_openblas_is_reported_and_not_used() {
    for core in Prescott Haswell; do
        OPENBLAS_CORETYPE=$core OPENBLAS_VERBOSE=2 "$train" $shape --mock-data --vocab-size 64 --metrics "$work/$core" \
            >"$work/$core.out" 2>"$work/$core.err" || return 1
        series lm_loss "$work/$core" >"$work/$core.loss"
    done
    grep -qs 'Core: Prescott' "$work/Prescott.err" "$work/Prescott.out" && grep -qsw avx2 /proc/cpuinfo || return 0
    says '^OpenBLAS does not know this processor and takes kernels of Prescott: products are computed by ' \
        "$work/Prescott.out" || return 1
    if grep -q 'OpenBLAS does not know' "$work/Haswell.out"; then return 1; fi
    ! grep -q 'by oneDNN and kernels of megatron.c' "$work/Prescott.out" ||
        { [ -s "$work/Haswell.loss" ] && cmp -s "$work/Prescott.loss" "$work/Haswell.loss"; }
}

# The process of a run, which starts anew once, has the variables that keep idle threads from spinning; a choice of the
# user stays.
idle_threads_sleep_soon() {
    [ -r /proc/self/environ ] && "$train" --version >/dev/null || return 1
    OMP_NUM_THREADS=2 "$train" --num-layers 1 --hidden-size 8 --num-attention-heads 1 --vocab-size 257 --seq-length 8 \
        --mock-data --train-iters 1 --lr 1e-3 --device cpu >"$work/out" 2>"$work/err" </dev/null || return 1
    if says '1 rank with 1 thread' "$work/out" >/dev/null; then
        echo "built without OpenMP: no threads"
        return 0
    fi
    cat >"$work/reward" <<'END'
#!/bin/sh
env | grep -E '^(GOMP_SPINCOUNT|KMP_BLOCKTIME|OMP_WAIT_POLICY)=' >"$0.env"
while read -r line; do echo 1; done
END
    chmod +x "$work/reward"
    echo '{"prompt": "1", "answer": "2"}' >"$work/prompts.jsonl"
    for policy in '' passive; do
        rm -f "$work/reward.env"
        env -u OMP_NUM_THREADS -u OMP_WAIT_POLICY -u GOMP_SPINCOUNT -u KMP_BLOCKTIME \
            ${policy:+OMP_WAIT_POLICY=$policy} "$train" --stage rl --num-layers 1 --hidden-size 32 \
            --num-attention-heads 2 --tokenizer-type ByteLevel --chat-template plain \
            --data-path "$work/prompts.jsonl" --seq-length 16 --max-new-tokens 2 \
            --rollout-batch-size 1 --num-return-sequences 2 --global-batch-size 2 --micro-batch-size 2 \
            --train-iters 1 --lr 1e-3 --eval-iters 0 --device cpu --reward command --reward-command "$work/reward" \
            >"$work/out" 2>"$work/err" </dev/null || return 1
        [ -s "$work/reward.env" ] || return 1
        if [ -n "$policy" ]; then
            [ "$(cat "$work/reward.env")" = "OMP_WAIT_POLICY=$policy" ] || return 1
        else
            says '^GOMP_SPINCOUNT=' "$work/reward.env" && says '^KMP_BLOCKTIME=' "$work/reward.env" || return 1
        fi
    done
}

train_says_epochs_of_its_data() {
    prepares lines 20 lines && trains_on lines --split 80,20,0 || return 1
    # 16 documents of 44 bytes and an end of document
    says "^Data: 192 tokens in 3 iterations: 0.27 epochs of $work/lines_text_document, which has 720 to train on.\$" \
        "$work/out"
}

# Epochs and samples are counted as the run reads them: the last step of --train-epochs is smaller, and a run that goes
# on may have had other batches.
epochs_and_samples_are_those_that_are_read() {
    for i in 1 2 3 4 5 6 7 8 9 10; do
        echo "{\"prompt\": \"q$i\", \"response\": \"answer\"}"
    done >"$work/ten.json"
    set -- --num-layers 1 --hidden-size 8 --num-attention-heads 1 --vocab-size 257 --tokenizer-type ByteLevel \
        --seq-length 64 --lr 1e-3 --eval-iters 0 --device cpu --metrics "$work/ten.jsonl"
    sft="--sft --chat-template plain --train-data-path $work/ten.json --global-batch-size 4"
    # shellcheck disable=SC2086
    "$train" "$@" $sft --train-epochs 1 --save "$work/ten" >"$work/out" 2>"$work/err" || return 1
    says '^Data: 81 tokens in 3 iterations: 1.00 epochs' "$work/out" &&
        [ "$(series consumed_samples "$work/ten.jsonl" | tr '\n' ' ')" = '4 8 10 ' ] || return 1
    # shellcheck disable=SC2086
    "$train" "$@" $sft --train-epochs 2 --load "$work/ten" --save "$work/ten" >"$work/out" 2>"$work/err" || return 1
    says '^Data: 162 tokens in 6 iterations: 2.00 epochs' "$work/out" &&
        [ "$(series consumed_samples "$work/ten.jsonl" | tr '\n' ' ')" = '4 8 10 14 18 20 ' ] || return 1
    prepares lines 20 lines || return 1
    text="--data-path $work/lines_text_document --split 1,0,0"
    rm -f "$work/ten.jsonl"
    # shellcheck disable=SC2086
    "$train" "$@" $text --train-iters 2 --global-batch-size 4 --save "$work/more" >"$work/out" 2>"$work/err" || return 1
    # shellcheck disable=SC2086
    "$train" "$@" $text --train-iters 12 --global-batch-size 2 --load "$work/more" --save "$work/more" >"$work/out" \
        2>"$work/err" || return 1
    says '^Data: 1.79 thousand tokens in 12 iterations: 1.99 epochs' "$work/out" &&
        [ "$(series consumed_samples "$work/ten.jsonl" | tail -n 1)" = 28 ] || return 1
    rm -f "$work/ten.jsonl"
    # shellcheck disable=SC2086
    "$train" "$@" $text --train-samples 30 --rampup-batch-size 2 2 8 --global-batch-size 4 >"$work/out" 2>"$work/err" ||
        return 1
    last=$(series consumed_samples "$work/ten.jsonl" | tail -n 1)
    awk -v n="$last" 'BEGIN { t = 64 * n; exit !(t > 1000 && t < 2000) }' &&
        says "^Data: $(awk -v n="$last" 'BEGIN { printf "%.2f thousand", 64 * n / 1000 }') tokens in" "$work/out"
}

# 10 samples take 8 positions each and the last one 9; steps of 4 leave 2 for the last.
the_last_step_of_epochs_has_the_samples_left() {
    for i in 1 2 3 4 5 6 7 8 9 10; do echo "{\"prompt\":\"q$i\",\"response\":\"answer\"}"; done >"$work/ten.jsonl"
    for i in 1 2 3 4 5 6 7; do
        echo "{\"prompt\":\"q$i\",\"chosen\":\"yes\",\"rejected\":\"no\"}"
    done >"$work/pairs.jsonl"
    for case in 'ten 81 10 --sft' 'pairs 63 7 --stage dpo'; do
        # shellcheck disable=SC2086
        set -- $case
        data=$1 tokens=$2 samples=$3
        shift 3
        rm -f "$work/epochs.jsonl"
        "$train" "$@" --num-layers 1 --hidden-size 8 --num-attention-heads 1 --tokenizer-type ByteLevel \
            --seq-length 32 --chat-template plain --train-data-path "$work/$data.jsonl" --train-epochs 1 \
            --global-batch-size 4 --micro-batch-size 1 --lr 1e-3 --eval-iters 0 --device cpu \
            --metrics "$work/epochs.jsonl" >"$work/out" 2>"$work/err" </dev/null || return 1
        says "^Data: $tokens tokens in [23] iterations: 1.00 epochs of .*, which has $tokens to train on" \
            "$work/out" || return 1
        [ "$(series consumed_samples "$work/epochs.jsonl" | tail -1)" = "$samples" ] || return 1
    done
}

train_says_the_grid() {
    [ -n "${HAVE_MPI:-}" ] && command -v mpirun >/dev/null || {
        echo 'skipped: MPI is absent'
        return 0
    }
    # shellcheck disable=SC2046,SC2086
    $(mpirun_here) -np 4 "$train" $shape --mock-data --vocab-size 64 --tensor-model-parallel-size 2 --bf16 \
        --swiglu --disable-bias-linear --sequence-parallel --num-experts 4 --moe-router-topk 2 \
        --expert-model-parallel-size 2 --expert-tensor-parallel-size 1 >"$work/out" 2>"$work/err" </dev/null || return 1
    says '^Device: CPU in bf16, 4 ranks with 1 thread each: TP 2 x PP 1 x CP 1 x DP 2; experts: ' "$work/out" &&
        says '; experts: ETP 1 x EP 2 x EDP 2.$' "$work/out" && says ' 4 experts with top-2 routing, ' "$work/out"
}

infer_says_what_it_runs_on_standard_error() {
    "$infer" --load "$work/run" --prompt-tokens 1,2 --print-tokens --max-new-tokens 4 --device cpu \
        >"$work/out" 2>"$work/err" || return 1
    begins "$work/err" "gpt2 model: 2 layers, hidden size 32, 28.0 thousand parameters, loaded from $work/run; CPU in\
 fp32, 1 rank with 1 thread; texts of at most 16 tokens" && [ "$(wc -l <"$work/out")" = 1 ] &&
        grep -Eqx '[0-9]+( [0-9]+){0,3}' "$work/out"
}

one_document_leaves_none_for_validation() {
    prepares one 20 file && trains_on one --split 80,20,0 &&
        says "^warning: no validation data, so no validation loss: $work/one_text_document is one document, which\
 --split does not divide; make more documents of the text, with data/preprocess --documents lines\$" "$work/err" &&
        [ "$(wc -l <"$work/err")" = 1 ]
}

an_empty_validation_split_is_reported() {
    prepares few 4 lines && trains_on few --split 99,1,0 &&
        says "^warning: no validation data, so no validation loss: --split 99,1,0 leaves it none of the 4 documents of\
 $work/few_text_document; make more documents of the text, with data/preprocess --documents lines, or give it a larger\
 share\$" "$work/err" || return 1
    trains_on few --split 1,0,0 &&
        says '^note: no validation data, so no validation loss: its share in --split is 0$' "$work/err" || return 1
    trains_on few --split 1,1,0 && [ ! -s "$work/err" ]
}

data_shorter_than_a_sequence_is_reported() {
    prepares short 1 lines && trains_on short --split 1,0,0 --eval-iters 0 --seq-length 64 &&
        says "^warning: the training data has 45 tokens, fewer than the 65 of a sequence and its last label, so that\
 every sample repeats them; give more data or a smaller --seq-length\$" "$work/err" || return 1
    trains_on short --split 1,0,0 --eval-iters 0 --seq-length 44 && [ ! -s "$work/err" ]
}

# A path of a blend, though the blend as a whole is longer.
a_short_path_of_a_blend_is_reported() {
    prepares short 1 lines && prepares brief 1 lines && prepares many 40 lines || return 1
    trains_on many --split 1,0,0 --eval-iters 0 --seq-length 64 --data-path 0.9 "$work/many_text_document" 0.1 \
        "$work/short_text_document" && says "^warning: the training data of $work/short_text_document has 45 tokens,\
 fewer than the 65 of a sequence and its last label, so that every sample repeats them; give more data or a smaller\
 --seq-length\$" "$work/err" && [ "$(wc -l <"$work/err")" = 1 ] || return 1
    trains_on many --split 1,0,0 --eval-iters 0 --seq-length 64 --data-path 0.8 "$work/many_text_document" 0.1 \
        "$work/short_text_document" 0.1 "$work/brief_text_document" &&
        says "^warning: .*short_text_document has .*; paths of this blend that are so short: 2\$" \
            "$work/err" && [ "$(wc -l <"$work/err")" = 1 ] || return 1
    trains_on many --split 1,0,0 --eval-iters 0 --seq-length 44 --data-path 0.9 "$work/many_text_document" 0.1 \
        "$work/short_text_document" && [ ! -s "$work/err" ]
}

check train_says_what_it_will_do train_says_what_it_will_do
check an_old_openblas_is_reported_and_not_used an_old_openblas_is_reported_and_not_used
check idle_threads_sleep_soon idle_threads_sleep_soon
check train_says_epochs_of_its_data train_says_epochs_of_its_data
check epochs_and_samples_are_those_that_are_read epochs_and_samples_are_those_that_are_read
check the_last_step_of_epochs_has_the_samples_left the_last_step_of_epochs_has_the_samples_left
check train_says_the_grid train_says_the_grid
check infer_says_what_it_runs_on_standard_error infer_says_what_it_runs_on_standard_error
check one_document_leaves_none_for_validation one_document_leaves_none_for_validation
check an_empty_validation_split_is_reported an_empty_validation_split_is_reported
check data_shorter_than_a_sequence_is_reported data_shorter_than_a_sequence_is_reported
check a_short_path_of_a_blend_is_reported a_short_path_of_a_blend_is_reported
exit $failed
