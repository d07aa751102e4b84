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
        says "rank $((ranks - 1)): tp 0 cp 0 pp $((ranks - 1)) dp 0</td><td>[0-9.]* ([0-9.]*%)</td>" "$work/dom" ||
        return 1
    open_page '#0-1' && says "id=\"view\">0.000 to 1.000 ms, [1-9][0-9]* of $boxes boxes" "$work/dom" || return 1
    seen=$(sed -n 's/.*1\.000 ms, \([0-9]*\) of .*/\1/p' "$work/dom")
    [ "$seen" -lt "$boxes" ]
}

# times_of RANK FILE: ms of computing and of communicating. Operations of the CPU do not overlap, so times add up.
times_of() {
    awk -v rank="$1" '
        function number(key) {
            match($0, "\"" key "\":[0-9.]*")
            return substr($0, RSTART + length(key) + 3, RLENGTH) + 0
        }
        number("pid") != rank { next }
        /"thread_name"/ { lane[number("tid")] = /"phases"/ ? "phases" : /"compute"/ ? "compute" : "communicate" }
        /"ph":"X"/ { sum[lane[number("tid")]] += number("dur") / 1000 }
        END { printf "%.2f %.2f\n", sum["compute"], sum["communicate"] }' "$2"
}

# Communication is not time in which a rank does nothing: the three parts of each row are those of the file.
the_table_has_the_files_times() {
    open_page || return 1
    for rank in $(seq 0 $((ranks - 1))); do
        times_of "$rank" "$work/trace.json" >"$work/times"
        ms='<td>\([0-9.]*\) ([^<]*<.td>'
        sed -n "s/.*<td>rank $rank: [^<]*<.td>$ms$ms$ms.*/\1 \2 \3/p" "$work/dom" | paste -d ' ' - "$work/times" | awk '
            { d = $1 - $4; e = $2 - $5; if (d * d > 0.0004 || e * e > 0.0004 || $3 < 0) { print; exit 1 } rows++ }
            END { exit rows != 1 }' || return 1
    done
}

# Ranks that have fewer cores than they are, and as many.
says_how_many_cores_were_shared() {
    head -n 1 "$work/trace.json" | grep -q '"otherData":{"cores":[1-9]' || { echo 'the file has no cores' && return 1; }
    sed 's/"cores":[0-9]*/"cores":1/' "$work/trace.html" >"$work/few.html"
    page=$work/few.html open_page || return 1
    if [ $ranks = 1 ]; then says 'id="cores" hidden' "$work/dom" || return 1
    else says 'id="cores">2 ranks shared 1 core and computed in turns' "$work/dom" || return 1; fi
    sed "s/\"cores\":[0-9]*/\"cores\":$ranks/" "$work/trace.html" >"$work/enough.html"
    page=$work/enough.html open_page && says 'id="cores" hidden' "$work/dom" || return 1
    command -v taskset >/dev/null || return 0
    taskset -c "$(taskset -cp $$ | sed 's/.*: *//; s/[-,].*//')" "$train" --mock-data --num-layers 1 --hidden-size 32 \
        --num-attention-heads 4 --vocab-size 64 --seq-length 16 --micro-batch-size 1 --global-batch-size 1 --lr 1 \
        --train-iters 2 --eval-iters 0 --device cpu --trace "$work/one.json" >"$work/out" 2>"$work/err" &&
        head -n 1 "$work/one.json" | grep -q '"otherData":{"cores":1}'
}

# Every text lies inside the picture, and the names on the left end before the boxes; no name of a box is cut.
labels_are_whole() {
    awk '/^showAddress\(\);/ {
            print "const whole = new Set(), problems = [], plain = pen.fillText.bind(pen);"
            print "for (const box of boxes) {"
            print "    whole.add(box.event.name).add(String(box.event.args.micro_batch));"
            print "    whole.add(box.event.name + \" \" + box.event.args.micro_batch);"
            print "}"
            print "pen.fillText = (text, x, y) => {"
            print "    if (!text) return;"
            print "    const right = x + pen.measureText(text).width, row = rows.some(one => one.text === text);"
            print "    if (right > canvas.clientWidth || (row && x < LABEL && right > LABEL)) problems.push(text);"
            print "    if (x >= LABEL && y > HEAD && !whole.has(text)) problems.push(text);"
            print "    plain(text, x, y);"
            print "};"
            print; print "show(last / 3, last / 2);"
            print "document.title = `cut: ${problems.join()}.`;"
            next
        }
        { print }' "$work/trace.html" >"$work/labels.html"
    page=$work/labels.html open_page && says '<title>cut: \.</title>' "$work/dom"
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
    check the_table_has_the_files_times the_table_has_the_files_times
    check says_how_many_cores_were_shared says_how_many_cores_were_shared
    check labels_are_whole labels_are_whole
    check the_picture_has_boxes the_picture_has_boxes
else
    echo 'skipped: no chromium here'
fi
exit $failed
