# Prints the files of the project that programs need, found through their includes: a source needs what it includes,
# and whoever includes X.h also needs X.c beside it, which defines what the header declares (tests/test_standalone.sh
# holds headers to that). A header that make writes is named by the program that it is made from.
#
#   awk -f data/scripts/needs.awk PROGRAM.c...            the files of all of them, one a line, sorted
#   awk -v rules=BUILD -f data/scripts/needs.awk ...      a word for each: BUILD/PROGRAM: and the objects that it needs
#                                                         beside its own, separated by |
#
# Run from the root of the project.

function exists(file,    line, status) {
    if (!(file in known)) {
        status = (getline line <file)
        if (status >= 0) close(file)
        known[file] = status >= 0
    }
    return known[file]
}

# "a/b/../c" is "a/c".
function simple(path) {
    while (match(path, /[^\/.]+\/\.\.\//)) path = substr(path, 1, RSTART - 1) substr(path, RSTART + RLENGTH)
    return path
}

# The files that `file` includes, in includes[file], separated by blanks.
function read_includes(file,    line, name, folder, beside, made) {
    includes[file] = ""
    folder = file
    if (!sub(/[^\/]*$/, "", folder)) folder = ""
    while ((getline line <file) > 0) {
        if (line !~ /^#include "/) continue
        split(line, name, "\"")
        beside = simple(folder name[2])
        made = name[2]
        sub(/_program\.h$/, ".py", made)
        sub(/_text\.h$/, ".html", made)
        if (exists(beside)) includes[file] = includes[file] " " beside
        else if (exists(name[2])) includes[file] = includes[file] " " name[2]
        else if (made != name[2] && exists(made)) includes[file] = includes[file] " " made
    }
    close(file)
}

function visit(file,    list, n, i, source) {
    if (file in seen) return
    seen[file] = 1
    if (!(file in includes)) read_includes(file)
    n = split(includes[file], list, " ")
    for (i = 1; i <= n; i++) visit(list[i])
    source = file
    if (sub(/\.h$/, ".c", source) && exists(source)) visit(source)
}

BEGIN {
    for (p = 1; p < ARGC; p++) {
        if (!exists(ARGV[p])) {
            print ARGV[p] ": there is no such file" >"/dev/stderr"
            exit 1
        }
        if (rules != "") split("", seen)
        visit(ARGV[p])
        if (rules == "") continue
        word = ARGV[p]
        sub(/\.c$/, ":", word)
        word = rules "/" word
        for (file in seen)
            if (file != ARGV[p] && sub(/\.c$/, ".o", file)) word = word "|" rules "/" file
        print word
    }
    if (rules == "")
        for (file in seen) print file | "sort"
}
