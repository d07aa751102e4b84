/* fuzz_request.c: bodies of requests to a server. The first byte selects the endpoint. */
#include "data/serve/request.h"

#include <stdlib.h>
#include <string.h>

static mt_service open_service(void) {
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static mt_tokenizer *tokenizer;
    static mt_chat *chat;
    mt_error error;
    if (!tokenizer) {
        MT_CHECK(mt_tokenizer_open(&tokenizer, MT_TOKENIZER_BYTE_LEVEL, NULL, &error) == 0);
        MT_CHECK(mt_chat_open(&chat, MT_CHAT_PLAIN, tokenizer, NULL, &error) == 0);
    }
    mt_service service = {.name = "model", .tokenizer = tokenizer, .bos = -1, .context = 64, .vocab_size = 257};
    static const mt_image_reader reader = {
        .config = {.patch_size = 4, .temporal_patch_size = 2, .merge_size = 2, .min_pixels = 64, .max_pixels = 1024},
        .image_token_id = 256};
    service.images = &reader, service.max_image_tokens = 16;
    service.max_choices = 8, service.max_new_tokens = -1, service.chat = chat, service.chat_lock = &lock;
    service.sampling = (mt_sampling){.temperature = 1, .top_p = 1};
    return service;
}

static void check_refusal(const mt_request_error *refusal) {
    MT_CHECK(refusal->status >= 400 && refusal->status < 500);
    MT_CHECK(refusal->error.text[0] != '\0' && !strchr(refusal->error.text, '\n'));
}

static void check_request(const mt_request *r, const mt_service *service) {
    MT_CHECK(r->num_prompts >= 1 && r->num_choices >= 1 && r->num_prompts * r->num_choices <= service->max_choices);
    for (int64_t i = 0; i < r->num_prompts; i++) {
        const mt_ids *prompt = &r->prompts[i];
        MT_CHECK(prompt->count >= 1 && prompt->count + r->max_new_tokens <= service->context);
        for (int64_t t = 0; t < prompt->count; t++)
            MT_CHECK(prompt->data[t] >= 0 && prompt->data[t] < service->vocab_size);
    }
    MT_CHECK(r->max_new_tokens > 0 || r->echo);
    MT_CHECK(r->num_rivals >= -1 && r->num_rivals <= 20);
    MT_CHECK(r->sampling.temperature >= 0 && r->sampling.top_p > 0 && r->sampling.top_p <= 1);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    const mt_service service = open_service();
    mt_request_error refusal = {.status = 0};
    if (size == 0) return 0;
    const char *body = (const char *)data + 1;
    int64_t bytes = (int64_t)size - 1;
    if (data[0] % 3 == 2) {
        mt_ids ids = {0};
        if (mt_request_read_tokenize(&ids, body, bytes, &service, &refusal) != 0) check_refusal(&refusal);
        free(ids.data);
        return 0;
    }
    mt_request request;
    if (mt_request_read(&request, data[0] % 3 == 1, body, bytes, &service, &refusal) == 0)
        check_request(&request, &service);
    else
        check_refusal(&refusal);
    mt_request_free(&request);
    return 0;
}
