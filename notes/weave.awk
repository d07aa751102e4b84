# Puts the code that a page quotes between the page's lines, from the sources as they are now. The marker
#
#   <!-- quote FILE NAME -->
#   <!-- quote FILE NAME from "TEXT" to "TEXT" -->
#
# is followed by an indented block: the function, type or table NAME of FILE, in C or Python, or its lines from the
# first one that has the first TEXT to the next one that has the second. `awk -f notes/weave.awk PAGE` prints the page with
# each block as it must be; a marker without such code is an error.
#
# The marker
#
#   <!-- diff FILE FILE SECTION -->
#
# is followed by a block between fences: the changes from the first FILE to the second that begin in SECTION of the
# second, a title between "/* ==== " and " =". Text before the first section is the section "top".
#
# A definition begins with a line that is not indented and ends with the first line that begins with a brace, as
# clang-format writes them.

function fail(reason) {
    printf "%s:%d: %s\n", FILENAME, FNR, reason >"/dev/stderr"
    failed = 1
}

# Reads the lines of a definition into code[1..]; returns their number. A prototype is no definition. The name may stand
# in any line before the body.
function find_definition(file, name,    line, count, start, has_body, is_it, ends) {
    count = has_body = 0
    if (file ~ /\.py$/) return find_function(file, name)
    start = "(^|[^A-Za-z0-9_])" name "([^A-Za-z0-9_]|$)"
    while ((getline line <file) > 0) {
        if (!has_body && line ~ /^[A-Za-z_]/ && line !~ /^extern "C" {$/) count = is_it = 0
        else if (count == 0) continue
        code[++count] = line
        if (has_body) ends = line ~ /^}/
        else {
            if (line ~ start) is_it = 1
            has_body = line ~ /{/
            ends = line ~ /{.*}/
            if (!has_body && line ~ /;/) count = 0
        }
        if (!ends) continue
        if (is_it) break
        count = has_body = ends = 0
    }
    close(file)
    return has_body && is_it ? count : 0 # not the last definition of a file that ends within its line
}

# The same for a function in Python, which ends before an empty line.
function find_function(file, name,    line, count) {
    while ((getline line <file) > 0) {
        if (count == 0 && index(line, "def " name "(") != 1) continue
        if (line == "") break
        code[++count] = line
    }
    close(file)
    return count
}

function print_quote(    count, i, from, to) {
    count = find_definition(words[3], words[4])
    if (count == 0) {
        fail(words[3] " has no definition of " words[4])
        return
    }
    from = 1
    to = count
    if (has_range) {
        for (from = 1; from <= count && index(code[from], range_from) == 0; from++) continue
        for (to = from; to <= count && index(code[to], range_to) == 0; to++) continue
        if (to > count) {
            fail(words[4] " has no lines from \"" range_from "\" to \"" range_to "\"")
            return
        }
    }
    for (i = from; i <= to; i++) print code[i] == "" ? "" : "    " code[i]
}

# The function or type that begins in a line; "" if none does.
function definition_name(line,    name) {
    if (line !~ /^[a-z].*[({,]$/) return ""
    name = line
    if (sub(/\(.*/, "", name)) sub(/.*[ *]/, "", name)
    else if (!sub(/ \{$/, "", name) || !sub(/^typedef /, "", name)) return ""
    return name
}

# Prints the changes of a section, each with the name of the definition that it is in.
function print_diff(    line, number, title, section, name, part, count, from, file) {
    file = words[4]
    for (number = 1; (getline line <file) > 0; number++) {
        if (line ~ /^\/\* ==== /) {
            title = line
            gsub(/^\/\* ==== | =+ \*\/$/, "", title)
            name = ""
        }
        if (line ~ /^}/) name = ""
        if (definition_name(line) != "") name = definition_name(line)
        section[number] = title == "" ? "top" : title
        definition[number] = name
    }
    close(file)
    title = $0
    sub(/^<!-- diff [^ ]+ [^ ]+ /, "", title)
    sub(/ -->$/, "", title)
    print "```diff"
    command = "diff -U1 " words[3] " " words[4]
    while ((command | getline line) > 0) {
        if (line ~ /^(---|\+\+\+) /) continue
        if (line ~ /^@@ /) {
            split(line, part, /[ ,+]+/)
            number = part[4] + 0
            from = section[number + 1]
            name = definition[number] != "" ? " " definition[number] : ""
            line = line name
            count += from == title
        }
        if (from == title) print line
    }
    close(command)
    print "```"
    if (!count) fail(words[4] " has no changes in its section \"" title "\"")
}

# The part of the marker in quotation marks.
function read_range(text,    parts) {
    has_range = split(text, parts, "\"") >= 5
    range_from = parts[2]
    range_to = parts[4]
}

/^<!-- quote / {
    if (replaces) print ""
    print
    split($0, words, " ")
    read_range($0)
    print ""
    print_quote()
    replaces = 1
    next
}

/^<!-- diff / {
    print
    split($0, words, " ")
    print ""
    print_diff()
    print ""
    replaces_fence = 1
    next
}

# The block that was there, between fences, and empty lines around it.
replaces_fence == 1 && /^$/ { next }
replaces_fence == 1 && /^```diff$/ { replaces_fence = 2; next }
replaces_fence == 2 { if (/^```$/) replaces_fence = 3; next }
replaces_fence == 3 && /^$/ { next }
replaces_fence { replaces_fence = 0 }

# The block that was there: indented lines, with empty ones between them.
replaces && (/^$/ || /^    /) { next }
replaces {
    replaces = 0
    print ""
}
{ print }
END { exit failed }
