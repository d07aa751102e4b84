/* rewards.c: rewards of responses: exact answers, numbers, patterns, a program of the user's. */
#include "rewards.h"

#include "../tokens/tokenizer.h"
#include "../tokens/tokenizer_vocab.h"
#include "line_command.h"

#include <ctype.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#ifdef MT_HAVE_PCRE2
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#endif

struct mt_reward_function {
    mt_reward_kind kind;
    char *argument;

    void *pattern, *match, *context, *stack; // pcre2
    int answer_group;                        // of the pattern; 0: none
    bool gave_up;                            // a response took the pattern too long, and that was reported

    mt_text repaired; // scratch
    mt_line_command command;
};

/* ---- exact and number ------------------------------------------------------------------------------------------- */

static void trim(const char **text, int64_t *bytes) {
    while (*bytes > 0 && isspace((unsigned char)**text)) ++*text, --*bytes;
    while (*bytes > 0 && isspace((unsigned char)(*text)[*bytes - 1])) --*bytes;
}

static bool same_text(const char *a, int64_t a_bytes, const char *b, int64_t b_bytes) {
    trim(&a, &a_bytes);
    trim(&b, &b_bytes);
    return a_bytes == b_bytes && memcmp(a, b, (size_t)a_bytes) == 0;
}

static bool is_digit(const char *p, const char *end) {
    return p < end && *p >= '0' && *p <= '9';
}

/* Bytes of a separator of groups of three digits, "," or LaTeX's "{,}", ",\!" and spaces, or a narrow or no-break space
 * of Unicode; 0: none, or other than three digits after it. */
static int64_t group_separator(const char *p, const char *end) {
    static const char *const separators[] = {
        ",\\!", "{,}", "\\,", "\\!", "\\;", "\\:", "\\ ", "~", ",", "\xC2\xA0", "\xE2\x80\xAF", "\xE2\x80\x89"};
    for (size_t i = 0; i < sizeof separators / sizeof *separators; i++) {
        int64_t bytes = (int64_t)strlen(separators[i]);
        if (end - p < bytes || memcmp(p, separators[i], (size_t)bytes) != 0) continue;
        p += bytes;
        bool three = is_digit(p, end) && is_digit(p + 1, end) && is_digit(p + 2, end) && !is_digit(p + 3, end);
        return three ? bytes : 0;
    }
    return 0;
}

static bool starts_with(const char *p, const char *end, const char *word) {
    int64_t bytes = (int64_t)strlen(word);
    return end - p >= bytes && memcmp(p, word, (size_t)bytes) == 0;
}

/* The bytes of the first of these texts at p; 0: none. */
static int64_t text_at(const char *p, const char *end, const char *const *texts) {
    for (; *texts; texts++)
        if (starts_with(p, end, *texts)) return (int64_t)strlen(*texts);
    return 0;
}

/* Bytes of a decimal mark: a point, or LaTeX's "{,}" where no group of three digits follows. */
static int64_t decimal_mark(const char *p, const char *end) {
    static const char *const marks[] = {".", "{.}", "{,}", NULL};
    int64_t bytes = text_at(p, end, marks);
    return bytes > 0 && is_digit(p + bytes, end) ? bytes : 0;
}

/* Skips spaces, and LaTeX's: "\ ", "\,", "\;", "\:", "\!" and "~". */
static const char *skip_spaces(const char *p, const char *end) {
    while (p < end) {
        bool latex = *p == '\\' && p + 1 < end && strchr(" ,;:!", p[1]);
        if (!latex && !isspace((unsigned char)*p) && *p != '~') break;
        p += latex ? 2 : 1;
    }
    return p;
}

/* Reads a superscript digit or minus of Unicode; returns the end, or p if there is none. */
static const char *read_superscript(const char *p, const char *end, char *out) {
    static const char *const signs[] = {"\xE2\x81\xB0", "\xC2\xB9",     "\xC2\xB2",     "\xC2\xB3",
                                        "\xE2\x81\xB4", "\xE2\x81\xB5", "\xE2\x81\xB6", "\xE2\x81\xB7",
                                        "\xE2\x81\xB8", "\xE2\x81\xB9", "\xE2\x81\xBB"};
    for (size_t i = 0; i < sizeof signs / sizeof *signs; i++)
        if (starts_with(p, end, signs[i])) {
            *out = "0123456789-"[i];
            return p + strlen(signs[i]);
        }
    return p;
}

/* Reads the power of "10^{6}", "10^-3" or "10" with superscripts, an integer of up to four digits; returns the end, or
 * NULL. */
static const char *read_power(const char *p, const char *end, char power[8]) {
    int count = 0;
    char sign;
    if (p < end && *p != '^') {
        for (const char *next; count < 5 && (next = read_superscript(p, end, &sign)) > p; p = next)
            power[count++] = sign;
    } else {
        p = skip_spaces(p + (p < end), end);
        bool braced = p < end && *p == '{';
        if (braced) p = skip_spaces(p + 1, end);
        if (p < end && *p == '-') power[count++] = *p++;
        while (is_digit(p, end) && count < 5) power[count++] = *p++;
        if (braced) {
            p = skip_spaces(p, end);
            if (p == end || *p++ != '}') return NULL;
        }
    }
    power[count] = 0;
    bool is_integer = count > (power[0] == '-') && !strchr(power + 1, '-');
    return is_integer && !is_digit(p, end) && read_superscript(p, end, &sign) == p ? p : NULL;
}

/* Reads the factor of scientific notation, "\times 10^{6}"; returns the end, or NULL. */
static const char *read_factor(const char *p, const char *end, char power[8]) {
    static const char *const signs[] = {"\\times", "\\cdot", "\xC3\x97", "\xC2\xB7", "\xE2\x8B\x85", "*", "x", NULL};
    p = skip_spaces(p, end);
    int64_t sign = text_at(p, end, signs);
    p = skip_spaces(p + sign, end);
    return sign > 0 && starts_with(p, end, "10") ? read_power(p + 2, end, power) : NULL;
}

/* Reads digits, perhaps in groups of three, a fraction and an exponent; with `powers` also powers of ten and scientific
 * notation. Returns the end, or p without a number. At most 60 characters are read. */
static const char *read_decimal(const char *p, const char *end, bool powers, long double *value) {
    char digits[72], power[8];
    int count = 0, run = 0; // run: digits since the start or the last comma, which three follow
    const char *start = p, *after = NULL;
    for (; count < 50; p++) {
        int64_t groups = run > 0 && run <= 3 ? group_separator(p, end) : 0;
        if (groups > 0)
            run = 0, p += groups - 1;
        else if (is_digit(p, end))
            digits[count++] = *p, run++;
        else
            break;
    }
    int64_t mark = decimal_mark(p, end);
    if (mark > 0 && (*p == '.' || count > 0)) {
        digits[count++] = '.', p += mark;
        while (is_digit(p, end) && count < 54) digits[count++] = *p++;
    }
    if (count == 0) return start;
    const char *exponent = p + (p + 1 < end && (p[1] == '+' || p[1] == '-') ? 2 : 1);
    if (p < end && (*p == 'e' || *p == 'E') && is_digit(exponent, end)) {
        while (p < exponent) digits[count++] = *p++;
        while (is_digit(p, end) && count < 60) digits[count++] = *p++;
    } else if (powers) {
        bool ten = count == 2 && memcmp(digits, "10", 2) == 0;
        if (ten && (after = read_power(p, end, power))) count = 1; // 1e6
        if (!after) after = read_factor(p, end, power);
        if (after) count += snprintf(digits + count, 8, "e%s", power), p = after;
    }
    digits[count] = 0;
    *value = strtold(digits, NULL);
    return isfinite(*value) ? p : start;
}

/* The bytes of the first of these names of LaTeX at p; 0: none. */
static int64_t name_at(const char *p, const char *end, const char *const *names) {
    for (; *names; names++) {
        int64_t bytes = (int64_t)strlen(*names);
        if (starts_with(p, end, *names) && !(p + bytes < end && isalpha((unsigned char)p[bytes]))) return bytes;
    }
    return 0;
}

static int64_t fraction_name(const char *p, const char *end) {
    static const char *const names[] = {"\\frac", "\\dfrac", "\\tfrac", "\\cfrac", "\\sfrac", "\\nicefrac", NULL};
    return name_at(p, end, names);
}

static int64_t binomial_name(const char *p, const char *end) {
    static const char *const names[] = {"\\binom", "\\dbinom", "\\tbinom", NULL};
    return name_at(p, end, names);
}

/* Names that take what follows them as an argument, so that numbers in it are not those of the text. */
static int64_t function_name(const char *p, const char *end) {
    static const char *const names[] = {
        "\\sqrt", "\\log", "\\ln",     "\\lg",   "\\exp",          "\\sin",    "\\cos",    "\\tan",      "\\cot",
        "\\sec",  "\\csc", "\\sinh",   "\\cosh", "\\tanh",         "\\arcsin", "\\arccos", "\\arctan",   "\\overline",
        "\\bar",  "\\dot", "\\ddot",   "\\hat",  "\\gcd",          "\\max",    "\\min",    "\\sum",      "\\prod",
        "\\int",  "\\lim", "\\varphi", "\\phi",  "\\operatorname", "sqrt",     "\\Gamma",  "\\underset", NULL};
    static const char root[] = "\xE2\x88\x9A";
    return starts_with(p, end, root) ? (int64_t)strlen(root) : name_at(p, end, names);
}

/* Reads an argument of LaTeX that is a number: braces around one, or a single digit. Returns the end, or NULL. */
static const char *read_argument(const char *p, const char *end, long double *value) {
    int braces = 0;
    p = skip_spaces(p, end);
    if (is_digit(p, end)) {
        *value = *p - '0';
        return p + 1;
    }
    for (; p < end && *p == '{' && braces < 8; braces++) p = skip_spaces(p + 1, end);
    if (braces == 0) return NULL;
    bool negative = p < end && *p == '-';
    const char *first = skip_spaces(p + negative, end), *after = read_decimal(first, end, false, value);
    if (after == first) return NULL;
    if (negative) *value = -*value;
    for (; braces > 0; braces--) {
        after = skip_spaces(after, end);
        if (after == end || *after++ != '}') return NULL;
    }
    return after;
}

/* Reads "\frac{a}{b}" or, as LaTeX does, "\frac12"; returns the end, or p if there is none. */
static const char *read_latex_fraction(const char *p, const char *end, long double parts[2]) {
    int64_t name = fraction_name(p, end);
    const char *after = name > 0 ? read_argument(p + name, end, &parts[0]) : NULL;
    if (after) after = read_argument(after, end, &parts[1]);
    return after && parts[1] != 0 ? after : p;
}

/* Reads a fraction that is one sign of Unicode; returns the end, or p if there is none. */
static const char *read_fraction_sign(const char *p, const char *end, long double parts[2]) {
    static const struct {
        const char *text;
        int above, below;
    } signs[] = {{"\xC2\xBC", 1, 4},     {"\xC2\xBD", 1, 2},      {"\xC2\xBE", 3, 4},     {"\xE2\x85\x90", 1, 7},
                 {"\xE2\x85\x91", 1, 9}, {"\xE2\x85\x92", 1, 10}, {"\xE2\x85\x93", 1, 3}, {"\xE2\x85\x94", 2, 3},
                 {"\xE2\x85\x95", 1, 5}, {"\xE2\x85\x96", 2, 5},  {"\xE2\x85\x97", 3, 5}, {"\xE2\x85\x98", 4, 5},
                 {"\xE2\x85\x99", 1, 6}, {"\xE2\x85\x9A", 5, 6},  {"\xE2\x85\x9B", 1, 8}, {"\xE2\x85\x9C", 3, 8},
                 {"\xE2\x85\x9D", 5, 8}, {"\xE2\x85\x9E", 7, 8}};
    for (size_t i = 0; i < sizeof signs / sizeof *signs; i++)
        if (starts_with(p, end, signs[i].text)) {
            parts[0] = signs[i].above, parts[1] = signs[i].below;
            return p + strlen(signs[i].text);
        }
    return p;
}

/* Reads "a/b", "a / b" or "a \over b"; returns the end, or p if there is none. */
static const char *read_fraction(const char *p, const char *end, long double parts[2]) {
    static const char *const lines[] = {"/", "\\over", "\xE2\x81\x84", NULL};
    const char *after = read_decimal(p, end, false, &parts[0]), *line = skip_spaces(after, end);
    int64_t bytes = text_at(line, end, lines);
    if (after == p || bytes == 0) return p;
    const char *first = skip_spaces(line + bytes, end);
    bool negative = first < end && *first == '-';
    first += negative;
    const char *last = read_decimal(first, end, false, &parts[1]);
    if (last == first || parts[1] == 0) return p;
    if (negative) parts[1] = -parts[1];
    return last;
}

/* Reads a number without a sign: a decimal, a fraction, or a mixed number, which is an integer with a fraction below 1
 * behind it. */
static const char *read_number(const char *p, const char *end, long double *value) {
    long double parts[2];
    const char *after = read_latex_fraction(p, end, parts);
    if (after == p) after = read_fraction_sign(p, end, parts);
    if (after == p) after = read_fraction(p, end, parts);
    if (after > p) {
        *value = parts[0] / parts[1];
        return after;
    }
    if ((after = read_decimal(p, end, true, value)) == p || *value != floorl(*value)) return after;
    const char *next = skip_spaces(after, end), *last = read_latex_fraction(next, end, parts);
    if (last == next) last = read_fraction_sign(next, end, parts);
    if (last == next && next > after) last = read_fraction(next, end, parts);
    if (last == next || parts[0] <= 0 || parts[0] >= parts[1] || memchr(p, '.', (size_t)(after - p))) return after;
    *value += parts[0] / parts[1];
    return last;
}

/* True for a sign of Unicode that changes the number before it: superscript or subscript digits, a fraction. */
static bool is_raised(const char *p, const char *end) {
    const unsigned char *u = (const unsigned char *)p;
    if (end - p >= 2 && u[0] == 0xC2)
        return u[1] == 0xB2 || u[1] == 0xB3 || u[1] == 0xB9 || (u[1] >= 0xBC && u[1] <= 0xBE);
    if (end - p < 3 || u[0] != 0xE2) return false;
    return (u[1] == 0x81 && u[2] >= 0xB0) || (u[1] == 0x82 && u[2] <= 0x8E) ||
           (u[1] == 0x85 && u[2] >= 0x90 && u[2] <= 0x9F);
}

/* "^\circ" behind a number, which leaves it as it is; 0: none. */
static int64_t degrees(const char *p, const char *end) {
    static const char *const names[] = {"\\circ", "\\degree", NULL};
    const char *start = p;
    if (p == end || *p != '^') return name_at(p, end, names + 1);
    p = skip_spaces(p + 1, end);
    bool braced = p < end && *p == '{';
    if (braced) p = skip_spaces(p + 1, end);
    int64_t name = name_at(p, end, names);
    if (name == 0) return 0;
    p += name;
    if (braced) p = skip_spaces(p, end) + (skip_spaces(p, end) < end);
    return p - start;
}

/* A single letter that stands for a number: x, y, z, or the imaginary unit. */
static bool is_variable(const char *p, const char *end) {
    return p < end && *p != 0 && strchr("xyzi", *p) && !(p + 1 < end && isalnum((unsigned char)p[1]));
}

/* True if the number from `start` to p goes on with a part that changes it: a power, an index (a base), digits that
 * repeat or go on, a root, pi, a function, a fraction, a factor, a variable. Degrees do not. */
static bool goes_on(const char *start, const char *p, const char *end) {
    static const char *const words[] = {"\\pi",     "\xCF\x80", "e^",       "\\times", "\\cdot", "\\div",    "\\over",
                                        "\\choose", "\xC3\x97", "\xC3\xB7", "\\infty", "\\pm",   "\xC2\xB1", NULL};
    static const char *const dots[] = {"...", "\xE2\x80\xA6", "\\ldots", "\\dots", "\\cdots", NULL};
    bool has_point = memchr(start, '.', (size_t)(p - start)) != NULL;
    if (is_digit(p, end) || is_raised(p, end) || is_variable(p, end)) return true;
    if (has_point && text_at(skip_spaces(p, end), end, dots) > 0) return true;
    if (p + 1 < end && *p == '.' && p[1] == '\\' && function_name(p + 1, end) > 0) return true; // 0.\overline{3}
    if (p < end && *p == '^') return degrees(p, end) == 0;
    if (p < end && *p == '_' && (is_digit(p + 1, end) || (starts_with(p, end, "_{") && is_digit(p + 2, end))))
        return true;
    if (p + 1 < end && *p == ':' && is_digit(p + 1, end)) return true; // a ratio, a time
    if (p + 1 < end && *p == '*' && isalnum((unsigned char)p[1])) return true;
    if (p + 1 < end && (*p == 'x' || *p == 'X') && isxdigit((unsigned char)p[1])) return true; // 2x3, 0x1f
    if (starts_with(p, end, "pi") && !(p + 2 < end && isalpha((unsigned char)p[2]))) return true;
    p = skip_spaces(p, end);
    bool divided = p < end && *p == '/';
    if (divided) p = skip_spaces(p + 1, end);
    if (divided && p < end && (*p == '(' || starts_with(p, end, "pi") || is_digit(p, end))) return true;
    return fraction_name(p, end) + binomial_name(p, end) + function_name(p, end) + text_at(p, end, words) > 0;
}

typedef enum place { ALONE, INDEX, OPERAND } place;

/* True if `before` ends with this word. */
static bool ends_with(const char *start, const char *before, const char *word) {
    int64_t bytes = (int64_t)strlen(word);
    return before - start >= bytes && memcmp(before - bytes, word, (size_t)bytes) == 0;
}

/* Where a number at p stands: alone; as a power or an index of a name or a unit, which is none of its own (cm^2, x_1);
 * as a part of a product, a quotient, a ratio, a sum without spaces, an absolute value. */
static place place_of(const char *start, const char *p) {
    static const char *const words[] = {"\\times", "\\cdot",   "\\div",   "\\over",   "\xC3\x97", "\xC3\xB7", "\\pm",
                                        "\\mp",    "\xC2\xB1", "\\lvert", "\\lfloor", "\\lceil",  "\\left|",  "/"};
    bool is_fraction = *p == '\\';
    while (p > start && (p[-1] == '-' || p[-1] == '{' || p[-1] == ' ')) p--;
    if (is_fraction && p > start && p[-1] >= '0' && p[-1] <= '9') return OPERAND; // a product
    if (p > start && (p[-1] == '^' || p[-1] == '_'))
        return p - 1 > start && (is_digit(p - 2, p) || p[-2] == ')') ? OPERAND : INDEX;
    if (p - 1 > start && p[-1] == ':' && is_digit(p - 2, p)) return OPERAND;
    if (p - 1 > start && p[-1] == '+' && (isalnum((unsigned char)p[-2]) || p[-2] == ')' || p[-2] == '}'))
        return OPERAND;
    if (p - 1 > start && (p[-1] == 'x' || p[-1] == 'X' || p[-1] == '*') && is_digit(p - 2, p)) return OPERAND;
    if (p - 2 > start && ends_with(start, p, "**") && is_digit(p - 3, p)) return OPERAND;
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (ends_with(start, p, words[i])) return OPERAND;
    return ALONE;
}

/* Skips a group in braces, parentheses or brackets, with those in it; p if there is none. */
static const char *skip_group(const char *p, const char *end) {
    int64_t depth = 0;
    if (p == end || !strchr("{([", *p) || *p == 0) return p;
    for (const char *at = p; at < end; at++) {
        depth += *at == '{' || *at == '(' || *at == '[';
        depth -= *at == '}' || *at == ')' || *at == ']';
        if (depth == 0) return at + 1;
    }
    return end;
}

/* The end of a fraction that is no number, such as "\frac{\pi}{2}", or of a binomial: behind its two arguments. */
static const char *skip_fraction(const char *p, const char *end) {
    p += fraction_name(p, end) + binomial_name(p, end);
    for (int argument = 0; argument < 2; argument++) {
        p = skip_spaces(p, end);
        const char *after = skip_group(p, end);
        p = after == p && p < end ? p + 1 : after;
    }
    return p;
}

/* The end of a function with its argument: "\sqrt[3]{8}", "\log_{2} 8", "\sin(30^\circ)". */
static const char *skip_function(const char *p, const char *end) {
    long double ignored;
    p += function_name(p, end);
    for (const char *next = skip_spaces(p, end); next < end && strchr("_^[", *next) && *next; // limits, a degree
         next = skip_spaces(p, end)) {
        bool is_degree = *next == '[';
        next = skip_spaces(next + !is_degree, end);
        p = skip_group(next, end);
        if (p == next && p < end) p++;
    }
    const char *next = skip_spaces(p, end);
    if (starts_with(next, end, "\\left")) next += strlen("\\left");
    const char *after = skip_group(next, end);
    if (after == next) after = read_number(next, end, &ignored);
    return after > next ? after : p;
}

static const char *const sign_words[] = {"minus", "Minus", "negative", "Negative", NULL};

/* True if a word for a minus sign stands before p, and no number before it, as in "7 minus 5". */
static bool follows_sign_word(const char *start, const char *p) {
    while (p > start && (p[-1] == ' ' || p[-1] == '$')) p--;
    for (int i = 0; sign_words[i]; i++) {
        if (!ends_with(start, p, sign_words[i])) continue;
        p -= strlen(sign_words[i]);
        if (p > start && (isalpha((unsigned char)p[-1]) || p[-1] == '-')) return false; // non-negative
        while (p > start && p[-1] == ' ') p--;
        return p == start || !(is_digit(p - 1, p) || strchr(")}", p[-1]));
    }
    return false;
}

/* True if a minus sign stands before p, perhaps with a currency sign or brackets between, and is no subtraction as in
 * 3-5. Spaces may follow it after a sign such as = or a bracket, or before a fraction of LaTeX; elsewhere it may be a
 * dash. */
static bool is_negative(const char *start, const char *p) {
    if (follows_sign_word(start, p)) return true;
    bool is_fraction = *p == '\\' && (p == start || p[-1] != '$');
    while (p > start && (p[-1] == '$' || p[-1] == '\\')) p--;
    const char *outer = p; // -(5), -{5}, -\left(5\right)
    while (outer > start && (outer[-1] == '{' || outer[-1] == '('))
        outer -= ends_with(start, outer, "\\left(") ? strlen("\\left(") : 1;
    if (ends_with(start, outer, "-") || ends_with(start, outer, "\xe2\x88\x92")) p = outer;
    if (ends_with(start, p, "{-}")) return true;
    const char *number = p;
    while (p > start && p[-1] == ' ') p--;
    bool spaced = p < number;
    if (ends_with(start, p, "\xe2\x88\x92") || ends_with(start, p, "\xe2\x80\x93"))
        p -= 3; // U+2212, and U+2013, which stands for it
    else if (ends_with(start, p, "-"))
        p -= 1;
    else
        return false;
    const char *before = p;
    while (spaced && before > start && before[-1] == ' ') before--;
    if (spaced) return before == start ? is_fraction : strchr("=([{<>&", before[-1]) != NULL;
    return p == start || !(isalnum((unsigned char)p[-1]) || p[-1] == ')' || p[-1] == '}');
}

/* The contents of the last closed \boxed{} or \fbox{}, or of "\boxed 5"; false: none. */
static bool find_box(const char **text, const char **end) {
    static const char *const boxes[] = {"\\boxed", "\\fbox", NULL};
    for (const char *p = *end; p-- > *text;) {
        int64_t name = *p == '\\' ? name_at(p, *end, boxes) : 0;
        if (name == 0) continue;
        const char *first = skip_spaces(p + name, *end);
        bool braced = first < *end && *first == '{';
        const char *last = first += braced;
        for (int64_t depth = 1; last < *end; last++) {
            depth += (*last == '{') - (*last == '}');
            if (braced ? depth == 0 : isspace((unsigned char)*last) || *last == '$') break;
        }
        if (braced && last == *end) continue;
        *text = first, *end = last;
        return true;
    }
    return false;
}

/* Behind the last "=" of a text, if it is one chain of equations; false: it is a list of them, or an inequality. */
static bool find_last_side(const char **text, const char *end) {
    static const char *const signs[] = {"=", "\\approx", "\xE2\x89\x88", NULL};
    static const char *const lists[] = {";", ",", "\\\\", "\\quad", "\\text", "\\lor", "\\vee", "\\land", " or ", NULL};
    const char *side = *text;
    int64_t depth = 0, bytes;
    bool is_list = false, is_first = true; // the first side may be a tuple or a function
    for (const char *p = *text; p < end; p++) {
        if ((bytes = text_at(p, end, signs)) > 0) {
            if (is_list || (p > *text && strchr("<>!", p[-1]))) return false;
            p += bytes - 1, side = p + 1, is_first = false;
            continue;
        }
        depth += *p == '(' || *p == '{';
        depth -= *p == ')' || *p == '}';
        if (depth == 0 && !is_first && text_at(p, end, lists) > 0 && group_separator(p, end) == 0) is_list = true;
    }
    *text = side;
    return true;
}

static bool is_letter(const char *p, const char *end) {
    return p < end && (isalpha((unsigned char)*p) || (unsigned char)*p >= 0x80);
}

/* Signs of Unicode that are no letters: operators, roots, pi, superscripts. */
static bool is_operator(const char *p, const char *end) {
    static const char *const signs[] = {"\xCF\x80",     "\xCE\xA0",     "\xC2\xB1",     "\xC3\x97", "\xC3\xB7",
                                        "\xC2\xB7",     "\xE2\x80\xA6", "\xE2\x88",     "\xE2\x89", "\xE2\x8B",
                                        "\xE2\x81\x84", "\xE2\x86",     "\xE2\x80\xB0", NULL};
    return is_raised(p, end) || text_at(p, end, signs) > 0;
}

/* The bytes of a word or a unit at p; 0: a variable, a product of some, a function, or a word that joins numbers. */
static int64_t word_at(const char *p, const char *end, bool is_unit) {
    static const char *const others[] = {"or",  "and", "plus", "minus", "times", "mod",  "to", "sin", "cos",
                                         "tan", "log", "ln",   "lg",    "exp",   "sqrt", "pi", "inf", "infinity",
                                         "max", "min", "gcd",  "lcm",   "not",   "over", "e",  NULL};
    const char *after = p;
    while (is_letter(after, end) && !is_operator(after, end)) after++;
    int64_t bytes = after - p;
    for (size_t i = 0; others[i]; i++)
        if (bytes == (int64_t)strlen(others[i]) && memcmp(p, others[i], (size_t)bytes) == 0) return 0;
    if (bytes == 1) return is_unit && strchr("mgshlLNJWVAKCFTM", *p) ? 1 : 0;
    bool is_product = bytes <= 3;
    for (const char *at = p; at < after; at++) is_product = is_product && strchr("abcknpqxyz", *at);
    return is_product ? 0 : bytes;
}

/* The bytes of a word for a minus sign; 0: none. */
static int64_t sign_word_at(const char *p, const char *end) {
    int64_t bytes = text_at(p, end, sign_words);
    return is_letter(p + bytes, end) ? 0 : bytes;
}

/* Behind "\text{...}" and its like with words alone; with a number or a sign in it only its name is skipped. p: none.
 */
static const char *skip_text(const char *p, const char *end) {
    static const char *const names[] = {"\\text",   "\\textbf", "\\textit", "\\textrm", "\\mathrm",
                                        "\\mathbf", "\\mathit", "\\mathsf", "\\mbox",   NULL};
    int64_t name = name_at(p, end, names);
    if (name == 0) return p;
    const char *group = skip_spaces(p + name, end), *after = skip_group(group, end);
    bool is_long = after - group > 3; // a letter alone may be a variable
    for (const char *at = group; at < after; at++)
        is_long = is_long && !is_digit(at, end) && *at != '\\' && sign_word_at(at, end) == 0;
    return is_long ? after : p + name;
}

/* Bytes of a sign that stands around a number and does not change it; 0: none. */
static int64_t around_at(const char *p, const char *end, bool found) {
    static const char *const names[] = {"\\left", "\\right", "\\displaystyle", "\\quad", "\\qquad", NULL};
    static const char *const spaces[] = {"\xC2\xA0", "\xE2\x80\xAF", "\xE2\x80\x89", "\xE3\x80\x80", NULL};
    static const char *const currencies[] = {"\xC2\xA3", "\xC2\xA5", "\xE2\x82\xAC", NULL};
    static const char *const marks[] = {"\\$", "\\#", "\\{", "\\}", "\\(", "\\)", "\\[", "\\]", "**", NULL};
    static const char *const behind[] = {"%", "\\%", "\xC2\xB0", "\xE2\x80\xB2", "'", "/", "\\circ", NULL};
    if (!found && end - p > 3 && p[0] == '(' && p[1] >= 'A' && p[1] <= 'E' && p[2] == ')') return 3; // (A) of a choice
    if (*p != 0 && strchr("{}()[]$#`\".,;:", *p)) return 1;
    int64_t bytes = name_at(p, end, names) + text_at(p, end, spaces) + text_at(p, end, currencies);
    if (bytes == 0) bytes = text_at(p, end, marks);
    if (bytes == 0 && found) bytes = text_at(p, end, behind);
    return bytes == 0 && found ? degrees(p, end) : bytes;
}

/* Behind the power of a unit, "^2", "^{-1}" or a superscript; p: none. */
static const char *skip_power(const char *p, const char *end) {
    char ignored;
    const char *after = read_superscript(p, end, &ignored);
    if (after > p || p == end || *p != '^') return after;
    p = skip_spaces(p + 1, end);
    if (p < end && *p == '{') return skip_group(p, end);
    if (p < end && *p == '-') p++;
    while (is_digit(p, end)) p++;
    return p;
}

/* Reads a text that is one number, perhaps behind "x =", with a sign, a currency, a unit, words. False: it has what may
 * be a part of an expression, such as a variable, a sum, a pair, an interval; such an expression is not computed. */
static bool read_alone(const char *p, const char *end, bool boxed, long double *value) {
    bool found = false, negative = false, word = false; // word: p is behind a word
    const char *next, *start = p;
    if (!find_last_side(&p, end)) return false;
    for (; (p = skip_spaces(p, end)) < end; p = next) {
        long double number;
        int64_t bytes;
        if ((next = read_number(p, end, &number)) > p) {
            if (found || goes_on(p, next, end) || (word && isalpha((unsigned char)p[-1]))) return false;
            if (!boxed) negative = is_negative(start, p);
            *value = number, found = true, word = false;
        } else if (*p == '-' || starts_with(p, end, "\xE2\x88\x92") || starts_with(p, end, "\xE2\x80\x93")) {
            next = p + (*p == '-' ? 1 : 3);
            if (found ? !is_letter(next, end) : negative || word) return false;
            negative = negative || !found;
        } else if (!found && !negative && (bytes = sign_word_at(p, end)) > 0) {
            next = p + bytes;
            negative = true;
        } else if ((next = skip_text(p, end)) > p) {
            word = next[-1] == '}';
        } else if ((bytes = word_at(p, end, found)) > 0) {
            next = p + bytes;
            word = true;
        } else if (found && word && (next = skip_power(p, end)) > p) {
            word = false;
        } else if ((bytes = around_at(p, end, found)) > 0) {
            if (!found && word && strchr("([", *p)) return false; // a function
            next = p + bytes;
            if (*p != '{' && *p != '}') word = false;
        } else {
            static const char *const between[] = {"\\cdot", "!", NULL}; // units, words
            static const char *const plus[] = {"+", NULL};
            if (found && word ? !(bytes = text_at(p, end, between)) : found || word || !(bytes = text_at(p, end, plus)))
                return false;
            next = p + bytes;
        }
    }
    if (found && negative) *value = -*value;
    return found;
}

/* The last number of a text. False: it has none, or that is part of an expression, which is not computed. */
static bool find_last(const char *text, const char *end, long double *number) {
    bool found = false;
    for (const char *p = text; p < end;) {
        long double value;
        bool is_function = function_name(p, end) > 0 && (p == text || *p != 's' || !isalpha((unsigned char)p[-1]));
        const char *after = is_function ? p : read_number(p, end, &value);
        if (is_function || (after == p && fraction_name(p, end) + binomial_name(p, end) > 0)) {
            found = false;
            p = is_function ? skip_function(p, end) : skip_fraction(p, end);
            continue;
        }
        place place = after > p ? place_of(text, p) : INDEX;
        if (place != INDEX) {
            found = place == ALONE && !goes_on(p, after, end);
            *number = is_negative(text, p) ? -value : value;
        }
        p = after > p ? after : p + 1;
    }
    return found;
}

/* True for sentences: three words of three letters. */
static bool is_prose(const char *p, const char *end) {
    int64_t words = 0;
    for (const char *after; p < end && words<3; p = after> p ? after : p + 1) {
        bool is_name = *p == '\\';
        for (after = p + is_name; is_letter(after, end);) after++;
        words += !is_name && after - p > 2;
    }
    return words == 3;
}

/* The number of a text: of its last box; behind its last "####"; of the whole text, if that is one number; else of a
 * sentence, or of any response, the last one. */
static bool find_number(const char *text, int64_t bytes, bool is_answer, long double *number) {
    const char *end = text + bytes, *first = text;
    if (bytes > 0 && find_box(&text, &end)) return read_alone(text, end, true, number);
    for (const char *p = end; p - first >= 4 && text == first; p--)
        if (memcmp(p - 4, "####", 4) == 0) text = p;
    if (read_alone(text, end, text > first, number)) return true;
    return (!is_answer || is_prose(first, end)) && find_last(first, end, number);
}

int mt_reward_check_number(const char *answer, int64_t bytes, mt_error *error) {
    long double number;
    if (find_number(answer, bytes, true, &number)) return 0;
    return mt_error_set(error,
                        "the answer \"%.*s\" has no number, several, or one in an expression; correct the data, or use "
                        "the reward exact",
                        (int)mt_min(bytes, 80), answer);
}

/* Long doubles round a decimal and the quotient of a fraction correctly, so that equal numbers compare equal. */
static int score_number(const mt_reward_item *item, double *score, mt_error *error) {
    long double answer, response;
    if (!find_number(item->answer, item->answer_bytes, true, &answer))
        return mt_reward_check_number(item->answer, item->answer_bytes, error);
    *score = find_number(item->response, item->response_bytes, false, &response) && response == answer;
    return 0;
}

/* ---- regex ------------------------------------------------------------------------------------------------------ */

#ifdef MT_HAVE_PCRE2
static int open_pattern(mt_reward_function *r, mt_error *error) {
    int code;
    PCRE2_SIZE offset;
    pcre2_code *pattern =
        pcre2_compile((PCRE2_SPTR)r->argument, PCRE2_ZERO_TERMINATED, PCRE2_UTF | PCRE2_UCP, &code, &offset, NULL);
    if (!pattern) {
        PCRE2_UCHAR why[256];
        pcre2_get_error_message(code, why, sizeof why);
        return mt_error_set(error, "the reward's pattern \"%s\": %s, at byte %lld", r->argument, (const char *)why,
                            (long long)offset);
    }
    pcre2_jit_compile(pattern, PCRE2_JIT_COMPLETE); // if this fails, pcre2_match interprets the pattern
    int group = pcre2_substring_number_from_name(pattern, (PCRE2_SPTR) "answer");
    r->pattern = pattern;
    r->match = pcre2_match_data_create_from_pattern(pattern, NULL);
    r->context = pcre2_match_context_create(NULL);
    r->stack = pcre2_jit_stack_create(1 << 15, 1 << 23, NULL); // NULL if PCRE2 has no JIT
    if (r->stack) pcre2_jit_stack_assign(r->context, NULL, r->stack);
    r->answer_group = group > 0 ? group : 0;
    return 0;
}

static void close_pattern(mt_reward_function *r) {
    pcre2_match_data_free(r->match);
    pcre2_match_context_free(r->context);
    pcre2_jit_stack_free(r->stack);
    pcre2_code_free(r->pattern);
}

/* A response that a pattern takes too long for counts as one without a match; the first of a run is reported. */
static void report_limit(mt_reward_function *r, int status) {
    PCRE2_UCHAR why[256] = "";
    pcre2_get_error_message(status, why, sizeof why);
    r->gave_up = true;
    fprintf(stderr,
            "warning: the reward's pattern \"%s\" gave up on a response of %lld bytes (%s), which counts as no match, "
            "as later ones will; simplify the pattern\n",
            r->argument, (long long)r->repaired.bytes, (const char *)why);
}

/* Finds the next match from *from on, and sets *from behind it. */
static bool next_match(mt_reward_function *r, PCRE2_SIZE *from) {
    const mt_text *text = &r->repaired;
    if (*from > (PCRE2_SIZE)text->bytes) return false;
    int status = pcre2_match(r->pattern, (PCRE2_SPTR)(text->bytes ? text->data : ""), (PCRE2_SIZE)text->bytes, *from,
                             PCRE2_NO_UTF_CHECK, r->match, r->context);
    if (status < 0) {
        if (status != PCRE2_ERROR_NOMATCH && !r->gave_up) report_limit(r, status);
        return false;
    }
    const PCRE2_SIZE *span = pcre2_get_ovector_pointer(r->match);
    *from = span[1] > *from ? span[1] : *from + 1;
    while (*from < (PCRE2_SIZE)text->bytes && ((unsigned char)text->data[*from] & 0xc0) == 0x80) ++*from;
    return true;
}

static int score_pattern(mt_reward_function *r, const mt_reward_item *item, double *score) {
    PCRE2_SIZE from = 0;
    r->repaired.bytes = 0;
    mt_utf8_repair(&r->repaired, item->response, item->response_bytes);
    *score = 0;
    while (next_match(r, &from)) {
        const PCRE2_SIZE *span = (PCRE2_SIZE *)pcre2_get_ovector_pointer(r->match) + 2 * r->answer_group;
        *score = 1;
        if (r->answer_group == 0) break;
        *score = span[0] != PCRE2_UNSET && item->answer &&
                 same_text(r->repaired.data + span[0], (int64_t)(span[1] - span[0]), item->answer, item->answer_bytes);
    }
    return 0;
}
#else
static int open_pattern(mt_reward_function *r, mt_error *error) {
    (void)r;
    return mt_error_set(error, "the reward regex needs PCRE2, which this build lacks; install libpcre2-dev and run "
                               "make again, or use the reward command");
}

static void close_pattern(mt_reward_function *r) {
    (void)r;
}

static int score_pattern(mt_reward_function *r, const mt_reward_item *item, double *score) {
    (void)r, (void)item, (void)score;
    return -1; // open_pattern has failed
}
#endif

/* ---- command ---------------------------------------------------------------------------------------------------- */

/* Responses that a command scores. */
typedef struct batch {
    mt_reward_function *reward;
    const mt_reward_item *items;
    double *scores;
} batch;

static void write_request(void *context, int64_t i) {
    static const char *const keys[] = {"{\"prompt\": ", ", \"response\": ", ", \"answer\": "};
    const batch *b = context;
    const mt_reward_item *item = &b->items[i];
    const char *texts[] = {item->prompt, item->response, item->answer};
    const int64_t bytes[] = {item->prompt_bytes, item->response_bytes, item->answer_bytes};
    mt_line_command *command = &b->reward->command;
    for (int k = 0; k < 3; k++) {
        mt_text_append(&command->request, keys[k], (int64_t)strlen(keys[k]));
        if (texts[k])
            mt_line_command_append_string(command, texts[k], bytes[k]);
        else
            mt_text_append(&command->request, "null", 4);
    }
    mt_text_append(&command->request, "}\n", 2);
}

/* Beyond it squares and sums of rewards may overflow, and advantages become 0. */
#define MT_LARGEST_REWARD 1e30

/* The number of a line of output. */
static int read_score(void *context, int64_t i, int64_t sent, const char *line, int64_t bytes, mt_error *error) {
    const batch *b = context;
    char text[64], *end = text;
    (void)sent;
    trim(&line, &bytes);
    if (bytes > 0 && bytes < (int64_t)sizeof text) {
        memcpy(text, line, (size_t)bytes);
        text[bytes] = 0;
        b->scores[i] = strtod(text, &end);
        bool decimal = strspn(text, "+-.0123456789eE") == (size_t)bytes; // no hexadecimal number
        if (decimal && end == text + bytes && fabs(b->scores[i]) <= MT_LARGEST_REWARD) return 0;
    }
    return mt_error_set(
        error,
        "the reward command \"%s\" wrote \"%.*s\" as line %lld of its output; it must write one decimal "
        "number a line, of at most %g in size, and other messages to standard error",
        b->reward->argument, (int)mt_min(bytes, 80), line, (long long)b->reward->command.lines, MT_LARGEST_REWARD);
}

static int score_by_command(mt_reward_function *r, const mt_reward_item *items, int64_t count, double *scores,
                            mt_error *error) {
    batch b = {r, items, scores};
    mt_line_exchange exchange = {.count = count,
                                 .requests = "responses",
                                 .answer = "one number",
                                 .longest = 4096,
                                 .context = &b,
                                 .write = write_request,
                                 .read = read_score};
    int status = mt_line_command_exchange(&r->command, &exchange, error);
    return status == MT_LINE_COMMAND_STOPPED ? MT_REWARD_STOPPED : status;
}

/* ---- all kinds -------------------------------------------------------------------------------------------------- */

int mt_reward_open(mt_reward_function **out, mt_reward_kind kind, const char *argument, double seconds,
                   mt_error *error) {
    static const char *const arguments[] = {[MT_REWARD_REGEX] = "pattern", [MT_REWARD_COMMAND] = "command"};
    bool needs = kind == MT_REWARD_REGEX || kind == MT_REWARD_COMMAND;
    *out = NULL;
    if (needs && (!argument || !*argument)) return mt_error_set(error, "the reward needs a %s", arguments[kind]);
    mt_reward_function *r = mt_calloc(sizeof *r);
    r->kind = kind;
    r->argument = mt_strdup(argument ? argument : "");
    r->command.child.to = r->command.child.from = -1;
    int status = 0;
    if (kind == MT_REWARD_REGEX) status = open_pattern(r, error);
    if (kind == MT_REWARD_COMMAND)
        status = mt_line_command_open(&r->command, "reward command", argument, seconds, error);
    if (status == 0)
        *out = r;
    else
        mt_reward_close(r);
    return status;
}

void mt_reward_close(mt_reward_function *r) {
    if (!r) return;
    mt_line_command_close(&r->command);
    if (r->pattern) close_pattern(r);
    free(r->repaired.data);
    free(r->argument);
    free(r);
}

int mt_rewards_compute(mt_reward_function *r, const mt_reward_item *items, int64_t count, double *scores,
                       mt_error *error) {
    if (r->kind == MT_REWARD_COMMAND) return score_by_command(r, items, count, scores, error);
    for (int64_t i = 0; i < count; i++) {
        const mt_reward_item *item = &items[i];
        bool compares = r->kind != MT_REWARD_REGEX || r->answer_group > 0;
        if (compares && !item->answer)
            return mt_error_set(error, "the prompt \"%.*s\" has no answer; this reward compares with one",
                                (int)mt_min(item->prompt_bytes, 80), item->prompt ? item->prompt : "");
        if (r->kind == MT_REWARD_REGEX)
            score_pattern(r, item, &scores[i]);
        else if (r->kind == MT_REWARD_EXACT)
            scores[i] = same_text(item->response, item->response_bytes, item->answer, item->answer_bytes);
        else if (score_number(item, &scores[i], error) != 0)
            return -1;
    }
    return 0;
}
