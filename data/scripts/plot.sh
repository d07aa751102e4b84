#!/bin/sh
# Draws the curves of training runs from the files that --metrics writes: loss, gradient norm, tokens per second,
# memory, learning rate, skipped steps and rewards, where a run has them, as an SVG or a PNG. Prints the loss as
# characters to the terminal too.
#
#   usage: data/scripts/plot.sh RUN.jsonl[,RUN.jsonl...] [OUTPUT.svg|OUTPUT.png]
set -euf
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

# columns FILE: iteration, loss, validation loss, gradient norm, learning rate, tokens/s, memory in GiB, skipped steps,
# reward; NaN for a missing value. An iteration has two lines if the run went back to a checkpoint; the later line
# counts.
columns() {
    awk '
    function value(key) {
        if (!match($0, "\"" key "\" *: *[-+.0-9eE]+")) return "NaN"
        text = substr($0, RSTART, RLENGTH)
        sub(/.*: */, "", text)
        return text
    }
    { iteration = value("iteration"); validation = value("validation_loss"); bytes = value("peak_memory_bytes")
      kind = validation != "NaN" ? "v" : value("lm_loss") != "NaN" || /"lm_loss"/ ? "t" : "o"
      if (iteration == "NaN" || kind == "o") next
      line[iteration kind] = iteration " " value("lm_loss") " " validation " " value("grad_norm") " " \
          value("learning_rate") " " value("tokens_per_second") " " (bytes == "NaN" ? bytes : bytes / 1073741824) " " \
          value("skipped_iterations") " " value("reward") }
    END { for (key in line) print line[key] }' <"$1" | sort -s -n -k 1,1
}

# curve COLUMN [validation]: gnuplot's list of curves of all runs, $work/N with the title in $work/N.title. With
# validation, their validation losses too.
curve() {
    separator=''
    for i in $(seq "$number"); do
        printf "%s'%s' using 1:%s with lines title '%s'" "$separator" "$i" "$1" "$(cat "$work/$i.title")"
        separator=', '
    done
    [ -n "${2:-}" ] || return 0
    for i in $(seq "$number"); do
        awk '$3 != "NaN" { found = 1 } END { exit !found }' "$work/$i" || continue
        printf ", '%s' using 1:3 with linespoints title '%s, validation'" "$i" "$(cat "$work/$i.title")"
    done
}

number=0
old_ifs=$IFS
IFS=,
for run in $runs; do
    IFS=$old_ifs
    if ! { [ -f "$run" ] && [ -r "$run" ]; }; then
        echo "$run: cannot be read, or is not a regular file; RUN names files that train --metrics wrote" >&2
        exit 1
    fi
    number=$((number + 1))
    columns "$run" >"$work/$number"
    if ! awk '$1 != "NaN" && $2 != "NaN" { found = 1 } END { exit !found }' "$work/$number"; then
        echo "$run: has no line with \"iteration\" and \"lm_loss\"; RUN names files that train --metrics wrote" >&2
        exit 1
    fi
    # a quote would end gnuplot's string, and a new line its command
    printf '%s' "$(basename -- "$run" .jsonl)" | tr '\001-\037\177' '?' | sed "s/'/''/g" >"$work/$number.title"
done

# has COLUMN [ABOVE]: true if a run has a number in the column, above this one.
has() {
    for i in $(seq "$number"); do
        awk -v column="$1" -v above="${2:--1e308}" \
            '$column != "NaN" && $column > above { found = 1 } END { exit !found }' "$work/$i" && return 0
    done
    return 1
}

# panel TITLE FORMAT COLUMN [ABOVE]: adds a panel, unless it would be empty.
panel() {
    has "$3" "${4:--1e308}" || return 0
    panels=$((panels + 1))
    printf "set title '%s'\nset format y '%s'\nplot %s\n" "$1" "$2" "$(curve "$3")" >>"$work/panels"
}

# from_zero COLUMN: the next panel's axis has zero and the column's largest number, with room around them; from_any: the
# numbers of the panel.
from_zero() {
    for i in $(seq "$number"); do cat "$work/$i"; done | awk -v column="$1" '
        $column != "NaN" && $column > most { most = $column }
        END { printf("set yrange [%g:%g]\n", -0.05 * most, (most > 0 ? 1.05 * most : 1)) }' >>"$work/panels"
}
from_any() {
    printf 'set yrange [*:*]\nset autoscale yfix\n' >>"$work/panels"
}

panels=1
: >"$work/panels"
panel 'gradient norm (before clipping)' '%g' 4
from_zero 6
panel 'tokens per second' '%.0f' 6
from_zero 7
panel 'memory of a rank, GiB' '%g' 7 0
from_any
panel 'learning rate' '%.1e' 5
from_zero 8
panel 'steps skipped so far' '%g' 8 0
from_any
panel 'reward' '%.1f' 9
rows=$(((panels + 1) / 2))
shown="set title 'loss'
plot $(curve 2 validation)"
if has 9; then
    shown="set title 'reward'
set format y '%.1f'
plot $(curve 9)"
fi

size="1200,$((rows * 340))"
terminal="svg size $size dynamic background 'white' font 'sans,13'"
case $output in *.png) terminal="pngcairo size $size font 'sans,11'" ;; esac
cat >"$work/plot" <<GNUPLOT
set datafile missing 'NaN'
set key noenhanced
set grid
set xlabel 'iteration'
# room around the curves, so that no part of them lies on the frame
set offsets graph 0.02, graph 0.02, graph 0.05, graph 0.05
set autoscale xfix
set autoscale yfix
set terminal $terminal
set output 'curves'
set multiplot layout $rows,2
set title 'loss'
plot $(curve 2 validation)
unset key
$(cat "$work/panels")
unset multiplot
unset output
GNUPLOT
(cd "$work" && gnuplot plot)
cp -- "$work/curves" "$output.part"
mv -- "$output.part" "$output"

cat >"$work/terminal" <<GNUPLOT
set datafile missing 'NaN'
set key noenhanced
set terminal dumb noenhanced size 100,26
set xlabel 'iteration'
$shown
GNUPLOT
(cd "$work" && gnuplot terminal)
echo "curves: $output"
