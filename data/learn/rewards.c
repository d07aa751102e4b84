/* rewards.c: rewards of responses: exact answers, numbers, patterns, a program of the user's. */
#include "rewards.h"

#include "../base/child.h"
#include "../base/signals.h"
#include "../tokens/tokenizer.h"
#include "../tokens/tokenizer_vocab.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#ifdef MT_HAVE_PCRE2
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#endif

struct mt_reward_function {
    mt_reward_kind kind;
    char *argument;
    double seconds;

    void *pattern, *match, *context, *stack; // pcre2
    int answer_group;                        // of the pattern; 0: none

    mt_child child;            // the command
    mt_text repaired, request; // scratch; the line that is being sent
    mt_text received;          // output without its whole lines
    int64_t lines;             // of output, since the start
};

/* ---- exact and number ----------------------------------------------------------------------------------------------
 */

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

/* Reads digits, perhaps in groups of three, a fraction and an exponent; returns the end, or p without a
 * number. At most 60 characters are read. */
static const char *read_decimal(const char *p, const char *end, long double *value) {
    char digits[64];
    int count = 0, run = 0; // run: digits since the start or the last comma, which three follow
    const char *start = p;
    for (; count < 50; p++) {
        int64_t groups = run > 0 && run <= 3 ? group_separator(p, end) : 0;
        if (groups > 0)
            run = 0, p += groups - 1;
        else if (is_digit(p, end))
            digits[count++] = *p, run++;
        else
            break;
    }
    if (p < end && *p == '.' && is_digit(p + 1, end)) {
        digits[count++] = *p++;
        while (is_digit(p, end) && count < 54) digits[count++] = *p++;
    }
    if (count == 0) return start;
    const char *exponent = p + (p + 1 < end && (p[1] == '+' || p[1] == '-') ? 2 : 1);
    if (p < end && (*p == 'e' || *p == 'E') && is_digit(exponent, end)) {
        while (p < exponent) digits[count++] = *p++;
        while (is_digit(p, end) && count < 60) digits[count++] = *p++;
    }
    digits[count] = 0;
    *value = strtold(digits, NULL);
    return p;
}

static bool starts_with(const char *p, const char *end, const char *word) {
    int64_t bytes = (int64_t)strlen(word);
    return end - p >= bytes && memcmp(p, word, (size_t)bytes) == 0;
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

/* The bytes of the first of these names of LaTeX at p; 0: none. */
static int64_t name_at(const char *p, const char *end, const char *const *names) {
    for (; *names; names++) {
        int64_t bytes = (int64_t)strlen(*names);
        if (starts_with(p, end, *names) && !(p + bytes < end && isalpha((unsigned char)p[bytes]))) return bytes;
    }
    return 0;
}

static int64_t fraction_name(const char *p, const char *end) {
    static const char *const names[] = {"\\frac", "\\dfrac", "\\tfrac", "\\cfrac", NULL};
    return name_at(p, end, names);
}

static int64_t binomial_name(const char *p, const char *end) {
    static const char *const names[] = {"\\binom", "\\dbinom", "\\tbinom", NULL};
    return name_at(p, end, names);
}

/* Reads an argument of LaTeX that is a number: braces around one, or a single digit. Returns the end, or NULL. */
static const char *read_argument(const char *p, const char *end, long double *value) {
    p = skip_spaces(p, end);
    if (is_digit(p, end)) {
        *value = *p - '0';
        return p + 1;
    }
    if (p == end || *p != '{') return NULL;
    p = skip_spaces(p + 1, end);
    bool negative = p < end && *p == '-';
    const char *first = skip_spaces(p + negative, end), *after = read_decimal(first, end, value);
    if (after == first) return NULL;
    after = skip_spaces(after, end);
    if (after == end || *after != '}') return NULL;
    if (negative) *value = -*value;
    return after + 1;
}

/* Reads "\frac{a}{b}" or, as LaTeX does, "\frac12"; returns the end, or p if there is none. */
static const char *read_latex_fraction(const char *p, const char *end, long double parts[2]) {
    int64_t name = fraction_name(p, end);
    const char *after = name > 0 ? read_argument(p + name, end, &parts[0]) : NULL;
    if (after) after = read_argument(after, end, &parts[1]);
    return after && parts[1] != 0 ? after : p;
}

/* Reads "a/b" or "a / b"; returns the end, or p if there is none. */
static const char *read_fraction(const char *p, const char *end, long double parts[2]) {
    const char *after = read_decimal(p, end, &parts[0]), *slash = skip_spaces(after, end);
    if (after == p || slash >= end || *slash != '/') return p;
    const char *first = skip_spaces(slash + 1, end), *last = read_decimal(first, end, &parts[1]);
    return last == first || parts[1] == 0 ? p : last;
}

/* Reads a number without a sign: a decimal, a fraction, or a mixed number, which is an integer with a fraction below 1
 * behind it. */
static const char *read_number(const char *p, const char *end, long double *value) {
    long double parts[2];
    const char *after = *p == '\\' ? read_latex_fraction(p, end, parts) : read_fraction(p, end, parts);
    if (after > p) {
        *value = parts[0] / parts[1];
        return after;
    }
    if (*p == '\\' || (after = read_decimal(p, end, value)) == p || memchr(p, '.', (size_t)(after - p))) return after;
    const char *next = skip_spaces(after, end), *last = read_latex_fraction(next, end, parts);
    if (last == next && next > after) last = read_fraction(next, end, parts);
    if (last == next || parts[0] <= 0 || parts[0] >= parts[1]) return after;
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

/* True if a number that ends at p goes on with a part that changes it: a power, an index (a base), digits that repeat,
 * a root, pi, a function, a fraction. Degrees do not. */
static bool goes_on(const char *p, const char *end) {
    static const char *const words[] = {"\\sqrt",   "\\pi",         "\\log", "\\ln",       "\\sin", "\\cos", "\\tan",
                                        "\xCF\x80", "\xE2\x88\x9A", "e^",    "\\overline", "\\bar", "\\dot{"};
    if (is_raised(p, end)) return true;
    if (p + 1 < end && *p == '.' && p[1] == '\\') p++; // 0.\overline{3}
    if (p < end && *p == '^') {
        const char *power = skip_spaces(p + 1, end);
        if (power < end && *power == '{') power = skip_spaces(power + 1, end);
        return !starts_with(power, end, "\\circ");
    }
    if (p < end && *p == '_' && (is_digit(p + 1, end) || (starts_with(p, end, "_{") && is_digit(p + 2, end))))
        return true;
    p = skip_spaces(p, end);
    if (fraction_name(p, end) + binomial_name(p, end) > 0) return true;
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (starts_with(p, end, words[i])) return true;
    return false;
}

typedef enum place { ALONE, INDEX, OPERAND } place;

/* Where a number at p stands: alone; as a power or an index of a name or a unit, which is none of its own (cm^2, x_1);
 * under a root or in a function. */
static place place_of(const char *start, const char *p) {
    static const char *const words[] = {"\\sqrt", "\\log",        "\\ln",       "\\sin", "\\cos",
                                        "\\tan",  "\xE2\x88\x9A", "\\overline", "\\bar", "\\dot"};
    bool is_fraction = *p == '\\';
    while (p > start && (p[-1] == '-' || p[-1] == '{' || p[-1] == ' ')) p--;
    if (is_fraction && p > start && p[-1] >= '0' && p[-1] <= '9') return OPERAND; // a product
    if (p > start && (p[-1] == '^' || p[-1] == '_'))
        return p - 1 > start && (is_digit(p - 2, p) || p[-2] == ')') ? OPERAND : INDEX;
    if (p > start && p[-1] == ']') // the degree of a root
        while (p > start && *--p != '[') continue;
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        int64_t bytes = (int64_t)strlen(words[i]);
        if (p - start >= bytes && memcmp(p - bytes, words[i], (size_t)bytes) == 0) return OPERAND;
    }
    return ALONE;
}

/* The end of a fraction that is no number, such as "\frac{\pi}{2}", or of a binomial: behind its two arguments. */
static const char *skip_fraction(const char *p, const char *end) {
    p += fraction_name(p, end) + binomial_name(p, end);
    for (int argument = 0; argument < 2; argument++) {
        int64_t depth = 0;
        p = skip_spaces(p, end);
        for (; p < end; p++) {
            depth += (*p == '{') - (*p == '}');
            if (depth <= 0) break;
        }
        if (p < end) p++;
    }
    return p;
}

/* True if a minus sign stands before p, perhaps with a currency sign between, and is no subtraction as in 3-5. Spaces
 * may follow it after a sign such as = or a bracket, or at the start of a box; elsewhere it may be a dash. */
static bool is_negative(const char *start, const char *p, bool boxed) {
    while (p > start && (p[-1] == '$' || p[-1] == '\\')) p--;
    const char *number = p;
    while (p > start && p[-1] == ' ') p--;
    bool spaced = p < number;
    if (p - start >= 3 && (memcmp(p - 3, "\xe2\x88\x92", 3) == 0 || memcmp(p - 3, "\xe2\x80\x93", 3) == 0))
        p -= 3; // U+2212, and U+2013, which stands for it
    else if (p > start && p[-1] == '-')
        p -= 1;
    else
        return false;
    const char *before = p;
    while (spaced && before > start && before[-1] == ' ') before--;
    if (spaced) return before == start ? boxed : strchr("=([{<>&", before[-1]) != NULL;
    return p == start || !(isalnum((unsigned char)p[-1]) || p[-1] == ')' || p[-1] == '}');
}

/* The contents of the last closed \boxed{}; false: none. */
static bool find_box(const char **text, const char **end) {
    static const char box[] = "\\boxed{";
    for (const char *p = *end; p-- > *text;) {
        if (*p != '\\' || *end - p < (int64_t)sizeof box - 1 || memcmp(p, box, sizeof box - 1) != 0) continue;
        const char *first = p + sizeof box - 1, *last = first;
        for (int64_t depth = 1; last < *end; last++) {
            depth += (*last == '{') - (*last == '}');
            if (depth == 0) break;
        }
        if (last == *end) continue;
        *text = first, *end = last;
        return true;
    }
    return false;
}

/* The number of a text: the last one. False: it has none, or the last is part of an expression that is not computed, as
 * are several numbers in a box: a sum, a pair. */
static bool find_number(const char *text, int64_t bytes, long double *number) {
    const char *end = text + bytes;
    bool found = false, boxed = text && find_box(&text, &end);
    int64_t count = 0;
    for (const char *p = end; boxed && p-- > text;) // x = 3
        if (*p == '=') {
            text = p + 1;
            break;
        }
    for (const char *p = text; p < end;) {
        long double value;
        const char *after = read_number(p, end, &value);
        if (after == p && fraction_name(p, end) + binomial_name(p, end) > 0) {
            found = false;
            p = skip_fraction(p, end);
            continue;
        }
        place place = after > p ? place_of(text, p) : INDEX;
        if (place != INDEX) {
            found = place == ALONE && !goes_on(after, end);
            *number = is_negative(text, p, boxed) ? -value : value;
            count++;
        }
        p = after > p ? after : p + 1;
    }
    return found && !(boxed && count > 1);
}

int mt_reward_check_number(const char *answer, int64_t bytes, mt_error *error) {
    long double number;
    if (find_number(answer, bytes, &number)) return 0;
    return mt_error_set(
        error, "the answer \"%.*s\" has no number, or one in an expression; correct the data, or use the reward exact",
        (int)mt_min(bytes, 80), answer);
}

/* Long doubles round a decimal and the quotient of a fraction correctly, so that equal numbers compare equal. */
static int score_number(const mt_reward_item *item, double *score, mt_error *error) {
    long double answer, response;
    if (!find_number(item->answer, item->answer_bytes, &answer))
        return mt_reward_check_number(item->answer, item->answer_bytes, error);
    *score = find_number(item->response, item->response_bytes, &response) && response == answer;
    return 0;
}

/* ---- regex ---------------------------------------------------------------------------------------------------------
 */

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

/* Finds the next match from *from on, and sets *from behind it. */
static bool next_match(mt_reward_function *r, PCRE2_SIZE *from) {
    const mt_text *text = &r->repaired;
    if (*from > (PCRE2_SIZE)text->bytes) return false;
    int status = pcre2_match(r->pattern, (PCRE2_SPTR)(text->bytes ? text->data : ""), (PCRE2_SIZE)text->bytes, *from,
                             PCRE2_NO_UTF_CHECK, r->match, r->context);
    if (status < 0) return false; // no match, or a limit
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

/* ---- command -------------------------------------------------------------------------------------------------------
 */

static int open_command(mt_reward_function *r, mt_error *error) {
    char *arguments[] = {"sh", "-c", r->argument, NULL};
    int status = mt_child_start(&r->child, "/bin/sh", arguments);
    if (status == 0) return 0;
    return mt_error_set(error, "the reward command \"%s\" cannot be started: %s", r->argument, strerror(status));
}

/* The command's output ended. */
static int report_end(mt_reward_function *r, int64_t answered, int64_t count, mt_error *error) {
    int status = mt_child_end(&r->child, 1);
    char how[96] = "closed its output";
    if (status != -1 && WIFEXITED(status))
        snprintf(how, sizeof how, "ended with exit status %d%s", WEXITSTATUS(status),
                 WEXITSTATUS(status) == 127 ? " (the shell did not find it)" : "");
    else if (status != -1 && WIFSIGNALED(status))
        snprintf(how, sizeof how, "was ended by signal %d (%s)", WTERMSIG(status), strsignal(WTERMSIG(status)));
    return mt_error_set(error,
                        "the reward command \"%s\" %s after %lld answers to %lld responses; its own messages, if any, "
                        "stand above; it must read until the end of its input",
                        r->argument, how, (long long)answered, (long long)count);
}

/* Appends a JSON string. */
static void append_string(mt_reward_function *r, const char *text, int64_t bytes) {
    mt_text *to = &r->request;
    char escape[8];
    r->repaired.bytes = 0;
    mt_utf8_repair(&r->repaired, text, bytes);
    mt_text_append(to, "\"", 1);
    for (int64_t i = 0; i < r->repaired.bytes; i++) {
        unsigned char c = (unsigned char)r->repaired.data[i];
        if (c == '"' || c == '\\')
            snprintf(escape, sizeof escape, "\\%c", c);
        else if (c < 32)
            snprintf(escape, sizeof escape, "\\u%04x", c);
        else
            escape[0] = (char)c, escape[1] = 0;
        mt_text_append(to, escape, (int64_t)strlen(escape));
    }
    mt_text_append(to, "\"", 1);
}

static void write_request(mt_reward_function *r, const mt_reward_item *item) {
    static const char *const keys[] = {"{\"prompt\": ", ", \"response\": ", ", \"answer\": "};
    const char *texts[] = {item->prompt, item->response, item->answer};
    const int64_t bytes[] = {item->prompt_bytes, item->response_bytes, item->answer_bytes};
    r->request.bytes = 0;
    for (int i = 0; i < 3; i++) {
        mt_text_append(&r->request, keys[i], (int64_t)strlen(keys[i]));
        if (texts[i])
            append_string(r, texts[i], bytes[i]);
        else
            mt_text_append(&r->request, "null", 4);
    }
    mt_text_append(&r->request, "}\n", 2);
}

/* Beyond it squares and sums of rewards may overflow, and advantages become 0. */
#define MT_LARGEST_REWARD 1e30

/* The number of a line of output, without its line end. */
static int read_score(mt_reward_function *r, const char *line, int64_t bytes, double *score, mt_error *error) {
    char text[64], *end = text;
    r->lines++;
    trim(&line, &bytes);
    if (bytes > 0 && bytes < (int64_t)sizeof text) {
        memcpy(text, line, (size_t)bytes);
        text[bytes] = 0;
        *score = strtod(text, &end);
        bool decimal = strspn(text, "+-.0123456789eE") == (size_t)bytes; // no hexadecimal number
        if (decimal && end == text + bytes && fabs(*score) <= MT_LARGEST_REWARD) return 0;
    }
    return mt_error_set(
        error,
        "the reward command \"%s\" wrote \"%.*s\" as line %lld of its output; it must write one decimal "
        "number a line, of at most %g in size, and other messages to standard error",
        r->argument, (int)mt_min(bytes, 80), line, (long long)r->lines, MT_LARGEST_REWARD);
}

/* The scores of a batch; `sent` bytes of the request of item `next` - 1 are sent. */
typedef struct batch {
    const mt_reward_item *items;
    int64_t count, next, sent, answered;
    double *scores;
} batch;

static int report_surplus(const mt_reward_function *r, mt_error *error) {
    return mt_error_set(
        error,
        "the reward command \"%s\" wrote more lines than it got responses; it must write one number for "
        "each, and other messages to standard error",
        r->argument);
}

/* Takes the whole lines of `received`. A line for a response that is not wholly sent is no answer. */
static int take_lines(mt_reward_function *r, batch *b, mt_error *error) {
    mt_text *text = &r->received;
    int64_t taken = 0, asked = b->next - (b->sent < r->request.bytes);
    for (const char *end; (end = memchr(text->data + taken, '\n', (size_t)(text->bytes - taken)));) {
        const char *line = text->data + taken;
        if (b->answered == asked) return report_surplus(r, error);
        if (read_score(r, line, end - line, &b->scores[b->answered], error) != 0) return -1;
        b->answered++;
        taken = end + 1 - text->data;
    }
    text->bytes -= taken;
    memmove(text->data, text->data + taken, (size_t)text->bytes);
    if (text->bytes > 0 && b->answered == b->count) return report_surplus(r, error);
    return text->bytes > 4096 ? read_score(r, text->data, text->bytes, &b->scores[b->answered], error) : 0;
}

/* Reads the bytes that are available. */
static int receive(mt_reward_function *r, batch *b, mt_error *error) {
    char piece[65536];
    ssize_t bytes = read(r->child.from, piece, sizeof piece);
    if (bytes < 0 && (errno == EAGAIN || errno == EINTR)) return 0;
    if (bytes <= 0) return report_end(r, b->answered, b->count, error);
    mt_text_append(&r->received, piece, bytes);
    return take_lines(r, b, error);
}

/* Writes as much as the pipe takes. A command that reads no more is noticed where its output ends. */
static void send_request(mt_reward_function *r, batch *b) {
    b->sent += mt_child_write(&r->child, r->request.data + b->sent, (size_t)(r->request.bytes - b->sent));
}

/* A signal that comes just before poll is seen after this time. */
enum { STOP_MILLISECONDS = 200 };

/* 0, -1 or MT_REWARD_STOPPED. */
static int exchange(mt_reward_function *r, batch *b, mt_error *error) {
    double until = mt_time() + r->seconds;
    struct pollfd from = {r->child.from, POLLIN, 0};
    char surplus;
    b->sent = r->request.bytes = 0;
    if (r->child.to < 0) return report_end(r, 0, b->count, error);
    if (poll(&from, 1, 0) > 0) { // before anything was asked
        ssize_t bytes = read(r->child.from, &surplus, 1);
        if (bytes > 0) return report_surplus(r, error);
        if (bytes == 0) return report_end(r, 0, b->count, error);
    }
    while (b->answered < b->count) {
        if (b->sent == r->request.bytes && b->next < b->count) {
            write_request(r, &b->items[b->next++]);
            b->sent = 0;
        }
        bool sends = b->sent < r->request.bytes && r->child.to >= 0;
        struct pollfd ends[] = {{r->child.from, POLLIN, 0}, {sends ? r->child.to : -1, POLLOUT, 0}};
        double left = until - mt_time();
        if (left <= 0)
            return mt_error_set(error,
                                "the reward command \"%s\" wrote %lld answers to %lld responses in %g s; it hangs, is "
                                "too slow, or waits for more input: it must answer each line and flush (python3 -u)",
                                r->argument, (long long)b->answered, (long long)b->count, r->seconds);
        if (mt_stop_requested()) return MT_REWARD_STOPPED;
        if (poll(ends, 2, (int)fmin(1000 * left + 1, STOP_MILLISECONDS)) < 0) continue; // a signal
        if (ends[0].revents && receive(r, b, error) != 0) return -1;
        if (ends[1].revents) send_request(r, b);
    }
    return 0;
}

static int score_by_command(mt_reward_function *r, const mt_reward_item *items, int64_t count, double *scores,
                            mt_error *error) {
    batch b = {.items = items, .count = count, .scores = scores};
    if (r->child.process == 0) return mt_error_set(error, "the reward command \"%s\" has ended", r->argument);
    int status = exchange(r, &b, error);
    if (status != 0) mt_child_end(&r->child, 0);
    return status;
}

/* ---- all kinds -----------------------------------------------------------------------------------------------------
 */

int mt_reward_open(mt_reward_function **out, mt_reward_kind kind, const char *argument, double seconds,
                   mt_error *error) {
    static const char *const arguments[] = {[MT_REWARD_REGEX] = "pattern", [MT_REWARD_COMMAND] = "command"};
    bool needs = kind == MT_REWARD_REGEX || kind == MT_REWARD_COMMAND;
    *out = NULL;
    if (needs && (!argument || !*argument)) return mt_error_set(error, "the reward needs a %s", arguments[kind]);
    mt_reward_function *r = mt_calloc(sizeof *r);
    r->kind = kind, r->seconds = seconds;
    r->argument = mt_strdup(argument ? argument : "");
    r->child.to = r->child.from = -1;
    int status = 0;
    if (kind == MT_REWARD_REGEX) status = open_pattern(r, error);
    if (kind == MT_REWARD_COMMAND) status = open_command(r, error);
    if (status == 0)
        *out = r;
    else
        mt_reward_close(r);
    return status;
}

void mt_reward_close(mt_reward_function *r) {
    if (!r) return;
    mt_child_end(&r->child, 2);
    if (r->pattern) close_pattern(r);
    free(r->repaired.data);
    free(r->request.data);
    free(r->received.data);
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
