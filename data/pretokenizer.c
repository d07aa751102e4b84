/* pretokenizer.c: normalizes text and cuts it into words, as the `normalizer` and `pre_tokenizer` of a tokenizer.json
 * say. Regular expressions run on PCRE2 (compiled to machine code where it can), Unicode normalization on utf8proc. */
#include "tokenizer_internal.h"

#include <stdlib.h>
#include <string.h>

#ifdef MT_HAVE_PCRE2
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#endif
#ifdef MT_HAVE_UTF8PROC
#include <utf8proc.h>
#endif

/* The pattern of GPT-2's encoder.py. */
const char mt_gpt2_pattern[] = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";

/* ---- patterns -------------------------------------------------------------------------------------------------- */

void mt_pattern_literal(mt_pattern *out, const char *text, int64_t bytes) {
    *out = (mt_pattern){.source = mt_malloc(bytes + 1), .bytes = bytes};
    memcpy(out->source, text, (size_t)bytes);
    out->source[bytes] = 0;
}

#ifdef MT_HAVE_PCRE2

/* tokenizer.json's patterns are written for Oniguruma. Where the same letters mean something else to PCRE2, they are
 * spelled out: \s is Unicode's White_Space (PCRE2 adds U+180E), \w also takes marks and connectors (PCRE2 does not). */
#define SPACES "\\t-\\r\\x{85}\\p{Z}"
#define WORDS  "\\p{L}\\p{M}\\p{Nd}\\p{Nl}\\p{Pc}\\x{24B6}-\\x{24E9}"

/* Translates one escape at source[0] == '\\'; returns its length in the source, or 0 if it cannot be translated. */
static int64_t translate_escape(mt_text *out, const char *source, int64_t bytes, bool in_class) {
    char letter = bytes > 1 ? source[1] : 0;
    const char *set = letter == 's' || letter == 'S' ? SPACES : letter == 'w' || letter == 'W' ? WORDS : NULL;
    bool negated = letter == 'S' || letter == 'W';
    if (letter == 'h' || letter == 'H') return 0; // a hexadecimal digit there, a blank here
    if (set && in_class && !negated) {
        mt_text_append(out, set, (int64_t)strlen(set));
    } else if (set && !in_class) {
        mt_text_append(out, negated ? "[^" : "[", negated ? 2 : 1);
        mt_text_append(out, set, (int64_t)strlen(set));
        mt_text_append(out, "]", 1);
    } else {
        int64_t length = bytes > 1 ? 2 : 1;
        if (bytes > 2 && strchr("pPx", letter) && source[2] == '{')
            while (length < bytes && source[length - 1] != '}') length++;
        mt_text_append(out, source, length);
        return length;
    }
    return 2;
}

/* Appends PCRE2's spelling of an Oniguruma pattern; false if the two differ in a way that is not translated. */
static bool translate_pattern(mt_text *out, const char *source, int64_t bytes) {
    bool in_class = false;
    for (int64_t i = 0, class_start = 0; i < bytes;) {
        char c = source[i], next = i + 1 < bytes ? source[i + 1] : 0;
        if (c == '\\') {
            int64_t length = translate_escape(out, source + i, bytes - i, in_class);
            if (!length) return false;
            i += length;
            continue;
        }
        if (!in_class && c == '}' && next == '+') return false; // a{1,3}+ repeats there, is possessive here
        if (in_class && c == '&' && next == '&') return false;  // intersection of classes
        if (in_class && c == '[') {
            const char *end = next == ':' ? memchr(source + i, ']', (size_t)(bytes - i)) : NULL;
            if (!end) return false; // a class within a class
            mt_text_append(out, source + i, end + 1 - (source + i));
            i = end + 1 - source;
            continue;
        }
        if (!in_class && c == '[') {
            in_class = true;
            class_start = i + 1 + (next == '^');
        } else if (in_class && c == ']' && i > class_start) {
            in_class = false;
        }
        mt_text_append(out, &c, 1);
        i++;
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
    uint32_t options = PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C;
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
    pcre2_jit_compile(compiled, PCRE2_JIT_COMPLETE); // where it fails, pcre2_match interprets instead
    mt_pattern_literal(out, regex, bytes);
    out->code = compiled;
    return 0;
}

void mt_pattern_free(mt_pattern *pattern) {
    pcre2_code_free(pattern->code);
    free(pattern->source);
    *pattern = (mt_pattern){0};
}

/* The limit turns a catastrophic pattern into an error; the patterns in use stay far below it on any text. */
void mt_encoder_open_patterns(mt_encoder *encoder) {
    encoder->match_data = pcre2_match_data_create(1, NULL);
    encoder->match_context = pcre2_match_context_create(NULL);
    encoder->jit_stack = pcre2_jit_stack_create(1 << 15, 1 << 23, NULL); // NULL where PCRE2 has no JIT
    if (!encoder->match_data || !encoder->match_context) mt_die("out of memory: a pattern's match data");
    pcre2_set_match_limit(encoder->match_context, 20000000);
    if (encoder->jit_stack) pcre2_jit_stack_assign(encoder->match_context, NULL, encoder->jit_stack);
}

void mt_encoder_close_patterns(mt_encoder *encoder) {
    pcre2_match_data_free(encoder->match_data);
    pcre2_match_context_free(encoder->match_context);
    pcre2_jit_stack_free(encoder->jit_stack);
}

/* As pattern_next, for a regular expression. */
static int regex_next(mt_encoder *encoder, const mt_pattern *pattern, const char *text, int64_t bytes, int64_t from,
                      int64_t *start, int64_t *end, mt_error *error) {
    int found = pcre2_match(pattern->code, (PCRE2_SPTR)text, (PCRE2_SIZE)bytes, (PCRE2_SIZE)from, PCRE2_NO_UTF_CHECK,
                            encoder->match_data, encoder->match_context);
    if (found == PCRE2_ERROR_NOMATCH) return 0;
    if (found < 0) {
        PCRE2_UCHAR why[160] = "";
        pcre2_get_error_message(found, why, sizeof why);
        return mt_error_set(error, "%s: the pattern '%.200s' gives up on this text: %s", encoder->tokenizer->path,
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

void mt_encoder_open_patterns(mt_encoder *encoder) {
    (void)encoder;
}

void mt_encoder_close_patterns(mt_encoder *encoder) {
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

/* Finds the first match at or after `from`: 1 and its span, 0 if there is none, -1 if PCRE2 gives up. */
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

/* Where to search next after a match: past it, and past one more character if it was empty. */
static int64_t after_match(const char *text, int64_t bytes, int64_t start, int64_t end) {
    if (end > start || end >= bytes) return end + (end == start);
    mt_utf8_state state;
    return end + mt_utf8_scan(text + end, bytes - end, &state);
}

/* ---- normalizers ----------------------------------------------------------------------------------------------- */

#ifdef MT_HAVE_UTF8PROC

bool mt_is_word(uint32_t c) {
    utf8proc_category_t category = utf8proc_category((utf8proc_int32_t)c);
    return (category >= UTF8PROC_CATEGORY_LU && category <= UTF8PROC_CATEGORY_NL) || category == UTF8PROC_CATEGORY_PC ||
           (c >= 0x24B6 && c <= 0x24E9) || c == 0x200C || c == 0x200D;
}

/* True if normalizing cannot change the text: below U+0300 NFC changes nothing, in ASCII no form does. */
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

/* Appends the marks [count] in the order of their combining classes, equal ones as they come (bucket sort). */
static void append_sorted(mt_text *out, const mark *marks, int64_t count) {
    for (int combining_class = 1; count && combining_class < 256; combining_class++)
        for (int64_t i = 0; i < count; i++)
            if (marks[i].combining_class == combining_class) mt_utf8_append(out, (uint32_t)marks[i].codepoint);
}

/* utf8proc sorts a run of combining marks by swapping neighbours, in quadratic time. Sorting the long ones first, which
 * is the first thing that every normalization form does to them, keeps hostile text linear. Returns false if there are
 * none. */
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
        if (c == 0x130) // the one character whose lower case is two
            mt_text_append(out, "i\xCC\x87", 3);
        else
            mt_utf8_append(out, (uint32_t)utf8proc_tolower((utf8proc_int32_t)c));
    }
    return 0;
}

#else

bool mt_is_word(uint32_t c) { // not asked for: tokens that need it are refused
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

static int replace(mt_encoder *encoder, const mt_rule *step, mt_text *out, const char *text, int64_t bytes,
                   mt_error *error) {
    int64_t copied = 0, start = 0, end = 0;
    for (int64_t from = 0; from <= bytes;) {
        int found = pattern_next(encoder, &step->pattern, text, bytes, from, &start, &end, error);
        if (found < 0) return -1;
        if (!found) break;
        mt_text_append(out, text + copied, start - copied);
        mt_text_append(out, step->content, step->content_bytes);
        copied = end;
        from = after_match(text, bytes, start, end);
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
        if (failed) return -1;
        *text = out->data ? out->data : "";
        *bytes = out->bytes;
    }
    return 0;
}

/* ---- pre-tokenizers -------------------------------------------------------------------------------------------- */

/* The piece being put together by a split: the behaviors differ only in what may join it. */
typedef struct mt_piece {
    int64_t start, end;
    bool any, is_match; // is_match: whether the last span that joined was a match
} mt_piece;

static bool may_join(mt_behavior behavior, const mt_piece *piece, bool is_match) {
    if (!piece->any) return false;
    if (behavior == MT_CONTIGUOUS) return is_match == piece->is_match;
    if (behavior == MT_MERGED_WITH_PREVIOUS) return is_match && !piece->is_match;
    if (behavior == MT_MERGED_WITH_NEXT) return !is_match && piece->is_match;
    return false;
}

/* Hands a complete piece of step `index` to the next step. */
static int emit_piece(mt_encoder *encoder, int index, bool first, const char *text, const mt_piece *piece, mt_ids *ids,
                      mt_error *error) {
    bool removed = piece->is_match && encoder->tokenizer->pretokenizer[index].behavior == MT_REMOVED;
    if (!piece->any || removed) return 0;
    return mt_pretokenize(encoder, index + 1, first && piece->start == 0, text + piece->start,
                          piece->end - piece->start, ids, error);
}

/* Takes in the next span of a split: it joins the piece, or completes it and begins another. */
static int split_span(mt_encoder *encoder, int index, bool first, const char *text, mt_piece span, mt_piece *piece,
                      mt_ids *ids, mt_error *error) {
    if (may_join(encoder->tokenizer->pretokenizer[index].behavior, piece, span.is_match)) {
        piece->end = span.end;
        piece->is_match = span.is_match;
        return 0;
    }
    mt_piece done = *piece;
    *piece = span;
    return emit_piece(encoder, index, first, text, &done, ids, error);
}

static int split(mt_encoder *encoder, int index, bool first, const char *text, int64_t bytes, mt_ids *ids,
                 mt_error *error) {
    const mt_rule *step = &encoder->tokenizer->pretokenizer[index];
    mt_piece piece = {0};
    int64_t done = 0, start = 0, end = 0;
    for (int64_t from = 0; from < bytes;) {
        int found = pattern_next(encoder, &step->pattern, text, bytes, from, &start, &end, error);
        if (found < 0) return -1;
        if (!found) break;
        mt_piece gap = {done, start, true, step->invert}, match = {start, end, true, !step->invert};
        if (start > done && split_span(encoder, index, first, text, gap, &piece, ids, error)) return -1;
        if (split_span(encoder, index, first, text, match, &piece, ids, error)) return -1;
        done = end;
        from = after_match(text, bytes, start, end);
    }
    mt_piece rest = {done, bytes, true, step->invert};
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

int mt_pretokenize(mt_encoder *encoder, int index, bool first, const char *text, int64_t bytes, mt_ids *ids,
                   mt_error *error) {
    const mt_tokenizer *tokenizer = encoder->tokenizer;
    if (!bytes) return 0;
    if (index == tokenizer->pretokenizer_steps) return mt_bpe_encode(encoder, text, bytes, ids, error);
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
