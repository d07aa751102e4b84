#!/bin/sh
# The demo runs as `make demo` runs it, and generates words. With few iterations: a line for each
# phase, and on a terminal the progress of training in place. `make deps` prints one line.
set -u
. tests/suite.sh
for program in train infer data/preprocess; do
    if ! [ -x "$MT_BIN/$program" ]; then
        echo "skipped: $program is not built"
        exit 0
    fi
done
export DEMO_DIR="$work/demo" DEMO_ITERS=2

# Nine in ten generated words are words of the text; of a model that has learned nothing, hardly any is.
the_demo_generates_words() {
    (unset DEMO_ITERS && DEMO_DIR=$work/whole DEMO_RANKS=${HAVE_MPI:+4} data/scripts/demo.sh) >"$work/out" \
        2>"$work/err" ||
        return 1
    cp "$work/out" "$work/whole.out"
    counts=$(sed -n 's/^6\. words: \([0-9]*\) of the \([0-9]*\) generated words occur in the text$/\1 \2/p' "$work/out")
    known=${counts% *} all=${counts#* }
    echo "$known of $all words"
    says ' 100/250 .* GFLOP/s  [0-9:]* left$' "$work/out" || return 1 # a whole line, without a terminal
    [ "$all" -ge 20 ] && [ $((100 * known)) -ge $((75 * all)) ]
}

# figures FILE: the numbers of words, documents and tokens, and the losses, one a line.
figures() {
    sed -n 's/^ *1\. text: \([0-9]*\) words .*/\1/p
        s/^ *2\. tokens: \([0-9]*\) documents, \([0-9]*\) tokens .*/\1 \2/p
        s/^ *3\. training: .* loss \([0-9.]*\) to \([0-9.]*\), validation loss \([0-9.]*\) .*/\1 \2 \3/p' "$1" |
        tr ' ' '\n'
}

# README shows lines of the demo. The losses are within 10% of these. The counts are those of the project's own text,
# which grows: a tenth more, and the lines are written again.
readme_shows_what_the_demo_prints() {
    figures README.md >"$work/shown" && figures "$work/whole.out" >"$work/printed" || return 1
    paste "$work/shown" "$work/printed" | awk '
        { d = $2 > 0 ? $1 / $2 - 1 : 1 }
        { most = 0.1 }
        d > most || d < -most { print "README says " $1 ", and the demo prints " $2; failed = 1 }
        END { exit failed || NR != 6 }'
}

the_demo_prints_a_line_for_each_phase() {
    DEMO_RANKS=${HAVE_MPI:+4} data/scripts/demo.sh >"$work/out" 2>"$work/err" || return 1
    [ ! -s "$work/err" ] && [ "$(grep -c '^[1-6]\. ' "$work/out")" = 6 ] && ! grep '^replacing' "$work/out" || return 1
    # before the generated text nothing else
    sed '/^5\. /q' "$work/out" >"$work/phases"
    [ "$(wc -l <"$work/phases")" = 5 ] || return 1
    says '^3\. training: Llama on .*, 2 iterations in [0-9]* s, loss [0-9.]* to [0-9.]*, validation loss [0-9.]* ' \
        "$work/out"
}

# As a further demo would, without its minutes.
a_demo_says_that_it_replaces_a_run() {
    sh -c 'set -eu; model=$1 log=$1/other.log; . data/scripts/demo-steps.sh; begin_log' sh "$work/whole" >"$work/out" &&
        [ "$(cat "$work/out")" = "replacing the earlier run in $work/whole" ]
}

the_demo_leaves_its_files() {
    for file in data/corpus_text_document.bin data/corpus_text_document.idx config.json metrics.jsonl; do
        [ -s "$work/demo/$file" ] || return 1
    done
    command -v gnuplot >/dev/null || return 0
    [ -s "$work/demo/loss.svg" ] && says "^4\. curves: $work/demo/loss.svg" "$work/out"
}

the_demo_generates_text() {
    sed '1,/^5\. /d' "$work/out" >"$work/text"
    tail -n 1 "$work/text" | grep -Eqx '6\. words: [0-9]+ of the [0-9]+ generated words occur in the text' || return 1
    says '^The loss' "$work/text" && says '^Each rank' "$work/text"
}

the_log_has_every_command() {
    for program in data/preprocess train data/scripts/plot.sh; do
        says "^\$ .*$program " "$work/demo/demo.log" || return 1
    done
    says '2/2 100%  loss ' "$work/demo/demo.log"
}

progress_on_a_terminal_is_in_place() {
    script -qec 'DEMO_RANKS=1 data/scripts/demo.sh' /dev/null <"$work/empty" >"$work/out" 2>"$work/err" || return 1
    tr '\r' '\n' <"$work/out" >"$work/lines"
    says '     2/2 100%  loss ' "$work/lines" || return 1
    [ "$(grep -c 'loss .*grad norm' "$work/out")" -le 1 ] # one line, however many updates
}

a_failure_shows_the_end_of_the_log() {
    if DEMO_RANKS=1 DEMO_ITERS=-1 data/scripts/demo.sh >"$work/out" 2>"$work/err"; then return 1; fi
    says 'error: --train-iters' "$work/err"
}

# deps FAKE: make deps with an apt-get that prints much, and ends with status $1.
deps() {
    mkdir -p "$work/bin" "$work/tree" && cp Makefile megatron.h "$work/tree" || return 1
    printf '#!/bin/sh\nexit 1\n' >"$work/bin/dpkg-query"
    printf '#!/bin/sh\necho "Get:1 noise $*"\nexit %s\n' "$1" >"$work/bin/apt-get"
    printf '#!/bin/sh\nexec "$@"\n' >"$work/bin/sudo"
    chmod +x "$work/bin"/*
    (PATH=$work/bin:$PATH && cd "$work/tree" && MAKEFLAGS='' MAKELEVEL=0 make deps) >"$work/out" 2>"$work/err"
}

make_deps_prints_one_line() {
    deps 0 && [ ! -s "$work/err" ] && [ "$(wc -l <"$work/out")" = 1 ] && says '^installing: ' "$work/out" || return 1
    if deps 1; then return 1; fi
    says 'Get:1 noise -q update' "$work/err"
}

: >"$work/empty"
check the_demo_generates_words the_demo_generates_words
check readme_shows_what_the_demo_prints readme_shows_what_the_demo_prints
check the_demo_prints_a_line_for_each_phase the_demo_prints_a_line_for_each_phase
check the_demo_leaves_its_files the_demo_leaves_its_files
check the_demo_generates_text the_demo_generates_text
check the_log_has_every_command the_log_has_every_command
if command -v script >/dev/null; then
    check progress_on_a_terminal_is_in_place progress_on_a_terminal_is_in_place
else
    echo "skipped: there is no script(1) to make a terminal with"
fi
check a_failure_shows_the_end_of_the_log a_failure_shows_the_end_of_the_log
check a_demo_says_that_it_replaces_a_run a_demo_says_that_it_replaces_a_run
check make_deps_prints_one_line make_deps_prints_one_line
exit $failed
