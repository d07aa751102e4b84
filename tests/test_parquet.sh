#!/bin/sh
# Files of Parquet as samples and prompts: the same as the lines of JSON that have the same rows. pyarrow writes the
# files, in the Python of MT_PYTHON or in that of `make deps-dev`.
set -u
. tests/suite.sh
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive
model='--num-layers 1 --hidden-size 16 --num-attention-heads 2 --position-embedding-type rope --vocab-size 257
    --tokenizer-type ByteLevel --chat-template plain --device cpu --seq-length 64 --micro-batch-size 1 --lr 1e-3
    --eval-iters 0 --split 1,0,0'
python=${MT_PYTHON:-python3}
if ! "$python" -c 'import pyarrow.parquet' 2>/dev/null && [ -z "${MT_PYTHON:-}" ]; then
    python=build/python/bin/python
fi

# sft FILES...: trains on samples; its losses are in $work/metrics.
sft() {
    rm -f "$work/metrics"
    # shellcheck disable=SC2086
    "$train" --sft $model --global-batch-size 2 --train-iters 3 --metrics "$work/metrics" --data-path "$@" \
        >"$work/out" 2>"$work/err" </dev/null
}

# A program in the place of Python: SCRIPT.
fake() {
    printf '#!/bin/sh\n%s\n' "$1" >"$work/python" && chmod +x "$work/python"
    export MT_PYTHON="$work/python"
}

# unread PATTERN: the samples of x.parquet cannot be read.
unread() {
    # shellcheck disable=SC2086
    refused "x.parquet: $1" "$train" --sft $model --global-batch-size 1 --train-iters 1 --data-path "$work/x.parquet"
}

# Each failure of the program that reads is one line that says what to do, and no hang.
a_program_that_fails_is_an_error() (
    printf 'PAR1 and more' >"$work/x.parquet"
    fake 'exit 3' && unread 'is a Parquet file, which needs pyarrow or duckdb in Python for MT_PYTHON=.*; install' &&
        fake 'exit 5' && unread '.*python ended before it could read the file' &&
        fake 'echo; echo ={}; exit 6' && unread 'the program that reads it, .* exit status 6 before the end' &&
        fake 'echo; echo =[]; kill -KILL $$' && unread '.*was ended by signal 9' &&
        fake 'echo; echo "{}"; echo =' && unread 'the program that reads it wrote something else than rows' &&
        fake 'echo; echo "!no such thing"' && unread 'cannot be read as a Parquet file: no such thing' &&
        fake 'echo; echo =[]; echo =' && unread 'has no samples'
)

# A signal ends a run that waits for the program: the first one, not the end of the wait.
a_signal_ends_the_wait() (
    printf 'PAR1 and more' >"$work/x.parquet"
    for before in : echo; do
        fake "$before; : >'$work/started'; exec sleep $((2 * hang))"
        rm -f "$work/started"
        # shellcheck disable=SC2086
        timeout "$hang" "$train" --sft $model --global-batch-size 1 --train-iters 1 --data-path "$work/x.parquet" \
            >"$work/out" 2>"$work/err" </dev/null &
        while [ ! -e "$work/started" ]; do sleep 0.1; done
        kill -TERM $!
        wait $!
        status=$?
        [ "$status" = 1 ] && says '^error: .*a signal ended the run while ' "$work/err" || return 1
    done
)

write_files() {
    "$python" - "$work" <<'END'
import json, sys
import pyarrow as pa, pyarrow.parquet as pq
work = sys.argv[1]
def both(name, rows, schema=None, size=2):
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), work + "/" + name + ".parquet", row_group_size=size)
    with open(work + "/" + name + ".jsonl", "w") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")
say = lambda i: [{"role": "user", "content": "Say %d \"caf\u00e9\" \U0001F600\n" % i, "tool_calls": None},
                 {"role": "assistant", "content": "%d\u0000\\" % i, "tool_calls": None}]
both("messages", [{"messages": say(i), "n": i, "x": i / 3, "none": None} for i in range(5)])
both("more", [{"prompt": "a%d" % i, "response": "b" * i} for i in range(1, 4)])
both("a'[1] *x", [{"prompt": "a%d" % i, "response": "b" * i} for i in range(1, 4)])
both("null", [{"prompt": "a", "response": "b"}, {"prompt": None, "response": "b"}, {"prompt": "c", "response": "d"}])
both("lacks", [{"question": "a", "solution": "b"}])
both("many", [{"prompt": "a%d" % i, "response": "b" * (i % 7 + 1)} for i in range(2500)], size=1100)
both("prompts", [{"data_source": "x", "prompt": [{"role": "user", "content": "Say %d" % i}], "ability": "math",
                  "reward_model": {"ground_truth": "%d" % i, "style": "rule"}} for i in range(4)])
image = pa.schema([("prompt", pa.string()), ("response", pa.string()),
                   ("images", pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())])))])
pq.write_table(pa.Table.from_pylist([{"prompt": "a", "response": "b",
                                      "images": [{"bytes": b"\xff\xd8", "path": None}]}], schema=image),
               work + "/image.parquet")
pq.write_table(pa.table({"prompt": ["a", "c"], "response": pa.array([b"b", b"\xff\xd8"])}), work + "/binary.parquet")
pq.write_table(pa.table({"prompt": ["a"], "response": ["b"], "images": pa.array([[]], pa.list_(pa.binary()))}),
               work + "/no_image.parquet")
pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), work + "/empty.parquet")
pq.write_table(pa.table([pa.array(["a"]), pa.array(["b"])], ["prompt", "prompt"]), work + "/twice.parquet")
import datetime, decimal
pq.write_table(pa.table({"prompt": ["a", "b"], "answer": pa.array([decimal.Decimal("1.50"), None]),
                         "day": [datetime.date(2026, 1, 2), None], "nan": [float("nan"), float("inf")],
                         "at": pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.int64()))}),
               work + "/types.parquet")
pq.write_table(pa.table({"prompt": ["a", "b"], "response": ["c", "d"], "Prompt": [1, 2],
                         "s": [{"x": 1, "prompt": [{"y": 2}]}] * 2, "at": pa.array([1, 2], pa.timestamp("ns")),
                         "in": pa.array([{"at": 1}] * 2, pa.struct([("at", pa.timestamp("ns"))]))}),
               work + "/odd.parquet")
pq.write_table(pa.table({"prompt": ["a"], "response": ["b"],
                         "m": pa.array([[("k", 1), ("k", 2)]], pa.map_(pa.string(), pa.int64()))}),
               work + "/pairs.parquet")
whole = open(work + "/many.parquet", "rb").read()
open(work + "/cut.parquet", "wb").write(whole[:len(whole) // 2])
open(work + "/damaged.parquet", "wb").write(whole[:40] + bytes(200) + whole[240:])
open(work + "/text.parquet", "w").write('{"prompt": "a", "response": "b"}\n')
open(work + "/nothing.parquet", "w")
END
}

# The losses of a run on rows of Parquet are those of a run on the same lines.
rows_are_lines() {
    for file in messages more "a'[1] *x" many; do
        sft "$work/$file.jsonl" && mv "$work/metrics" "$work/lines" &&
            sed -n 's/.*jsonl: \([0-9]* samples.*\)/\1/p' "$work/out" >"$work/of_lines" && sft "$work/$file.parquet" &&
            sed -n 's/.*parquet: \([0-9]* samples.*\)/\1/p' "$work/out" >"$work/of_rows" &&
            [ -s "$work/of_rows" ] && cmp "$work/of_lines" "$work/of_rows" &&
            same_series "$work/lines" "$work/metrics" 0 0 lm_loss grad_norm || return 1
    done
}

# Several files, of both kinds, one after another.
files_mix() {
    sft "$work/messages.jsonl" "$work/more.jsonl" "$work/many.jsonl" && mv "$work/metrics" "$work/lines" &&
        sft "$work/messages.parquet" "$work/more.jsonl" "$work/many.parquet" && says ': 2508 samples' "$work/out" &&
        same_series "$work/lines" "$work/metrics" 0 0 lm_loss grad_norm
}

# refuses FILE PATTERN ARGUMENTS...: a run on the samples of $work/FILE.parquet.
refuses() {
    file=$1 pattern=$2
    shift 2
    # shellcheck disable=SC2086
    refused "$file.parquet$pattern" "$train" --sft $model --global-batch-size 1 --train-iters 1 \
        --data-path "$work/$file.parquet" "$@"
}

damage_is_an_error() {
    refuses cut ': cannot be read as a Parquet file: ' && refuses damaged ': cannot be read as a Parquet file: ' &&
        refuses text ': cannot be read as a Parquet file: ' && refuses nothing ': cannot be read as a Parquet file: ' &&
        refuses twice ':.* prompt' && refuses empty ': has no samples' &&
        refuses absent ': cannot be read: No such file'
}

rows_that_are_no_samples_have_a_number() {
    refuses binary ':2: "response" ' &&
        refuses null ':2: has "response" but not "prompt".*; the file has the columns prompt, response$' &&
        refuses lacks ':1: has neither messages, nor .*; the file has the columns question, solution$' &&
        refuses image ':1: has "images", which only a model with' && sft "$work/no_image.parquet" &&
        sft "$work/null.parquet" --skip-bad-samples 1 && says 'skipped .*null.parquet:2: ' "$work/out" &&
        says ': 2 samples.*1 bad lines' "$work/out"
}

# Rows of verl: a list of messages as the prompt, and the answer in a struct. --answer-key names fields of structs.
prompts_of_verl_have_answers() {
    for key in '' '--answer-key reward_model.ground_truth' '--answer-key reward_model.style'; do
        # shellcheck disable=SC2086
        "$train" --stage rl --adv-estimator grpo --reward exact --num-return-sequences 2 --max-new-tokens 4 \
            --rollout-batch-size 2 --global-batch-size 4 $(echo "$model" | sed 's/--eval-iters 0 --split 1,0,0//') \
            $key --data-path "$work/prompts.parquet" --train-iters 1 >"$work/out" 2>"$work/err" </dev/null &&
            says ': 4 prompts' "$work/out" && says 'not read: .*"data_source"' "$work/out" &&
            ! grep 'not read: .*reward_model' "$work/out" || return 1
    done
    # shellcheck disable=SC2086
    refused 'prompts.parquet:1: has no "reward_model.truth" for the reward' "$train" --stage rl --adv-estimator grpo \
        --reward exact --num-return-sequences 2 --max-new-tokens 4 --rollout-batch-size 2 --global-batch-size 4 \
        $(echo "$model" | sed 's/--eval-iters 0 --split 1,0,0//') --answer-key reward_model.truth \
        --data-path "$work/prompts.parquet" --train-iters 1
}

# infer reads prompts and samples to score likewise; data/preprocess names the format.
infer_reads_rows() {
    # shellcheck disable=SC2086
    sft "$work/more.jsonl" --save "$work/model" --save-interval 3 --overwrite || return 1
    set -- "$infer" --load "$work/model" --tokenizer-type ByteLevel --chat-template plain --device cpu
    for format in jsonl parquet; do
        "$@" --prompts "$work/more.$format" --max-new-tokens 4 --temperature 0 --out "$work/prompts.$format.out" \
            >"$work/out" 2>"$work/err" &&
            "$@" --score "$work/more.$format" --out "$work/score.$format.out" >"$work/out" 2>"$work/err" || return 1
    done
    cmp "$work/prompts.jsonl.out" "$work/prompts.parquet.out" &&
        cmp "$work/score.jsonl.out" "$work/score.parquet.out" &&
        [ "$(wc -l <"$work/score.parquet.out")" = 3 ] &&
        refused 'more.parquet: is a Parquet file; write its texts as JSON Lines' "$(dirname "$train")/data/preprocess" \
            --input "$work/more.parquet" --output-prefix "$work/text" --tokenizer-type ByteLevel
}

# Values that JSON has not do not end a run.
values_of_other_types_are_texts() {
    # shellcheck disable=SC2086
    "$train" --stage rl --adv-estimator grpo --reward number --num-return-sequences 2 --max-new-tokens 4 \
        --rollout-batch-size 1 --global-batch-size 2 $(echo "$model" | sed 's/--eval-iters 0 --split 1,0,0//') \
        --skip-bad-samples 1 --data-path "$work/types.parquet" --train-iters 1 >"$work/out" 2>"$work/err" </dev/null &&
        says 'skipped .*types.parquet:2: has no "answer"' "$work/out" && says ': 1 prompts' "$work/out"
}

# Columns that Python has no values for stop no run, and names that differ in upper case are kept.
columns_that_nobody_asked_for_are_no_error() {
    sft "$work/odd.parquet" && says ': 2 samples' "$work/out" &&
        refuses odd ':1: has "response" but not "none".*; the file has .* prompt, response, Prompt, s, at, in$' \
            --prompt-key none &&
        refuses odd ':1: .*"Prompt"' --prompt-key Prompt || return 1
    [ "$1" = duckdb ] || { sft "$work/pairs.parquet" && says ': 1 samples' "$work/out"; } # duckdb refuses such a map
}

all_of_them() {
    check "$1: rows_are_lines" rows_are_lines
    check "$1: files_mix" files_mix
    check "$1: damage_is_an_error" damage_is_an_error
    check "$1: rows_that_are_no_samples_have_a_number" rows_that_are_no_samples_have_a_number
    check "$1: prompts_of_verl_have_answers" prompts_of_verl_have_answers
    check "$1: infer_reads_rows" infer_reads_rows
    check "$1: values_of_other_types_are_texts" values_of_other_types_are_texts
    check "$1: columns_that_nobody_asked_for_are_no_error" columns_that_nobody_asked_for_are_no_error "$1"
}

check a_program_that_fails_is_an_error a_program_that_fails_is_an_error
check a_signal_ends_the_wait a_signal_ends_the_wait
if ! "$python" -c 'import pyarrow.parquet' 2>/dev/null; then
    echo "skipped: $python has no pyarrow to write files of Parquet: make deps-dev installs it, or set MT_PYTHON"
    exit $failed
fi
export MT_PYTHON="$python"
write_files || exit 1
all_of_them pyarrow
if "$python" -c 'import duckdb' 2>/dev/null; then
    mkdir "$work/hidden" && echo 'raise ImportError' >"$work/hidden/pyarrow.py"
    export PYTHONPATH="$work/hidden"
    all_of_them duckdb
fi
exit $failed
