#!/bin/sh
# The commands of README and of the notes' experiments run as they are written. Blocks of code are taken from the text;
# only what this file replaces in plain sight differs: fewer iterations, "..." and names of folders.
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
    [ -s "$work/infer" ] && (cd "$tree" && echo 'Hello!' | sh "$work/infer") >"$work/out" 2>"$work/err" &&
        [ "$(wc -l <"$work/out")" -ge 1 ]
}

several_ranks() {
    has_mpi || return 0
    model='--mock-data --num-layers 8 --hidden-size 64 --num-attention-heads 4 --vocab-size 256 --seq-length 32'
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

# experiment CHAPTER PATTERN...: the blocks of its "Try it" that begin with one of the patterns, as one script.
experiment() {
    chapter=$(cd "$root" && echo notes/"$1"-*.md)
    shift
    blocks "$chapter" 'Try it'
    for pattern; do block "$pattern" || return 1; done >"$work/experiment"
    grep -q mpirun "$work/experiment" && ! has_mpi && return 0
    sed 's/--train-iters 100/--train-iters 3/' "$work/experiment" | mpi_options | runs
}

the_last_losses_agree() {
    [ "$(grep -c lm_loss "$work/out")" = 2 ] && [ "$(grep lm_loss "$work/out" | uniq | wc -l)" = 1 ]
}

chapter_1() {
    experiment 01 '^golden' && [ "$(grep -c lm_loss "$work/out")" = 5 ]
}

chapter_4() {
    experiment 04 '^printf' && block '^0000000' >"$work/want" && tail -n 3 "$work/out" | diff "$work/want" -
}

chapter_5() {
    rm -rf "$tree/run"
    experiment 05 '^tiny' && the_last_losses_agree
}

chapter_7() {
    experiment 07 '^p='
}

chapter_8() {
    experiment 08 '^m=' && { ! has_mpi || [ -s "$tree/four.jsonl" ]; }
}

chapter_9() {
    experiment 09 '^for strategy'
}

chapter_11() {
    experiment 11 '^m='
}

chapter_12() {
    experiment 12 '^m='
}

chapter_13() {
    rm -rf "$tree/run"
    experiment 13 '^tiny' && says 'damaged.*going on from iteration 10' "$work/err" && the_last_losses_agree || return 1
    blocks notes/13-checkpoints.md 'Crash safety' &&
        block 'train-iters 0' | sed 's/--load A --save B/--load run --save converted/' | runs &&
        says '"dtype": "bfloat16"' "$tree/converted/config.json"
}

chapter_14() {
    experiment 14 '^m='
}

# Memory and losses are those of the chapter; the code that it quotes is that of megatron.c.
chapter_16() {
    pipeline=
    has_mpi && pipeline='^for options in .*num-layers 2'
    experiment 16 '^export' ${pipeline:+"$pipeline"} || return 1
    { block '^35' && block '^36'; } | head -n "$(wc -l <"$work/out")" | awk '{ print $1 }' >"$work/want"
    awk '{ print $1 }' "$work/out" | diff "$work/want" - && [ "$(wc -l <"$work/want")" -ge 6 ] &&
        [ "$(head -n 6 "$work/out" | cut -d' ' -f2- | uniq | wc -l)" = 1 ] || return 1
    blocks notes/16-recomputation.md '.*'
    for quote in mt_slots_place mt_layer_backward; do
        block "^static void $quote" >"$work/quote" || return 1
        lines=$(wc -l <"$work/quote")
        grep -A $((lines - 1)) -Fx -- "$(head -n 1 "$work/quote")" megatron.c | diff "$work/quote" - || return 1
    done
}

# All numbers are the chapter's.
chapter_17() {
    pipeline=
    has_mpi && pipeline='^for options in .*all" "'
    experiment 17 '^export' '^measure_state() {' ${pipeline:+"$pipeline"} || return 1
    { block '^35' && block '^13' && block '^36'; } | head -n "$(wc -l <"$work/out")" >"$work/want"
    diff "$work/want" "$work/out" && [ "$(wc -l <"$work/want")" -ge 11 ] || return 1
    blocks notes/17-offloading.md 'The optimizer' && block '^mt_wait_stream' >"$work/quote" || return 1
    while read -r line; do grep -qF -- "$line" megatron.c || return 1; done <"$work/quote"
}

# Every recipe trains to within 1% of bf16's validation loss, and to about the chapter's: the text is that of other
# chapters, which change. The code that it quotes is that of megatron.c.
chapter_18() {
    experiment 18 '^export' || return 1
    block '^2[.]87' >"$work/want"
    grep -v fp8_text "$work/out" | paste - "$work/want" | awk '
        NR == 1 { bf16 = $1 }
        { if (!($1 < 1.01 * bf16 && $1 > 0.99 * bf16 && $1 < 1.05 * $2 && $1 > 0.95 * $2)) { print; bad = 1 } }
        END { exit bad || NR != 5 }' || return 1
    blocks notes/18-fp8.md '.*'
    block '^static float mt_fp8_scale' >"$work/quote" || return 1
    grep -A $(($(wc -l <"$work/quote") - 1)) -Fx -- "$(head -n 1 "$work/quote")" megatron.c | diff "$work/quote" -
}

# The reward begins as in the chapter and rises; the code that it quotes is that of megatron.c.
chapter_19() {
    experiment 19 '^awk' || return 1
    block '^0[.]' >"$work/want"
    paste "$work/out" "$work/want" | awk '
        NR == 1 { first = $1; d = $1 - $2 } NR == 4 && ($1 < first + 0.25 || $1 < $2 - 0.15) { print; d = 1 }
        END { exit d > 0.1 || d < -0.1 || NR != 4 }' || return 1
    blocks notes/19-rewards.md '.*'
    block '^double plain' >"$work/quote" || return 1
    while read -r line; do grep -qF -- "$line" megatron.c || return 1; done <"$work/quote"
}

for test in training_on_your_own_text fine_tuning several_ranks hugging_face_models a_yaml_file chapter_1 \
    chapter_4 chapter_5 chapter_7 chapter_8 chapter_9 chapter_11 chapter_12 chapter_13 chapter_14 chapter_16 \
    chapter_17 chapter_18 chapter_19; do
    check $test $test
done
exit $failed
