/* preprocess.c: text to token files, like Megatron-LM's tools/preprocess_data.py.
 *
 * The main thread reads batches of whole documents and writes the encoded batches in the order of the input; worker
 * threads tokenize. The batches are in a ring of fixed size, so memory does not grow with the input, except for the
 * index (12 bytes per document).
 */
#include "../base/file.h"
#include "../base/hf_cache.h"
#include "../base/text.h"
#include "../tokens/prompts.h"
#include "../tokens/tokenizer.h"
#include "../tokens/tokenizer_encode.h"
#include "../options/option_table.h"
#include "indexed_dataset.h"
#include "parquet.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define BATCH_BYTES (256 * 1024)

/* ---- signals ----------------------------------------------------------------------------------------------------- */

static volatile sig_atomic_t interrupted; // set by a signal; the main thread then removes the temporary files
static char **temporary_files;            // of all writers
static volatile sig_atomic_t num_temporary_files;

static void remove_temporary_files(void) {
    for (int i = 0; i < num_temporary_files; i++) unlink(temporary_files[i]);
}

/* The first signal lets the main thread end; a second one, while that waits for a disk, ends the program here. */
static void interrupt(int signal_number) {
    (void)signal_number;
    if (interrupted) {
        remove_temporary_files();
        _exit(1);
    }
    interrupted = 1;
}

static int fail_interrupted(mt_error *error) {
    return mt_error_set(error, "interrupted; nothing was written");
}

/* From here on a signal is answered by the main thread; before, it ends the program, which has no files yet. */
static void handle_signals(void) {
    static const int numbers[] = {SIGINT, SIGTERM, SIGHUP};
    struct sigaction action = {.sa_handler = interrupt}; // no SA_RESTART: a signal interrupts a blocked read
    for (int i = 0; i < 3; i++) {
        struct sigaction before;
        sigaction(numbers[i], NULL, &before);
        if (before.sa_handler != SIG_IGN) sigaction(numbers[i], &action, NULL); // nohup
    }
}

/* ---- options ----------------------------------------------------------------------------------------------------- */

typedef struct settings {
    char *input, *output_prefix, *tokenizer_type, *tokenizer_model, *vocab_file, *merge_file, *documents, *workers;
    mt_strings json_keys;
    bool append_eod, no_special_tokens, encode, decode, help, version;
    mt_text_format format;
    int64_t num_workers;
} settings;

typedef enum option_kind { OPTION_WORD, OPTION_WORDS, OPTION_FLAG } option_kind;

typedef struct option {
    const char *name, *value;
    option_kind kind;
    size_t offset; // of the field in settings
    const char *help;
} option;

static const option options[] = {
    {"--input", "FILE", OPTION_WORD, offsetof(settings, input),
     "X.txt is plain text; any other name is JSONL (one JSON object per line)"},
    {"--json-keys", "KEY...", OPTION_WORDS, offsetof(settings, json_keys),
     "fields with the text; each field gets its own files (default: text); a field\n"
     "may be a list of strings, the sequences of one document"},
    {"--documents", "HOW", OPTION_WORD, offsetof(settings, documents),
     "split X.txt into documents by paragraphs (default; blank lines end one), lines,\n"
     "or not at all (file); the documents in order are the file, byte for byte"},
    {"--output-prefix", "P", OPTION_WORD, offsetof(settings, output_prefix),
     "write P_KEY_document.bin and .idx (P_text_document for X.txt)"},
    {"--tokenizer-type", "TYPE", OPTION_WORD, offsetof(settings, tokenizer_type),
     "HuggingFaceTokenizer, SentencePieceTokenizer, GPT2BPETokenizer, TikTokenizer,\n"
     "ByteLevel, or Llama2Tokenizer: SentencePiece that begins every document with BOS"},
    {"--tokenizer-model", "PATH", OPTION_WORD, offsetof(settings, tokenizer_model),
     "tokenizer.json, X.model, their folder, or ORG/NAME in the cache of Hugging Face\n"
     "(not for ByteLevel)"},
    {"--vocab-file", "FILE", OPTION_WORD, offsetof(settings, vocab_file), "vocab.json of GPT2BPETokenizer"},
    {"--merge-file", "FILE", OPTION_WORD, offsetof(settings, merge_file), "merges.txt of GPT2BPETokenizer"},
    {"--append-eod", NULL, OPTION_FLAG, offsetof(settings, append_eod),
     "end every document with the end-of-document token"},
    {"--tokenizer-hf-no-include-special-tokens", NULL, OPTION_FLAG, offsetof(settings, no_special_tokens),
     "leave out BOS and other tokens that a HuggingFaceTokenizer puts around a text"},
    {"--workers", "N", OPTION_WORD, offsetof(settings, workers),
     "threads that tokenize (default: one per core); the output is the same for any N"},
    {"--encode", NULL, OPTION_FLAG, offsetof(settings, encode),
     "print the ids of standard input, without BOS and EOD; write no files"},
    {"--decode", NULL, OPTION_FLAG, offsetof(settings, decode), "print the text of the ids on standard input"},
    {"--help", NULL, OPTION_FLAG, offsetof(settings, help), "print this help"},
    {"--version", NULL, OPTION_FLAG, offsetof(settings, version), "print the version"},
};
#define NUM_OPTIONS ((int64_t)(sizeof options / sizeof *options))

static void print_help(void) {
    printf("data/preprocess: turns text into the token files that training reads\n\n"
           "  data/preprocess --input X.jsonl --output-prefix P --tokenizer-type TYPE --tokenizer-model PATH "
           "--append-eod\n"
           "  data/preprocess --encode --tokenizer-type TYPE --tokenizer-model PATH < TEXT\n\n");
    for (int64_t i = 0; i < NUM_OPTIONS; i++) {
        char head[64];
        snprintf(head, sizeof head, "%s %s", options[i].name, options[i].value ? options[i].value : "");
        printf("  %-24s ", head);
        if (strlen(head) > 24) printf("\n%27s", "");
        for (const char *c = options[i].help; *c; c++)
            if (*c == '\n')
                printf("\n%27s", "");
            else
                putchar(*c);
        printf("\n");
    }
    printf("\nA document with empty text becomes a document without tokens, except BOS if texts begin with it. The "
           "output\n"
           "files appear only when all of them are complete; until then files that they replace stay.\n");
}

static int unknown_option(const char *word, mt_error *error) {
    const char *nearest = NULL;
    int least = (int)(strlen(word) / 2);
    for (int64_t i = 0; i < NUM_OPTIONS; i++) {
        int distance = mt_edit_distance(word, strlen(word), options[i].name);
        if (distance > least) continue;
        least = distance;
        nearest = options[i].name;
    }
    if (nearest) return mt_error_set(error, "%s: unknown option; did you mean %s?", word, nearest);
    return mt_error_set(error, "%s: unknown option; --help lists the options", word);
}

static const option *find_option(const char *word) {
    for (int64_t i = 0; i < NUM_OPTIONS; i++)
        if (strcmp(options[i].name, word) == 0) return &options[i];
    return NULL;
}

/* Takes the words up to the next option; at least one. */
static int parse_words(mt_strings *words, const option *found, int argc, char **argv, int *next, mt_error *error) {
    words->items = &argv[*next];
    words->count = 0;
    while (*next < argc && strncmp(argv[*next], "--", 2) != 0) {
        words->count++;
        (*next)++;
    }
    return words->count > 0 ? 0 : mt_error_set(error, "%s: needs a value (%s)", found->name, found->value);
}

/* Reads one option and its values from argv[*next] on. */
static int parse_option(settings *s, int argc, char **argv, int *next, mt_error *error) {
    const option *found = find_option(argv[*next]);
    if (!found) return unknown_option(argv[*next], error);
    (*next)++;
    void *field = (char *)s + found->offset;
    mt_strings words;
    if (found->kind == OPTION_FLAG) {
        *(bool *)field = true;
        return 0;
    }
    if (parse_words(&words, found, argc, argv, next, error) != 0) return -1;
    if (found->kind == OPTION_WORDS) {
        *(mt_strings *)field = words;
        return 0;
    }
    if (words.count > 1)
        return mt_error_set(error, "%s: takes one value, but %s follows it", found->name, words.items[1]);
    *(char **)field = words.items[0];
    return 0;
}

static int choose_format(settings *s, mt_error *error) {
    static const char *const names[] = {"paragraphs", "lines", "file"};
    bool plain = mt_text_ends_with(s->input, ".txt");
    s->format = plain ? MT_TEXT_PARAGRAPHS : MT_TEXT_JSONL;
    if (s->documents && !plain)
        return mt_error_set(error, "--documents: is for plain text, but --input %s is not .txt", s->input);
    if (plain && s->json_keys.count > 0)
        return mt_error_set(error, "--json-keys: --input %s is plain text and has no keys", s->input);
    for (int i = 0; s->documents && i < 3; i++)
        if (strcmp(s->documents, names[i]) == 0) {
            s->format = MT_TEXT_PARAGRAPHS + i;
            return 0;
        }
    if (s->documents) return mt_error_set(error, "--documents %s: give paragraphs, lines or file", s->documents);
    return 0;
}

static int choose_workers(settings *s, mt_error *error) {
    s->num_workers = sysconf(_SC_NPROCESSORS_ONLN);
    if (!s->workers) return 0;
    char *end;
    s->num_workers = strtol(s->workers, &end, 10);
    if (*end != '\0' || s->num_workers < 1 || s->num_workers > 1024)
        return mt_error_set(error, "--workers %s: give a number from 1 to 1024", s->workers);
    return 0;
}

/* The keys name the output files, so they must differ. */
static int choose_keys(settings *s, mt_error *error) {
    static char *text[] = {"text"};
    if (s->json_keys.count == 0) s->json_keys = (mt_strings){1, text};
    for (int64_t i = 0; i < s->json_keys.count; i++) {
        const char *key = s->json_keys.items[i];
        if (!*key || strchr(key, '/') || strcmp(key, "..") == 0 || strcmp(key, ".") == 0)
            return mt_error_set(error,
                                "--json-keys '%s': names the output files, so it must be part of a file's name; "
                                "rename the key",
                                key);
        for (int64_t k = 0; k < i; k++)
            if (strcmp(s->json_keys.items[i], s->json_keys.items[k]) == 0)
                return mt_error_set(error, "--json-keys: %s is named twice", s->json_keys.items[i]);
    }
    return 0;
}

/* Megatron's name for SentencePiece whose texts begin with BOS; its models are SentencePieceTokenizer's here. */
static bool is_llama2(const settings *s) {
    return strcmp(s->tokenizer_type, "Llama2Tokenizer") == 0;
}

static mt_tokenizer_type type_of(const settings *s) {
    return is_llama2(s) ? MT_TOKENIZER_SENTENCEPIECE
                        : (mt_tokenizer_type)mt_choice_index(MT_TOKENIZER_TYPES, s->tokenizer_type);
}

#define TOKENIZERS                                                                                                     \
    "HuggingFaceTokenizer, SentencePieceTokenizer, Llama2Tokenizer, GPT2BPETokenizer, TikTokenizer or ByteLevel"

static int check_settings(settings *s, mt_error *error) {
    if (!s->tokenizer_type) return mt_error_set(error, "--tokenizer-type: is needed; give " TOKENIZERS);
    if (!is_llama2(s) && mt_choice_index(MT_TOKENIZER_TYPES, s->tokenizer_type) <= MT_TOKENIZER_AUTO)
        return mt_error_set(error, "--tokenizer-type %s: unknown; give " TOKENIZERS, s->tokenizer_type);
    if (!s->vocab_file != !s->merge_file)
        return mt_error_set(error, "--vocab-file and --merge-file: give both or neither");
    if (s->vocab_file && type_of(s) != MT_TOKENIZER_GPT2_BPE)
        return mt_error_set(error,
                            "--vocab-file and --merge-file are for --tokenizer-type GPT2BPETokenizer; give that, "
                            "or name the tokenizer by --tokenizer-model");
    if (s->vocab_file && s->tokenizer_model)
        return mt_error_set(error, "--vocab-file and --tokenizer-model: give one or the other");
    if (s->encode + s->decode + (s->input != NULL) != 1)
        return mt_error_set(error, "give exactly one of --input, --encode and --decode (see --help)");
    bool is_hf = strcmp(s->tokenizer_type, "HuggingFaceTokenizer") == 0;
    if (s->no_special_tokens && (!is_hf || !s->input))
        return mt_error_set(error,
                            "--tokenizer-hf-no-include-special-tokens: goes with --input and --tokenizer-type "
                            "HuggingFaceTokenizer; of the others only Llama2Tokenizer begins documents with BOS");
    if (!s->input && (s->output_prefix || s->documents || s->workers || s->append_eod || s->json_keys.count > 0))
        return mt_error_set(error,
                            "--output-prefix, --json-keys, --documents, --append-eod and --workers go with --input, "
                            "not with --encode or --decode");
    if (!s->input) return 0;
    if (!s->output_prefix) return mt_error_set(error, "--output-prefix: is needed with --input");
    if (choose_format(s, error) != 0 || choose_keys(s, error) != 0) return -1;
    return choose_workers(s, error);
}

static int parse_settings(settings *s, int argc, char **argv, mt_error *error) {
    for (int next = 1; next < argc;)
        if (parse_option(s, argc, argv, &next, error) != 0) return -1;
    return s->help || s->version ? 0 : check_settings(s, error);
}

/* Reads what the tokenizer puts around a text. Megatron's SentencePieceTokenizer puts nothing, which is said where
 * prompts of this program begin with BOS. */
static int read_frame_of(mt_text_frame *frame, const settings *s, const char *model, const mt_tokenizer *tokenizer,
                         mt_error *error) {
    mt_tokenizer_type type = type_of(s);
    bool plain = type == MT_TOKENIZER_SENTENCEPIECE && !is_llama2(s), begins = false;
    if (!s->input || s->no_special_tokens) return 0;
    if (plain && mt_prompt_begins_with_bos(model, &begins, error) != 0) return -1;
    if (plain && begins && mt_tokenizer_bos(tokenizer) >= 0)
        fprintf(stderr, "note: documents begin without BOS, unlike prompts of this tokenizer; --tokenizer-type "
                        "Llama2Tokenizer writes it\n");
    if (type != MT_TOKENIZER_HUGGINGFACE && !is_llama2(s)) return 0;
    return mt_text_frame_read(frame, model, tokenizer, error);
}

/* Opens the tokenizer, and reads what it puts around a text. */
static int open_tokenizer(mt_tokenizer **tokenizer, mt_text_frame *frame, const settings *s, mt_error *error) {
    mt_tokenizer_type type = type_of(s);
    if (!s->vocab_file) {
        char *model = s->tokenizer_model ? mt_strdup(s->tokenizer_model) : NULL;
        int status = mt_hf_cache_find(&model, NULL, "--tokenizer-model", error);
        if (status == 0) status = mt_tokenizer_open(tokenizer, type, model, error);
        if (status == 0) status = read_frame_of(frame, s, model, *tokenizer, error);
        free(model);
        return status;
    }
    char *both = mt_malloc((int64_t)(strlen(s->vocab_file) + strlen(s->merge_file)) + 2);
    sprintf(both, "%s,%s", s->vocab_file, s->merge_file);
    int result = mt_tokenizer_open(tokenizer, type, both, error);
    free(both);
    return result;
}

/* ---- standard input to standard output --------------------------------------------------------------------------- */

static int read_standard_input(mt_text *text, mt_error *error) {
    size_t got;
    do {
        mt_text_reserve(text, 1 << 16);
        got = fread(text->data + text->bytes, 1, (size_t)(text->capacity - text->bytes - 1), stdin);
        text->bytes += (int64_t)got;
    } while (got > 0);
    text->data[text->bytes] = '\0';
    return ferror(stdin) ? mt_error_set(error, "standard input: cannot be read: %s", strerror(errno)) : 0;
}

static int encode_standard_input(const mt_tokenizer *tokenizer, mt_error *error) {
    mt_text text = {0};
    mt_ids ids = {0};
    int result = read_standard_input(&text, error);
    if (result == 0) result = mt_tokenizer_encode(tokenizer, text.data, text.bytes, &ids, error);
    for (int64_t i = 0; result == 0 && i < ids.count; i++) printf(i ? " %d" : "%d", (int)ids.data[i]);
    if (result == 0) putchar('\n');
    free(text.data);
    free(ids.data);
    return result == 0 ? mt_file_flush_output(error) : result;
}

/* Parses numbers separated by white space or commas. */
static int parse_ids(mt_ids *ids, const mt_text *text, mt_error *error) {
    const char *separators = " \t\r\n,";
    for (char *at = text->data + strspn(text->data, separators); *at;) {
        char *end;
        errno = 0;
        long id = strtol(at, &end, 10);
        if (end == at || (*end && !strchr(separators, *end)) || errno || id < 0 || id > INT32_MAX)
            return mt_error_set(error, "standard input: %.*s is not a token id; give numbers separated by spaces",
                                (int)strcspn(at, separators), at);
        mt_ids_push(ids, (int32_t)id);
        at = end + strspn(end, separators);
    }
    return 0;
}

static int decode_standard_input(const mt_tokenizer *tokenizer, mt_error *error) {
    mt_text input = {0}, output = {0};
    mt_ids ids = {0};
    int result = read_standard_input(&input, error);
    if (result == 0 && (int64_t)strlen(input.data) != input.bytes)
        result = mt_error_set(error, "standard input: holds bytes that are not numbers; give token ids");
    if (result == 0) result = parse_ids(&ids, &input, error);
    if (result == 0) result = mt_tokenizer_decode(tokenizer, ids.data, ids.count, &output, error);
    if (result == 0 && output.bytes > 0) fwrite(output.data, 1, (size_t)output.bytes, stdout);
    free(input.data);
    free(output.data);
    free(ids.data);
    return result == 0 ? mt_file_flush_output(error) : result;
}

/* ---- a batch of documents ---------------------------------------------------------------------------------------- */

/* The encoded batch for one key: tokens in sequences in documents. */
typedef struct encoded {
    mt_ids tokens;
    mt_ids lengths;       // tokens of each sequence
    mt_ids num_sequences; // of each document
} encoded;

typedef struct batch {
    char *text;
    int64_t bytes, capacity;
    int64_t first_line; // its number in the file
    encoded *keys;      // [num_keys]
    bool done, failed;
    mt_error error;
} batch;

/* One thread and its current batch. */
typedef struct worker {
    const settings *settings;
    mt_encoder *encoder;
    const mt_text_frame *frame; // of each text
    int32_t eod;                // -1: not appended
    batch *batch;
} worker;

/* Appends a sequence to the current document; a text without tokens adds none. */
static int encode_text(void *context, int64_t key, const char *text, int64_t bytes, mt_error *error) {
    worker *w = context;
    encoded *out = &w->batch->keys[key];
    int64_t before = out->tokens.count;
    for (int64_t i = 0; i < w->frame->before.count; i++) mt_ids_push(&out->tokens, w->frame->before.data[i]);
    if (mt_encode(w->encoder, text, bytes, &out->tokens, error) != 0) return -1;
    for (int64_t i = 0; i < w->frame->after.count; i++) mt_ids_push(&out->tokens, w->frame->after.data[i]);
    int64_t length = out->tokens.count - before;
    if (length >= INT32_MAX) return mt_error_set(error, "has more than 2^31 - 2 tokens; split it");
    if (length == 0) return 0;
    mt_ids_push(&out->lengths, (int32_t)length);
    out->num_sequences.data[out->num_sequences.count - 1]++;
    return 0;
}

static int encode_document(worker *w, const char *text, int64_t bytes, mt_error *error) {
    const settings *s = w->settings;
    bool json = s->format == MT_TEXT_JSONL;
    if (json && mt_text_is_blank(text, bytes)) return 0;
    for (int64_t key = 0; key < s->json_keys.count; key++) mt_ids_push(&w->batch->keys[key].num_sequences, 0);
    int result =
        json ? mt_jsonl_read(text, bytes, &s->json_keys, encode_text, w, error) : encode_text(w, 0, text, bytes, error);
    for (int64_t key = 0; result == 0 && key < s->json_keys.count && w->eod >= 0; key++) {
        encoded *out = &w->batch->keys[key];
        if (out->num_sequences.data[out->num_sequences.count - 1] == 0) continue;
        mt_ids_push(&out->tokens, w->eod);
        out->lengths.data[out->lengths.count - 1]++;
    }
    return result;
}

static int64_t count_lines(const char *text, const char *end) {
    int64_t lines = 0;
    for (; text < end && (text = memchr(text, '\n', (size_t)(end - text))); text++) lines++;
    return lines;
}

static void encode_batch(worker *w) {
    batch *b = w->batch;
    const char *start = b->text, *end = b->text + b->bytes;
    if (w->settings->format == MT_TEXT_JSONL && b->first_line == 1) start += mt_text_mark_bytes(b->text, end);
    for (int64_t key = 0; key < w->settings->json_keys.count; key++)
        b->keys[key].tokens.count = b->keys[key].lengths.count = b->keys[key].num_sequences.count = 0;
    b->failed = false;
    for (const char *text = start; text < end && !b->failed && !interrupted;) {
        const char *next = mt_text_document_end(w->settings->format, text, end);
        if (!next) next = end;
        mt_error error;
        if (encode_document(w, text, next - text, &error) != 0) {
            b->failed = true;
            mt_error_set(&b->error, "%s:%lld: %s", w->settings->input,
                         (long long)(b->first_line + count_lines(b->text, text)), error.text);
        }
        text = next;
    }
}

/* ---- reading ----------------------------------------------------------------------------------------------------- */

typedef struct reader {
    int descriptor;
    const char *path;
    mt_text_format format;
    char *rest; // read ahead, for the next batch
    int64_t rest_bytes, rest_capacity;
    int64_t line, bytes_read, file_bytes;
    bool ended;
} reader;

static int reader_open(reader *r, const settings *s, mt_error *error) {
    struct stat status;
    *r = (reader){.path = s->input, .format = s->format, .line = 1};
    r->descriptor = open(s->input, O_RDONLY | O_CLOEXEC);
    if (r->descriptor < 0)
        return mt_error_set(error, "--input %s: cannot be opened: %s; check the path", s->input, strerror(errno));
    MT_CHECK(fstat(r->descriptor, &status) == 0);
    if (S_ISREG(status.st_mode)) r->file_bytes = status.st_size;
    if (S_ISREG(status.st_mode) || S_ISFIFO(status.st_mode)) return 0;
    return mt_error_set(error, "%s: cannot be read: it is %s; give a file or a pipe", s->input,
                        S_ISDIR(status.st_mode) ? "a folder" : "a device");
}

static void reader_close(reader *r) {
    if (r->descriptor >= 0) close(r->descriptor);
    free(r->rest);
}

/* Appends the bytes of one read. */
static int read_more(reader *r, batch *b, mt_error *error) {
    if (b->capacity - b->bytes < BATCH_BYTES)
        b->text = mt_realloc(b->text, b->capacity = 2 * b->capacity + BATCH_BYTES);
    ssize_t got = read(r->descriptor, b->text + b->bytes, (size_t)(b->capacity - b->bytes));
    if (interrupted) return fail_interrupted(error);
    if (got < 0 && errno == EINTR) return 0;
    if (got < 0) return mt_error_set(error, "%s: cannot be read: %s", r->path, strerror(errno));
    r->ended = got == 0;
    r->bytes_read += got;
    b->bytes += got;
    return 0;
}

/* Bytes of the whole documents at the start of the batch. */
static int64_t whole_documents(const reader *r, const batch *b) {
    if (r->ended) return b->bytes;
    const char *text = b->text, *end = b->text + b->bytes;
    for (const char *next; text < end && (next = mt_text_document_end(r->format, text, end));) text = next;
    return text - b->text;
}

/* Fills a batch with whole documents; empty at the end of the file. */
static int read_batch(reader *r, batch *b, mt_error *error) {
    b->bytes = 0;
    if (r->ended && r->rest_bytes == 0) return 0;
    if (b->capacity < r->rest_bytes) b->text = mt_realloc(b->text, b->capacity = r->rest_bytes);
    if (r->rest_bytes > 0) memcpy(b->text, r->rest, (size_t)r->rest_bytes);
    b->bytes = r->rest_bytes;
    int64_t whole = 0, enough = BATCH_BYTES;
    while (whole == 0 && !r->ended) {
        while (b->bytes < enough && !r->ended)
            if (read_more(r, b, error) != 0) return -1;
        whole = whole_documents(r, b);
        enough = 2 * b->bytes; // a long document: look for its end again after twice as many bytes
    }
    if (r->ended) whole = b->bytes;
    r->rest_bytes = b->bytes - whole;
    if (r->rest_capacity < r->rest_bytes) r->rest = mt_realloc(r->rest, r->rest_capacity = r->rest_bytes);
    if (r->rest_bytes > 0) memcpy(r->rest, b->text + whole, (size_t)r->rest_bytes);
    b->bytes = whole;
    b->first_line = r->line;
    r->line += count_lines(b->text, b->text + whole);
    return 0;
}

/* ---- progress ---------------------------------------------------------------------------------------------------- */

typedef struct progress {
    double began, shown;
    bool terminal;
    int64_t bytes, file_bytes, documents, tokens;
} progress;

static void progress_show(progress *p) {
    double now = mt_time(), rate = (double)p->bytes / 1e6 / (now - p->began + 1e-9);
    if (!p->terminal || now - p->shown < 0.1) return;
    p->shown = now;
    fprintf(stderr, "\r\033[K");
    if (p->file_bytes > 0) {
        int done = (int)(40 * p->bytes / p->file_bytes);
        double left = (double)(p->file_bytes - p->bytes) / 1e6 / (rate + 1e-9);
        fprintf(stderr, "[%.*s%*s] %3d%% %.0f s left, ", done, "########################################", 40 - done,
                "", (int)(100 * p->bytes / p->file_bytes), left);
    }
    fprintf(stderr, "%.1f MB, %.1f MB/s, %lld documents", (double)p->bytes / 1e6, rate, (long long)p->documents);
    fflush(stderr);
}

static void progress_end(const progress *p, const settings *s) {
    double seconds = mt_time() - p->began;
    if (p->terminal) fprintf(stderr, "\r\033[K");
    for (int64_t key = 0; key < s->json_keys.count; key++)
        printf("%s%s_%s_document", key ? " " : "", s->output_prefix, s->json_keys.items[key]);
    printf(": %lld documents, %lld tokens from %.1f MB in %.1f s (%.1f MB/s)\n", (long long)p->documents,
           (long long)p->tokens, (double)p->bytes / 1e6, seconds, (double)p->bytes / 1e6 / (seconds + 1e-9));
}

/* ---- the ring of batches ----------------------------------------------------------------------------------------- */

typedef struct job {
    const settings *settings;
    const mt_tokenizer *tokenizer;
    const mt_text_frame *frame;
    reader reader;
    progress progress;
    mt_indexed_writer **writers; // [num_keys]
    batch *batches;              // [num_batches] batch i of the input is batches[i % num_batches]
    int64_t num_batches;
    pthread_t *threads;
    int64_t num_threads;

    pthread_mutex_t lock; // guards the fields below and `done` of the batches
    pthread_cond_t changed;
    int64_t num_read, num_taken, num_written;
    bool stop; // no more batches will be read
} job;

static batch *batch_at(job *j, int64_t index) {
    return &j->batches[index % j->num_batches];
}

static void *work(void *context) {
    job *j = context;
    worker w = {.settings = j->settings,
                .encoder = mt_encoder_open(j->tokenizer),
                .frame = j->frame,
                .eod = j->settings->append_eod ? mt_tokenizer_eod(j->tokenizer) : -1};
    pthread_mutex_lock(&j->lock);
    for (;;) {
        while (j->num_taken == j->num_read && !j->stop) pthread_cond_wait(&j->changed, &j->lock);
        if (j->num_taken == j->num_read) break;
        w.batch = batch_at(j, j->num_taken++);
        pthread_mutex_unlock(&j->lock);
        encode_batch(&w);
        pthread_mutex_lock(&j->lock);
        w.batch->done = true;
        pthread_cond_broadcast(&j->changed);
    }
    pthread_mutex_unlock(&j->lock);
    mt_encoder_close(w.encoder);
    return NULL;
}

static int write_encoded(job *j, mt_indexed_writer *writer, const encoded *out, mt_error *error) {
    const int32_t *tokens = out->tokens.data, *lengths = out->lengths.data;
    for (int64_t d = 0; d < out->num_sequences.count; d++) {
        int64_t sequences = out->num_sequences.data[d];
        if (mt_indexed_writer_add_document(writer, tokens, lengths, sequences, error) != 0) return -1;
        for (int64_t i = 0; i < sequences; i++) tokens += lengths[i];
        if (sequences > 0) lengths += sequences;
    }
    j->progress.tokens += out->tokens.count;
    return 0;
}

/* Waits for the oldest batch and writes it. */
static int write_oldest(job *j, mt_error *error) {
    batch *b = batch_at(j, j->num_written);
    pthread_mutex_lock(&j->lock);
    while (!b->done && !interrupted) { // a signal may come to any thread
        struct timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_nsec += 50000000;
        until.tv_sec += until.tv_nsec / 1000000000;
        until.tv_nsec %= 1000000000;
        pthread_cond_timedwait(&j->changed, &j->lock, &until);
    }
    pthread_mutex_unlock(&j->lock);
    if (interrupted) return fail_interrupted(error);
    if (b->failed) {
        *error = b->error;
        return -1;
    }
    for (int64_t key = 0; key < j->settings->json_keys.count; key++)
        if (write_encoded(j, j->writers[key], &b->keys[key], error) != 0) return -1;
    j->progress.bytes += b->bytes;
    j->progress.documents += b->keys[0].num_sequences.count;
    progress_show(&j->progress);
    j->num_written++;
    return 0;
}

static const char *skip_blanks(const char *text, const char *end) {
    while (text < end && memchr(" \t\r\n", *text, 4)) text++;
    return text;
}

/* True if the text begins like a JSON list of objects, or like an object that takes several lines. */
static bool begins_as_json(const char *text, const char *end) {
    text = skip_blanks(text, end);
    if (text < end && *text == '[')
        text = skip_blanks(text + 1, end);
    else if (end - text < 2 || text[0] != '{' || (text[1] != '\n' && text[1] != '\r'))
        return false;
    if (text == end || *text != '{') return false;
    text = skip_blanks(text + 1, end);
    return text < end && *text == '"';
}

/* JSON under the name of a plain text would be trained on with its braces. --documents says that it is one. */
static int refuse_json(const settings *s, const batch *b, mt_error *error) {
    enum { LINES = 2 };
    const char *text = b->text, *end = b->text + b->bytes;
    int objects = 0;
    if (mt_is_parquet("", text, b->bytes))
        return mt_error_set(error, "%s: is a Parquet file; write its texts as JSON Lines", s->input);
    if (s->format == MT_TEXT_JSONL || s->documents || b->bytes == 0) return 0;
    text += mt_text_mark_bytes(text, end);
    if (begins_as_json(text, end))
        return mt_error_set(error,
                            "%s: begins like JSON of several lines, but a name that ends with .txt means plain text, "
                            "braces and all; write one object per line into a file .jsonl, or give --documents lines "
                            "to take it as text",
                            s->input);
    for (const char *next; text < end && objects < LINES; text = next) {
        next = mt_text_document_end(MT_TEXT_JSONL, text, end);
        if (!next) next = end;
        if (mt_text_is_blank(text, next - text)) continue;
        mt_error ignored;
        json_t *object = mt_json_parse(text, next - text, JSON_DECODE_INT_AS_REAL | JSON_ALLOW_NUL, NULL, &ignored);
        bool is_object = json_object_size(object) > 0;
        json_decref(object);
        if (!is_object) return 0;
        objects++;
    }
    if (objects == 0) return 0;
    return mt_error_set(error,
                        "%s: its first lines are JSON objects, but a name that ends with .txt means plain text, braces "
                        "and all; rename it to .jsonl, or give --documents lines to take it as text",
                        s->input);
}

/* Reads batches into the ring; writes the oldest batch if the ring is full. */
static int run_job(job *j, mt_error *error) {
    for (;;) {
        if (j->num_read - j->num_written == j->num_batches && write_oldest(j, error) != 0) return -1;
        batch *b = batch_at(j, j->num_read);
        if (read_batch(&j->reader, b, error) != 0) return -1;
        if (j->num_read == 0 && refuse_json(j->settings, b, error) != 0) return -1;
        if (b->bytes == 0) break;
        pthread_mutex_lock(&j->lock);
        b->done = false;
        j->num_read++;
        pthread_cond_broadcast(&j->changed);
        pthread_mutex_unlock(&j->lock);
    }
    while (j->num_written < j->num_read)
        if (write_oldest(j, error) != 0) return -1;
    return 0;
}

static void stop_threads(job *j) {
    pthread_mutex_lock(&j->lock);
    j->stop = true;
    j->num_taken = j->num_read; // workers begin no further batch
    pthread_cond_broadcast(&j->changed);
    pthread_mutex_unlock(&j->lock);
    for (int64_t i = 0; i < j->num_threads; i++) pthread_join(j->threads[i], NULL);
}

static int start_threads(job *j, mt_error *error) {
    for (; j->num_threads < j->settings->num_workers; j->num_threads++) {
        int code = pthread_create(&j->threads[j->num_threads], NULL, work, j);
        if (code != 0)
            return mt_error_set(error, "--workers %lld: cannot start a thread: %s; give fewer",
                                (long long)j->settings->num_workers, strerror(code));
    }
    return 0;
}

/* ---- the job ----------------------------------------------------------------------------------------------------- */

static int open_writers(job *j, mt_error *error) {
    const settings *s = j->settings;
    mt_dtype dtype = mt_indexed_dtype_for_vocab(mt_tokenizer_vocab_size(j->tokenizer));
    // For mt_die in any thread. Files are published only after all workers have ended, and have other names then.
    atexit(remove_temporary_files);
    temporary_files = mt_calloc(2 * s->json_keys.count * (int64_t)sizeof *temporary_files);
    for (int64_t key = 0; key < s->json_keys.count; key++) {
        char *prefix = mt_malloc((int64_t)(strlen(s->output_prefix) + strlen(s->json_keys.items[key])) + 16);
        sprintf(prefix, "%s_%s_document", s->output_prefix, s->json_keys.items[key]);
        for (int i = 0; i < 2; i++) {
            char *name = mt_malloc((int64_t)strlen(prefix) + 40);
            sprintf(name, "%s.%s.tmp-%lld", prefix, i == 0 ? "bin" : "idx", (long long)getpid());
            temporary_files[num_temporary_files] = name;
            num_temporary_files++;
        }
        int result = mt_indexed_writer_open(&j->writers[key], prefix, dtype, error);
        for (int i = 0; i < 2 && result == 0; i++) {
            char *name = mt_malloc((int64_t)strlen(prefix) + 8);
            sprintf(name, "%s.%s", prefix, i == 0 ? "bin" : "idx");
            mt_new_file_note(name, "--output-prefix");
            free(name);
        }
        free(prefix);
        if (result != 0) return -1;
    }
    return 0;
}

/* Megatron's HuggingFaceTokenizer adds these too. */
static void print_frame(const mt_text_frame *frame, const settings *s) {
    const mt_ids *const parts[] = {&frame->before, &frame->after};
    static const char *const where[] = {"begins with the token", "ends with the token"};
    for (int k = 0; k < 2; k++) {
        if (parts[k]->count == 0) continue;
        printf("%s: each text %s", s->tokenizer_model, where[k]);
        for (int64_t i = 0; i < parts[k]->count; i++) printf(" %d", (int)parts[k]->data[i]);
        printf(", as its tokenizer says; --tokenizer-hf-no-include-special-tokens leaves it out\n");
    }
}

/* Completes all files before the first is renamed into place. */
static int publish(job *j, mt_error *error) {
    int64_t num_keys = j->settings->json_keys.count;
    if (j->progress.documents == 0)
        return mt_error_set(error, "%s: holds no documents; nothing was written", j->settings->input);
    for (int64_t key = 0; key < num_keys; key++)
        if (mt_indexed_writer_seal(j->writers[key], error) != 0) return -1;
    for (int64_t key = 0; key < num_keys; key++)
        if (mt_indexed_writer_publish(j->writers[key], error) != 0) return -1;
    return 0;
}

static void job_open(job *j, const settings *s, const mt_tokenizer *tokenizer) {
    *j = (job){
        .settings = s, .tokenizer = tokenizer, .num_batches = 2 * s->num_workers + 2, .reader = {.descriptor = -1}};
    j->writers = mt_calloc(s->json_keys.count * (int64_t)sizeof *j->writers);
    j->threads = mt_calloc(s->num_workers * (int64_t)sizeof *j->threads);
    j->batches = mt_calloc(j->num_batches * (int64_t)sizeof *j->batches);
    for (int64_t i = 0; i < j->num_batches; i++)
        j->batches[i].keys = mt_calloc(s->json_keys.count * (int64_t)sizeof *j->batches[i].keys);
    pthread_mutex_init(&j->lock, NULL);
    pthread_cond_init(&j->changed, NULL);
}

static void job_close(job *j) {
    int64_t num_keys = j->settings->json_keys.count;
    for (int64_t i = 0; i < j->num_batches; i++) {
        for (int64_t key = 0; key < num_keys; key++) {
            free(j->batches[i].keys[key].tokens.data);
            free(j->batches[i].keys[key].lengths.data);
            free(j->batches[i].keys[key].num_sequences.data);
        }
        free(j->batches[i].keys);
        free(j->batches[i].text);
    }
    for (int64_t key = 0; key < num_keys; key++) mt_indexed_writer_close(j->writers[key]);
    reader_close(&j->reader);
    pthread_cond_destroy(&j->changed);
    pthread_mutex_destroy(&j->lock);
    free(j->batches);
    free(j->threads);
    free(j->writers);
}

static int preprocess(const settings *s, const mt_tokenizer *tokenizer, const mt_text_frame *frame, mt_error *error) {
    if (s->append_eod && mt_tokenizer_eod(tokenizer) < 0)
        return mt_error_set(error, "--append-eod: the tokenizer has no end-of-document token; leave it out");
    job j;
    handle_signals();
    job_open(&j, s, tokenizer);
    j.frame = frame;
    print_frame(frame, s);
    int result = reader_open(&j.reader, s, error);
    if (result == 0) result = open_writers(&j, error);
    j.progress = (progress){.began = mt_time(), .terminal = isatty(2), .file_bytes = j.reader.file_bytes};
    if (result == 0) result = start_threads(&j, error);
    if (result == 0) result = run_job(&j, error);
    if (interrupted) {                            // workers may be inside of a long document
        if (result == 0) fail_interrupted(error); // a signal during the last write
        for (int64_t key = 0; key < s->json_keys.count; key++) mt_indexed_writer_close(j.writers[key]);
        fprintf(stderr, "%serror: %s\n", j.progress.terminal ? "\r\033[K" : "", error->text);
        _exit(1);
    }
    stop_threads(&j);
    if (result == 0) result = publish(&j, error);
    if (result == 0)
        progress_end(&j.progress, s);
    else if (j.progress.terminal)
        fprintf(stderr, "\r\033[K");
    job_close(&j);
    return result;
}

static int run(const settings *s, mt_error *error) {
    mt_tokenizer *tokenizer = NULL;
    mt_text_frame frame = {0};
    int result = open_tokenizer(&tokenizer, &frame, s, error);
    if (result == 0)
        result = s->encode   ? encode_standard_input(tokenizer, error)
                 : s->decode ? decode_standard_input(tokenizer, error)
                             : preprocess(s, tokenizer, &frame, error);
    mt_tokenizer_close(tokenizer);
    free(frame.before.data);
    free(frame.after.data);
    return result;
}

int main(int argc, char **argv) {
    settings s = {0};
    mt_error error;
    signal(SIGXFSZ, SIG_IGN); // exceeding a file size limit is then a write error
    int result = parse_settings(&s, argc, argv, &error);
    if (result == 0 && s.help)
        print_help();
    else if (result == 0 && s.version)
        printf("preprocess (megatron.c) %s\n", mt_version());
    else if (result == 0)
        result = run(&s, &error);
    if (result == 0) result = mt_file_flush_output(&error);
    if (result != 0) fprintf(stderr, "error: %s\n", error.text);
    return result == 0 ? 0 : 1;
}
