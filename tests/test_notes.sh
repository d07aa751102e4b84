#!/bin/sh
# The notes are true: the code that they quote is the source's, what they name exists, and their experiments print what
# the pages say. Marks in a page, which a reader does not see, say what is checked:
#
#   <!-- quote ... -->        the block below is that of notes/weave.awk
#   <!-- run -->              the block below is run; all blocks of a page are one script
#   <!-- prints -->           the block or table below is what the block before it printed; "..." is any text. Numbers
#                             may differ by one in the last digit, and by 5% with <!-- prints 5% -->
#
# MT_NOTES names pages to check; by default all are.
set -u
. tests/suite.sh
root=$(pwd)
export OMP_NUM_THREADS=1
pages=${MT_NOTES:-notes/[0-9]*.md}

# A folder that looks like the project's to a command: links to its files, and to the programs of this build.
tree=$work/tree
mkdir -p "$tree/data"
for file in "$root"/data/*; do ln -sf "$file" "$tree/data/"; done
for file in Makefile megatron.c megatron.h notes tests launch.sh README.md cuda; do ln -s "$root/$file" "$tree/"; done
ln -s "$train" "$tree/train"
ln -s "$infer" "$tree/infer"
ln -sf "$(dirname "$train")/data/preprocess" "$tree/data/preprocess"
mkdir "$tree/build"
[ -z "${MT_EXAMPLES:-}" ] || ln -s "$(cd "$MT_EXAMPLES/../.." && pwd)" "$tree/build/default"

has_mpi() {
    [ -n "${HAVE_MPI:-}" ] && command -v mpirun >/dev/null
}

quotes_are_the_source() {
    for page in $pages README.md; do
        awk -f notes/weave.awk "$page" >"$work/page" 2>"$work/err" && diff "$page" "$work/page" >"$work/out" || {
            echo "$page: quotes another source; \`make notes\` writes what it is now"
            return 1
        }
    done
}

# Files that are linked, files and code named between backticks, and options.
names_exist() {
    : >"$work/err"
    "$train" --help >"$work/options" 2>/dev/null
    "$infer" --help >>"$work/options" 2>/dev/null
    "$tree/data/preprocess" --help >>"$work/options" 2>/dev/null
    echo '--hostfile --oversubscribe' >>"$work/options" # of mpirun
    cat megatron.[ch] data/*.[ch] cuda/* tests/*.[ch] tests/*.sh data/*.sh notes/*.c notes/examples/*.c \
        train.c infer.c Makefile launch.sh | tr -cs 'A-Za-z0-9_' '\n' | sort -u >"$work/words"
    for page in $pages README.md; do awk -f tests/note_names.awk "$page"; done |
        sort -u >"$work/names"
    while read -r kind from word; do
        case $kind in
        file) [ -e "$tree/$word" ] || [ -e "$tree/$word.c" ] ;; # or a program
        word) grep -qxF "$word" "$work/words" ;;
        option) grep -q -e "$word\$" -e "$word[^a-z0-9-]" "$work/options" Makefile data/probe.sh ;;
        esac || echo "$from: there is no $kind $word" >>"$work/err"
    done <"$work/names"
    [ -s "$work/names" ] && ! [ -s "$work/err" ]
}

# experiments PAGE: runs the blocks of a page and compares what they print.
experiments() {
    rm -rf "$work/steps" && mkdir "$work/steps"
    awk -v to="$work/steps/" -v has_mpi="$(has_mpi && echo 1)" -f tests/note_steps.awk "$1" || return 1
    (cd "$tree" && sh "$work/steps/script") >"$work/out" 2>"$work/err" </dev/null || return 1
    for want in "$work"/steps/want.*; do
        [ -e "$want" ] || continue
        number=${want##*.}
        awk -v number="$number" '/^@@@ / { on = $2 == number; next } on' "$work/out" >"$work/steps/got"
        awk -v page="$1" -v tolerance="$(cat "$work/steps/tolerance.$number")" -f tests/note_compare.awk \
            "$want" "$work/steps/got" || return 1
    done
}

check quotes_are_the_source quotes_are_the_source
check names_exist names_exist
for page in $pages; do
    grep -q '^<!-- run' "$page" || continue
    name=${page##*/}
    check "experiments_of_$(echo "${name%.md}" | tr '-' '_')" experiments "$page"
done
exit $failed
