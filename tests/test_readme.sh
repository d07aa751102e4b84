#!/bin/sh
# The commands of README run as they are written. Blocks of code are taken from the text; only what this file replaces
# in plain sight differs: fewer iterations, "..." and names of folders. tests/test_notes.sh runs those of the notes.
set -u
. tests/suite.sh
root=$(pwd)
export OMP_NUM_THREADS=1
if ! [ -x "${MT_BIN:-.}/data/preprocess" ]; then
    echo "skipped: data/preprocess is not built"
    exit 77
fi

# A folder that looks like the project's to a command: links to its files, and to the programs of this build.
tree=$work/tree
mkdir -p "$tree/data"
for file in "$root"/data/*; do ln -sf "$file" "$tree/data/"; done
for file in Makefile megatron.h notes tests launch.sh; do ln -s "$root/$file" "$tree/"; done
ln -s "$train" "$tree/train"
ln -s "$infer" "$tree/infer"
ln -sf "$(dirname "$train")/data/preprocess" "$tree/data/preprocess"

# blocks FILE HEADING: writes the blocks of code of a section to $work/block.1, ...: lines indented by four or more
# blanks, up to a line of text or an empty line.
blocks() {
    rm -f "$work"/block.*
    awk -v heading="$2" -v to="$work/block." '
        /^#/ && !/^    / { on = $0 ~ "^#+ " heading; open = 0 }
        on && /^    / { if (!open) { open = 1; count++ } print substr($0, 5) >(to count); next }
        { open = 0 }' "$root/$1"
}

# block PATTERN: prints the block whose first line has PATTERN; a program without MPI has no mpirun.
block() {
    for file in "$work"/block.*; do
        if head -n 1 "$file" | grep -q -- "$1"; then
            cat "$file"
            return 0
        fi
    done
    echo "no block of code begins with $1" >&2
    return 1
}

# runs: runs standard input as a script in the tree; every command of it must succeed.
runs() {
    { echo 'set -e' && cat; } >"$work/script"
    (cd "$tree" && sh "$work/script") >"$work/out" 2>"$work/err" </dev/null
}

has_mpi() {
    [ -n "${HAVE_MPI:-}" ] && command -v mpirun >/dev/null
}

# Open MPI's option, which MPICH does not know.
mpi_options() {
    if mpirun --version 2>/dev/null | grep -qi 'open.mpi\|openrte'; then cat; else sed 's/--oversubscribe //'; fi
}

training_on_your_own_text() {
    cp README.md "$tree/my.txt" && blocks README.md 'Train on your own text' || return 1
    fewer='s/--train-iters 300/--train-iters 6/; s/--lr-warmup-iters 30/--lr-warmup-iters 2/
        s/--eval-interval 100/--eval-interval 3/'
    block '^data/preprocess' | runs && block '^\./train' | sed "$fewer" | runs || return 1
    says '^     6/6 100%  loss ' "$work/out" && says '^saved iteration 6 to runs/my' "$work/out" || return 1
    block '^memory plan' | grep -v tokens/s >"$work/plan" # the lines of the plan, as README shows them
    [ "$(grep -cxFf "$work/plan" "$work/out")" = 6 ] || return 1
    line=$(block '^memory plan' | sed -n 's|^ *299/300  99%|6/6 100%|p' |
        sed 's/lr [^ ]*/lr .../; s/\.\.\./[0-9.e-]*/g')
    [ -n "$line" ] && says "^ *$line\$" "$work/out" || return 1
    # "The same command with --load runs/my continues from there"
    block '^\./train' | sed "$fewer; s/--train-iters 6/--train-iters 8/; \$s|\$| --load runs/my|" | runs &&
        says '^     8/8 100%  loss ' "$work/out" || return 1
    block '^\./infer' | sed 's/--max-new-tokens 200/--max-new-tokens 20/' | runs && says '^Once upon a time' "$work/out"
}

# The model of the section before stands for the demo's.
fine_tuning() {
    blocks README.md 'Fine-tune a model' && block '^make demo' >"$work/commands" || return 1
    sed -n 's|runs/demo|runs/my|; s|--save|--train-epochs 1 --lr-warmup-iters 2 --save|p' "$work/commands" | runs &&
        says '^saved iteration [0-9]* to runs/chat' "$work/out" || return 1
    grep '^\./infer' "$work/commands" >"$work/infer"
    # the question that README names; a conversation of the data begins with it, as with every other of its questions
    question=$(sed -n 's/.*ask it "\(.*?\)".*/\1/p' "$root/README.md")
    [ -s "$work/infer" ] && [ -n "$question" ] &&
        (cd "$tree" && echo "$question" | sh "$work/infer") >"$work/out" 2>"$work/err" &&
        [ "$(wc -l <"$work/out")" -ge 1 ] && first_questions | grep -qx "$question"
}

# The first questions of the conversations of data/sft-demo.jsonl, and all questions.
first_questions() {
    sed -n 's/^{"prompt": "\([^"]*\)".*/\1/p
        s/^{"messages": \[{"role": "user", "content": "\([^"]*\)".*/\1/p' "$root/data/sft-demo.jsonl" | sort -u
}
all_questions() {
    grep -o '"prompt": "[^"]*"\|"role": "user", "content": "[^"]*"' "$root/data/sft-demo.jsonl" |
        sed 's/.*: "\(.*\)"/\1/' | sort -u
}

every_question_of_the_demo_begins_a_conversation() {
    first_questions >"$work/first" && all_questions >"$work/all" && [ "$(wc -l <"$work/all")" = 100 ] &&
        cmp "$work/first" "$work/all"
}

several_ranks() {
    has_mpi || return 0
    model='--mock-data --num-layers 6 --hidden-size 64 --num-attention-heads 4 --vocab-size 256 --seq-length 32'
    model="$model --global-batch-size 8 --train-iters 2 --lr 1e-3 --eval-iters 0 --device cpu"
    blocks README.md 'Several ranks' && block '^mpirun' | sed "s/ \.\.\. / $model /" | mpi_options | runs &&
        says '8 ranks with 1 thread each: TP 2 x PP 2 x CP 1 x DP 2' "$work/out"
}

hugging_face_models() {
    blocks README.md 'Hugging Face models' && block '^\./infer' | sed "s|--data-path \.\.\.|--data-path \
        my_text_document --seq-length 64 --train-iters 2 --lr 1e-3 --eval-iters 0|
        s|Qwen/Qwen3-0.6B|runs/my|; s/ DIR / runs\/my /; s/OUT/runs\/tuned/; s/ --prompt/ --max-new-tokens 4 --prompt/
        s/--load runs.my --data/--finetune &/" | runs && says '^saved iteration 2 to runs/tuned' "$work/out"
}

a_yaml_file() {
    blocks README.md Options && block '^# run.yaml' >"$tree/run.yaml" || return 1
    block '^\./train --config' | sed 's/$/ --train-iters 2/' | runs && says ' lr  *0.0005$' "$work/out" &&
        says ' hidden-size  *256$' "$work/out"
}

# A file of tests/roles is in the place of the reader's, and the weights of the first section in that of Qwen's.
a_file_of_roll() {
    cp tests/roles/roll.yaml "$tree/sft_config.yaml" && blocks README.md 'Files of ROLL' &&
        block '^\./train --config sft_config' >"$work/commands" || return 1
    head -n 1 "$work/commands" | runs && says '  sequence_length  *--seq-length 64$' "$work/out" || return 1
    has_mpi || return 0
    awk 'BEGIN { for (i = 0; i < 70; i++) printf "{\"instruction\": \"%d + 1\", \"output\": \"%d\"}\n", i, i + 1 }' \
        >"$tree/data/train.json" && cp "$tree/data/train.json" "$tree/valid.json" &&
        cp -RL "$tree/runs/my/latest" "$tree/base" || return 1
    rm "$tree"/base/trainer.json "$tree"/base/checksums.json "$tree"/base/optimizer.*
    tail -n 1 "$work/commands" | sed 's|models/Qwen2.5-7B|base|; s|-np 8|--oversubscribe -np 2|
        s|$| --eval-iters 1|' | mpi_options | runs &&
        says '^saved iteration [0-9]* to ./output/small' "$work/out"
}

checkpoints_of_megatron() {
    blocks README.md 'Checkpoints of Megatron-LM' && block '^\./infer --load tests/golden' | runs &&
        says '^wrote the weights to runs/megatron' "$work/out" &&
        block '^\./train --load runs/megatron' | sed 's/--train-iters 20/--train-iters 2/' | runs &&
        says '^saved iteration 2 to runs/goes-on' "$work/out"
}

# The commands in sentences: they begin with a program, and end with a backquote.
a_schedule_is_drawn_without_a_run() {
    tr '\n' ' ' <"$root/README.md" | grep -o '`\./train [^`]*--print-schedule`' | tr -d '`' >"$work/commands" &&
        runs <"$work/commands" && says "^peak: .*Bubble: " "$work/out"
}

# "An error names the options and says what to change, in one line; names that cannot be used are listed together"
errors_are_as_promised() {
    refused '--hidden-size.*--num-attention-heads' "$train" --num-layers 1 --hidden-size 65 --num-attention-heads 4 \
        --vocab-size 64 --seq-length 8 --mock-data --train-iters 1 --lr 1 || return 1
    if "$train" --no-such-option 1 --nor-this-one 2 >"$work/out" 2>"$work/err" </dev/null; then return 1; fi
    grep -q 'no-such-option' "$work/err" && grep -q 'nor-this-one' "$work/err" &&
        [ "$(grep -c '^error: ' "$work/err")" = 1 ] || return 1
    # "No option is accepted and ignored."
    echo text >"$work/plain.txt"
    refused '--json-keys' "$(dirname "$train")/data/preprocess" --input "$work/plain.txt" \
        --output-prefix "$work/plain" --tokenizer-type ByteLevel --json-keys text || return 1
    "$train" --help schedule >"$work/out" 2>"$work/err" && says '--print-schedule' "$work/out"
}

# Every program of the table is there, and `make needs` prints its files.
examples_are_listed() {
    grep -o '^| \[[a-z_]*\.cu*\](notes/examples/[a-z_]*\.cu*)' "$root/README.md" | sed 's/.*(\(.*\))/\1/' | sort \
        >"$work/listed"
    (cd "$root" && ls notes/examples/*.c notes/examples/*.cu) >"$work/there"
    diff "$work/there" "$work/listed" >"$work/out" || return 1
    words=$(grep -o 'make needs EXAMPLE=[a-z_]*' "$root/README.md" | head -n 1) && [ -n "$words" ] &&
        (cd "$root" && MAKEFLAGS='' MAKELEVEL=0 $words) >"$work/out" 2>"$work/err" &&
        says 'megatron.c megatron.h' "$work/out"
}

# The whole section, as it is written.
coming_from_other_programs() {
    blocks README.md 'Coming from other programs' || return 1
    for program in Megatron-LM ROLL verl Trinity-RFT transformers; do
        block "^# $program: " | runs || return 1
    done
    says '^saved iteration 3 to runs/from-transformers' "$work/out" && [ -e "$tree/runs/from-megatron/config.json" ]
}

for test in a_schedule_is_drawn_without_a_run errors_are_as_promised examples_are_listed training_on_your_own_text \
    every_question_of_the_demo_begins_a_conversation fine_tuning several_ranks hugging_face_models \
    a_yaml_file a_file_of_roll checkpoints_of_megatron coming_from_other_programs; do
    check $test $test
done
exit $failed
