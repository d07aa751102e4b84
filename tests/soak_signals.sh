#!/bin/sh
# Interrupts runs by signals for a while and looks for damaged memory: preference optimization on two pipeline stages
# with dropout, evaluations and frequent saves, beside busy processes, as a run once ended by a corrupted heap.
#
#   usage: [BUSY=2] [LIMIT=300] tests/soak_signals.sh SECONDS [none|malloc|valgrind|sanitizers]
#
# MT_BIN is the folder of the programs: for `sanitizers` build/sanitize-without-cuda.../bin, for a build without oneDNN
# its folder. `malloc` checks the C library's heap and fills freed memory. `valgrind` uses Open MPI's suppressions, and
# needs programs without AVX-512 (OPT=-O2); reads by generated code are left out, since oneDNN's go beyond its blocks.
# BUSY processes compete for the cores; a run that takes longer than LIMIT seconds is ended and counted apart.
#
# A series is one training in several runs, each of them but the last ended by one or two signals at a moment that
# changes from run to run. A run fails if it reports damage or ends by a signal that nobody sent; a series fails if its
# losses and gradient norms differ in one digit from those of a training without signals. build/soak keeps the output of
# a failure.
set -u
cd "$(dirname "$0")/.." || exit 1
. tests/suite.sh
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive HAVE_MPI=1
needs_mpi
MPIRUN=$(mpirun_here)
seconds=${1:?usage: tests/soak_signals.sh SECONDS [none|malloc|valgrind|sanitizers]}
tool=${2:-none}
limit=${LIMIT:-300}
ended=$(($(date +%s) + seconds))
kept=build/soak/$tool-$$

# The tool's command before `train`, and the sign by which it reports damage.
wrapper='' steps=24 width=64
damage='corrupted\|free()\|malloc()\|malloc_\|double free\|invalid \(size\|pointer\)\|internal check failed'
damage="$damage\\|Signal: \\(Aborted\\|Seg\\|Bus\\|Ill\\)\\|exited on signal \\([4678]\\|11\\) "
case $tool in
none) ;;
malloc) wrapper='env MALLOC_CHECK_=3 MALLOC_PERTURB_=165 LD_PRELOAD=libc_malloc_debug.so.0' ;; # not of mpirun
valgrind)
    steps=6 width=32
    wrapper="valgrind -q --undef-value-errors=no --log-file=$work/valgrind.%p"
    file=/usr/share/openmpi/openmpi-valgrind.supp
    [ -f $file ] && wrapper="$wrapper --suppressions=$file"
    ;;
sanitizers)
    export ASAN_OPTIONS=fast_unwind_on_malloc=0 UBSAN_OPTIONS=print_stacktrace=1
    export LSAN_OPTIONS="suppressions='$PWD/tests/lsan.supp':print_suppressions=0"
    damage="$damage\\|Sanitizer\\|runtime error"
    ;;
*)
    echo "$tool: none, malloc, valgrind or sanitizers"
    exit 2
    ;;
esac

awk 'BEGIN {
    n = split("the cow says moo and a dog barks at night while two birds sing of sun rain wind", w, " ")
    for (i = 0; i < 60; i++)
        printf "{\"prompt\": \"%s\", \"chosen\": \"%s\", \"rejected\": \"%s\"}\n", text(i, 1 + i % 4),
            text(i + 5, 1 + i % 6), text(i + 9, 1 + i % 5)
}
function text(i, words,    k, t) {
    for (k = 0; k < words; k++) t = t (k ? " " : "") w[(i * 7 + 3 * k) % n + 1]
    return t
}' >"$work/pairs.jsonl"

model="--num-layers 4 --hidden-size $width --num-attention-heads 4 --ffn-hidden-size $((2 * width)) --swiglu
    --normalization RMSNorm --disable-bias-linear --position-embedding-type rope
    --untie-embeddings-and-output-weights --vocab-size 257 --tokenizer-type ByteLevel --max-position-embeddings 128"
# shellcheck disable=SC2086
"$train" --device cpu $model --seq-length 64 --mock-data --train-iters 1 --lr 1e-3 --eval-iters 0 \
    --save "$work/base" >"$work/out" 2>&1 || { cat "$work/out" && exit 1; }
options="--device cpu --load $work/base --finetune --chat-template plain --lr 1e-3 --seq-length 64 --stage dpo
    --data-path $work/pairs.jsonl --global-batch-size 4 --hidden-dropout 0.1 --attention-dropout 0.1
    --pipeline-model-parallel-size 2 --train-iters $steps --eval-interval 4 --eval-iters 2 --log-interval 1
    --save-interval 3 --keep-checkpoints 2"

# start NAME: the training's next run, in a session of its own; process is its process id.
start() {
    # shellcheck disable=SC2086
    setsid $MPIRUN -np 2 $wrapper "$train" $options --save "$work/$1" --auto-resume --metrics "$work/$1.jsonl" \
        >"$work/out" 2>"$work/err" </dev/null &
    process=$!
}

# await: waits for the run until LIMIT; status is how it ended.
await() {
    began=$(date +%s)
    while kill -0 $process 2>/dev/null && [ $(($(date +%s) - began)) -lt "$limit" ]; do sleep 0.2; done
    if kill -KILL -$process 2>/dev/null; then long=$((long + 1)); fi
    wait $process
    status=$?
}

# iterations FILE: how many lines of metrics it has.
iterations() {
    grep -c '"lm_loss"' "$1" 2>/dev/null
}

# same NAME: the numbers of each step are those of the training without signals.
same() {
    for run in whole "$1"; do
        sed -n 's/.*"iteration": \([0-9]*\).*"lm_loss": \([^,]*\),.*"grad_norm": \([^,}]*\).*/\1 \2 \3/p' \
            "$work/$run.jsonl" >"$work/numbers.$run"
    done
    cmp -s "$work/numbers.whole" "$work/numbers.$1"
}

# keep WHY: the last run's output.
keep() {
    bad=$((bad + 1))
    mkdir -p "$kept"
    { echo "$1, run $runs, signals:$sent, status $status" && cat "$work/out" "$work/err" "$work"/valgrind.*; } \
        >"$kept/$runs" 2>/dev/null
    cp "$work"/*.jsonl "$kept"
    echo "$1: $kept/$runs"
}

# Prints valgrind's reports.
reports() {
    cat "$work"/valgrind.* 2>/dev/null | awk '
        /Invalid write|Invalid free|Mismatched free/ { print; next }
        /Invalid read|overlap/ { report = $0; getline; if ($0 !~ /: \?\?\?$/) print report "\n" $0 }'
}

# The last run's output without the stacks of mpirun, which may end by a signal of its own.
of_ranks() {
    awk '
        /Process received signal/ { printf "%s", block; block = "" }
        { block = block $0 "\n" }
        /End of error message/ { if (block !~ /mpirun\(/) printf "%s", block; block = "" }
        END { printf "%s", block }' "$work/out" "$work/err"
}

checked() {
    runs=$((runs + 1))
    if of_ranks | grep -q "$damage" || [ -n "$(reports)" ]; then keep damage; fi
    rm -f "$work"/valgrind.*
}

runs=0 series=0 signals=0 long=0 bad=0 sent=''
competitors=''
for i in $(seq "${BUSY:-2}"); do
    while :; do :; done &
    competitors="$competitors $!"
done
trap 'kill $competitors 2>/dev/null; kill -KILL -$process 2>/dev/null; rm -rf "$work"' EXIT
trap 'exit 1' INT TERM

start whole
await
checked
[ "$status" = 0 ] && [ "$bad" = 0 ] || { cat "$work/out" "$work/err" && exit 1; }

# The moments: 0.1 to 4 s after the first new step, in an order that looks arbitrary and is the same each time.
while [ "$(date +%s)" -lt "$ended" ]; do
    rm -rf "$work/cut" "$work/cut.jsonl"
    tries=0
    while :; do
        before=$(iterations "$work/cut.jsonl")
        start cut
        sent=''
        if [ $tries -lt 6 ]; then
            waited=0
            while kill -0 $process 2>/dev/null && [ $waited -lt $((10 * limit)) ] &&
                [ "$(iterations "$work/cut.jsonl")" = "$before" ]; do
                sleep 0.1
                waited=$((waited + 1))
            done
            sleep "$(((runs * 37 + tries * 11) % 40 / 10)).$(((runs * 37 + tries * 11) % 10))"
            case $((runs % 4)) in
            0 | 1) first=TERM ;;
            2) first=INT ;;
            *) first=USR1 ;;
            esac
            kill -s $first $process 2>/dev/null && sent=" $first" && signals=$((signals + 1))
            if [ $((runs % 3)) = 0 ] && sleep 0.5 && kill -s TERM $process 2>/dev/null; then
                sent="$sent TERM"
                signals=$((signals + 1))
            fi
        fi
        await
        if grep -q 'is in use by another run' "$work/err"; then # a rank of the run before is still saving
            sleep 1
            continue
        fi
        checked
        tries=$((tries + 1))
        [ "$(iterations "$work/cut.jsonl")" -ge $steps ] && break
        [ $tries -gt 7 ] && keep "no end" && break
        [ "$(date +%s)" -ge "$ended" ] && break
    done
    if [ "$(iterations "$work/cut.jsonl")" -ge $steps ]; then
        series=$((series + 1))
        same cut || keep "other numbers"
    fi
done
echo "$tool, $(cd "$(dirname "$train")" && pwd): $runs runs, $signals signals, $series series with equal numbers" \
    "compared, $long ended after $limit s, $bad failures"
[ $bad = 0 ]
