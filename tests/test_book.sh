#!/bin/sh
# make book: the pages that it makes, as a browser without a window (chromium) shows them. MT_DRAW is notes/draw.
set -u
. tests/suite.sh
if ! command -v pandoc >/dev/null; then
    echo "skipped: pandoc is absent"
    exit 77
fi
if ! [ -x "${MT_DRAW:-}" ]; then
    echo "not ok book: MT_DRAW=${MT_DRAW:-} is not a program; run this by make test"
    exit 1
fi
MT_BIN=$(dirname "$train")
export MT_BIN MT_DRAW HAVE_MPI="${HAVE_MPI:-}" OMP_NUM_THREADS=1
book=$work/book

is_made_of_all_chapters() {
    notes/book/book.sh "$book" >"$work/out" 2>"$work/err" && ! [ -s "$work/err" ] &&
        says "$book/index.html: [0-9]* pages; open it in a browser" "$work/out" || return 1
    for page in notes/*.md notes/steps/*.md UPGRADING.md CHANGELOG.md; do
        page=$book/$(echo "${page%.md}.html" | sed 's|README.html$|index.html|')
        [ -s "$page" ] || { echo "$page is absent" && return 1; }
    done
    for picture in notes/*.svg notes/*.png; do cmp "$picture" "$book/$picture" || return 1; done
    says '<a href="../explorer.html">The same for other sizes</a>' "$book/notes/07-pipelines.html" &&
        says '<a href="../trace.html">Steps of two ranks, operation by operation</a>' "$book/notes/10-grid.html" ||
        return 1
    [ -n "$HAVE_MPI" ] || says 'the traced step is of one rank: mpirun is absent here' "$work/out"
}

# A source file is a page with all of its lines, each with its number as an anchor.
source_files_have_lines_as_anchors() {
    for file in megatron.c notes/mini.c notes/extensions/loss.patch; do
        page=$book/source/$file.html lines=$(wc -l <"$file")
        [ "$(grep -c '<i id="L[0-9]*"></i>' "$page")" = "$lines" ] && says "<i id=\"L$((lines))\"></i>" "$page" ||
            return 1
        sed -n 's/^.*<i id="L[0-9]*"><\/i>//p' "$page" | sed 's/&lt;/</g; s/&gt;/>/g; s/&amp;/\&/g' | cmp - "$file" ||
            return 1
    done
}

# The lists of the page are those of the program: peaks, span and bubble of train --print-schedule.
schedules_are_those_that_train_prints() {
    for sizes in '1f1b 4 1 8' '1f1b 3 1 2' 'zb-h1 4 1 8' 'interleaved 4 2 8' 'interleaved 2 4 6'; do
        # shellcheck disable=SC2086
        set -- $sizes
        "$train" --num-layers $(($2 * $3)) --pipeline-model-parallel-size "$2" --pipeline-schedule "$1" \
            --num-virtual-stages-per-pipeline-rank "$3" --global-batch-size "$4" --print-schedule >"$work/out" \
            2>"$work/err" || return 1
        peaks=$(sed -n 's/.*  peak \([0-9]*\)$/\1/p' "$work/out" | paste -s -d , -)
        bubble=$(sed -n 's/.*Bubble: .* units, \([0-9.]*\)% of the work.*/\1/p' "$work/out")
        grep "^\"$1/$2/$3/$4\":" "$book/explorer.html" >"$work/list"
        says "\"peak\":\[$peaks\]" "$work/list" && sed 's/.*"bubble":\([0-9.]*\).*/\1/' "$work/list" |
            awk -v printed="$bubble" '{ if (sprintf("%.1f", 100 * $1) != printed) { print $1, printed; exit 1 } }' ||
            return 1
    done
}

# The page of a small text whose link leads nowhere is an error that names both.
a_link_to_nowhere_is_an_error() {
    printf '# A\n\n[b](b.md) [c](c.md)\n' >"$work/a.md"
    printf 'notes/a.md\tnotes/a.html\nnotes/b.md\tnotes/b.html\n' >"$work/site"
    if BOOK_PAGE=notes/a.md BOOK_SITE=$work/site BOOK_SECTIONS=$work/sections pandoc -f gfm \
        --lua-filter=notes/book/links.lua "$work/a.md" >"$work/out" 2>"$work/err"; then return 1; fi
    says 'notes/a.md: links to c.md, which is no file of the book' "$work/err"
}

other_folders_are_kept() {
    mkdir "$work/mine" && echo 1 >"$work/mine/file" || return 1
    if notes/book/book.sh "$work/mine" >"$work/out" 2>"$work/err"; then return 1; fi
    says "error: $work/mine: is no book, and would be replaced" "$work/err" && [ -f "$work/mine/file" ]
}

without_pandoc_one_line_says_so() {
    mkdir "$work/bin" "$work/old" && ln -s "$(command -v dirname)" "$work/bin" || return 1
    shell=$(command -v sh)
    if PATH=$work/bin "$shell" notes/book/book.sh "$work/old" >"$work/out" 2>"$work/err"; then return 1; fi
    says '^error: make book needs pandoc.*: make deps-dev installs it' "$work/err" &&
        [ "$(cat "$work/out" "$work/err" | wc -l)" = 1 ] && [ -d "$work/old" ]
}

check is_made_of_all_chapters is_made_of_all_chapters
check source_files_have_lines_as_anchors source_files_have_lines_as_anchors
check schedules_are_those_that_train_prints schedules_are_those_that_train_prints
check a_link_to_nowhere_is_an_error a_link_to_nowhere_is_an_error
check other_folders_are_kept other_folders_are_kept
check without_pandoc_one_line_says_so without_pandoc_one_line_says_so
if ! command -v chromium >/dev/null || ! command -v python3 >/dev/null; then
    echo 'skipped: no chromium, or no python3 to drive it, is here'
else
    mkdir "$work/profile"
    python3 tests/book_check.py "$book" "$work/profile" || failed=1
fi
exit $failed
