/* tokenizer_encode.c: text to ids. mt_encode, at the end of the file, calls the sections in this order:
 *
 *   added tokens       cut the text at added tokens
 *   normalizers        of a tokenizer.json, or of a SentencePiece model
 *   pre-tokenizers     cut normalized text into words
 *   words              a word becomes ids: BPE, or SentencePiece's unigram
 *
 * Regular expressions run on PCRE2 (compiled to machine code where possible), Unicode normalization on utf8proc.
 */
#include "tokenizer_encode.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#ifdef MT_HAVE_PCRE2
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#endif
#ifdef MT_HAVE_UTF8PROC
#include <utf8proc.h>
#endif

/* A part of the word that is one token so far; a doubly linked list in an array. */
typedef struct symbol {
    int32_t previous, next; // -1: none
    int32_t start, bytes;   // bytes 0: merged into the symbol before it
    int32_t id;
    bool frozen; // never merges
} symbol;

/* Two adjacent symbols that may merge. */
typedef struct merge_pair {
    uint64_t order; // lowest first: priority << 32 | left symbol
    int32_t right, bytes, id;
} merge_pair;

/* Unigram: the best path to one position of the text. */
typedef struct path_node {
    float score;
    int32_t start, next; // start of its last piece (-1: no path yet); end of the next piece on the best path
    int32_t id;
} path_node;

#define CACHE_SLOTS (1 << 16)
#define CACHE_BYTES 22
#define CACHE_IDS   6

typedef struct cache_slot {
    uint8_t bytes, count; // bytes 0: empty
    char word[CACHE_BYTES];
    int32_t ids[CACHE_IDS];
} cache_slot;

struct mt_encoder {
    const mt_tokenizer *tokenizer;
    cache_slot *cache; // [CACHE_SLOTS] the last word that hashed to each slot
    symbol *symbols;
    int64_t symbol_capacity;
    merge_pair *heap;
    int64_t heap_count, heap_capacity;
    int32_t *split_at; // [V] bytes of the left part that an UNUSED piece was merged from; 0: unknown
    path_node *path;
    int64_t path_capacity;
    mt_text repaired, normalized[2], prefixed[MT_MAX_STEPS];
    void *match_data, *match_context, *jit_stack; // pcre2
    int64_t match_budget;                         // of the text: units of PCRE2's match limit that are left
    double match_seconds, match_began;            // of the text: its limit for searches; this thread's clock before it
    int64_t searches;                             // of the text
    int64_t growth;                               // of the text: bytes by which normalizers may still lengthen it
    bool no_memory;                               // of the text: an array for a long word could not grow
    bool part;                                    // special tokens are not recognised
    bool first;                                   // the text begins a document
    mt_ids *places;                               // of added tokens, for mt_encode_places; NULL: not wanted
    mt_trie controls;                             // SentencePiece's control tokens, once they are needed
    mt_map neighbours;                            // left << 32 | right: characters beside each other in some token
    bool has_neighbours;                          // they are known, as is unknown_apart
    bool unknown_apart;                           // an unknown character never joins its neighbours
};

/* The pattern of GPT-2's encoder.py. */
const char mt_gpt2_pattern[] = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";

/* ---- patterns -------------------------------------------------------------------------------------------------- */

void mt_pattern_literal(mt_pattern *out, const char *text, int64_t bytes) {
    *out = (mt_pattern){.source = mt_malloc(bytes + 1), .bytes = bytes};
    memcpy(out->source, text, (size_t)bytes);
    out->source[bytes] = 0;
}

/* The start of the next search: the end of the match, one character further if the match was empty. */
static int64_t after_match(const char *text, int64_t bytes, int64_t start, int64_t end) {
    if (end > start || end >= bytes) return end + (end == start);
    mt_utf8_state state;
    return end + mt_utf8_scan(text + end, bytes - end, &state);
}

/* An empty match right after a match is none. *last is the end of the last match. */
static bool is_repeated(int64_t start, int64_t end, int64_t *last) {
    if (start == end && end == *last) return true;
    *last = end;
    return false;
}

#ifdef MT_HAVE_PCRE2

/* tokenizer.json's patterns are written for Oniguruma, in the syntax of Ruby. Syntax with another meaning in PCRE2 is
 * spelled out or refused: \s is Unicode's White_Space (PCRE2 adds U+180E); \w includes marks, connectors and, outside
 * of classes, the numbers of Latin-1 (not in PCRE2), \b agrees with it; names in [: :] are properties of Unicode. */
#define SPACES "\\t-\\r\\x{85}\\p{Z}"
#define WORDS  "\\p{L}\\p{M}\\p{Nd}\\p{Nl}\\p{Pc}\\x{24B6}-\\x{24E9}"
#define WORD   "[" WORDS WORDS_OF_LATIN_1 "]"
#define NO_SPACES                                                                                                      \
    "\\p{L}\\p{M}\\p{N}\\p{P}\\p{S}\\p{Cf}\\p{Co}\\p{Cs}\\p{Cn}\\x00-\\x08\\x0E-\\x1F\\x7F-\\x{84}\\x{86}-\\x{9F}"
#define WORDS_OF_LATIN_1 "\\x{B2}\\x{B3}\\x{B9}\\x{BC}-\\x{BE}"

static void append(mt_text *out, const char *text) {
    mt_text_append(out, text, (int64_t)strlen(text));
}

static bool compiles(const char *pattern) {
    int code;
    PCRE2_SIZE at;
    pcre2_code *compiled = pcre2_compile((PCRE2_SPTR)pattern, PCRE2_ZERO_TERMINATED, PCRE2_UTF, &code, &at, NULL);
    pcre2_code_free(compiled);
    return compiled != NULL;
}

/* Translates \p{NAME} or \P{NAME} of `length` bytes. A script is that of the character itself; PCRE2 from 10.40 on
 * adds characters that other scripts use too, such as the ideographic comma to Han. */
static void translate_property(mt_text *out, const char *source, int64_t length) {
    bool inverse = length > 3 && source[3] == '^', negated = (source[1] == 'P') != inverse;
    char script[80] = "";
    if (length > 5 && length < 60)
        snprintf(script, sizeof script, "\\%c{sc:%.*s", negated ? 'P' : 'p', (int)(length - 3 - inverse),
                 source + 3 + inverse);
    if (*script && compiles(script))
        append(out, script);
    else
        mt_text_append(out, source, length);
}

/* Translates the escape at source[0] == '\\'; returns its length in the source, or 0 if it cannot be translated. */
static int64_t translate_escape(mt_text *out, const char *source, int64_t bytes, bool in_class) {
    static const struct {
        char letter;
        const char *outside, *inside; // of a class; NULL: cannot be translated
    } rows[] = {
        {'s', "[" SPACES "]", SPACES},
        {'S', "[^" SPACES "]", NO_SPACES},
        {'w', "[" WORDS WORDS_OF_LATIN_1 "]", WORDS},
        {'W', "[^" WORDS WORDS_OF_LATIN_1 "]", NULL},
        {'b', "(?:(?<=" WORD ")(?!" WORD ")|(?<!" WORD ")(?=" WORD "))", "\\b"},
        {'B', "(?:(?<=" WORD ")(?=" WORD ")|(?<!" WORD ")(?!" WORD "))", NULL},
        {'h', NULL, NULL}, // a hexadecimal digit
        {'H', NULL, NULL},
        {'v', NULL, NULL}, // a vertical tab
        {'V', NULL, NULL}, // letters
        {'Q', NULL, NULL},
        {'E', NULL, NULL},
        {'G', NULL, NULL}, // the start of a search, which may go on in parts
    };
    char letter = bytes > 1 ? source[1] : 0;
    bool property = letter == 'p' || letter == 'P', braced = bytes > 2 && source[2] == '{';
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const char *set = in_class ? rows[i].inside : rows[i].outside;
        if (rows[i].letter != letter) continue;
        if (set) append(out, set);
        return set ? 2 : 0;
    }
    if (property && !braced) return 0; // a letter
    int64_t length = bytes > 1 ? 2 : 1;
    if (braced && (property || letter == 'x'))
        while (length < bytes && source[length - 1] != '}') length++;
    if (property)
        translate_property(out, source, length);
    else
        mt_text_append(out, source, length);
    return length;
}

/* Translates [:NAME:] or [:^NAME:] within a class; returns its length in the source, or 0. */
static int64_t translate_posix(mt_text *out, const char *source, int64_t bytes) {
    static const struct {
        const char *name, *set, *negated; // negated: NULL if it is not a single property
    } rows[] = {
        {"alpha", "\\p{Alphabetic}", "\\P{Alphabetic}"},
        {"lower", "\\p{Lowercase}", "\\P{Lowercase}"},
        {"upper", "\\p{Uppercase}", "\\P{Uppercase}"},
        {"digit", "\\p{Nd}", "\\P{Nd}"},
        {"cntrl", "\\p{Cc}", "\\P{Cc}"},
        {"ascii", "[:ascii:]", "[:^ascii:]"},
        {"xdigit", "0-9A-Fa-f", NULL},
        {"space", SPACES, NULL},
        {"blank", "\\t\\p{Zs}", NULL},
        {"punct", "\\p{P}\\p{S}", NULL},
        {"word", WORDS, NULL},
        {"alnum", "\\p{Alphabetic}\\p{Nd}", NULL},
        {"graph", "\\p{L}\\p{M}\\p{N}\\p{P}\\p{S}\\p{Cf}\\p{Co}", NULL},
        {"print", "\\p{L}\\p{M}\\p{N}\\p{P}\\p{S}\\p{Cf}\\p{Co}\\p{Zs}", NULL},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        for (int inverse = 0; inverse < 2; inverse++) {
            char text[16];
            const char *set = inverse ? rows[i].negated : rows[i].set;
            int64_t length = snprintf(text, sizeof text, "[:%s%s:]", inverse ? "^" : "", rows[i].name);
            if (!set || length > bytes || memcmp(source, text, (size_t)length) != 0) continue;
            append(out, set);
            return length;
        }
    return 0;
}

/* Translates options of a group, such as (?m: or (?i-m), at their '('; returns the length of "(?" and the letters.
 * Ruby's m is PCRE2's s, and Ruby has no s. 0: not supported; 2 without letters: another kind of group. */
static int64_t translate_group(mt_text *out, const char *source, int64_t bytes) {
    int64_t length = 2;
    while (length < bytes && strchr("imsx-", source[length])) length++;
    append(out, "(?");
    for (int64_t i = 2; i < length; i++) {
        if (source[i] == 's') return 0;
        mt_text_append(out, source[i] == 'm' ? "s" : source + i, 1);
    }
    return length;
}

/* Appends PCRE2's spelling of an Oniguruma pattern; false if the pattern cannot be translated. */
static bool translate_pattern(mt_text *out, const char *source, int64_t bytes) {
    bool in_class = false;
    for (int64_t i = 0, class_start = 0; i < bytes;) {
        char c = source[i], next = i + 1 < bytes ? source[i + 1] : 0;
        bool nested = in_class && c == '[', group = !in_class && c == '(' && next == '?';
        if (c == '\\' || nested || group) {
            int64_t length = c == '\\' ? translate_escape(out, source + i, bytes - i, in_class)
                             : nested  ? translate_posix(out, source + i, bytes - i)
                                       : translate_group(out, source + i, bytes - i);
            if (!length) return false;
            i += length;
            continue;
        }
        if (!in_class && c == '}' && next == '+') return false; // a{1,3}+ is possessive in PCRE2 only
        if (in_class && c == '&' && next == '&') return false;  // intersection of character classes
        if (!in_class && c == '[') {
            in_class = true;
            class_start = i + 1 + (next == '^');
        } else if (in_class && c == ']' && i > class_start) {
            in_class = false;
        }
        mt_text_append(out, &c, 1);
        i++;
        if (!in_class && c == '{' && next == ',' && i + 1 < bytes && isdigit((unsigned char)source[i + 1]))
            append(out, "0"); // {,3}
    }
    return true;
}

int mt_pattern_compile(mt_pattern *out, const char *path, const char *regex, int64_t bytes, mt_error *error) {
    mt_text pattern = {0};
    if (!translate_pattern(&pattern, regex, bytes)) {
        free(pattern.data);
        return mt_error_set(error, "%s: the pattern '%.*s' uses Oniguruma syntax that is not supported", path,
                            (int)(bytes < 200 ? bytes : 200), regex);
    }
    int code;
    PCRE2_SIZE at;
    uint32_t options = PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C | PCRE2_USE_OFFSET_LIMIT;
    pcre2_compile_context *context = pcre2_compile_context_create(NULL);
    if (!context) mt_die("out of memory: a pattern's compile context");
    pcre2_set_newline(context, PCRE2_NEWLINE_LF);
    pcre2_set_max_pattern_length(context, 1 << 16);
    pcre2_code *compiled = pcre2_compile((PCRE2_SPTR)(pattern.data ? pattern.data : ""), (PCRE2_SIZE)pattern.bytes,
                                         options, &code, &at, context);
    pcre2_compile_context_free(context);
    free(pattern.data);
    if (!compiled) {
        PCRE2_UCHAR why[160] = "";
        pcre2_get_error_message(code, why, sizeof why);
        return mt_error_set(error, "%s: the pattern '%.*s' does not compile: %s", path,
                            (int)(bytes < 200 ? bytes : 200), regex, (char *)why);
    }
    pcre2_jit_compile(compiled, PCRE2_JIT_COMPLETE); // if this fails, pcre2_match interprets the pattern
    mt_pattern_literal(out, regex, bytes);
    out->code = compiled;
    return 0;
}

void mt_pattern_free(mt_pattern *pattern) {
    pcre2_code_free(pattern->code);
    free(pattern->source);
    *pattern = (mt_pattern){0};
}

/* A budget for each text turns catastrophic backtracking into an error; common patterns stay far below it on any text.
 * Its unit is that of PCRE2's match limit, which holds for one start of a match. PCRE2 does not say how much a start
 * took, so it is tried with a limit that costs nothing, then with limits 16 times as high, which are paid in full. */
enum { FREE_MATCH_LIMIT = 256, MATCH_LIMIT_STEP = 16, TEXT_BUDGET = 20000000, BYTE_BUDGET = 100 };

/* The limit counts no characters that a start passes without a choice, such as those of a lookahead, so the searches of
 * a text have a limit of processor time too: a hundred times what slow patterns take. */
static void begin_searches(mt_encoder *encoder, int64_t bytes) {
    encoder->match_budget = TEXT_BUDGET + BYTE_BUDGET * bytes;
    encoder->match_began = -1;
    encoder->searches = 0;
    encoder->match_seconds = 5 + 1e-5 * (double)bytes;
    if (encoder->tokenizer->match_seconds > 0) encoder->match_seconds = encoder->tokenizer->match_seconds;
}

static double thread_seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static double seconds_left(mt_encoder *encoder) {
    double now = thread_seconds();
    if (encoder->match_began < 0) encoder->match_began = now;
    return encoder->match_seconds - (now - encoder->match_began);
}

static void open_patterns(mt_encoder *encoder) {
    encoder->match_data = pcre2_match_data_create(1, NULL);
    encoder->match_context = pcre2_match_context_create(NULL);
    encoder->jit_stack = pcre2_jit_stack_create(1 << 15, 1 << 23, NULL); // NULL if PCRE2 has no JIT
    if (!encoder->match_data || !encoder->match_context) mt_die("out of memory: a pattern's match data");
    if (encoder->jit_stack) pcre2_jit_stack_assign(encoder->match_context, NULL, encoder->jit_stack);
}

static void close_patterns(mt_encoder *encoder) {
    pcre2_match_data_free(encoder->match_data);
    pcre2_match_context_free(encoder->match_context);
    pcre2_jit_stack_free(encoder->jit_stack);
}

/* Searches from `from`, at starts up to `last` (PCRE2_UNSET: all). */
static int regex_try(mt_encoder *encoder, const mt_pattern *pattern, const char *text, int64_t bytes, int64_t from,
                     PCRE2_SIZE last, int64_t limit) {
    pcre2_set_match_limit(encoder->match_context, (uint32_t)mt_min(limit, UINT32_MAX));
    pcre2_set_offset_limit(encoder->match_context, last);
    return pcre2_match(pattern->code, (PCRE2_SPTR)text, (PCRE2_SIZE)bytes, (PCRE2_SIZE)from, PCRE2_NO_UTF_CHECK,
                       encoder->match_data, encoder->match_context);
}

/* A match at the start `at`, paid from the text's budget if the free limit does not do. */
static int regex_try_start(mt_encoder *encoder, const mt_pattern *pattern, const char *text, int64_t bytes, int64_t at,
                           bool *paid) {
    int64_t limit = FREE_MATCH_LIMIT;
    int found = regex_try(encoder, pattern, text, bytes, at, (PCRE2_SIZE)at, limit);
    *paid = found == PCRE2_ERROR_MATCHLIMIT;
    double left = *paid ? seconds_left(encoder) : 0;
    while (found == PCRE2_ERROR_MATCHLIMIT) {
        limit *= MATCH_LIMIT_STEP;
        encoder->match_budget -= limit;
        if (encoder->match_budget < 0 || left < 0) break;
        found = regex_try(encoder, pattern, text, bytes, at, (PCRE2_SIZE)at, limit);
        double after = seconds_left(encoder);
        left = found == PCRE2_ERROR_MATCHLIMIT ? after - MATCH_LIMIT_STEP * (left - after) : after; // of the next try
    }
    return found;
}

/* PCRE2's result of a search from `at`. Many starts are tried at once; if one is costly, singly up to that one. Without
 * a match their number doubles, so that few calls search a long text, and time is looked at before it is much. */
static int regex_search(mt_encoder *encoder, const mt_pattern *pattern, const char *text, int64_t bytes, int64_t at) {
    enum { FEW_STARTS = 64, SEARCHES_WITHOUT_CLOCK = 32 };
    if (encoder->searches++ % SEARCHES_WITHOUT_CLOCK == 0 && seconds_left(encoder) < 0) return PCRE2_ERROR_MATCHLIMIT;
    for (int64_t starts = FEW_STARTS; at <= bytes; starts *= 2) {
        int64_t last = mt_min(at + starts - 1, bytes);
        if (starts > FEW_STARTS && seconds_left(encoder) < 0) return PCRE2_ERROR_MATCHLIMIT;
        int found = regex_try(encoder, pattern, text, bytes, at, last < bytes ? (PCRE2_SIZE)last : PCRE2_UNSET,
                              FREE_MATCH_LIMIT);
        if (found == PCRE2_ERROR_NOMATCH && last < bytes) {
            for (at = last + 1; at < bytes && ((unsigned char)text[at] & 0xC0) == 0x80;) at++;
            continue;
        }
        if (found != PCRE2_ERROR_MATCHLIMIT) return found;
        for (bool paid = false; at <= bytes && !paid; at = after_match(text, bytes, at, at)) {
            found = regex_try_start(encoder, pattern, text, bytes, at, &paid);
            if (found != PCRE2_ERROR_NOMATCH) return found;
        }
    }
    return PCRE2_ERROR_NOMATCH;
}

/* pattern_next for a regular expression. */
static int regex_next(mt_encoder *encoder, const mt_pattern *pattern, const char *text, int64_t bytes, int64_t from,
                      int64_t *start, int64_t *end, mt_error *error) {
    int found = regex_search(encoder, pattern, text, bytes, from);
    if (found == PCRE2_ERROR_NOMATCH) return 0;
    if (found == PCRE2_ERROR_MATCHLIMIT)
        return mt_error_set(
            error,
            "%s: the pattern '%.200s' fails on this text of %lld bytes: it %s; get the tokenizer from its "
            "source, or leave out the text",
            encoder->tokenizer->path, pattern->source, (long long)bytes,
            seconds_left(encoder) < 0 ? "takes too long" : "backtracks too much");
    if (found < 0) {
        PCRE2_UCHAR why[160] = "";
        pcre2_get_error_message(found, why, sizeof why);
        return mt_error_set(error, "%s: the pattern '%.200s' fails on this text: %s", encoder->tokenizer->path,
                            pattern->source, (char *)why);
    }
    const PCRE2_SIZE *span = pcre2_get_ovector_pointer(encoder->match_data);
    *start = (int64_t)span[0];
    *end = (int64_t)span[1];
    return *start >= from && *end >= *start ? 1 : 0; // \K may set the start past the end, or before `from`
}

#else

int mt_pattern_compile(mt_pattern *out, const char *path, const char *regex, int64_t bytes, mt_error *error) {
    (void)out, (void)regex, (void)bytes;
    return mt_error_set(
        error,
        "%s: this tokenizer splits text by a regular expression, and this program was built without PCRE2; "
        "install its development package and build again",
        path);
}

void mt_pattern_free(mt_pattern *pattern) {
    free(pattern->source);
    *pattern = (mt_pattern){0};
}

static void begin_searches(mt_encoder *encoder, int64_t bytes) {
    (void)encoder, (void)bytes;
}

static void open_patterns(mt_encoder *encoder) {
    (void)encoder;
}

static void close_patterns(mt_encoder *encoder) {
    (void)encoder;
}

static int regex_next(mt_encoder *encoder, const mt_pattern *pattern, const char *text, int64_t bytes, int64_t from,
                      int64_t *start, int64_t *end, mt_error *error) {
    (void)encoder, (void)pattern, (void)text, (void)bytes, (void)from, (void)start, (void)end;
    return mt_error_set(error, "this program was built without PCRE2");
}

#endif

void mt_rule_free(mt_rule *step) {
    mt_pattern_free(&step->pattern);
    free(step->content);
}

/* Finds the first match at or after `from`: 1 and its span, 0 if there is none, -1 if PCRE2 fails. */
static int pattern_next(mt_encoder *encoder, const mt_pattern *pattern, const char *text, int64_t bytes, int64_t from,
                        int64_t *start, int64_t *end, mt_error *error) {
    if (pattern->code) return regex_next(encoder, pattern, text, bytes, from, start, end, error);
    const char *at = pattern->bytes && from < bytes
                         ? memmem(text + from, (size_t)(bytes - from), pattern->source, (size_t)pattern->bytes)
                         : NULL;
    if (!at) return 0;
    *start = at - text;
    *end = *start + pattern->bytes;
    return 1;
}

/* ---- normalizers ----------------------------------------------------------------------------------------------- */

#ifdef MT_HAVE_UTF8PROC

static bool is_word(uint32_t c) {
    utf8proc_category_t category = utf8proc_category((utf8proc_int32_t)c);
    return (category >= UTF8PROC_CATEGORY_LU && category <= UTF8PROC_CATEGORY_NL) || category == UTF8PROC_CATEGORY_PC ||
           (c >= 0x24B6 && c <= 0x24E9) || c == 0x200C || c == 0x200D;
}

/* True if normalization cannot change the text: NFC keeps text below U+0300, every form keeps ASCII. */
static bool is_normal(mt_unicode_form form, const char *text, int64_t bytes) {
    unsigned char limit = form == MT_NFC ? 0xCC : 0x80;
    for (int64_t i = 0; i < bytes; i++)
        if ((unsigned char)text[i] >= limit) return false;
    return true;
}

typedef struct mark {
    int32_t codepoint;
    int32_t combining_class;
} mark;

/* Appends the marks [count] by combining class, in a stable order (bucket sort). */
static void append_sorted(mt_text *out, const mark *marks, int64_t count) {
    for (int combining_class = 1; count && combining_class < 256; combining_class++)
        for (int64_t i = 0; i < count; i++)
            if (marks[i].combining_class == combining_class) mt_utf8_append(out, (uint32_t)marks[i].codepoint);
}

/* utf8proc sorts a run of combining marks by bubble sort, in quadratic time. Sorting long runs first keeps hostile text
 * linear; every normalization form begins with this sort, so the result is the same. False if there are no long runs.
 */
static bool sort_long_mark_runs(mt_text *out, const char *text, int64_t bytes) {
    enum { LONG = 64 };
    int64_t run = 0, count = 0;
    mark *marks = NULL;
    bool any = false;
    for (int64_t i = 0; i < bytes && !any;) {
        uint32_t c = 0;
        i += mt_utf8_decode(text + i, bytes - i, &c);
        run = utf8proc_get_property((utf8proc_int32_t)c)->combining_class ? run + 1 : 0;
        any = run > LONG;
    }
    if (!any) return false;
    marks = mt_malloc((bytes + 1) * (int64_t)sizeof *marks);
    for (int64_t i = 0; i < bytes;) {
        uint32_t c = 0;
        i += mt_utf8_decode(text + i, bytes - i, &c);
        marks[count] = (mark){(int32_t)c, utf8proc_get_property((utf8proc_int32_t)c)->combining_class};
        if (marks[count++].combining_class) continue;
        append_sorted(out, marks, count - 1);
        mt_utf8_append(out, c);
        count = 0;
    }
    append_sorted(out, marks, count);
    free(marks);
    return true;
}

static int normalize_unicode(const mt_rule *step, const char *path, mt_text *out, const char *text, int64_t bytes,
                             mt_error *error) {
    if (is_normal(step->form, text, bytes)) {
        mt_text_append(out, text, bytes);
        return 0;
    }
    mt_text sorted = {0};
    if (sort_long_mark_runs(&sorted, text, bytes)) {
        text = sorted.data;
        bytes = sorted.bytes;
    }
    int options = UTF8PROC_STABLE;
    options |= step->form == MT_NFC || step->form == MT_NFKC ? UTF8PROC_COMPOSE : UTF8PROC_DECOMPOSE;
    if (step->form == MT_NFKC || step->form == MT_NFKD) options |= UTF8PROC_COMPAT;
    utf8proc_uint8_t *normal = NULL;
    utf8proc_ssize_t length = utf8proc_map((const utf8proc_uint8_t *)text, bytes, &normal, (utf8proc_option_t)options);
    free(sorted.data);
    if (length < 0) return mt_error_set(error, "%s: normalizing the text: %s", path, utf8proc_errmsg(length));
    mt_text_append(out, (const char *)normal, length);
    free(normal);
    return 0;
}

static int lowercase(const char *path, mt_text *out, const char *text, int64_t bytes, mt_error *error) {
    (void)path, (void)error;
    for (int64_t i = 0; i < bytes;) {
        uint32_t c = 0;
        i += mt_utf8_decode(text + i, bytes - i, &c);
        if (c == 0x130) // the only character whose lower case has two characters
            mt_text_append(out, "i\xCC\x87", 3);
        else
            mt_utf8_append(out, (uint32_t)utf8proc_tolower((utf8proc_int32_t)c));
    }
    return 0;
}

#else

static bool is_word(uint32_t c) { // never called: the loader refuses tokens that need it
    (void)c;
    return false;
}

static int normalize_unicode(const mt_rule *step, const char *path, mt_text *out, const char *text, int64_t bytes,
                             mt_error *error) {
    (void)step, (void)path, (void)out, (void)text, (void)bytes;
    return mt_error_set(error, "%s: this program was built without utf8proc", path);
}

static int lowercase(const char *path, mt_text *out, const char *text, int64_t bytes, mt_error *error) {
    (void)out, (void)text, (void)bytes;
    return mt_error_set(error, "%s: this program was built without utf8proc", path);
}

#endif

static void strip(const mt_rule *step, mt_text *out, const char *text, int64_t bytes) {
    int64_t start = 0, end = 0;
    bool any = false;
    for (int64_t i = 0; i < bytes;) {
        uint32_t c = 0;
        int length = mt_utf8_decode(text + i, bytes - i, &c);
        if (!mt_is_white_space(c)) {
            if (!any) start = i;
            any = true;
            end = i + length;
        }
        i += length;
    }
    if (!any) return;
    if (!step->left) start = 0;
    if (!step->right) end = bytes;
    mt_text_append(out, text + start, end - start);
}

static void begin_text(mt_encoder *encoder, int64_t bytes) {
    begin_searches(encoder, bytes);
    encoder->growth = MT_TEXT_GROWTH(bytes);
    encoder->no_memory = false;
}

/* Refuses a text of `bytes` that has grown to `grown` if that is more than the whole text may grow by. */
static int check_growth(const mt_encoder *encoder, int64_t bytes, int64_t grown, mt_error *error) {
    if (grown - bytes <= encoder->growth) return 0;
    return mt_error_set(error, "%s: its normalizers lengthen a text of %lld bytes to over %lld; get the file again",
                        encoder->tokenizer->path, (long long)bytes, (long long)(bytes + encoder->growth));
}

static int replace(mt_encoder *encoder, const mt_rule *step, mt_text *out, const char *text, int64_t bytes,
                   mt_error *error) {
    int64_t copied = 0, start = 0, end = 0, last = -1;
    for (int64_t from = 0; from <= bytes; from = after_match(text, bytes, start, end)) {
        int found = pattern_next(encoder, &step->pattern, text, bytes, from, &start, &end, error);
        if (found < 0) return -1;
        if (!found) break;
        if (is_repeated(start, end, &last)) continue;
        mt_text_append(out, text + copied, start - copied);
        if (check_growth(encoder, bytes, out->bytes + step->content_bytes, error) != 0) return -1;
        mt_text_append(out, step->content, step->content_bytes);
        copied = end;
    }
    mt_text_append(out, text + copied, bytes - copied);
    return 0;
}

int mt_normalize(mt_encoder *encoder, const char **text, int64_t *bytes, mt_error *error) {
    const mt_tokenizer *tokenizer = encoder->tokenizer;
    for (int i = 0; i < tokenizer->normalizer_steps; i++) {
        const mt_rule *step = &tokenizer->normalizer[i];
        mt_text *out = &encoder->normalized[i % 2];
        int failed = 0;
        out->bytes = 0;
        if (step->kind == MT_RULE_UNICODE) {
            failed = normalize_unicode(step, tokenizer->path, out, *text, *bytes, error);
        } else if (step->kind == MT_RULE_LOWERCASE) {
            failed = lowercase(tokenizer->path, out, *text, *bytes, error);
        } else if (step->kind == MT_RULE_STRIP) {
            strip(step, out, *text, *bytes);
        } else if (step->kind == MT_RULE_REPLACE) {
            failed = replace(encoder, step, out, *text, *bytes, error);
        } else if (*bytes) { // MT_RULE_PREPEND
            mt_text_append(out, step->content, step->content_bytes);
            mt_text_append(out, *text, *bytes);
        }
        if (failed || check_growth(encoder, *bytes, out->bytes, error) != 0) return -1;
        encoder->growth -= mt_max(out->bytes - *bytes, 0);
        *text = out->data ? out->data : "";
        *bytes = out->bytes;
    }
    return 0;
}
/* ---- SentencePiece's normalizer: follows normalizer.cc step by step -------------------------------------------- */

/* The longest rule of the charsmap that matches at the start of the text: its length (0 if none) and its replacement.
 * The units are those of Darts-clone (Yata): bit 8 marks a leaf below, the low byte is the label, the high bits are an
 * offset that is XORed to the position. Every position is checked because the file may be damaged. */
static int64_t charsmap_find(const mt_sentencepiece_rules *rules, const char *text, int64_t bytes, const char **out) {
    if (!rules->unit_count) return 0;
    int64_t longest = 0, results = 0;
    uint32_t at = 0, unit = rules->units[0];
    for (int64_t i = 0; i < bytes && results < 32; i++) { // sentencepiece keeps 32 results
        at ^= (unit >> 10) << ((unit & 0x200) >> 6);
        at ^= (unsigned char)text[i];
        if (at >= rules->unit_count) break;
        unit = rules->units[at];
        if ((unit & 0x800000FFu) != (unsigned char)text[i]) break;
        if (!(unit & 0x100)) continue;
        uint32_t leaf = at ^ ((unit >> 10) << ((unit & 0x200) >> 6));
        if (leaf >= rules->unit_count) break;
        uint32_t value = rules->units[leaf] & 0x7FFFFFFFu;
        if (value >= rules->replacement_bytes) break;
        *out = rules->replacements + value;
        longest = i + 1;
        results++;
    }
    return longest;
}

/* Normalizes the longest prefix that matches a rule, or one character; returns its length. */
static int64_t normalize_prefix(const mt_tokenizer *tokenizer, const char *text, int64_t bytes, const char **out,
                                int64_t *out_bytes) {
    int32_t ignored;
    int64_t length = mt_trie_longest(&tokenizer->user_defined, text, bytes, &ignored);
    *out = text;
    *out_bytes = length;
    if (length) return length;
    length = charsmap_find(&tokenizer->rules, text, bytes, out);
    if (length) {
        *out_bytes = (int64_t)strlen(*out);
        return length;
    }
    uint32_t codepoint;
    length = mt_utf8_decode(text, bytes, &codepoint);
    *out = length ? text : "\xEF\xBF\xBD";
    *out_bytes = length ? length : 3;
    return length ? length : 1;
}

static void append_spaced(const mt_tokenizer *tokenizer, mt_text *out, const char *text, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i++) {
        if (text[i] == ' ' && tokenizer->rules.escape_whitespaces)
            mt_text_append(out, MT_SPACE_SYMBOL, 3);
        else
            mt_text_append(out, text + i, 1);
    }
}

static int normalize_sentencepiece(const mt_encoder *encoder, mt_text *out, const char *text, int64_t bytes,
                                   mt_error *error) {
    const mt_tokenizer *tokenizer = encoder->tokenizer;
    const mt_sentencepiece_rules *rules = &tokenizer->rules;
    bool dummy_prefix = rules->add_dummy_prefix && encoder->first;
    const char *part, *end = text + bytes;
    int64_t part_bytes;
    out->bytes = 0;
    while (rules->remove_extra_whitespaces && text < end) {
        int64_t length = normalize_prefix(tokenizer, text, end - text, &part, &part_bytes);
        if (part_bytes != 1 || *part != ' ') break;
        text += length;
    }
    if (text == end) return 0;
    bool after_space = rules->remove_extra_whitespaces;
    if (dummy_prefix && !rules->whitespace_as_suffix) append_spaced(tokenizer, out, " ", 1);
    while (text < end) {
        text += normalize_prefix(tokenizer, text, end - text, &part, &part_bytes);
        for (; after_space && part_bytes && *part == ' '; part++) part_bytes--;
        if (check_growth(encoder, bytes, out->bytes + part_bytes, error) != 0) return -1;
        append_spaced(tokenizer, out, part, part_bytes);
        if (part_bytes) after_space = part[part_bytes - 1] == ' ';
        if (!rules->remove_extra_whitespaces) after_space = false;
    }
    const char *space = rules->escape_whitespaces ? MT_SPACE_SYMBOL : " ";
    int64_t space_bytes = (int64_t)strlen(space);
    while (rules->remove_extra_whitespaces && out->bytes >= space_bytes &&
           !memcmp(out->data + out->bytes - space_bytes, space, (size_t)space_bytes))
        out->bytes -= space_bytes;
    if (dummy_prefix && rules->whitespace_as_suffix) append_spaced(tokenizer, out, " ", 1);
    return 0;
}

/* ---- byte-pair encoding ------------------------------------------------------------------------------------------
 *
 * Sennrich et al. 2016, "Neural machine translation of rare words with subword units": begin with characters or bytes,
 * and merge the best pair of adjacent symbols until no pair may merge.
 *
 * A heap holds the pairs that may merge, so a word of n symbols takes O(n log n) even if the text is hostile. A pair in
 * the heap is stale if one side has merged since. Symbols only grow, so a pair is current exactly if both sides exist
 * and their total length is unchanged.
 */

/* Maps a score to an integer that is smaller the higher the score is. */
static uint32_t score_order(float score) {
    uint32_t bits;
    score += 0.0f; // -0 becomes 0
    memcpy(&bits, &score, sizeof bits);
    return bits & 0x80000000u ? bits : 0x7FFFFFFFu - bits;
}

/* The token that two adjacent symbols merge into, and its priority; false if they do not merge. */
static bool merged_pair(mt_encoder *encoder, const char *text, int32_t left, uint32_t *priority, int32_t *id) {
    const mt_tokenizer *tokenizer = encoder->tokenizer;
    const symbol *a = &encoder->symbols[left], *b = &encoder->symbols[a->next];
    if (tokenizer->kind == MT_KIND_BPE) {
        uint64_t *merge = mt_map_find(&tokenizer->merges, (uint64_t)(uint32_t)a->id << 32 | (uint32_t)b->id);
        if (!merge) return false;
        *priority = (uint32_t)(*merge >> 32);
        *id = (int32_t)*merge;
        return true;
    }
    if (a->frozen || b->frozen) return false;
    *id = mt_token_find(tokenizer, text + a->start, a->bytes + b->bytes);
    if (*id < 0) return false;
    const mt_token *token = &tokenizer->tokens[*id];
    if (token->type == MT_TOKEN_UNUSED) encoder->split_at[*id] = a->bytes;
    *priority = score_order(token->score);
    return token->type == MT_TOKEN_NORMAL || token->type == MT_TOKEN_USER_DEFINED || token->type == MT_TOKEN_UNUSED;
}

/* Makes room for `count` elements in an array for one word. Without memory the array stays, and no_memory makes the
 * whole text an error, which, unlike mt_malloc's, a caller can complete by the name of the file. */
static bool make_room(mt_encoder *encoder, void **array, int64_t *capacity, int64_t count, size_t size) {
    if (count <= *capacity) return true;
    int64_t larger_capacity = mt_max(2 * *capacity, mt_max(count, 256));
    void *larger = encoder->no_memory ? NULL : realloc(*array, (size_t)larger_capacity * size);
    if (!larger) {
        encoder->no_memory = true;
        return false;
    }
    *array = larger;
    *capacity = larger_capacity;
    return true;
}

static bool symbols_reserve(mt_encoder *encoder, int64_t count) {
    void *symbols = encoder->symbols;
    bool done = make_room(encoder, &symbols, &encoder->symbol_capacity, count, sizeof *encoder->symbols);
    encoder->symbols = symbols;
    return done;
}

static void heap_push(mt_encoder *encoder, merge_pair pair) {
    void *pairs = encoder->heap;
    bool done = make_room(encoder, &pairs, &encoder->heap_capacity, encoder->heap_count + 1, sizeof *encoder->heap);
    merge_pair *heap = encoder->heap = pairs;
    if (!done) return;
    int64_t at = encoder->heap_count++;
    for (; at > 0 && heap[(at - 1) / 2].order > pair.order; at = (at - 1) / 2) heap[at] = heap[(at - 1) / 2];
    heap[at] = pair;
}

static merge_pair heap_pop(mt_encoder *encoder) {
    merge_pair *heap = encoder->heap, top = heap[0], last = heap[--encoder->heap_count];
    int64_t at = 0, count = encoder->heap_count;
    for (int64_t child; (child = 2 * at + 1) < count; at = child) {
        if (child + 1 < count && heap[child + 1].order < heap[child].order) child++;
        if (heap[child].order >= last.order) break;
        heap[at] = heap[child];
    }
    heap[at] = last;
    return top;
}

/* Pushes the pair of `left` and its next symbol onto the heap if they may merge. */
static void consider(mt_encoder *encoder, const char *text, int32_t left) {
    if (left < 0 || encoder->symbols[left].next < 0) return;
    int32_t right = encoder->symbols[left].next, id;
    uint32_t priority;
    if (!merged_pair(encoder, text, left, &priority, &id)) return;
    int32_t bytes = encoder->symbols[left].bytes + encoder->symbols[right].bytes;
    heap_push(encoder, (merge_pair){(uint64_t)priority << 32 | (uint32_t)left, right, bytes, id});
}

/* Merges the symbols [count] of `text` until no pair may merge. */
static void merge_symbols(mt_encoder *encoder, const char *text, int64_t count) {
    symbol *symbols = encoder->symbols;
    encoder->heap_count = 0;
    for (int64_t i = 0; i + 1 < count; i++) consider(encoder, text, (int32_t)i);
    while (encoder->heap_count) {
        merge_pair best = heap_pop(encoder);
        int32_t left_index = (int32_t)(uint32_t)best.order;
        symbol *left = &symbols[left_index], *right = &symbols[best.right];
        if (!left->bytes || !right->bytes || left->bytes + right->bytes != best.bytes) continue;
        left->bytes = best.bytes;
        left->id = best.id;
        left->next = right->next;
        right->bytes = 0;
        if (right->next >= 0) symbols[right->next].previous = left_index;
        consider(encoder, text, left->previous);
        consider(encoder, text, left_index);
    }
}

/* ---- parts of long words ---------------------------------------------------------------------------------------
 *
 * A file without a pre-tokenizer makes one word of a whole text, and a text without spaces may be one by any rules.
 * Such a word is merged in parts, so that memory does not grow with it. A part ends between two characters that are
 * neighbours in no token: what merges is a token, so no merge crosses that place.
 */

enum { PART_SYMBOLS = 1 << 16 };

/* The first character (byte-level: byte) of the text: its length, or 0 if it is ill-formed. */
static int first_character(const mt_tokenizer *tokenizer, const char *text, int64_t bytes, uint32_t *character) {
    if (!tokenizer->byte_level) return mt_utf8_decode(text, bytes, character);
    *character = (unsigned char)*text;
    return 1;
}

/* In a tokenizer.json unknown characters may be fused or dropped, and a merge may name the tokens of their bytes. */
static bool unknown_stays_apart(const mt_tokenizer *tokenizer) {
    if (tokenizer->kind != MT_KIND_BPE) return true; // encode_sentencepiece_word fuses across parts
    if (!tokenizer->byte_fallback) return false;
    for (int byte = 0; byte < 256; byte++)
        if (tokenizer->byte_ids[byte] < 0) return false;
    for (int64_t i = 0; i < tokenizer->merges.capacity; i++) {
        uint64_t key = tokenizer->merges.slots[i].key_plus_one - 1;
        if (tokenizer->merges.slots[i].key_plus_one == 0) continue;
        for (int byte = 0; byte < 256; byte++)
            if (tokenizer->byte_ids[byte] == (int32_t)(key >> 32) || tokenizer->byte_ids[byte] == (int32_t)key)
                return false;
    }
    return true;
}

static void find_neighbours(mt_encoder *encoder) {
    const mt_tokenizer *tokenizer = encoder->tokenizer;
    encoder->has_neighbours = true;
    encoder->unknown_apart = unknown_stays_apart(tokenizer);
    for (int32_t id = 0; id < tokenizer->vocab_size; id++) {
        if (tokenizer->tokens[id].type == MT_TOKEN_ABSENT) continue;
        const char *text = mt_token_text(tokenizer, id), *end = text + tokenizer->tokens[id].text_bytes;
        uint32_t left = 0, right = 0;
        for (int before = 0, length; text < end; text += mt_max(length, 1)) {
            length = first_character(tokenizer, text, end - text, &right);
            if (before > 0 && length > 0) mt_map_insert(&encoder->neighbours, (uint64_t)left << 32 | right, 0);
            before = length;
            left = right;
        }
    }
}

static bool is_known(const mt_tokenizer *tokenizer, const char *text, int64_t bytes) {
    int32_t id = mt_token_find(tokenizer, text, bytes);
    return id >= 0 && id != tokenizer->unknown;
}

/* True if a part of the word that has `count` symbols may end at `at`. */
static bool may_end_part(mt_encoder *encoder, const char *word, int64_t bytes, int64_t at, int64_t count) {
    const mt_tokenizer *tokenizer = encoder->tokenizer;
    if (count < PART_SYMBOLS || tokenizer->has_unused) return false; // UNUSED pieces need all merges of the word
    if (!encoder->has_neighbours) find_neighbours(encoder);
    int64_t start = at - 1;
    while (!tokenizer->byte_level && start > 0 && ((unsigned char)word[start] & 0xC0) == 0x80) start--;
    uint32_t left = 0, right = 0;
    int length = first_character(tokenizer, word + at, bytes - at, &right);
    if (length == 0 || first_character(tokenizer, word + start, at - start, &left) != at - start) return false;
    if (mt_map_find(&encoder->neighbours, (uint64_t)left << 32 | right)) return false;
    return encoder->unknown_apart ||
           (is_known(tokenizer, word + start, at - start) && is_known(tokenizer, word + at, length));
}

/* ---- words: BPE of tokenizer.json and GPT-2 -------------------------------------------------------------------- */

static void symbol_push(mt_encoder *encoder, int64_t *count, int32_t id, int32_t start, int32_t bytes) {
    if (!symbols_reserve(encoder, *count + 1)) return;
    symbol *symbols = encoder->symbols;
    int32_t at = (int32_t)(*count)++;
    symbols[at] = (symbol){at - 1, -1, start, bytes, id, false};
    if (at > 0) symbols[at - 1].next = at;
}

/* Pushes the tokens <0xXX> of an unknown character; false unless every byte has one. */
static bool push_fallback(mt_encoder *encoder, int64_t *count, const char *word, int32_t start, int32_t bytes) {
    const int32_t *byte_ids = encoder->tokenizer->byte_ids;
    for (int32_t i = start; i < start + bytes; i++)
        if (byte_ids[(unsigned char)word[i]] < 0) return false;
    for (int32_t i = start; i < start + bytes; i++) symbol_push(encoder, count, byte_ids[(unsigned char)word[i]], i, 1);
    return true;
}

/* Cuts the word, or its first part of *done bytes, into characters (byte-level: bytes) of the vocabulary. An unknown
 * character becomes its bytes, or the unknown token (one per run if fuse_unknown), or nothing, in the order of
 * `tokenizers`. */
static int64_t first_symbols(mt_encoder *encoder, const char *word, int32_t bytes, int32_t *done) {
    const mt_tokenizer *tokenizer = encoder->tokenizer;
    int64_t count = 0;
    int32_t unknown_start = 0, unknown_bytes = 0, start = 0;
    for (int32_t length; start < bytes && !may_end_part(encoder, word, bytes, start, count); start += length) {
        mt_utf8_state state;
        length = tokenizer->byte_level ? 1 : mt_utf8_scan(word + start, bytes - start, &state);
        int32_t id = tokenizer->byte_level ? tokenizer->byte_ids[(unsigned char)word[start]]
                                           : mt_token_find(tokenizer, word + start, length);
        if (id < 0 && tokenizer->byte_fallback && push_fallback(encoder, &count, word, start, length)) continue;
        if (id < 0 && tokenizer->unknown < 0) continue;
        bool fused = id < 0 && unknown_bytes && tokenizer->fuse_unknown;
        if (unknown_bytes && !fused) {
            symbol_push(encoder, &count, tokenizer->unknown, unknown_start, unknown_bytes);
            unknown_bytes = 0;
        }
        if (id >= 0) {
            symbol_push(encoder, &count, id, start, length);
        } else {
            if (!fused) unknown_start = start;
            unknown_bytes += length;
        }
    }
    if (unknown_bytes) symbol_push(encoder, &count, tokenizer->unknown, unknown_start, unknown_bytes);
    *done = start;
    return count;
}

static void encode_new_word(mt_encoder *encoder, const char *word, int32_t bytes, mt_ids *ids) {
    int32_t whole = encoder->tokenizer->ignore_merges ? mt_token_find(encoder->tokenizer, word, bytes) : -1;
    if (whole >= 0) {
        mt_ids_push(ids, whole);
        return;
    }
    for (int32_t part; bytes > 0; word += part, bytes -= part) {
        int64_t count = first_symbols(encoder, word, bytes, &part);
        merge_symbols(encoder, word, count);
        for (int32_t at = count ? 0 : -1; at >= 0; at = encoder->symbols[at].next)
            mt_ids_push(ids, encoder->symbols[at].id);
    }
}

/* ---- words: SentencePiece's BPE, as in bpe_model.cc ------------------------------------------------------------ */

/* The length of the character according to its first byte (sentencepiece's OneCharLen). */
static int64_t one_character(const char *text, int64_t bytes) {
    int64_t length = "\1\1\1\1\1\1\1\1\1\1\1\1\2\2\3\4"[(unsigned char)*text >> 4];
    return length < bytes ? length : bytes;
}

/* Appends the id of a piece. An unknown piece becomes its bytes; else a run of unknown pieces is one token. */
static void push_piece(const mt_tokenizer *tokenizer, const char *piece, int64_t bytes, int32_t id, bool *after_unknown,
                       mt_ids *ids) {
    bool unknown = id == tokenizer->unknown;
    if (unknown && tokenizer->byte_fallback) {
        for (int64_t i = 0; i < bytes; i++) mt_ids_push(ids, tokenizer->byte_ids[(unsigned char)piece[i]]);
    } else if (!unknown || !*after_unknown) {
        mt_ids_push(ids, id);
    }
    *after_unknown = unknown;
}

/* Splits an UNUSED piece into the two parts that it was merged from, recursively. */
static void push_resegmented(const mt_encoder *encoder, const char *piece, int64_t bytes, bool *after_unknown,
                             mt_ids *ids) {
    const mt_tokenizer *tokenizer = encoder->tokenizer;
    int32_t id = mt_token_find(tokenizer, piece, bytes);
    if (id < 0) id = tokenizer->unknown;
    int32_t left = tokenizer->tokens[id].type == MT_TOKEN_UNUSED ? encoder->split_at[id] : 0;
    if (!left) {
        push_piece(tokenizer, piece, bytes, id, after_unknown, ids);
        return;
    }
    push_resegmented(encoder, piece, left, after_unknown, ids);
    push_resegmented(encoder, piece + left, bytes - left, after_unknown, ids);
}

/* Cuts the word, or its first part of *done bytes, into user-defined pieces and characters. */
static int64_t first_pieces(mt_encoder *encoder, const char *text, int32_t bytes, int32_t *done) {
    int64_t count = 0;
    int32_t at = 0, ignored;
    while (at < bytes && !may_end_part(encoder, text, bytes, at, count)) {
        int64_t before = count,
                defined = mt_trie_longest(&encoder->tokenizer->user_defined, text + at, bytes - at, &ignored);
        int32_t length = (int32_t)(defined ? defined : one_character(text + at, bytes - at));
        symbol_push(encoder, &count, -1, at, length);
        if (count > before) encoder->symbols[before].frozen = defined > 0;
        at += length;
    }
    *done = at;
    return count;
}

static void encode_sentencepiece_word(mt_encoder *encoder, const char *text, int32_t bytes, mt_ids *ids) {
    const mt_tokenizer *tokenizer = encoder->tokenizer;
    bool after_unknown = false;
    if (tokenizer->has_unused) memset(encoder->split_at, 0, (size_t)tokenizer->vocab_size * sizeof *encoder->split_at);
    for (int32_t part; bytes > 0; text += part, bytes -= part) {
        int64_t count = first_pieces(encoder, text, bytes, &part);
        const symbol *symbols = encoder->symbols;
        merge_symbols(encoder, text, count);
        for (int32_t at = count ? 0 : -1; at >= 0; at = symbols[at].next)
            push_resegmented(encoder, text + symbols[at].start, symbols[at].bytes, &after_unknown, ids);
    }
}

/* ---- words: cache and boundaries ------------------------------------------------------------------------------- */

/* Natural text repeats its words: each slot of the cache keeps the last word that hashed to it. */
static void encode_word(mt_encoder *encoder, const char *word, int32_t bytes, mt_ids *ids) {
    bool cached = bytes <= CACHE_BYTES && !encoder->tokenizer->has_unused;
    cache_slot *slot = cached ? &encoder->cache[mt_hash(word, bytes) & (CACHE_SLOTS - 1)] : NULL;
    if (slot && slot->bytes == bytes && !memcmp(slot->word, word, (size_t)bytes)) {
        for (int i = 0; i < slot->count; i++) mt_ids_push(ids, slot->ids[i]);
        return;
    }
    int64_t before = ids->count;
    if (encoder->tokenizer->kind == MT_KIND_BPE)
        encode_new_word(encoder, word, bytes, ids);
    else
        encode_sentencepiece_word(encoder, word, bytes, ids);
    int64_t count = ids->count - before;
    if (!slot || count > CACHE_IDS || encoder->no_memory) return;
    slot->bytes = (uint8_t)bytes;
    slot->count = (uint8_t)count;
    memcpy(slot->word, word, (size_t)bytes);
    if (count) memcpy(slot->ids, ids->data + before, (size_t)count * sizeof *slot->ids);
}

static bool is_space_symbol(const char *text, int64_t bytes) {
    return bytes >= 3 && !memcmp(text, MT_SPACE_SYMBOL, 3);
}

/* The end of the first word: before a space symbol that follows another character. */
static int64_t word_end(const char *text, int64_t bytes) {
    int64_t at = 0;
    while (is_space_symbol(text + at, bytes - at)) at += 3;
    while (at < bytes && !is_space_symbol(text + at, bytes - at)) at++;
    return at;
}

void mt_tokenizer_find_words(mt_tokenizer *tokenizer) {
    if (tokenizer->byte_level || tokenizer->has_unused || mt_token_find(tokenizer, MT_SPACE_SYMBOL, 3) < 0) return;
    for (int32_t id = 0; id < tokenizer->vocab_size; id++) {
        const mt_token *token = &tokenizer->tokens[id];
        if (token->type != MT_TOKEN_ABSENT &&
            word_end(mt_token_text(tokenizer, id), token->text_bytes) < token->text_bytes)
            return;
    }
    tokenizer->words_at_spaces = true;
}

static int fail_without_memory(const mt_encoder *encoder, int64_t bytes, mt_error *error) {
    return mt_error_set(error,
                        "out of memory: %s cannot cut a text of %lld bytes, since tokens may cross every place in it; "
                        "split the text",
                        encoder->tokenizer->path, (long long)bytes);
}

static int encode_words(mt_encoder *encoder, const char *text, int64_t bytes, mt_ids *ids, mt_error *error) {
    for (int64_t length; bytes; text += length, bytes -= length) {
        length = encoder->tokenizer->words_at_spaces ? word_end(text, bytes) : bytes;
        if (length > INT32_MAX / 2)
            return mt_error_set(error, "%s: a text of %lld bytes without a word boundary is too long; split it",
                                encoder->tokenizer->path, (long long)length);
        encode_word(encoder, text, (int32_t)length, ids);
        if (encoder->no_memory) return fail_without_memory(encoder, length, error);
    }
    return 0;
}

/* ---- unigram, as in unigram_model.cc --------------------------------------------------------------------------- */

/* Makes room for a path to `end`. Nodes that no path has reached yet are clean. */
static bool reserve_path(mt_encoder *encoder, int64_t end) {
    int64_t before = encoder->path_capacity;
    void *path = encoder->path;
    bool done = make_room(encoder, &path, &encoder->path_capacity, end + 1, sizeof *encoder->path);
    encoder->path = path;
    for (int64_t i = before; i < encoder->path_capacity; i++) encoder->path[i] = (path_node){0, -1, -1, -1};
    return done;
}

/* Keeps the path to `end` whose last piece begins at `start` if it is the first or the best so far. */
static void offer_path(mt_encoder *encoder, int64_t start, int64_t end, int32_t id, float score) {
    if (!reserve_path(encoder, end)) return;
    path_node *node = &encoder->path[end];
    if (node->start >= 0 && score <= node->score) return;
    *node = (path_node){score, (int32_t)start, -1, id};
}

/* Extends the best path to `start` by every piece that begins there, and by the unknown token if no piece is exactly
 * one character. Returns the furthest position reached. */
static int64_t extend_paths(mt_encoder *encoder, const char *text, int64_t bytes, int64_t start) {
    const mt_tokenizer *tokenizer = encoder->tokenizer;
    const mt_trie *pieces = &tokenizer->pieces;
    int64_t character = one_character(text + start, bytes - start), furthest = start + character;
    float base = encoder->path[start].score;
    bool single = false;
    int64_t node = pieces->count ? 0 : -1;
    for (int64_t end = start; end < bytes && node >= 0;) {
        node = mt_trie_step(pieces, node, text[end++]);
        if (node < 0 || pieces->values[node] < 0) continue;
        const mt_token *token = &tokenizer->tokens[pieces->values[node]];
        float score = token->score;
        if (token->type == MT_TOKEN_USER_DEFINED) score = (float)(end - start) * tokenizer->max_score - 0.1f;
        offer_path(encoder, start, end, pieces->values[node], score + base);
        if (end - start == character) single = true;
        if (end > furthest) furthest = end;
    }
    float unknown_score = tokenizer->min_score - 10.0f;
    if (!single) offer_path(encoder, start, start + character, tokenizer->unknown, unknown_score + base);
    return furthest;
}

/* Appends the pieces of the best path to `end`, and leaves clean nodes but the first, which `end` becomes. */
static void push_best_path(mt_encoder *encoder, const char *text, int64_t end, bool *after_unknown, mt_ids *ids) {
    path_node *path = encoder->path;
    float score = path[end].score;
    for (int64_t at = end; at > 0; at = path[at].start) path[path[at].start].next = (int32_t)at;
    for (int64_t at = 0, next; at < end; at = next) {
        next = path[at].next;
        push_piece(encoder->tokenizer, text + at, next - at, path[next].id, after_unknown, ids);
    }
    for (int64_t at = 0; at <= end; at++) path[at] = (path_node){0, -1, -1, -1};
    path[0] = (path_node){score, 0, -1, -1};
}

/* The Viterbi algorithm over characters. Sums are float and are rebased to zero below -100000, as in sentencepiece 0.2,
 * so that near ties are broken alike in texts of any length. A long text ends a part where all paths meet. */
static void encode_unigram(mt_encoder *encoder, const char *text, int64_t bytes, mt_ids *ids) {
    int64_t furthest = 0;
    bool after_unknown = false;
    if (!reserve_path(encoder, 0)) return;
    encoder->path[0] = (path_node){0, 0, -1, -1};
    for (int64_t start = 0; start < bytes && !encoder->no_memory; start += one_character(text + start, bytes - start)) {
        if (start >= PART_SYMBOLS && furthest == start) {
            push_best_path(encoder, text, start, &after_unknown, ids);
            text += start;
            bytes -= start;
            start = furthest = 0;
        }
        path_node *path = encoder->path;
        float base = path[start].score;
        for (int64_t i = start; base < -100000.0f && i <= furthest; i++)
            if (path[i].start >= 0) path[i].score -= base;
        furthest = mt_max(furthest, extend_paths(encoder, text, bytes, start));
    }
    if (!encoder->no_memory) {
        push_best_path(encoder, text, bytes, &after_unknown, ids);
        return;
    }
    free(encoder->path);
    encoder->path = NULL;
    encoder->path_capacity = 0;
}

static int encode_sentencepiece(mt_encoder *encoder, const char *text, int64_t bytes, mt_ids *ids, mt_error *error) {
    mt_text *normal = &encoder->normalized[0];
    if (normalize_sentencepiece(encoder, normal, text, bytes, error) != 0) return -1;
    if (encoder->tokenizer->kind == MT_KIND_SENTENCEPIECE_BPE)
        return encode_words(encoder, normal->data, normal->bytes, ids, error);
    if (normal->bytes > INT32_MAX / 2)
        return mt_error_set(error, "%s: a text of %lld bytes is too long; split it", encoder->tokenizer->path,
                            (long long)normal->bytes);
    encode_unigram(encoder, normal->data, normal->bytes, ids);
    return encoder->no_memory ? fail_without_memory(encoder, normal->bytes, error) : 0;
}

/* ---- pre-tokenizers -------------------------------------------------------------------------------------------- */

/* Applies the pre-tokenizers from `index` on and encodes the words. `first`: the text begins the document. */
static int pretokenize(mt_encoder *encoder, int index, bool first, const char *text, int64_t bytes, mt_ids *ids,
                       mt_error *error);

/* The piece that a split is building: the behaviors differ only in the spans that may join it. */
typedef struct piece_span {
    int64_t start, end;
    bool any, is_match; // is_match: the last span that joined was a match
} piece_span;

static bool may_join(mt_behavior behavior, const piece_span *piece, bool is_match) {
    if (!piece->any) return false;
    if (behavior == MT_CONTIGUOUS) return is_match == piece->is_match;
    if (behavior == MT_MERGED_WITH_PREVIOUS) return is_match && !piece->is_match;
    if (behavior == MT_MERGED_WITH_NEXT) return !is_match && piece->is_match;
    return false;
}

/* Passes a complete piece of step `index` to the next step. */
static int emit_piece(mt_encoder *encoder, int index, bool first, const char *text, const piece_span *piece,
                      mt_ids *ids, mt_error *error) {
    bool removed = piece->is_match && encoder->tokenizer->pretokenizer[index].behavior == MT_REMOVED;
    if (!piece->any || removed) return 0;
    return pretokenize(encoder, index + 1, first && piece->start == 0, text + piece->start, piece->end - piece->start,
                       ids, error);
}

/* The next span of a split joins the piece, or completes it and begins another. */
static int split_span(mt_encoder *encoder, int index, bool first, const char *text, piece_span span, piece_span *piece,
                      mt_ids *ids, mt_error *error) {
    if (may_join(encoder->tokenizer->pretokenizer[index].behavior, piece, span.is_match)) {
        piece->end = span.end;
        piece->is_match = span.is_match;
        return 0;
    }
    piece_span done = *piece;
    *piece = span;
    return emit_piece(encoder, index, first, text, &done, ids, error);
}

static int split(mt_encoder *encoder, int index, bool first, const char *text, int64_t bytes, mt_ids *ids,
                 mt_error *error) {
    const mt_rule *step = &encoder->tokenizer->pretokenizer[index];
    piece_span piece = {0};
    int64_t done = 0, start = 0, end = 0, last = -1;
    for (int64_t from = 0; from < bytes; from = after_match(text, bytes, start, end)) {
        int found = pattern_next(encoder, &step->pattern, text, bytes, from, &start, &end, error);
        if (found < 0) return -1;
        if (!found) break;
        if (is_repeated(start, end, &last)) continue;
        piece_span gap = {done, start, true, step->invert}, match = {start, end, true, !step->invert};
        if (start > done && split_span(encoder, index, first, text, gap, &piece, ids, error)) return -1;
        if (split_span(encoder, index, first, text, match, &piece, ids, error)) return -1;
        done = end;
    }
    piece_span rest = {done, bytes, true, step->invert};
    if (done < bytes && split_span(encoder, index, first, text, rest, &piece, ids, error)) return -1;
    return emit_piece(encoder, index, first, text, &piece, ids, error);
}

static int metaspace(mt_encoder *encoder, int index, bool first, const char *text, int64_t bytes, mt_ids *ids,
                     mt_error *error) {
    const mt_rule *step = &encoder->tokenizer->pretokenizer[index];
    mt_text *out = &encoder->prefixed[index];
    out->bytes = 0;
    bool has_prefix =
        text[0] == ' ' || (bytes >= step->content_bytes && !memcmp(text, step->content, (size_t)step->content_bytes));
    if (!has_prefix && (step->prefix == MT_PREFIX_ALWAYS || (step->prefix == MT_PREFIX_FIRST && first)))
        mt_text_append(out, step->content, step->content_bytes);
    for (int64_t i = 0; i < bytes; i++) {
        if (text[i] == ' ')
            mt_text_append(out, step->content, step->content_bytes);
        else
            mt_text_append(out, text + i, 1);
    }
    return split(encoder, index, first, out->data, out->bytes, ids, error);
}

static int pretokenize(mt_encoder *encoder, int index, bool first, const char *text, int64_t bytes, mt_ids *ids,
                       mt_error *error) {
    const mt_tokenizer *tokenizer = encoder->tokenizer;
    if (!bytes) return 0;
    if (index == tokenizer->pretokenizer_steps) return encode_words(encoder, text, bytes, ids, error);
    const mt_rule *step = &tokenizer->pretokenizer[index];
    if (step->kind == MT_RULE_METASPACE) return metaspace(encoder, index, first, text, bytes, ids, error);
    if (step->kind == MT_RULE_BYTE_LEVEL && step->prefix == MT_PREFIX_ALWAYS && text[0] != ' ') {
        mt_text *out = &encoder->prefixed[index];
        out->bytes = 0;
        mt_text_append(out, " ", 1);
        mt_text_append(out, text, bytes);
        text = out->data;
        bytes = out->bytes;
    }
    return split(encoder, index, first, text, bytes, ids, error);
}

/* ---- the encoder and added tokens ------------------------------------------------------------------------------ */

mt_encoder *mt_encoder_open(const mt_tokenizer *tokenizer) {
    mt_encoder *encoder = mt_calloc(sizeof *encoder);
    encoder->tokenizer = tokenizer;
    open_patterns(encoder);
    begin_text(encoder, 0); // for texts of the tokenizer's own
    if (tokenizer->kind != MT_KIND_BYTES) encoder->cache = mt_calloc(CACHE_SLOTS * (int64_t)sizeof *encoder->cache);
    if (tokenizer->has_unused)
        encoder->split_at = mt_calloc(tokenizer->vocab_size * (int64_t)sizeof *encoder->split_at);
    return encoder;
}

void mt_encoder_close(mt_encoder *encoder) {
    if (!encoder) return;
    close_patterns(encoder);
    for (int i = 0; i < MT_MAX_STEPS; i++) free(encoder->prefixed[i].data);
    mt_trie_free(&encoder->controls);
    free(encoder->normalized[0].data);
    free(encoder->normalized[1].data);
    free(encoder->repaired.data);
    free(encoder->path);
    free(encoder->neighbours.slots);
    free(encoder->split_at);
    free(encoder->heap);
    free(encoder->symbols);
    free(encoder->cache);
    free(encoder);
}

/* True if the character before text[at] (with `after`: the one at text[at]) exists and is a \w. */
static bool word_beside(const char *text, int64_t bytes, int64_t at, bool after) {
    uint32_t c = 0;
    int64_t from = at;
    if (!after)
        for (from--; from > 0 && ((unsigned char)text[from] & 0xC0) == 0x80;) from--;
    return from >= 0 && from < bytes && mt_utf8_decode(text + from, bytes - from, &c) && is_word(c);
}

/* Extends the span of an added token over the white space that it strips; to the left at most to `limit`. */
static void strip_around(const mt_added_token *added, const char *text, int64_t bytes, int64_t limit, int64_t *start,
                         int64_t *end) {
    uint32_t c;
    int length;
    while (added->rstrip && *end < bytes && (length = mt_utf8_decode(text + *end, bytes - *end, &c)) &&
           mt_is_white_space(c))
        *end += length;
    while (added->lstrip && *start > limit) {
        int64_t at = *start - 1;
        while (at > limit && ((unsigned char)text[at] & 0xC0) == 0x80) at--;
        if (!mt_utf8_decode(text + at, *start - at, &c) || !mt_is_white_space(c)) break;
        *start = at;
    }
}

/* Notes that ids[index] is an added token which stands for the text's bytes [start, end). */
static void push_place(mt_encoder *encoder, int64_t index, int64_t start, int64_t end) {
    if (!encoder->places) return;
    mt_ids_push(encoder->places, (int32_t)index);
    mt_ids_push(encoder->places, (int32_t)start);
    mt_ids_push(encoder->places, (int32_t)end);
}

static int encode_parts(mt_encoder *encoder, int pass, bool first, const char *text, int64_t bytes, mt_ids *ids,
                        mt_error *error);

/* Encodes text without added tokens of this pass: pass 0 normalizes it, pass 1 cuts it into words. */
static int encode_part(mt_encoder *encoder, int pass, bool first, const char *text, int64_t bytes, mt_ids *ids,
                       mt_error *error) {
    if (pass == 1) return pretokenize(encoder, 0, first, text, bytes, ids, error);
    if (mt_normalize(encoder, &text, &bytes, error)) return -1;
    return encode_parts(encoder, 1, first, text, bytes, ids, error);
}

/* Cuts the text at the added tokens of a pass (0: before normalization, 1: after), the leftmost and longest first.
 * `first`: the text begins the document. */
static int encode_parts(mt_encoder *encoder, int pass, bool first, const char *text, int64_t bytes, mt_ids *ids,
                        mt_error *error) {
    const mt_trie *trie = &encoder->tokenizer->added_tries[pass];
    int64_t done = 0;
    for (int64_t at = 0; trie->count && at < bytes;) {
        int32_t index = 0;
        int64_t length = mt_trie_longest(trie, text + at, bytes - at, &index);
        int64_t start = at, end = at + length;
        at += length ? length : 1;
        if (!length) continue;
        const mt_added_token *added = &encoder->tokenizer->added[index];
        if (encoder->part && encoder->tokenizer->tokens[added->id].type == MT_TOKEN_CONTROL) continue;
        if (added->single_word && (word_beside(text, bytes, start, false) || word_beside(text, bytes, end, true)))
            continue;
        strip_around(added, text, bytes, done, &start, &end);
        if (start > done && encode_part(encoder, pass, first && done == 0, text + done, start - done, ids, error))
            return -1;
        if (pass == 0) push_place(encoder, ids->count, start, end);
        mt_ids_push(ids, added->id);
        done = end;
    }
    if (done == bytes) return 0;
    return encode_part(encoder, pass, first && done == 0, text + done, bytes - done, ids, error);
}

static int encode(mt_encoder *encoder, const char *text, int64_t bytes, mt_ids *ids, mt_error *error) {
    const mt_tokenizer *tokenizer = encoder->tokenizer;
    if (bytes > MT_MAX_TEXT)
        return mt_error_set(error, "a text of %lld bytes is too long (the limit is %lld bytes); split it",
                            (long long)bytes, (long long)MT_MAX_TEXT);
    if (tokenizer->kind == MT_KIND_BYTES) {
        for (int64_t i = 0; i < bytes; i++) mt_ids_push(ids, (unsigned char)text[i]);
        return 0;
    }
    if (tokenizer->kind != MT_KIND_BPE) return encode_sentencepiece(encoder, text, bytes, ids, error);
    if (!mt_utf8_is_valid(text, bytes)) {
        encoder->repaired.bytes = 0;
        mt_utf8_repair(&encoder->repaired, text, bytes);
        text = encoder->repaired.data;
        bytes = encoder->repaired.bytes;
    }
    return encode_parts(encoder, 0, encoder->first, text, bytes, ids, error);
}

static int encode_as(mt_encoder *encoder, bool part, bool first, const char *text, int64_t bytes, mt_ids *ids,
                     mt_error *error) {
    int64_t before = ids->count;
    begin_text(encoder, bytes);
    encoder->part = part;
    encoder->first = first;
    if (bytes <= 0 || !encode(encoder, text, bytes, ids, error)) return 0;
    ids->count = before;
    return -1;
}

int mt_encode(mt_encoder *encoder, const char *text, int64_t bytes, mt_ids *ids, mt_error *error) {
    return encode_as(encoder, false, true, text, bytes, ids, error);
}

int mt_encode_part(mt_encoder *encoder, const char *text, int64_t bytes, bool first, mt_ids *ids, mt_error *error) {
    return encode_as(encoder, true, first, text, bytes, ids, error);
}

/* Finds SentencePiece's control tokens, which its own encoder leaves as texts. */
static int encode_controls(mt_encoder *encoder, const char *text, int64_t bytes, mt_ids *ids, mt_error *error) {
    const mt_tokenizer *tokenizer = encoder->tokenizer;
    int64_t done = 0;
    for (int32_t id = 0; id < tokenizer->vocab_size && encoder->controls.count == 0; id++)
        if (tokenizer->tokens[id].type == MT_TOKEN_CONTROL && tokenizer->tokens[id].text_bytes > 0)
            mt_trie_insert(&encoder->controls, mt_token_text(tokenizer, id), tokenizer->tokens[id].text_bytes, id);
    for (int64_t at = 0; at < bytes && encoder->controls.count > 0;) {
        int32_t id = 0;
        int64_t length = mt_trie_longest(&encoder->controls, text + at, bytes - at, &id);
        int64_t end = at + mt_max(length, 1);
        if (length > 0) {
            if (mt_encode_part(encoder, text + done, at - done, done == 0, ids, error) != 0) return -1;
            push_place(encoder, ids->count, at, end);
            mt_ids_push(ids, id);
            done = end;
        }
        at = end;
    }
    return mt_encode_part(encoder, text + done, bytes - done, done == 0, ids, error);
}

int mt_encode_places(mt_encoder *encoder, const char *text, int64_t bytes, mt_ids *ids, mt_ids *places,
                     mt_error *error) {
    mt_tokenizer_kind kind = encoder->tokenizer->kind;
    bool controls = kind == MT_KIND_SENTENCEPIECE_BPE || kind == MT_KIND_UNIGRAM;
    int64_t before = ids->count;
    MT_CHECK(bytes <= MT_MAX_TEXT && mt_utf8_is_valid(text, bytes));
    encoder->places = places;
    int status =
        controls ? encode_controls(encoder, text, bytes, ids, error) : mt_encode(encoder, text, bytes, ids, error);
    encoder->places = NULL;
    if (status != 0) ids->count = before;
    return status;
}

int mt_tokenizer_encode(const mt_tokenizer *tokenizer, const char *text, int64_t bytes, mt_ids *ids, mt_error *error) {
    mt_encoder *encoder = mt_encoder_open(tokenizer);
    int failed = mt_encode(encoder, text, bytes, ids, error);
    mt_encoder_close(encoder);
    return failed;
}
