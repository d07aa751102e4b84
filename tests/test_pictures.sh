#!/bin/sh
# The pictures of the notes are what the program draws now: notes/draw, run here, gives the committed files again.
# MT_DRAW is the program.
set -u
if ! [ -x "${MT_DRAW:-}" ]; then
    echo "not ok pictures: MT_DRAW=${MT_DRAW:-} is not a program; run this by make test"
    exit 1
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if ! "$MT_DRAW" "$work"; then
    echo "not ok pictures_are_drawn"
    exit 1
fi
for picture in "$work"/* notes/*.svg; do
    name=$(basename "$picture")
    if cmp -s "$work/$name" "notes/$name"; then
        echo "ok picture $name"
    else
        echo "not ok picture $name: is not what the program draws; run make pictures and look at it"
    fi
done | sort -u
if "$MT_DRAW" --steps >"$work/steps" &&
    awk -f notes/planner_rows.awk "$work/steps" notes/lab.md | cmp -s - notes/lab.md; then
    echo "ok lab_has_the_rows_of_the_planners_picture"
else
    echo "not ok lab_has_the_rows_of_the_planners_picture: run make pictures"
fi
for picture in notes/*.svg; do
    if grep -q "($(basename "$picture"))" notes/*.md; then
        echo "ok shown $(basename "$picture")"
    else
        echo "not ok shown $(basename "$picture"): no chapter shows it"
    fi
done
