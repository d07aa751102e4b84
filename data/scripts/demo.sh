#!/bin/sh
# Prepares text, trains a small Llama on it and generates text, in under two minutes on two cores. The text is this
# project's own: its notes, and the comments of its code. Nothing is downloaded.
#
#   usage: data/scripts/demo.sh      (make demo)
#
# Prints a line for each phase, and on a terminal the progress of training in place. All commands and their output are
# in DEMO_DIR/demo.log. MT_BIN is the folder of the programs, DEMO_DIR that of the model, DEMO_ITERS the number of
# iterations, DEMO_OPTIONS more options of train. DEMO_RANKS ranks, which `make demo` sets to the cores if it found MPI,
# share the work: two by data parallelism, four by tensor and pipeline parallelism.
set -eu
bin=${MT_BIN:-.}
model=${DEMO_DIR:-runs/demo}
iterations=${DEMO_ITERS:-250}
corpus=$model/data/corpus
tokenizer=data/demo-tokenizer.json
log=$model/demo.log

. data/scripts/demo-steps.sh

# 1. Text: notes without the comments that tests read, and the comments of the code without their stars. A blank line
# ends a document. Each run of blanks, as in tables and code, becomes one blank; otherwise the model often writes blanks
# only.
mkdir -p "$model/data"
begin_log
{
    for file in *.md notes/*.md; do sed '/^<!--.*-->$/d; /^<!--/,/-->$/d' "$file" && echo; done
    cat ./*.[ch] data/*/*.[ch] cuda/*.cu cuda/*.cuh tests/*.[ch] notes/*.c | awk '
        /^ *\/\*/ { inside = 1; text = $0; sub(/^ *\/\*+/, "", text) }
        !/^ *\/\*/ { text = $0; sub(/^ *\*( |$)/, "", text) }
        inside {
            ends = text ~ /\*\//
            sub(/\*\/.*/, "", text)
            gsub(/---+|===+/, "", text)
            gsub(/^ +| +$/, "", text)
            print text
            if (ends) { print ""; inside = 0 }
        }'
} | tr -s ' ' >"$corpus.txt"
echo "1. text: $(($(wc -w <"$corpus.txt"))) words of notes and comments ($corpus.txt)"

# 2. Tokens: 1024 pieces of words, from a tokenizer.json that Hugging Face tokenizers trained on this text.
run "$bin/data/preprocess" --input "$corpus.txt" --output-prefix "$corpus" --tokenizer-type HuggingFaceTokenizer \
    --tokenizer-model "$tokenizer" --append-eod --workers 2
echo "2. tokens: $(sed -n 's/.*: \([0-9]* documents, [0-9]* tokens\) .*/\1/p' "$log" | tail -n 1)" \
    "(${corpus}_text_document.bin)"

# 3. Training, on ranks of one thread if mpirun is there.
launch='' layout='' ranks='one rank'
if [ "${DEMO_RANKS:-1}" = 4 ] && command -v mpirun >/dev/null; then
    launch=$(mpirun_command 4) ranks='four ranks, TP 2 x PP 2'
    layout='--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2'
elif [ "${DEMO_RANKS:-1}" = 2 ] && command -v mpirun >/dev/null; then
    launch=$(mpirun_command 2) ranks='two ranks, DP 2' layout='--use-distributed-optimizer'
fi
began=$(date +%s)
# shellcheck disable=SC2086
run $launch "$bin/train" $layout \
    --num-layers 4 --hidden-size 128 --ffn-hidden-size 384 --num-attention-heads 4 \
    --group-query-attention --num-query-groups 2 --seq-length 256 --max-position-embeddings 256 \
    --normalization RMSNorm --swiglu --position-embedding-type rope --disable-bias-linear \
    --untie-embeddings-and-output-weights \
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$tokenizer" \
    --data-path "${corpus}_text_document" --split 95,5,0 \
    --micro-batch-size 8 --global-batch-size 16 --train-iters "$iterations" \
    --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-iters $((iterations / 20)) \
    --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0 \
    --eval-interval $((iterations > 5 ? iterations / 5 : 1)) --eval-iters 4 \
    --save "$model" --metrics "$model/metrics.jsonl" --overwrite ${DEMO_OPTIONS:-}
head -n 1 "$model/metrics.jsonl" >"$model/data/first"
# one batch's loss varies, so the loss at the end is a mean
last=$(mean_of_last "$((iterations / 10 + 1))" "$model/metrics.jsonl" lm_loss)
echo "3. training: Llama on $ranks, $iterations iterations in $(($(date +%s) - began)) s," \
    "loss $(value "$model/data/first" lm_loss | cut -c1-4) to $last," \
    "validation loss $(value "$model/metrics.jsonl" validation_loss | cut -c1-4) ($model)"

# 4. The curves of the run.
draw_curves "$model/loss.svg"

# words: prints the words of standard input, one a line: letters in lower case, at least two.
words() {
    LC_ALL=C tr -cs '[:alpha:]' '\n' | LC_ALL=C tr '[:upper:]' '[:lower:]' | grep -E '^.{2,}$' || :
}

# 5. Generation: three texts for each prompt, as some are short; the first of each is shown. The last line counts the
# generated words, without those of the prompts, that the text has, too.
echo "5. generated text ($bin/infer --load $model --prompt TEXT writes more):"
set -- 'The loss' 'Each rank' 'A checkpoint' 'The gradient of' 'A pipeline stage' 'The model' 'If the' 'All ranks'
"$bin/infer" --load "$model" --prompt "$@" "$@" "$@" --max-new-tokens 100 --temperature 0.4 --top-p 0.9 --seed 1 \
    >"$model/data/generated" 2>>"$log" || { tail -n 20 "$log" >&2 && exit 1; }
sed '/^== 9 of/,$d' "$model/data/generated"
words <"$corpus.txt" | sort -u >"$model/data/vocabulary"
prompts=$(printf 's/^%s//;' "$@")
sed "/^== [0-9]* of [0-9]* ==\$/d; $prompts" "$model/data/generated" | words >"$model/data/words"
echo "6. words: $(grep -cxFf "$model/data/vocabulary" "$model/data/words" || :) of the" \
    "$(wc -l <"$model/data/words") generated words occur in the text"
