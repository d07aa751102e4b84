#!/bin/sh
# Draws the curves of training runs from the files that --metrics writes: loss, gradient norm, learning rate and tokens
# per second, as an SVG; and the loss once more in characters, for the terminal.
#
#   usage: data/plot.sh RUN.jsonl[,RUN.jsonl...] [OUTPUT.svg]
set -eu
runs=${1:-}
if [ -z "$runs" ]; then
    echo "usage: make plot RUN=metrics.jsonl[,more.jsonl] [OUT=curves.svg]" >&2
    exit 2
fi
first=${runs%%,*}
output=${2:-${first%.jsonl}.svg}
if ! command -v gnuplot >/dev/null; then
    echo "no curves are drawn: gnuplot is not installed (make deps installs it)"
    exit 0
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# columns FILE: iteration, loss, validation loss, gradient norm, learning rate, tokens/s; NaN where a line lacks one.
columns() {
    awk '
    function value(key) {
        if (!match($0, "\"" key "\" *: *[-+.0-9eE]+")) return "NaN"
        text = substr($0, RSTART, RLENGTH)
        sub(/.*: */, "", text)
        return text
    }
    { print value("iteration"), value("lm_loss"), value("validation_loss"), value("grad_norm"), value("learning_rate"),
            value("tokens_per_second") }' "$1"
}

# add_curves COLUMNS RUN: adds a run to what gnuplot plots, a list with commas; the word COLUMN stands for the column.
curves=''
validation=''
add_curves() {
    name=$(basename "$2" .jsonl)
    curves="${curves:+$curves, }'$1' using 1:COLUMN with lines title '$name'"
    if awk '$3 != "NaN" { found = 1 } END { exit !found }' "$1"; then
        validation="$validation, '$1' using 1:3 with linespoints title '$name, validation'"
    fi
}

number=0
old_ifs=$IFS
IFS=,
for run in $runs; do
    IFS=$old_ifs
    if ! [ -r "$run" ]; then
        echo "$run: cannot be read; RUN names files that train --metrics wrote" >&2
        exit 1
    fi
    number=$((number + 1))
    columns "$run" >"$work/$number"
    if ! awk '$1 != "NaN" && $2 != "NaN" { found = 1 } END { exit !found }' "$work/$number"; then
        echo "$run: has no line with \"iteration\" and \"lm_loss\"; RUN names files that train --metrics wrote" >&2
        exit 1
    fi
    add_curves "$work/$number" "$run"
done

curve() { echo "$curves" | sed "s/COLUMN/$1/g"; }

cat >"$work/plot" <<GNUPLOT
set datafile missing 'NaN'
set key noenhanced
set grid
set xlabel 'iteration'
set terminal svg size 1200,800 dynamic background 'white' font 'sans,13'
set output '$output.part'
set multiplot layout 2,2
set title 'loss'
plot $(curve 2)$validation
unset key
set title 'gradient norm (before clipping)'
plot $(curve 4)
set title 'learning rate'
set format y '%.1e'
plot $(curve 5)
set title 'tokens per second'
set format y '%.0f'
set yrange [0:*]
plot $(curve 6)
unset multiplot
unset output
GNUPLOT
gnuplot "$work/plot"
mv "$output.part" "$output"

cat >"$work/terminal" <<GNUPLOT
set datafile missing 'NaN'
set key noenhanced
set terminal dumb noenhanced size 100,26
set xlabel 'iteration'
set title 'loss'
plot $(curve 2)$validation
GNUPLOT
gnuplot "$work/terminal"
echo "curves: $output"
