#!/bin/sh
# Prepares text, trains a small model on it and generates text, in a few minutes on a laptop. Prints every command
# before it runs it. The corpus is this project's own code and notes: nothing is downloaded.
#
#   usage: data/demo.sh      (make demo)
#
# MT_BIN is the folder of the programs, DEMO_DIR that of the model, DEMO_ITERS the number of iterations. With
# DEMO_RANKS=4, which `make demo` sets if it found MPI, four ranks share the model by tensor and pipeline parallelism.
set -eu
bin=${MT_BIN:-.}
model=${DEMO_DIR:-runs/demo}
iterations=${DEMO_ITERS:-400}
corpus=$model/data/corpus

run() {
    printf '\n$'
    for word in "$@"; do
        case $word in *' '* | '') printf " '%s'" "$word" ;; *) printf ' %s' "$word" ;; esac
    done
    printf '\n'
    "$@"
}

# 1. Text: one JSON object a line, each a document of at most 60 lines.
mkdir -p "$model/data"
for file in *.md *.c *.h notes/*.md notes/*.c data/*.[ch] tests/*.[ch]; do
    [ -f "$file" ] || continue
    sed 's/\\/\\\\/g; s/"/\\"/g' "$file" | awk '
        NR % 60 == 1 { if (NR > 1) print "\"}"; printf "{\"text\": \"" }
        { gsub(/\t/, "\\t"); printf "%s\\n", $0 }
        END { if (NR) print "\"}" }'
done >"$corpus.jsonl"
echo "1. the corpus: $(wc -l <"$corpus.jsonl") documents, $(wc -c <"$corpus.jsonl") bytes of code and notes"

# 2. Tokens: here every byte is a token.
run "$bin/data/preprocess" --input "$corpus.jsonl" --json-keys text --output-prefix "$corpus" \
    --tokenizer-type ByteLevel --append-eod --workers 2

# 3. Train a Llama of 0.9 million parameters, on four ranks of one thread if mpirun is there.
launch='' layout=''
if [ "${DEMO_RANKS:-1}" = 4 ] && command -v mpirun >/dev/null; then
    launch='env OMP_NUM_THREADS=1 mpirun -np 4' layout='--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2'
    if mpirun --version 2>/dev/null | grep -qi 'open.mpi\|openrte'; then
        launch='env OMP_NUM_THREADS=1 mpirun --oversubscribe -np 4'
        # With fewer cores than ranks, a waiting rank yields its core.
        export OMPI_MCA_mpi_yield_when_idle=1 OMPI_MCA_btl_vader_single_copy_mechanism=none
        if [ "$(id -u)" = 0 ]; then export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; fi
    fi
fi
# shellcheck disable=SC2086
run $launch "$bin/train" $layout \
    --num-layers 4 --hidden-size 128 --ffn-hidden-size 384 --num-attention-heads 4 \
    --group-query-attention --num-query-groups 2 --seq-length 256 --max-position-embeddings 256 \
    --normalization RMSNorm --swiglu --position-embedding-type rope --disable-bias-linear \
    --untie-embeddings-and-output-weights \
    --tokenizer-type ByteLevel --data-path "${corpus}_text_document" --split 95,5,0 \
    --micro-batch-size 8 --global-batch-size 16 --train-iters "$iterations" \
    --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-iters $((iterations / 20)) \
    --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0 \
    --eval-interval $((iterations > 5 ? iterations / 5 : 1)) --eval-iters 4 \
    --save "$model" --metrics "$model/metrics.jsonl" --overwrite

# 4. Draw the loss.
run data/plot.sh "$model/metrics.jsonl" "$model/loss.svg"

# 5. Generate text.
run "$bin/infer" --load "$model" --tokenizer-type ByteLevel --prompt 'static void mt_' \
    --max-new-tokens 400 --temperature 0.7 --top-p 0.95 --seed 1
printf '\nMore: %s/infer --load %s --tokenizer-type ByteLevel --prompt TEXT\n' "$bin" "$model"
