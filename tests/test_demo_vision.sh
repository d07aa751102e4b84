#!/bin/sh
# The demo of pictures, as `make demo-vision` runs it with fewer iterations: the model learns to name colours and places
# of shapes. After all 800 it names 98 to 100 in a hundred.
set -u
. tests/suite.sh
command -v python3 >/dev/null || {
    echo 'skipped: python3 is absent, and data/scripts/shapes.py needs it'
    exit 0
}

# shares FIELD: percentages of right answers: field 5 of all, field 14 of pictures with new combinations.
shares() {
    awk -v field="$1" '/^3[.] after .* of 200 answers are right/ { print $field + 0 }' "$work/out"
}

the_demo_learns_to_name_colours_and_places() {
    DEMO_ITERS=500 DEMO_DIR=$work/demo data/scripts/demo-vision.sh >"$work/out" 2>"$work/err" || {
        grep 'built without libpng\|needs python3-jinja2' "$work/err" && exit 0
        return 1
    }
    [ ! -s "$work/err" ] && [ "$(shares 5 | wc -l)" -eq 3 ] || return 1
    first=$(shares 5 | head -n 1) last=$(shares 5 | tail -n 1) new=$(shares 14 | tail -n 1)
    echo "from $first% to $last%, new combinations $new%" >>"$work/err"
    awk -v a="$first" -v b="$last" -v new="$new" 'BEGIN { exit !(a < 5 && b > 75 && new > 75) }'
}

# The page stands alone, with a picture for each answer that it shows.
the_demo_leaves_a_page() {
    page=$work/demo/page.html
    [ "$(grep -o '<figcaption' "$page" | wc -l)" -ge 24 ] &&
        [ "$(grep -o '<img alt=[^>]* src="data:image/png;base64,' "$page" | wc -l)" -ge 24 ] &&
        ! grep -q 'src="[^d]\|http' "$page" && says '<td>500<td>' "$page"
}

check the_demo_learns_to_name_colours_and_places the_demo_learns_to_name_colours_and_places
check the_demo_leaves_a_page the_demo_leaves_a_page
exit $failed
