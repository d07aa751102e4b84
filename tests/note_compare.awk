# Compares what a page says that a block prints, the first file, with what it printed, the second; see test_notes.sh.
# `tolerance`: in percent; 0: one in the last digit.

function is_number(text) { return text ~ /^[-+]?[0-9][0-9,]*(\.[0-9]+)?(e[-+]?[0-9]+)?%?[,;:)]?$/ }

function number_of(text) {
    gsub(/,/, "", text)
    return text + 0
}

# One in the last digit of a decimal number as it is written; whole numbers are exact.
function last_digit(text,    digits) {
    if (text !~ /\./) return 0
    digits = text
    sub(/^[^.]*\./, "", digits)
    sub(/[^0-9].*/, "", digits)
    return 10 ^ -length(digits)
}

function agrees(a, b,    bound) {
    if (a == b) return 1
    if (!is_number(a) || !is_number(b)) return 0
    bound = tolerance > 0 ? tolerance / 100 * (number_of(a) < 0 ? -number_of(a) : number_of(a)) : last_digit(a)
    return number_of(a) - number_of(b) <= bound * 1.0001 && number_of(b) - number_of(a) <= bound * 1.0001
}

function line_agrees(expected, printed,    a, b, m, n, i) {
    m = split(expected, a, " ")
    n = split(printed, b, " ")
    for (i = 1; i <= m; i++) {
        if (a[i] == "...") return 1
        if (i > n || !agrees(a[i], b[i])) return 0
    }
    return m == n
}

# A row of a table counts without its bars; the two lines above the rows do not, nor do empty lines.
FNR == NR {
    if (/^\|/) {
        if (++table_rows <= 2) next
        gsub(/[|`]/, " ")
    }
    want[++wants] = $0
    next
}
NF { got[++gots] = $0 }

END {
    for (i = j = 1; i <= wants; i++) {
        if (want[i] ~ /^ *\.\.\.$/) {
            if (i == wants) j = gots + 1
            while (i < wants && j <= gots && !line_agrees(want[i + 1], got[j])) j++
            continue
        }
        if (j > gots || !line_agrees(want[i], got[j])) {
            gsub(/ +/, " ", want[i])
            gsub(/^ | $/, "", want[i])
            printf "%s says \"%s\", and its commands print \"%s\"\n", page, want[i], j <= gots ? got[j] : ""
            exit 1
        }
        j++
    }
    if (j <= gots) {
        printf "%s: its commands print \"%s\" behind what the page says\n", page, got[j]
        exit 1
    }
}
