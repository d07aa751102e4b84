#!/bin/sh
# The table "Families" of README.md is true: the cells of each row are tried with the models of tests/golden/hf that it
# names. A "yes" runs: one run of several ranks has all the divisions that the row allows, and the losses of one rank.
# A "no" ends with one line that has the message of the table below. A GPU is simulated, with the limits of
# cuda/limits.h.
set -u
. tests/suite.sh
needs_mpi
export OMP_NUM_THREADS=1

# section: the lines of README.md's section.
section() {
    awk '/^## / { on = $0 == "## Families" } on' README.md
}

# rows: a line for each folder: its name and the cells, without blanks, in the order of the columns.
rows() {
    section | awk -F ' *[|] *' '/^[|].*`/ && !/^[|] [(]/ {
        cells = ""
        for (i = 4; i < NF; i++) cells = cells " " ($i == "" ? "?" : $i)
        gsub(/no [(]/, "no(", cells)
        count = split($3, folders, "`")
        for (i = 2; i <= count; i += 2) print folders[i] cells }'
}

columns='train generate TP PP CP EP fp8 packed LoRA CUDA'

the_table_has_a_row_for_each_family() {
    heads=$(section | awk -F ' *[|] *' '/^[|] Family/ { for (i = 4; i < NF; i++) print $i }')
    # shellcheck disable=SC2086
    [ "$(echo $heads)" = "$columns" ] || return 1
    rows | cut -d' ' -f1 | sort >"$work/out"
    ls tests/golden/hf | diff - "$work/out"
}

# An empty cell, a word other than yes, or a note without a message is a hole.
no_cell_is_a_hole() {
    rows | awk -v columns="$columns" '
        BEGIN { wanted = split(columns, names, " ") }
        NF != wanted + 1 { print $1 " has " NF - 1 " cells"; bad = 1 }
        { for (i = 2; i <= NF; i++) if ($i != "yes" && $i !~ /^no[(][a-z][)]$/) { print $1 ": " $i; bad = 1 } }
        END { exit bad || NR == 0 }' >"$work/out" || return 1
    for note in $(rows | tr ' ' '\n' | sed -n 's/^no//p' | sort -u); do
        [ -n "$(message "$note")" ] || {
            echo "$note has no message"
            return 1
        }
    done
}

# message NOTE: what a refusal says.
message() {
    section | awk -F ' *[|] *' -v note="$1" '$2 == note { gsub(/`/, "", $4); print $4 }'
}

# A tokenizer of letters, whose 29 tokens every model has, and texts that share rows of 32 tokens.
awk 'BEGIN {
    for (i = 0; i < 26; i++) letters = letters sprintf(", \"%c\": %d", 97 + i, i + 3)
    print "{\"added_tokens\": [{\"id\": 0, \"content\": \"<s>\", \"special\": true}, " \
        "{\"id\": 1, \"content\": \"</s>\", \"special\": true}], " \
        "\"pre_tokenizer\": {\"type\": \"ByteLevel\", \"add_prefix_space\": false}, " \
        "\"decoder\": {\"type\": \"ByteLevel\"}, \"model\": {\"type\": \"BPE\", \"merges\": [], " \
        "\"vocab\": {\"<s>\": 0, \"</s>\": 1, \"\304\240\": 2" letters "}}}" }' >"$work/tokenizer.json"
awk 'BEGIN {
    for (i = 0; i < 40; i++) {
        text = "a"
        for (j = 0; j < i % 9 + 2; j++) text = text sprintf(" %c%c", 97 + (i * 7 + j) % 26, 97 + (i + j * 3) % 26)
        print "{\"text\": \"" text "\"}"
    } }' >"$work/texts.jsonl"

# trains RANKS NAME OPTION...: three steps, whose numbers are in $work/NAME.jsonl, and what is saved in $work/NAME.
trains() {
    on=$1 run=$2
    shift 2
    rm -rf "$work/$run" "$work/$run.jsonl"
    on_ranks "$on" "$train" --load "$folder" --finetune --sft $packing --chat-template plain --loss-on all \
        --data-path "$work/texts.jsonl" --split 1,0,0 --tokenizer-type HuggingFaceTokenizer \
        --tokenizer-model "$work/tokenizer.json" --seq-length 32 --micro-batch-size 1 --global-batch-size 4 \
        --train-iters 3 --lr 1e-3 --eval-iters 0 --device cpu --metrics "$work/$run.jsonl" "$@" &&
        [ "$(series lm_loss "$work/$run.jsonl" | wc -l)" = 3 ]
}

# generates_on RANKS OPTION...: the tokens are in $work/tokens.
generates_on() {
    on=$1
    shift
    on_ranks "$on" "$infer" --load "$folder" --prompt-tokens 3,4,5 --max-new-tokens 6 --temperature 0 --print-tokens \
        --device cpu "$@" && grep -E '^[0-9]+( [0-9]+)*$' "$work/out" >"$work/tokens"
}

generates() {
    generates_on 1 "$@"
}

# Two tensor-parallel ranks write the tokens of one.
generates_alike() {
    generates && cp "$work/tokens" "$work/alone" && generates_on 2 --tensor-model-parallel-size 2 &&
        cmp "$work/alone" "$work/tokens"
}

# On one simulated H200.
simulates() {
    on_ranks 1 "$train" --load "$folder" --finetune --mock-data --seq-length 32 --micro-batch-size 1 \
        --global-batch-size 4 --train-iters 3 --lr 1e-3 --bf16 --explain --gpu h200 --gpus 1 &&
        says '^  step  ' "$work/out"
}

# The adapters begin with no effect, and then have one; infer reads what was saved.
adapts() {
    trains 1 lora --lora-rank 2 --lora-target all-linear --save "$work/lora" &&
        [ "$(first_loss lora)" = "$(first_loss one)" ] && [ -n "$(first_loss one)" ] &&
        [ "$(series lm_loss "$work/lora.jsonl" | tail -n 1)" != "$(series lm_loss "$work/one.jsonl" | tail -n 1)" ] &&
        generates --load-adapter "$work/lora"
}

first_loss() {
    series lm_loss "$work/$1.jsonl" | head -n 1
}

# Products in fp8 are not those in fp32.
trains_in_fp8() {
    trains 1 fp8 --fp8-format hybrid && [ "$(first_loss fp8)" != "$(first_loss one)" ]
}

# refuses NOTE COMMAND...: it must fail with one line that has the message of the note.
refuses() {
    note=$1
    shift
    if "$@"; then
        echo "the table says no $note, but this runs: $*"
        return 1
    fi
    sed -n '/^error: /{s/ (config.json)//g;p;}' "$work/err" >"$work/refusal"
    [ "$(wc -l <"$work/refusal")" = 1 ] && grep -qF -- "$(message "$note")" "$work/refusal" && return 0
    echo "expected \"$(message "$note")\" from $*"
    return 1
}

# The option that divides a model as the column says.
division() {
    case $1 in
    TP) echo --tensor-model-parallel-size 2 --sequence-parallel ;;
    PP) echo --pipeline-model-parallel-size 2 ;;
    CP) echo --context-parallel-size 2 ;;
    EP) echo --expert-model-parallel-size 2 ;;
    esac
}

# cell COLUMN: of the row.
cell() {
    echo "$cells" | tr ' ' '\n' | sed -n "s/^$1=//p"
}

# holds COLUMN COMMAND...: the command does what the cell says, yes or no.
holds() {
    said=$(cell "$1")
    shift
    if [ "$said" = yes ]; then "$@"; else refuses "${said#no}" "$@"; fi
}

# All divisions that the row allows train as one rank; each of the others is refused.
divides() {
    divisions='' ranks=1
    for column in TP PP CP EP; do
        if [ "$(cell $column)" = yes ]; then
            divisions="$divisions $(division $column)"
            [ $column = EP ] && [ $ranks -gt 2 ] || ranks=$((2 * ranks))
        else
            # shellcheck disable=SC2046
            holds $column trains 2 no $(division $column) || return 1
        fi
    done
    # shellcheck disable=SC2086
    trains $ranks many $divisions && same_series "$work/one.jsonl" "$work/many.jsonl" 1e-5 0 lm_loss
}

# family FOLDER CELL...
family() {
    folder=tests/golden/hf/$1 cells=$(for column in $columns; do shift && printf '%s=%s ' "$column" "$1"; done)
    packing=--sequence-packing
    if [ "$(cell packed)" != yes ]; then
        holds packed trains 1 no || return 1
        packing=''
    fi
    holds train trains 1 one && divides && holds fp8 trains_in_fp8 && holds LoRA adapts &&
        holds generate generates_alike && holds CUDA simulates
}

check the_table_has_a_row_for_each_family the_table_has_a_row_for_each_family
check no_cell_is_a_hole no_cell_is_a_hole
rows >"$work/rows"
while read -r row; do
    # shellcheck disable=SC2086
    check "${row%% *}" family $row
done <"$work/rows"
exit $failed
