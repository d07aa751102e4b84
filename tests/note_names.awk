# The names in a page, one a line: kind, page and name with tabs between them. See test_notes.sh.

function emit(kind, name) { printf "%s\t%s\t%s\n", kind, FILENAME, name }

# The folder of the page; links are relative to it.
function place(path,    folder) {
    folder = FILENAME
    if (!sub(/[^\/]*$/, "", folder)) folder = ""
    return folder path
}

# Differences of programs are not text.
/^```/ { fenced = !fenced }
fenced { next }

# Links: their files, and the headings that they point to, as GitHub names them.
{
    rest = $0
    while (match(rest, /\]\([^): ]+/)) {
        name = substr(rest, RSTART + 2, RLENGTH - 2)
        rest = substr(rest, RSTART + RLENGTH)
        if (rest ~ /^:/) continue
        if (split(name, part, "#") == 2) anchors[part[1] "#" part[2]]
        if (part[1] != "") emit("file", place(part[1]))
    }
}

{
    rest = $0
    while (match(rest, /--[a-z][a-z0-9-]*[a-z0-9]/)) {
        before = RSTART > 1 ? substr(rest, RSTART - 1, 1) : ""
        name = substr(rest, RSTART, RLENGTH)
        after = substr(rest, RSTART + RLENGTH, 1)
        if (before !~ /[-a-z<!]/ && after !~ /[*{\[]/) emit("option", name)
        rest = substr(rest, RSTART + RLENGTH)
    }
    rest = $0
    while (match(rest, /(^|[ (`])(data|tests|notes|cuda)\/[A-Za-z0-9_.\/-]*[A-Za-z0-9]/)) {
        name = substr(rest, RSTART, RLENGTH)
        sub(/^[ (`]/, "", name)
        rest = substr(rest, RSTART + RLENGTH)
        if (rest !~ /^[_-]?[*<[{]/) emit("file", name)
    }
}

# Code between backticks: words with an underscore.
function find_words(text,    part, count, i) {
    count = split(text, part, "`")
    for (i = 2; i <= count; i += 2) {
        if (part[i] !~ /^[A-Za-z][A-Za-z0-9_]*_[A-Za-z0-9_]*(\(\))?$/) continue
        sub(/\(\)$/, "", part[i])
        emit("word", part[i])
    }
}

# Functions and types with their section: "`a`, `b`, §9d", "`a` (megatron.c §9d)".
function find_sections(text,    part, count, i, tag, before) {
    count = split(text, part, "§")
    for (i = 2; i <= count; i++) {
        match(part[i], /^[0-9]+[a-z]?/)
        tag = substr(part[i], 1, RLENGTH)
        before = part[i - 1]
        sub(/(megatron\.[ch]|[ ,:(]| in)*$/, "", before)
        while (match(before, /`[a-z0-9]+_[a-z0-9_]+`$/)) {
            emit("section", substr(before, RSTART + 1, RLENGTH - 2) "\t" tag)
            before = substr(before, 1, RSTART - 1)
            sub(/(,| |and)*$/, "", before)
        }
    }
}

# Chapters by number: "chapter 7", "[chapter 7](07-pipelines.md)", "[7](07-pipelines.md)". A link leads to its number.
function find_chapters(text,    link, part) {
    while (match(text, /\[([Cc]hapter )?[0-9]+\]\([0-9]+-|[Cc]hapter [0-9]+/)) {
        link = substr(text, RSTART, RLENGTH)
        text = substr(text, RSTART + RLENGTH)
        gsub(/[^0-9]+/, " ", link)
        if (split(link, part, " ") == 2 && part[1] + 0 != part[2] + 0) emit("chapter", part[1] " in the file " part[2])
        else emit("chapter", part[1] + 0)
    }
}

# A paragraph, or a row of a table.
function end_paragraph() {
    find_words(paragraph)
    find_chapters(paragraph)
    find_sections(paragraph)
    paragraph = ""
}
/^$/ || /^[|]/ { end_paragraph() }
!/^    / { paragraph = paragraph $0 " " }

# The name that GitHub gives to a heading.
function anchor_of(heading) {
    heading = tolower(heading)
    gsub(/[^a-z0-9 _-]/, "", heading)
    gsub(/ /, "-", heading)
    return heading
}

END {
    end_paragraph()
    for (link in anchors) {
        split(link, part, "#")
        file = part[1] == "" ? FILENAME : place(part[1])
        found = 0
        while ((getline line <file) > 0)
            if (sub(/^#+ /, "", line) && anchor_of(line) == part[2]) found = 1
        close(file)
        if (!found) emit("anchor", link)
    }
}
