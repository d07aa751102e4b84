#!/bin/sh
# The man pages are well-formed and have every option; the bash completions complete names and choices.
set -u
. tests/suite.sh

pages_are_well_formed() {
    for program in train infer; do
        "$MT_BIN/$program" --help man-page >"$work/$program.1" || return 1
        # Each option of --help has a paragraph, and no line is a request that troff does not know.
        "$MT_BIN/$program" --help | sed -n 's/^[ *] --\([a-z0-9-]*\).*/\1/p' | sort >"$work/options"
        sed -n 's/^\.B \\-\\-\([^ ]*\).*/\1/p' "$work/$program.1" | sed '/^help$/d; /^config$/d; s/\\//g' |
            sort >"$work/paged"
        grep -vx config "$work/options" | diff - "$work/paged" >"$work/err" || return 1
        grep "^[.']" "$work/$program.1" | grep -v '^\.\(TH\|SH\|SS\|TP\|PP\|B\|I\|RI\)\( \|$\)' >"$work/err" && return 1
        [ -s "$work/options" ] || return 1
    done
}

page_is_shown() {
    "$MT_BIN/train" --help man-page >"$work/page.1"
    if command -v mandoc >/dev/null; then
        mandoc -T lint -W error "$work/page.1" >"$work/err" || return 1
        mandoc -T utf8 "$work/page.1" >"$work/out" || return 1
    elif command -v groff >/dev/null; then
        groff -ww -man -T utf8 "$work/page.1" >"$work/out" 2>"$work/err" && [ ! -s "$work/err" ] || return 1
    else
        echo "skipped: neither mandoc nor groff is here"
        return 0
    fi
    says 'maximum learning rate' "$work/out"
}

# completes PROGRAM BEFORE WORD EXPECTED: what a Tab after WORD offers.
completes() {
    "$MT_BIN/$1" --help bash-completion >"$work/completion" && bash -n "$work/completion" || return 1
    offered=$(bash -c '. "$1"; compopt() { :; }; COMP_WORDS=("megatron-$2" "$3" "$4") COMP_CWORD=2
        "_megatron_$2"; echo ${COMPREPLY[*]}' - "$work/completion" "$1" "$2" "$3")
    [ "$offered" = "$4" ] || { echo "$2 $3: $offered" && return 1; }
}

version_is_the_header_s() {
    number=$(sed -n 's/^#define MT_VERSION *"\(.*\)"/\1/p' megatron.h)
    for program in train infer data/preprocess; do
        [ "$("$MT_BIN/$program" --version)" = "${program#data/} (megatron.c) $number" ] || return 1
    done
}

# One option is looked up in all the ways that people write it.
help_of_one_option_is_found() {
    "$MT_BIN/train" --help min-lr >"$work/page.1" && grep -q '^  *--min-lr N' "$work/page.1" || return 1
    for words in --help=min-lr --help=--min-lr '--help --min-lr'; do
        # shellcheck disable=SC2086
        "$MT_BIN/train" $words >"$work/page.2" && cmp -s "$work/page.1" "$work/page.2" || return 1
    done
}

words_without_options_are_refused() {
    "$MT_BIN/train" --help zzzz >"$work/out" 2>"$work/err" && return 1
    says "no option has 'zzzz'" "$work/err"
}

check man_pages_are_well_formed_and_have_every_option pages_are_well_formed
check man_page_is_shown page_is_shown
if command -v bash >/dev/null; then
    check names_complete completes train --swiglu --rotary-p '--rotary-percent'
    check choices_complete completes train --device c 'cpu cuda'
    check files_complete completes infer --load tests/test_manua 'tests/test_manual.sh'
else
    echo "skipped: bash is absent"
fi
check version_is_the_header_s version_is_the_header_s
check help_of_one_option_is_found help_of_one_option_is_found
check words_without_options_are_refused words_without_options_are_refused
exit $failed
