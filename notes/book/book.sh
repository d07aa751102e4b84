#!/bin/sh
# Makes the book: README, chapters, steps, glossary, measurements, changes and pictures as one folder of pages, which
# needs no server and loads nothing from the network; with a page that draws pipeline schedules, and a traced step.
#
#   usage: notes/book/book.sh FOLDER      (make book; run it in the root of the project)
#
# MT_DRAW is notes/draw, MT_BIN the folder of train, HAVE_MPI empty where MPI is absent. The pages and their order are
# those of the tables of notes/README.md. A book in FOLDER is replaced.
set -eu
site=$1
here=$(dirname "$0") tab=$(printf '\t')
if ! command -v pandoc >/dev/null; then
    echo "error: make book needs pandoc, which makes pages of the chapters: make deps-dev installs it" >&2
    exit 1
fi
if [ -e "$site" ] && ! [ -f "$site/explorer.js" ] && [ -n "$(ls -A "$site")" ]; then
    echo "error: $site: is no book, and would be replaced; name a folder that is empty or new" >&2
    exit 1
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# title FILE: the first heading of a page.
title() {
    sed -n 's/^# //p' "$1" | head -n 1
}

# ---- the pages in their order: $work/pages has "GROUP TAB FILE TAB PAGE TAB TITLE" a line

# linked FILE: "GROUP TAB FILE" for each link in a table of notes/README.md, under the heading or bold text before it.
linked() {
    awk '
        /^## / { group = substr($0, 4) }
        /^\*\*.*\*\*/ { group = substr($0, 3); sub(/\.?\*\*.*/, "", group) }
        /^\|/ { for (text = $0; match(text, /\]\([^)#:]*\.md/); text = substr(text, RSTART + RLENGTH))
                    print group "\t" substr(text, RSTART + 2, RLENGTH - 2) }' "$1"
}
{
    printf 'Begin\tREADME.md\nBegin\tnotes/README.md\n'
    linked notes/README.md | sed "s|$tab|${tab}notes/|" >"$work/linked"
    grep '^The path' "$work/linked"
    printf 'The path as a program\tnotes/steps/README.md\n'
    linked notes/steps/README.md | sed "s|.*$tab|The path as a program${tab}notes/steps/|"
    printf 'The path as a program\tnotes/steps/autograd.md\n'
    grep -v '^The path' "$work/linked"
    for page in notes/glossary.md notes/lab.md CONTRIBUTING.md UPGRADING.md CHANGELOG.md; do
        printf 'Reference\t%s\n' $page
    done
} | while IFS=$tab read -r group file; do
    page=$(echo "${file%.md}.html" | sed 's|README.html$|index.html|')
    printf '%s\t%s\t%s\t%s\n' "$group" "$file" "$page" "$(title "$file")"
done >"$work/pages"
for file in notes/*.md notes/steps/*.md; do
    if ! grep -q "$tab$file$tab" "$work/pages"; then
        echo "error: $file: no table of notes/README.md or notes/steps/README.md has it" >&2
        exit 1
    fi
done

# ---- files that pages link to, beside pages and pictures: source files become pages of numbered lines

cut -f 2 "$work/pages" | while read -r file; do
    folder=$(dirname "$file")
    grep -o '](\([^)]*\))' "$file" | sed 's/^](//; s/)$//; s/#.*//' | grep -v -e '^$' -e '^[a-z]*:' -e '\.md$' |
        while read -r link; do echo "$folder/$link"; done
done | sed -e 's|^\./||' -e :again -e 's|[^/.][^/]*/\.\./||' -e 't again' | sort -u >"$work/links"
{
    printf 'megatron.h\nmegatron.c\nnotes/mini.c\n'
    grep -v -e '\.svg$' -e '\.png$' "$work/links"
} | sort -u | while read -r file; do if [ -f "$file" ]; then echo "$file"; fi; done >"$work/sources"
{
    cut -f 2,3 "$work/pages"
    grep -e '\.svg$' -e '\.png$' "$work/links" | while read -r file; do
        if [ -f "$file" ]; then printf '%s\t%s\n' "$file" "$file"; fi
    done
    while read -r file; do printf '%s\tsource/%s.html\n' "$file" "$file"; done <"$work/sources"
} >"$work/site"

# ---- the frame of a page

# The last lines of the contents: pages that are no file of the repository.
{
    while read -r file; do printf 'Source\t-\tsource/%s.html\t%s\n' "$file" "$file"; done <"$work/sources" |
        grep -e '/megatron\.' -e '/mini\.c\.html'
    printf 'To try\t-\texplorer.html\tPipeline schedules\nTo try\t-\ttrace.html\tTraced steps\n'
} >"$work/more"
cat "$work/pages" "$work/more" >"$work/contents"

# frame PAGE TITLE BODY [SECTIONS]: the page of the site, written to it. Contents on the left, or on a phone folded at
# the top; at the end links to the pages before and after.
frame() {
    awk -F '\t' -v page="$1" -v title="$2" -v body="$3" -v sections="${4:-/dev/null}" '
        function escaped(text) {
            gsub(/&/, "\\&amp;", text); gsub(/</, "\\&lt;", text); gsub(/>/, "\\&gt;", text)
            return text
        }
        function turn(place, name, before, after) {
            if (place == "") return ""
            return "<a href=\"" up place "\" rel=\"" name "\">" before escaped(titles[place]) after "</a>\n"
        }
        BEGIN {
            up = page
            gsub(/[^\/]+\//, "../", up)
            sub(/[^\/]*$/, "", up)
            print "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">"
            print "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">"
            print "<title>" escaped(title) "</title>\n<link rel=\"stylesheet\" href=\"" up "style.css\">"
            print "</head>\n<body>\n<nav id=\"contents\" aria-label=\"the book\">"
            print "<input type=\"checkbox\" id=\"unfold\">\n<label for=\"unfold\">Contents</label>\n<div>"
        }
        $1 != group { print (group != "" ? "</ul>\n" : "") "<h2>" escaped($1) "</h2>\n<ul>"; group = $1 }
        {
            titles[$3] = $4
            if ($3 == page) before = last
            if (last == page) after = $3
            last = $3
            print "<li><a href=\"" up $3 "\"" ($3 == page ? " aria-current=\"page\"" : "") ">" escaped($4) "</a>"
            if ($3 == page) {
                list = ""
                while ((getline line <sections) > 0) {
                    split(line, part, "\t")
                    list = list "<li><a href=\"#" part[1] "\">" escaped(part[2]) "</a></li>\n"
                }
                if (list != "") print "<ul>\n" list "</ul>"
            }
            print "</li>"
        }
        END {
            print "</ul>\n</div>\n</nav>\n<main>"
            while ((getline line <body) > 0) print line
            print "<nav class=\"turn\" aria-label=\"before and after\">"
            printf "%s%s", turn(before, "prev", "\342\206\220 ", ""), turn(after, "next", "", " \342\206\222")
            print "</nav>\n</main>\n</body>\n</html>"
        }' "$work/contents" >"$site/$1"
}

# ---- the site

rm -rf "$site"
mkdir -p "$site"
cut -f 2 "$work/site" | sed 's|[^/]*$||' | sort -u | while read -r folder; do mkdir -p "$site/$folder"; done
cp "$here/style.css" "$here/explorer.js" "$site"
cut -f 2 "$work/site" | grep -e '\.svg$' -e '\.png$' | while read -r picture; do cp "$picture" "$site/$picture"; done

# Two pages at a time.
export BOOK_SITE="$work/site" WORK="$work" HERE="$here"
mkdir "$work/body"
cut -f 2 "$work/pages" | xargs -P 2 -I FILE sh -c '
    name=$(echo "$1" | tr / -)
    BOOK_PAGE=$1 BOOK_SECTIONS=$WORK/body/$name.sections pandoc -f gfm-emoji -t html5 --wrap=preserve \
        --lua-filter="$HERE/links.lua" "$1" >"$WORK/body/$name" 2>"$WORK/body/$name.err" ||
        { tail -n 3 "$WORK/body/$name.err" >&2; exit 1; }' sh FILE
while IFS=$tab read -r group file page title; do
    name=$(echo "$file" | tr / -)
    frame "$page" "$title" "$work/body/$name" "$work/body/$name.sections"
done <"$work/pages"

while read -r file; do
    {
        printf '<h1>%s</h1>\n<pre class="source"><code>' "$file"
        sed 's/&/\&amp;/g; s/</\&lt;/g; s/>/\&gt;/g' "$file" | awk '{ print "<i id=\"L" NR "\"></i>" $0 }'
        echo '</code></pre>'
    } >"$work/source"
    frame "source/$file.html" "$file" "$work/source"
done <"$work/sources"

"$MT_DRAW" --schedules "$work/schedules.json"
{
    cat "$here/explorer.html"
    echo '<script id="schedules" type="application/json">'
    cat "$work/schedules.json"
    echo '</script>'
    echo '<script src="explorer.js"></script>'
} >"$work/explorer"
frame explorer.html 'Pipeline schedules' "$work/explorer"

# The traced step: two stages of a small model, on one rank where MPI is absent.
ranks=1
if [ -n "${HAVE_MPI:-}" ] && command -v mpirun >/dev/null; then ranks=2; fi
RANKS=$ranks OPTIONS="--device cpu --num-layers 4 --hidden-size 64 --pipeline-model-parallel-size $ranks" \
    data/scripts/trace.sh "$work/trace.html" >"$work/trace.out"
awk '{ print } /^<body>/ { print "<p><a href=\"index.html\">The book</a></p>" }' "$work/trace.html" >"$site/trace.html"
if [ $ranks = 1 ]; then echo "the traced step is of one rank: mpirun is absent here"; fi

echo "$site/index.html: $(find "$site" -name '*.html' | wc -l | tr -d ' ') pages; open it in a browser"
