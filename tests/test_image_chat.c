/* test_image_chat.c: conversations with pictures become the tokens and grids that transformers' processor makes. */
#include "../data/datasets/image_chat.h"
#include "../data/datasets/packing.h"
#include "../data/tokens/tokenizer_vocab.h"
#include "../data/base/file.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "picture_folder.h"

typedef struct fixture {
    json_t *golden;
    mt_tokenizer *tokenizer;
    mt_chat *chat;
    mt_image_reader reader;
} fixture;

static void close_fixture(fixture *f) {
    mt_chat_close(f->chat);
    if (f->tokenizer) mt_tokenizer_close(f->tokenizer);
    json_decref(f->golden);
}

/* False where this build cannot read PNG, or the template needs python3-jinja2 and there is none. */
static bool open_fixture(fixture *f) {
    mt_error error = {{0}};
    mt_run_options options = {0};
    options.stack = (mt_options){.vision = {.tower = MT_VISION_QWEN2_5,
                                            .patch_size = 4,
                                            .temporal_patch_size = 2,
                                            .spatial_merge_size = 2,
                                            .image_token_id = PICTURE_IMAGE_TOKEN}};
    mt_chat_message hello = {"user", "Hi", 2};
    mt_ids ids = {0}, turns = {0};
    *f = (fixture){.golden = mt_json_read("tests/golden/images/chat.json", &error)};
    assert_non_null(f->golden);
    write_picture_folder(f->golden);
    if (mt_tokenizer_open_folder(&f->tokenizer, root, &error) != 0) fail_msg("%s", error.text);
    if (mt_chat_open(&f->chat, MT_CHAT_AUTO, f->tokenizer, root, &error) != 0) fail_msg("%s", error.text);
    if (mt_image_reader_open(&f->reader, &options, NULL, &error) != 0) fail_msg("%s", error.text);
    f->reader.config.min_pixels = 256, f->reader.config.max_pixels = 1600;
    int status = mt_chat_encode(f->chat, &hello, 1, true, &ids, &turns, &error);
    if (status != 0) assert_non_null(strstr(error.text, "needs python3-jinja2"));
    free(ids.data), free(turns.data);
    bool reads = status == 0;
#ifndef MT_HAVE_PNG
    reads = false;
#endif
    if (!reads) printf("skipped: python3-jinja2 or libpng is absent\n");
    if (!reads) close_fixture(f);
    return reads;
}

static void conversations_become_the_tokens_of_transformers(void **state) {
    (void)state;
    fixture f;
    mt_error error = {{0}};
    size_t c, i;
    json_t *kase, *id;
    if (!open_fixture(&f)) skip();
    assert_in_range(json_array_size(json_object_get(f.golden, "cases")), 7, 100);
    json_array_foreach(json_object_get(f.golden, "cases"), c, kase) {
        const json_t *beside = json_object_get(kase, "images"), *grids = json_object_get(kase, "grids");
        const json_t *expected = json_object_get(kase, "ids");
        mt_ids ids = {0}, turns = {0};
        mt_images images = {0};
        f.reader.folder = beside ? "tests/golden/images" : NULL;
        mt_ids_push(&ids, 7), mt_ids_push(&turns, -1); // tokens of before stay
        bool generates = json_is_true(json_object_get(kase, "generates"));
        mt_image_chat conversation = {json_object_get(kase, "messages"), beside, NULL, generates};
        if (mt_image_chat_encode(f.chat, &f.reader, &conversation, &ids, &turns, &images, &error) != 0)
            fail_msg("case %d: %s", (int)c, error.text);
        assert_int_equal(ids.count, json_array_size(expected) + 1);
        assert_int_equal(turns.count, ids.count);
        json_array_foreach(expected, i, id) assert_int_equal(ids.data[i + 1], json_integer_value(id));
        assert_int_equal(images.count, json_array_size(grids));
        for (int64_t k = 0; k < images.count; k++) {
            const json_t *grid = json_array_get(grids, (size_t)k);
            assert_int_equal(images.items[k].grid.height, json_integer_value(json_array_get(grid, 0)));
            assert_int_equal(images.items[k].grid.width, json_integer_value(json_array_get(grid, 1)));
        }
        for (int64_t k = 0; k < ids.count && c < 6; k++) // pictures of users are no answers
            if (ids.data[k] == PICTURE_IMAGE_TOKEN) assert_int_equal(turns.data[k], -1);
        mt_images_cut(&images, 0);
        free(ids.data), free(turns.data);
    }
    close_fixture(&f);
}

/* The tokens of a conversation; NULL with error. */
static int encode(const fixture *f, const char *messages, const char *beside, mt_ids *ids, mt_images *images,
                  mt_error *error) {
    json_t *list = json_loads(messages, 0, NULL), *pictures = beside ? json_loads(beside, JSON_DECODE_ANY, NULL) : NULL;
    mt_ids turns = {0};
    assert_non_null(list);
    assert_true(!beside || pictures);
    mt_image_chat conversation = {list, pictures, NULL, true};
    int status = mt_image_chat_encode(f->chat, &f->reader, &conversation, ids, &turns, images, error);
    free(turns.data);
    json_decref(list);
    json_decref(pictures);
    return status;
}

#define PICTURE   "tests/golden/images/square.png"
#define ONE(part) "[{\"role\": \"user\", \"content\": [" part "]}]"

static void a_picture_has_one_meaning_in_all_forms(void **state) {
    static const char *const forms[][2] = {
        {ONE("{\"type\": \"image\", \"image\": \"" PICTURE "\"}"), NULL},
        {ONE("{\"image\": \"" PICTURE "\"}"), NULL},
        {ONE("{\"type\": \"image\", \"path\": \"" PICTURE "\"}"), "[]"},
        {ONE("{\"type\": \"image\", \"url\": \"file://" PICTURE "\"}"), "null"},
        {ONE("{\"type\": \"image_url\", \"image_url\": {\"url\": \"" PICTURE "\"}}"), NULL},
        {ONE("{\"type\": \"image_url\", \"image_url\": \"file://" PICTURE "\"}"), NULL},
        {ONE("{\"type\": \"image\"}"), "[\"" PICTURE "\"]"},
        {"[{\"role\": \"user\", \"content\": \"<image>\"}]", "[{\"path\": \"" PICTURE "\"}]"},
        {"[{\"role\": \"user\", \"content\": \"<image>\"}]", "\"" PICTURE "\""},
    };
    (void)state;
    fixture f;
    mt_ids first = {0};
    mt_images images = {0};
    mt_error error = {{0}};
    if (!open_fixture(&f)) skip();
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++) {
        mt_ids ids = {0};
        if (encode(&f, forms[i][0], forms[i][1], &ids, &images, &error) != 0)
            fail_msg("form %d: %s", (int)i, error.text);
        assert_int_equal(images.count, (int64_t)i + 1);
        assert_true(images.items[i].fingerprint == images.items[0].fingerprint);
        if (i == 0) first = ids;
        assert_int_equal(ids.count, first.count);
        assert_memory_equal(ids.data, first.data, (size_t)ids.count * 4);
        if (i > 0) free(ids.data);
    }
    int64_t count = images.items[0].grid.height * images.items[0].grid.width * 96;
    float *patches = mt_malloc(count * 4);
    assert_int_equal(mt_image_read(patches, &images.items[0], &f.reader.config, &error), 0);
    images.items[0].fingerprint++;
    assert_int_equal(mt_image_read(patches, &images.items[0], &f.reader.config, &error), -1);
    assert_non_null(strstr(error.text, "square.png: has changed since the run began"));
    free(patches), free(first.data);
    mt_images_cut(&images, 0);
    close_fixture(&f);
}

static void a_picture_in_an_address_is_decoded(void **state) {
    (void)state;
    fixture f;
    mt_images images = {0};
    mt_ids ids = {0};
    mt_error error = {{0}};
    // one white pixel
    static const char address[] =
        ONE("{\"type\": \"image_url\", \"image_url\": {\"url\": \"data:image/png;base64,"
            "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGP4DwABAQEAsTj2FAAAAABJRU5ErkJggg==\"}}");
    if (!open_fixture(&f)) skip();
    if (encode(&f, address, NULL, &ids, &images, &error) != 0) fail_msg("%s", error.text);
    assert_int_equal(images.items[0].grid.height, 4); // 256 pixels
    free(ids.data);
    mt_images_cut(&images, 0);
    close_fixture(&f);
}

static void bad_pictures_are_refused_and_nothing_is_added(void **state) {
    static const struct {
        const char *messages, *beside, *says;
    } cases[] = {
        {ONE("{\"type\": \"image\"}"), NULL, "has 0 pictures in \"images\" and 1 places"},
        {ONE("{\"type\": \"text\", \"text\": \"Hi\"}"), "[\"a.png\"]", "has 1 pictures in \"images\" and 0 places"},
        {"[{\"role\": \"user\", \"content\": \"<image>\"}]", "[\"a.png\", \"b.png\"]", "has 2 pictures in \"images\""},
        {"[{\"role\": \"user\", \"content\": \"<image>\"}]", "[7]", "item 1 is not the path of a picture"},
        {"[{\"role\": \"user\", \"content\": \"<image>\"}]", "[{\"bytes\": \"x\"}]", "write its bytes to a file"},
        {"[{\"role\": \"user\", \"content\": \"<image>\"}]", "{\"a\": 1}", "\"images\" is not a list of paths"},
        {ONE("{\"type\": \"image\", \"image\": \"absent.png\"}"), NULL, "absent.png"},
        {ONE("{\"type\": \"image\", \"image\": \"README.md\"}"), NULL, "README.md: neither PNG nor JPEG"},
        {ONE("{\"type\": \"image\", \"image\": \"https://a.b/c.png\"}"), NULL, "is on a network; download it"},
        {ONE("{\"type\": \"image\", \"image\": \"data:image/png;base64,*\"}"), NULL, "is not data:image/png;base64"},
        {ONE("{\"type\": \"video\", \"video\": \"a.mp4\"}"), NULL, "has the type \"video\"; parts are"},
        {ONE("7"), NULL, "a part of a message's content is not an object"},
        {ONE("{\"type\": \"text\"}"), NULL, "has the type text and no \"text\""},
        {"[{\"role\": \"user\", \"content\": \"an <|image_pad|> of its own\"}]", NULL,
         "has 0 pictures, and its text 1 image tokens (token 1028)"},
        {"[{\"content\": \"no role\"}]", NULL, "message 1 has no \"role\""},
        {"[{\"role\": \"user\", \"content\": 7}]", NULL, "message 1: \"content\" is neither a text nor a list"},
    };
    (void)state;
    fixture f;
    mt_images images = {0};
    mt_ids ids = {0};
    mt_error error = {{0}};
    if (!open_fixture(&f)) skip();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_int_equal(encode(&f, cases[i].messages, cases[i].beside, &ids, &images, &error), -1);
        if (!strstr(error.text, cases[i].says)) fail_msg("'%s' instead of '%s'", error.text, cases[i].says);
        assert_int_equal(ids.count, 0);
        assert_int_equal(images.count, 0);
    }
    free(ids.data);
    close_fixture(&f);
}

static void copy_picture(const char *name, const char *to) {
    char command[700];
    snprintf(command, sizeof command, "cp tests/golden/images/%s %s", name, at(to));
    assert_int_equal(system(command), 0);
}

/* Reads lines of a file in `root`, with paths relative to it. */
static int read_samples(const fixture *f, mt_samples *samples, mt_sft_config config, const char *lines,
                        mt_error *error) {
    char *paths[] = {(char *)at("lines.jsonl")};
    FILE *file = fopen(paths[0], "w");
    assert_non_null(file);
    fputs(lines, file);
    fclose(file);
    config.paths = (mt_strings){1, paths}, config.tokenizer_path = root, config.vocab_size = PICTURE_VOCABULARY;
    config.images = &f->reader;
    return mt_samples_read(samples, &config, f->tokenizer, error);
}

#define LINE(content, images)                                                                                          \
    "{\"messages\": [{\"role\": \"user\", \"content\": \"" content "\"}, "                                             \
    "{\"role\": \"assistant\", \"content\": \"Yes\"}], \"images\": [" images "]}\n"

static void samples_keep_their_pictures_and_batches_read_them(void **state) {
    (void)state;
    fixture f;
    mt_samples samples;
    mt_batch batch;
    mt_step_plan plan;
    mt_error error = {{0}};
    if (!open_fixture(&f)) skip();
    copy_picture("square.png", "a.png"), copy_picture("wide.png", "b.png");
    mt_sft_config config = {.seq_length = 200, .loss_on = MT_LOSS_ON_ALL};
    if (read_samples(&f, &samples, config,
                     LINE("<image> and <image>", "\"a.png\", \"b.png\"") LINE("none", "") LINE("<image>", "\"b.png\""),
                     &error) != 0)
        fail_msg("%s", error.text);
    const int64_t offsets[] = {0, 2, 2, 3};
    assert_int_equal(samples.count, 3);
    assert_memory_equal(samples.image_offsets, offsets, sizeof offsets);
    assert_true(samples.images.items[1].fingerprint == samples.images.items[2].fingerprint);
    for (int64_t t = 0; t < samples.offsets[3]; t++)
        if (samples.tokens[t] == PICTURE_IMAGE_TOKEN) assert_false(samples.is_trained[t]);
    mt_piece pieces[3];
    int64_t tokens = 0, patches = 0, first[] = {0, 3};
    for (int64_t s = 0; s < 3; s++) {
        pieces[s] = (mt_piece){s, mt_sample_length(&samples, s), tokens};
        tokens += pieces[s].length;
        for (int64_t i = samples.image_offsets[s]; i < samples.image_offsets[s + 1]; i++)
            patches += samples.images.items[i].grid.height * samples.images.items[i].grid.width;
    }
    int64_t most = mt_samples_max_patches(&samples, tokens);
    assert_in_range(most, patches, 4 * tokens);
    assert_int_equal(most % 4, 0);
    mt_plan_shape shape = {.num_ranks = 1, .micro_batch_size = 1, .row_length = tokens, .work = {1, 1, 0}};
    const mt_options tower = {
        .vision = {.tower = MT_VISION_QWEN2_5, .patch_size = 4, .temporal_patch_size = 2, .spatial_merge_size = 2}};
    mt_batch_alloc(&batch, tokens);
    mt_batch_alloc_images(&batch, &tower, most);
    mt_step_plan_balance(&plan, pieces, first, 1, &shape);
    for (int again = 0; again < 2; again++) { // a batch that held images before
        if (mt_step_plan_fill(&plan, 0, 0, &samples, 0, &batch, &error) != 0) fail_msg("%s", error.text);
        assert_int_equal(batch.images.num_images, 3);
    }
    float *expected = mt_malloc(patches * 96 * 4), *to = expected;
    for (int64_t i = 0; i < 3; i++) {
        assert_int_equal(mt_image_read(to, &samples.images.items[i], &f.reader.config, &error), 0);
        assert_int_equal(batch.images.grids[i].width, samples.images.items[i].grid.width);
        to += samples.images.items[i].grid.height * samples.images.items[i].grid.width * 96;
    }
    assert_memory_equal(batch.images.patches, expected, (size_t)(patches * 96) * 4);
    copy_picture("square.png", "b.png");
    assert_int_equal(mt_step_plan_fill(&plan, 0, 0, &samples, 0, &batch, &error), -1);
    assert_non_null(strstr(error.text, "b.png: has changed since the run began"));
    free(expected);
    mt_step_plan_free(&plan);
    mt_batch_free(&batch);
    uint64_t print = mt_samples_fingerprint(&samples);
    mt_samples_free(&samples);
    assert_int_equal(read_samples(&f, &samples, config, LINE("<image> and <image>", "\"a.png\", \"b.png\""), &error),
                     0);
    assert_true(mt_samples_fingerprint(&samples) != print);
    mt_samples_free(&samples);
    close_fixture(&f);
}

static void a_sample_keeps_its_pictures_whole(void **state) {
    (void)state;
    fixture f;
    mt_samples samples;
    mt_error error = {{0}};
    if (!open_fixture(&f)) skip();
    copy_picture("square.png", "a.png");
    const char *lines = LINE("none", "") LINE("A <image> that is cut", "\"a.png\"");
    mt_sft_config config = {.seq_length = 20, .loss_on = MT_LOSS_ON_ALL};
    assert_int_equal(read_samples(&f, &samples, config, lines, &error), -1);
    assert_non_null(strstr(error.text, "lines.jsonl:2: has "));
    assert_non_null(strstr(error.text, "1 pictures, and --seq-length 20 would cut a picture"));
    config.long_samples = MT_LONG_DROP;
    assert_int_equal(read_samples(&f, &samples, config, lines, &error), 0);
    assert_int_equal(samples.count, 1), assert_int_equal(samples.images.count, 0);
    mt_samples_free(&samples);
    config = (mt_sft_config){.seq_length = 34, .loss_on = MT_LOSS_ON_ALL}; // text is cut behind the picture
    assert_int_equal(read_samples(&f, &samples, config, lines, &error), 0);
    assert_int_equal(samples.count, 2), assert_int_equal(samples.images.count, 1);
    assert_int_equal(samples.offsets[2] - samples.offsets[1], 35);
    mt_samples_free(&samples);
    close_fixture(&f);
}

static void templates_without_parts_are_refused(void **state) {
    (void)state;
    fixture f;
    mt_images images = {0};
    mt_ids ids = {0};
    mt_error error = {{0}};
    if (!open_fixture(&f)) skip();
    mt_chat_close(f.chat);
    assert_int_equal(mt_chat_open(&f.chat, MT_CHAT_CHATML, f.tokenizer, root, &error), 0);
    assert_int_equal(encode(&f, ONE("{\"image\": \"" PICTURE "\"}"), NULL, &ids, &images, &error), -1);
    assert_non_null(strstr(error.text, "has pictures, which only the chat template of a folder writes"));
    mt_run_options none = {0};
    assert_int_equal(mt_image_reader_open(&f.reader, &none, NULL, &error), -1);
    assert_non_null(strstr(error.text, "no vision tower"));
    close_fixture(&f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(conversations_become_the_tokens_of_transformers),
        cmocka_unit_test(a_picture_has_one_meaning_in_all_forms),
        cmocka_unit_test(a_picture_in_an_address_is_decoded),
        cmocka_unit_test(bad_pictures_are_refused_and_nothing_is_added),
        cmocka_unit_test(samples_keep_their_pictures_and_batches_read_them),
        cmocka_unit_test(a_sample_keeps_its_pictures_whole),
        cmocka_unit_test(templates_without_parts_are_refused),
    };
    return cmocka_run_group_tests_name("image_chat", tests, make_root, remove_root);
}
