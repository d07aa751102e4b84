# The names in a page, one a line: kind, page and name with tabs between them. See test_notes.sh.

function emit(kind, name) { printf "%s\t%s\t%s\n", kind, FILENAME, name }

# The folder of the page; links are relative to it.
function place(path,    folder) {
    folder = FILENAME
    if (!sub(/[^\/]*$/, "", folder)) folder = ""
    return folder path
}

{
    rest = $0
    while (match(rest, /\]\([^)#: ]+/)) {
        name = substr(rest, RSTART + 2, RLENGTH - 2)
        rest = substr(rest, RSTART + RLENGTH)
        if (rest !~ /^:/) emit("file", place(name))
    }
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
!/^    / {
    rest = $0
    while (match(rest, /`[^`]+`/)) {
        code = substr(rest, RSTART + 1, RLENGTH - 2)
        rest = substr(rest, RSTART + RLENGTH)
        if (code !~ /^[A-Za-z][A-Za-z0-9_]*_[A-Za-z0-9_]*(\(\))?$/) continue
        sub(/\(\)$/, "", code)
        emit("word", code)
    }
}
