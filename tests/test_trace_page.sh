#!/bin/sh
# make trace: a page that draws a step of all ranks, in a browser without a window (chromium), where one is installed.
set -u
. tests/suite.sh
page=$work/trace.html

# Two ranks, so that there are messages; one where MPI is absent.
ranks=1
if [ -n "${HAVE_MPI:-}" ] && command -v mpirun >/dev/null; then ranks=2; fi

writes_a_page() {
    export OPTIONS="--device cpu --num-layers 2 --hidden-size 32 --pipeline-model-parallel-size $ranks"
    RANKS=$ranks MT_BIN=$(dirname "$train") OMP_NUM_THREADS=1 data/scripts/trace.sh "$page" >"$work/out" \
        2>"$work/err" &&
        says 'open it in a browser' "$work/out" && ! grep -E '(src|href)=|https?:' "$page"
}

# open_page [#FROM-TO]: the page as the browser has it after its script.
open_page() {
    timeout $hang chromium --headless --no-sandbox --disable-gpu --user-data-dir="$work/profile" --dump-dom \
        "file://$page${1:-}" >"$work/dom" 2>"$work/err"
}

# The browser's numbers are those of the file; a part of the time has fewer boxes, and all of them without one.
a_browser_draws_it() {
    boxes=$(grep -c '"ph":"X"' "$work/trace.json") messages=$(grep -c '"ph":"s"' "$work/trace.json")
    open_page && says "$ranks ranks, $boxes boxes, $messages messages; 2 steps in [0-9.]* ms" "$work/dom" &&
        says "id=\"view\">0.000 to [0-9.]* ms, $boxes of $boxes boxes" "$work/dom" &&
        says "rank $((ranks - 1)): tp 0 cp 0 pp $((ranks - 1)) dp 0</td><td>[0-9.]*</td>" "$work/dom" || return 1
    open_page '#0-1' && says "id=\"view\">0.000 to 1.000 ms, [1-9][0-9]* of $boxes boxes" "$work/dom" || return 1
    seen=$(sed -n 's/.*1\.000 ms, \([0-9]*\) of .*/\1/p' "$work/dom")
    [ "$seen" -lt "$boxes" ]
}

# The canvas is not empty: it has the colors of forwards and of computation.
the_picture_has_boxes() {
    awk '/^showAddress\(\);/ {
            print; print "const image = pen.getImageData(0, 0, canvas.width, canvas.height).data, seen = new Set();"
            print "for (let i = 0; i < image.length; i += 4) seen.add([image[i], image[i + 1], image[i + 2]].join());"
            print "document.title = seen.has(\"160,203,232\") && seen.has(\"78,121,167\") ? \"drawn\" : \"empty\";"
            next
        }
        { print }' "$work/trace.html" >"$work/pixels.html"
    page=$work/pixels.html open_page && says '<title>drawn</title>' "$work/dom"
}

refuses_other_files() {
    refused 'README.md: is no file of train --trace' data/scripts/trace.sh "$work/other.html" README.md &&
        ! [ -e "$work/other.html" ]
}

check writes_a_page writes_a_page
check refuses_other_files refuses_other_files
if command -v chromium >/dev/null; then
    check a_browser_draws_it a_browser_draws_it
    check the_picture_has_boxes the_picture_has_boxes
else
    echo 'skipped: no chromium here'
fi
exit $failed
