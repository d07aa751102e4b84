# The numbers in a page's text and tables, each of which must have a source; see test_notes.sh. Checked are decimals,
# whole numbers from 10 on, and any number before a unit; not names ("H200", "8B", "chapter 9"), years, and what stands
# between backticks. A source is a place on the same page that has the number too,
#
#   a block of commands, of quoted code or of output, or a formula in an indented block
#   "128 x 64 = 8,192"      an equation that holds, in the text; units may have other prefixes on its two sides
#   <!-- 2 * 64 = 128; 4.29: a copy on an H200, TB/s -->
#                           a comment, which readers of the page do not see: equations that hold up to rounding, and
#                           numbers that are given, with their reason
#   <!-- data/configs/gpt2-124m.json; lab.md#attention; "int n = 64" in megatron.c; lines megatron.h = 2,000 -->
#                           files, sections and lines of code that have the numbers; the length of a file
#
# or a page or section that the paragraph links, or the paragraph before a table. A number of a formula needs a source
# that is no formula. An error is a number without a source, an equation in a comment that does not hold, and a number
# in a comment that the page does not have.

function complain(text) {
    printf "%s: %s\n", FILENAME, text
    failed = 1
}

# ---- Expressions -----------------------------------------------------------------------------------------------------

# Splits arithmetic into token[1..num_tokens]; what is no arithmetic becomes "?".
function tokenize(text) {
    num_tokens = 0
    while (text != "") {
        if (!match(text, /^ +/) && !match(text, "^" NUMBER) && !match(text, /^(sqrt|log|exp)\(/) &&
            !match(text, /^[-+*\/^()]/) && !match(text, /^x /) && !match(text, /^[A-Za-z]+/))
            match(text, /^./)
        if (text !~ /^ /) token[++num_tokens] = substr(text, 1, RLENGTH)
        text = substr(text, RLENGTH + 1)
        if (token[num_tokens] == "x ") token[num_tokens] = "*"
        if (token[num_tokens] !~ /^([0-9]|[-+*\/^()]$|(sqrt|log|exp)\()/) token[num_tokens] = "?"
    }
}

function parse_sum(    value, sign) {
    value = parse_product()
    while (at <= num_tokens && token[at] ~ /^[-+]$/) {
        sign = token[at++] == "-" ? -1 : 1
        value += sign * parse_product()
    }
    return value
}

# "2 (a + b)" is a product too.
function parse_product(    value, divides, operand) {
    value = parse_power()
    while (at <= num_tokens && (token[at] ~ /^[*\/]$/ || token[at] == "(")) {
        divides = token[at] == "/"
        if (token[at] != "(") at++
        operand = parse_power()
        if (divides && operand == 0) invalid = 1
        else value = divides ? value / operand : value * operand
    }
    return value
}

function parse_power(    value) {
    value = parse_operand()
    if (at > num_tokens || token[at] != "^") return value
    at++
    return value ^ parse_power()
}

function parse_operand(    value, open) {
    open = at <= num_tokens ? token[at++] : "?"
    if (open ~ /^[0-9]/) return number_of(open)
    if (open == "-") return -parse_power()
    if (open !~ /\($/) {
        invalid = 1
        return 0
    }
    value = parse_sum()
    if (at > num_tokens || token[at++] != ")") invalid = 1
    if (open == "sqrt(") return value >= 0 ? sqrt(value) : 0
    if (open == "log(") return value > 0 ? log(value) : 0
    return open == "exp(" ? exp(value) : value
}

# The value of token[first..]; `invalid` is set if they are no expression.
function evaluate(first,    value) {
    at = first
    invalid = 0
    value = parse_sum()
    if (at <= num_tokens) invalid = 1
    return value
}

function number_of(text) {
    gsub(/,/, "", text)
    return text + 0
}

# Half of the last digit that is written; zeros at the end of a whole number may be rounded ones.
function rounding_of(text,    digits, exponent) {
    gsub(/,/, "", text)
    exponent = digits = 0
    if (match(text, /e[-+]?[0-9]+$/)) {
        exponent = substr(text, RSTART + 1) + 0
        text = substr(text, 1, RSTART - 1)
    }
    if (match(text, /\.[0-9]+$/)) digits = RLENGTH - 1
    else if (match(text, /[1-9]0+$/)) digits = 1 - RLENGTH
    return 0.501 * 10 ^ (exponent - digits)
}

function is_near(value, said, bound) { return value - said <= bound && said - value <= bound }

# `text` is value rounded. base: 0, or 1000 or 1024 if it may have another prefix of its unit; or percent.
function is_written(value, text, base,    said, bound, k) {
    said = number_of(text)
    bound = rounding_of(text)
    if (is_near(value, said, bound)) return 1
    if (!base) return 0
    for (k = -4; k <= 4; k++) if (is_near(value * base ^ k, said, bound)) return 1
    return is_near(value * 100, said, bound)
}

# ---- Text ------------------------------------------------------------------------------------------------------------

BEGIN {
    NUMBER = "([0-9][0-9,]*[0-9]|[0-9])(\\.[0-9]+)?(e[-+]?[0-9]+)?"
    COMMAND = "(^|[ (])(\\./|mpirun |make |build/|data/)" # in a block
    UNITS = "^ ?(%|UNIT|[KMGTk]i?B|bytes?|ms|µs|us|s|seconds?|minutes?|hours?|tokens|times|million|billion)([^A-Za-z]|$)"
}

# Without names, references and years; signs of multiplication become "*".
function clean(text) {
    gsub(/`[^`]*`/, " ; ", text)
    gsub(/\[[^]]*\]\([^)]*\)/, " ; ", text)
    gsub(/<[^>]*>/, " ", text)
    gsub(/§[0-9]+[a-z]?/, " ; ", text)
    gsub(/[Cc]hapters?( [0-9]+(,| and| to)?)+|[Ee]xercise [0-9]+/, " ; ", text)
    gsub(/(Llama|GPT|Qwen|Zen|cuDNN|Engine|Core|capability)[- ]?[0-9.]+/, " ; ", text)
    gsub(/[0-9.]+[BM]([^A-Za-z]|$)/, " ; ", text) # 8B
    gsub(/(^|[^A-Za-z0-9_.])[A-Za-z_]+-?[0-9][-A-Za-z0-9_]*/, " ; ", text) # bf16, H200, x86-64
    while (gsub(/[A-Za-z,;(] *(19[0-9][0-9]|20[0-2][0-9])([).,;:]| \|| and)/, " ; ", text)) continue # years
    gsub(/×|·/, "*", text)
    gsub(/²/, "^2", text)
    gsub(/10⁻/, " ; ", text)
    gsub(/([TGMK]?FLOP|[TGMK]i?B|tokens|bytes)\/s/, "UNIT", text)
    return text
}

# found[1..num_found]: the numbers of a text, or only those of a cleaned text that need a source.
function find_numbers(text, all,    from, number, before, after) {
    num_found = 0
    for (from = 1; match(substr(text, from), NUMBER); from += RSTART - 1 + RLENGTH) {
        number = substr(text, from + RSTART - 1, RLENGTH)
        before = from + RSTART > 2 ? substr(text, from + RSTART - 2, 1) : ""
        after = substr(text, from + RSTART - 1 + RLENGTH, 20)
        if (!all && (before ~ /[A-Za-z_^.]/ || after ~ /^[A-Za-z_]/)) continue
        if (all || number ~ /[.e]/ || number_of(number) >= 10 || after ~ UNITS) found[++num_found] = number
    }
}

function key_of(number) { return sprintf("%.17g", number_of(number)) }

function know(text,    i) {
    find_numbers(text, 1)
    for (i = 1; i <= num_found; i++) known[key_of(found[i])] = 1
}

# An equation's side: only numbers and operators.
function arithmetic(text) {
    gsub(/ billion/, " * 1000000000", text)
    gsub(/ million/, " * 1000000", text)
    gsub(/UNIT|(bytes?|per parameter|parameters|weights|tokens|elements|layers|operations|numbers|[KMGTk]i?B|ms|µs|us|[GT]FLOP|[GM])( |$)/, " ", text)
    return text
}

function numbers_from(first,    t, count) {
    for (t = first; t <= num_tokens; t++) count += token[t] ~ /^[0-9]/
    return count
}

# The numbers of the equations in a cleaned text are known, if the equations hold.
function learn_equations(text,    side, sides, i, first, number, t, base, value, wrong) {
    sides = split(text, side, / = /)
    for (i = 1; i < sides; i++) {
        if (!match(side[i + 1], "^ *(about |just |only )?" NUMBER)) continue
        number = substr(side[i + 1], 1, RLENGTH)
        sub(/^[ a-z]*/, "", number)
        base = side[i + 1] ~ /^[^A-Za-z]*[KMGT]iB/ ? 1024 : 1000
        tokenize(arithmetic(side[i]))
        for (t = num_tokens; t > 0 && token[t] != "?"; t--) continue
        wrong = ""
        for (first = t + 1; first < num_tokens; first++) {
            value = evaluate(first)
            if (invalid) continue
            if (is_written(value, number, base)) break
            if (wrong == "" && numbers_from(first) > 1) wrong = value
        }
        if (first < num_tokens) know(number)
        else if (wrong != "") complain("line " unit_line ": ... = " number " does not hold: " wrong)
    }
}

# The numbers of a file, a page or its section "page#section".
function learn_file(path, into,    part, line, on, i) {
    on = split(path, part, "#") < 2
    while ((getline line <part[1]) > 0) {
        if (!(into == "" && part[2] == "") && line ~ /^#+ / && part[2] != "") {
            sub(/^#+ /, "", line)
            on = anchor_of(line) == part[2]
        }
        if (!on) continue
        find_numbers(line, 1)
        for (i = 1; i <= num_found; i++) {
            if (into == "") known[key_of(found[i])] = 1
            else linked[into, key_of(found[i])] = 1
        }
    }
    close(part[1])
}

# The name that GitHub gives to a heading.
function anchor_of(heading) {
    heading = tolower(heading)
    gsub(/[^a-z0-9 _-]/, "", heading)
    gsub(/ /, "-", heading)
    return heading
}

function folder_of(page) { return sub(/[^\/]*$/, "", page) ? page : "" }

function learn_comment(text,    item, count, i, j, side, value) {
    gsub(/^<!-- *| *-->.*$/, "", text)
    gsub(/ +/, " ", text)
    count = split(text, item, / *; */)
    for (i = 1; i <= count; i++) {
        if (item[i] ~ /^[a-z][a-z0-9_\/.-]*\.(json|yaml)$/) learn_file(item[i], "")
        else if (item[i] ~ /^[a-z0-9-]+\.md(#[a-z0-9-]+)?$/) learn_file(folder_of(FILENAME) item[i], num_texts)
        else if (item[i] ~ /^".+" in [a-z][A-Za-z0-9_\/.-]+$/) learn_source(item[i])
        else if (split(item[i], side, / = /) == 2) {
            tokenize(side[1])
            value = evaluate(1)
            if (side[1] ~ /^lines /) value = count_lines(substr(side[1], 7), "")
            if (side[1] ~ /^rows /) value = count_lines(substr(side[1], 6), "rows")
            sub(/%$/, "", side[2])
            if (invalid || side[2] !~ "^-?" NUMBER "$") complain("no equation: " item[i])
            else if (!is_written(value, side[2], 0)) complain(item[i] " does not hold: " value)
            know(side[1])
            list(side[2], item[i])
        } else {
            sub(/:.*/, "", item[i]) # the reason
            list(clean(item[i]), item[i])
        }
    }
}

# The lines of a file that have the text.
function count_lines(path, text,    line, count) {
    count = invalid = 0
    while ((getline line <path) > 0)
        count += text == "rows" ? line !~ /^([#@]|$)/ : text == "" || index(line, text) > 0
    close(path)
    return count
}

# "TEXT" in FILE
function learn_source(item,    text) {
    text = item
    sub(/^"/, "", text)
    sub(/" in [^ ]*$/, "", text)
    if (count_lines(substr(item, length(text) + 7), text) == 0) complain("there is no " item)
    know(text)
}

function list(text, item,    i) {
    find_numbers(text, 1)
    for (i = 1; i <= num_found; i++) {
        known[key_of(found[i])] = 1
        listed[key_of(found[i])] = item
    }
}

# The pages and sections that a text links.
function learn_links(text, unit_number,    path) {
    while (match(text, /\]\([^): ]+\.md[^): ]*\)/)) {
        path = substr(text, RSTART + 2, RLENGTH - 3)
        text = substr(text, RSTART + RLENGTH)
        path = folder_of(FILENAME) path
        if (index(path "#", FILENAME "#") != 1) learn_file(path, unit_number)
    }
}

# ---- Pages -----------------------------------------------------------------------------------------------------------

# A unit is a paragraph, a list, a table or a block.
function end_unit() {
    if (unit != "" && mode == "text") {
        texts[++num_texts] = unit
        line_of[num_texts] = unit_line
    } else if (unit != "" && mode == "block" && unit !~ COMMAND) {
        formulas[++num_formulas] = unit
        formula_line[num_formulas] = unit_line
    } else if (unit != "") know(unit)
    if (unit != "" && mode != "run" && mode != "quote") learn_equations(clean(unit))
    unit = ""
}

function continue_unit(new_mode) {
    if (mode != new_mode) end_unit()
    mode = new_mode
    if (unit == "") unit_line = FNR
    unit = unit $0 (/^\|/ ? " ; " : " ")
}

/^<!-- diff / {
    end_unit()
    next
}
/^```/ { fenced = !fenced }
fenced || /^```/ { next }
/^<!-- (quote|run|prints)/ {
    end_unit()
    block = $2
    next
}
/^<!-- / {
    end_unit()
    comment = ""
    in_comment = 1
}
in_comment {
    comment = comment " " $0
    if (/-->/) {
        sub(/^ /, "", comment)
        learn_comment(comment)
        in_comment = 0
    }
    next
}
/^$/ {
    if (mode == "text") end_unit()
    next
}
/^#/ {
    end_unit()
    next
}
/^    / || (/^\|/ && block == "prints") {
    continue_unit(block == "" ? "block" : block)
    next
}
{
    block = ""
    sub(/^[0-9]+\. /, "; ")
    continue_unit("text")
}

# A formula is a source for the text, and not for itself.
function check_formulas(    i, j) {
    for (i = 1; i <= num_formulas; i++) {
        find_numbers(clean(formulas[i]), 0)
        for (j = 1; j <= num_found; j++) {
            used[key_of(found[j])] = 1
            if (!(key_of(found[j]) in known)) complain("line " formula_line[i] ": " found[j] " has no source")
        }
    }
    for (i = 1; i <= num_formulas; i++) know(formulas[i])
}

END {
    end_unit()
    check_formulas()
    for (i = 1; i <= num_texts; i++) {
        learn_links(texts[i] ~ /^\|/ ? texts[i - 1] texts[i] : texts[i], i)
        find_numbers(clean(texts[i]), 0)
        for (j = 1; j <= num_found; j++) {
            key = key_of(found[j])
            used[key] = 1
            total++
            if ((key in known) || ((i, key) in linked)) continue
            missing++
            complain("line " line_of[i] ": " found[j] " has no source")
        }
    }
    for (key in listed) if (!(key in used)) complain("the text has no " key ", which a comment has: " listed[key])
    if (stats) printf "# %s: %d numbers, %d without a source\n", FILENAME, total, missing
    exit failed
}
