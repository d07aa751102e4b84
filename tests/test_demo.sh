#!/bin/sh
# The demo runs with few iterations, from text to generated text, and leaves its files.
set -u
for program in train infer data/preprocess; do
    if ! [ -x "$MT_BIN/$program" ]; then
        echo "skipped: $program is not built"
        exit 0
    fi
done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

if DEMO_DIR=$work/demo DEMO_ITERS=2 DEMO_RANKS=${HAVE_MPI:+4} data/demo.sh >"$work/log" 2>&1; then
    echo "ok demo_runs"
else
    cat "$work/log"
    echo "not ok demo_runs"
fi
for file in data/corpus_text_document.bin data/corpus_text_document.idx config.json metrics.jsonl; do
    if [ -s "$work/demo/$file" ]; then echo "ok demo_writes $file"; else echo "not ok demo_writes $file"; fi
done
if ! command -v gnuplot >/dev/null; then
    echo "skipped: gnuplot is absent"
elif [ -s "$work/demo/loss.svg" ]; then
    echo "ok demo_draws_its_loss"
else
    echo "not ok demo_draws_its_loss"
fi
sample=$(awk '/^\$ .*infer / { writing = 1; next } /^More:/ { writing = 0 } writing' "$work/log")
if [ -n "$sample" ]; then echo "ok demo_writes_text"; else echo "not ok demo_writes_text"; fi
