/* Opens a Hugging Face folder (config.json, safetensors, tokenizer) and continues a prompt on the CPU, greedily.
 *
 *   make everything && build/default/notes/examples/load_and_generate DIR "Once upon a time"
 *
 * DIR is a folder that transformers saved, or ./train --save. Without a prompt the program begins with token 1, prints
 * token ids, and needs no tokenizer.
 */
#include "data/tokens/prompts.h"
#include "data/tokens/tokenizer.h"
#include "data/tokens/tokenizer_encode.h"
#include "data/models/generate.h"
#include "data/checkpoint/hf_folder.h"

#include <stdlib.h>
#include <string.h>

enum { MAX_TOKENS = 32 };

/* Most functions that can fail return -1 and put one line into an error. */
static void check(int status, const mt_error *error) {
    if (status != 0) mt_die("%s", error->text);
}

/* Writes the prompt's tokens, after a BOS token if the folder's tokenizer puts one there; returns their number. */
static int64_t encode(const mt_tokenizer *tokenizer, const char *folder, const char *prompt, int32_t *tokens) {
    mt_error error;
    mt_ids ids = {0};
    bool begins_with_bos;
    check(mt_prompt_begins_with_bos(folder, &begins_with_bos, &error), &error);
    if (begins_with_bos) mt_ids_push(&ids, mt_tokenizer_bos(tokenizer));
    check(mt_tokenizer_encode(tokenizer, prompt, (int64_t)strlen(prompt), &ids, &error), &error);
    if (ids.count >= MAX_TOKENS) mt_die("the prompt has %lld tokens; %d fit", (long long)ids.count, MAX_TOKENS - 1);
    memcpy(tokens, ids.data, (size_t)ids.count * sizeof *tokens);
    free(ids.data);
    return ids.count;
}

static void print_text(const mt_tokenizer *tokenizer, const int32_t *tokens, int64_t count) {
    mt_error error;
    mt_text text = {0};
    check(mt_tokenizer_decode(tokenizer, tokens, count, &text, &error), &error);
    printf("%.*s\n", (int)text.bytes, text.data);
    free(text.data);
}

int main(int argc, char **argv) {
    if (argc < 2) mt_die("usage: load_and_generate DIR [PROMPT]");
    mt_grid grid;
    mt_error error;
    mt_grid_start(&grid, &argc, &argv); // one rank, unless mpirun started several

    /* The model: options from config.json, weights from safetensors, memory for one sequence of MAX_TOKENS. */
    static const char *const settings[] = {"device", "cpu", NULL};
    mt_hf *hf;
    check(mt_hf_open(&hf, argv[1], settings, 1, MAX_TOKENS, &grid, &error), &error);

    int32_t tokens[MAX_TOKENS] = {1};
    int64_t count = 1;
    mt_tokenizer *tokenizer = NULL;
    if (argc > 2) {
        check(mt_tokenizer_open_folder(&tokenizer, argv[1], &error), &error);
        count = encode(tokenizer, argv[1], argv[2], tokens);
    }

    /* tokens[0, count) becomes prompt and continuation. mt_sampling instead of NULL draws with a temperature. */
    check(mt_generate(hf->model, tokens, &count, 1, MAX_TOKENS, NULL, &hf->stops, &error), &error);
    if (tokenizer) print_text(tokenizer, tokens, count);
    for (int64_t i = 0; !tokenizer && i < count; i++) printf("%d%c", tokens[i], i + 1 < count ? ' ' : '\n');

    mt_tokenizer_close(tokenizer);
    mt_hf_close(hf);
    mt_grid_stop(&grid);
    return 0;
}
