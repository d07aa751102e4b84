#!/bin/sh
# From text to a model that writes, in a few minutes on a laptop: every command is shown before it runs.
# The corpus is this project itself, its code and its notes, so that nothing needs to be downloaded.
#
#   usage: data/demo.sh      (make demo)
#
# MT_BIN is where the programs are, DEMO_DIR where the model goes, DEMO_ITERS for how many iterations it learns. With
# DEMO_RANKS=4 four ranks share the model, two by tensor and two by pipeline parallelism: `make demo` says so where it
# found MPI.
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

# 1. Text: a JSON object a line, a document of at most 60 lines each.
mkdir -p "$model/data"
rm -f "$model/metrics.jsonl"
for file in *.md *.c *.h notes/*.md notes/*.c data/*.[ch] tests/*.[ch]; do
    [ -f "$file" ] || continue
    sed 's/\\/\\\\/g; s/"/\\"/g' "$file" | awk '
        NR % 60 == 1 { if (NR > 1) print "\"}"; printf "{\"text\": \"" }
        { gsub(/\t/, "\\t"); printf "%s\\n", $0 }
        END { if (NR) print "\"}" }'
done >"$corpus.jsonl"
echo "1. the corpus: $(wc -l <"$corpus.jsonl") documents, $(wc -c <"$corpus.jsonl") bytes of code and notes"

# 2. Tokens: here every byte is one.
run "$bin/data/preprocess" --input "$corpus.jsonl" --json-keys text --output-prefix "$corpus" \
    --tokenizer-type ByteLevel --append-eod --workers 2

# 3. A Llama of 0.9 million parameters learns to continue the text, in four ranks of one thread where there is mpirun.
launch='' layout=''
if [ "${DEMO_RANKS:-1}" = 4 ] && command -v mpirun >/dev/null; then
    launch='env OMP_NUM_THREADS=1 mpirun -np 4' layout='--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2'
    if mpirun --version 2>/dev/null | grep -qi 'open.mpi\|openrte'; then
        launch='env OMP_NUM_THREADS=1 mpirun --oversubscribe -np 4'
        # With fewer cores than ranks, one that waits makes room.
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
    --save "$model" --metrics "$model/metrics.jsonl"

# 4. How it learned.
run data/plot.sh "$model/metrics.jsonl" "$model/loss.svg"

# 5. What it writes.
run "$bin/infer" --load "$model" --tokenizer-type ByteLevel --prompt 'static void mt_' \
    --max-new-tokens 400 --temperature 0.7 --top-p 0.95 --seed 1
printf '\nMore: %s/infer --load %s --tokenizer-type ByteLevel --prompt TEXT\n' "$bin" "$model"
