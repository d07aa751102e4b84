/* Safetensors files, single and as folders with an index: accepted, or refused with a message. */
#include "../data/checkpoint/mxfp4.h"
#include "folder.h"

#include <dirent.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

/* Every message is one line that begins with the file's name. */
static void assert_one_line(const mt_error *error, const char *name) {
    assert_null(strchr(error->text, '\n'));
    if (strncmp(error->text, name, strlen(name)) != 0) fail_msg("\"%s\" does not begin with %s", error->text, name);
    assert_non_null(strchr(error->text, ';'));
}

/* An image in memory from a header's text and a number of data bytes 0, 1, 2, ... */
static char *make_image(const char *header, int64_t data_bytes, int64_t *bytes) {
    uint64_t length = strlen(header);
    *bytes = 8 + (int64_t)length + data_bytes;
    char *image = mt_malloc(*bytes); // of exactly this size, so that a sanitizer sees reads past it
    memcpy(image, &length, 8);
    memcpy(image + 8, header, length);
    for (int64_t i = 0; i < data_bytes; i++) image[8 + (int64_t)length + i] = (char)i;
    return image;
}

static int open_header(mt_safetensors **file, const char *header, int64_t data_bytes, char **image, mt_error *error) {
    int64_t bytes;
    *image = make_image(header, data_bytes, &bytes);
    return mt_safetensors_open_memory(file, *image, bytes, "image", error);
}

static void assert_refused(const char *header, int64_t data_bytes, const char *words) {
    mt_safetensors *file;
    mt_error error;
    char *image;
    if (open_header(&file, header, data_bytes, &image, &error) == 0) fail_msg("accepted: %s", header);
    assert_one_line(&error, "image:");
    if (!strstr(error.text, words)) fail_msg("\"%s\" does not say \"%s\"", error.text, words);
    free(image);
}

static void check_names(const char *folder) {
    DIR *directory = opendir(folder);
    assert_non_null(directory);
    int accepted = 0, refused = 0;
    for (struct dirent *entry; (entry = readdir(directory));) {
        char path[512];
        mt_safetensors *file;
        mt_error error;
        snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
        if (strncmp(entry->d_name, "ok_", 3) == 0) {
            if (mt_safetensors_open(&file, path, &error) != 0) fail_msg("%s", error.text);
            mt_safetensors_close(file);
            accepted++;
        } else if (strncmp(entry->d_name, "bad_", 4) == 0) {
            if (mt_safetensors_open(&file, path, &error) == 0) fail_msg("accepted: %s", path);
            assert_one_line(&error, path);
            refused++;
        }
    }
    closedir(directory);
    assert_true(accepted >= 8 && refused >= 17);
}

static void every_file_is_accepted_or_refused_as_its_name_says(void **state) {
    (void)state;
    check_names("tests/golden/safetensors");
}

static void every_shared_file_is_accepted_or_refused_as_its_name_says(void **state) {
    (void)state;
    const char *shared = getenv("MT_SHARED");
    char folder[512];
    snprintf(folder, sizeof folder, "%s/safetensors", shared ? shared : "../shared");
    if (access(folder, R_OK) != 0) {
        print_message("skipped: %s is absent\n", folder);
        skip();
    }
    check_names(folder);
}

static void tensors_are_found_by_name_with_their_shape_and_bytes(void **state) {
    (void)state;
    mt_safetensors *file;
    mt_error error;
    char *image;
    const char *header = "{\"__metadata__\":{\"format\":\"pt\"},"
                         "\"b\":{\"dtype\":\"BF16\",\"shape\":[2,3],\"data_offsets\":[4,16]},"
                         "\"a\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,4]},"
                         "\"empty\":{\"dtype\":\"I64\",\"shape\":[0,7],\"data_offsets\":[4,4]}}";
    assert_int_equal(open_header(&file, header, 16, &image, &error), 0);
    assert_int_equal(mt_safetensors_count(file), 3);
    assert_string_equal(mt_safetensors_get(file, 0)->name, "a");
    const mt_tensor_info *b = mt_safetensors_find(file, "b");
    assert_non_null(b);
    assert_int_equal(b->dtype, MT_BF16);
    assert_int_equal(b->num_dims, 2);
    assert_int_equal(b->shape[0], 2);
    assert_int_equal(b->shape[1], 3);
    assert_int_equal(b->bytes, 12);
    assert_int_equal(((const char *)b->data)[0], 4);
    assert_string_equal(b->file, "image");
    assert_int_equal(mt_safetensors_find(file, "a")->num_dims, 0);
    assert_int_equal(mt_safetensors_find(file, "empty")->bytes, 0);
    assert_null(mt_safetensors_find(file, "c"));
    mt_safetensors_close(file);
    free(image);
}

static void what_a_header_may_not_say_is_refused_in_words(void **state) {
    (void)state;
#define ENTRY(dtype, shape, offsets) "{\"t\":{\"dtype\":" dtype ",\"shape\":" shape ",\"data_offsets\":" offsets "}}"
    assert_refused(ENTRY("\"F99\"", "[1]", "[0,4]"), 4, "dtype \"F99\"");
    assert_refused(ENTRY("5", "[1]", "[0,4]"), 4, "no dtype");
    assert_refused(ENTRY("\"F32\"", "[-1]", "[0,4]"), 4, "shape");
    assert_refused(ENTRY("\"F32\"", "[1.0]", "[0,4]"), 4, "shape");
    assert_refused(ENTRY("\"F32\"", "{}", "[0,4]"), 4, "shape");
    assert_refused(ENTRY("\"F32\"", "[1,1,1,1,1,1,1,1,1]", "[0,4]"), 4, "more than 8 dimensions");
    assert_refused(ENTRY("\"F32\"", "[4611686018427387904]", "[0,4]"), 4, "overflows");
    assert_refused(ENTRY("\"F32\"", "[4294967296,4294967296,0]", "[0,0]"), 0, "overflows");
    assert_refused(ENTRY("\"F32\"", "[99999999999999999999]", "[0,4]"), 4, "shape");
    assert_refused(ENTRY("\"F32\"", "[1]", "[0]"), 4, "data_offsets");
    assert_refused(ENTRY("\"F32\"", "[1]", "[0,4,4]"), 4, "data_offsets");
    assert_refused(ENTRY("\"F32\"", "[1]", "[-4,0]"), 4, "data_offsets");
    assert_refused(ENTRY("\"F32\"", "[1]", "[0,8]"), 4, "outside");
    assert_refused(ENTRY("\"F32\"", "[1]", "[4,0]"), 4, "outside");
    assert_refused(ENTRY("\"F32\"", "[2]", "[0,4]"), 4, "do not fit");
    assert_refused(ENTRY("\"F32\"", "[1]", "[1,5]"), 5, "does not begin");
    assert_refused(ENTRY("\"F32\"", "[1]", "[0,4]"), 5, "after the last");
    assert_refused("{\"t\":[]}", 0, "no dtype");
    assert_refused("{\"__metadata__\":{\"a\":1}}", 0, "__metadata__");
    assert_refused("{\"__metadata__\":\"a\"}", 0, "__metadata__");
    assert_refused("[]", 0, "object");
    assert_refused("{} {}", 0, "JSON");
#undef ENTRY
}

static void duplicate_names_are_refused(void **state) {
    (void)state;
    assert_refused("{\"t\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},"
                   "\"t\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[1,2]}}",
                   2, "duplicate");
}

static void two_tensors_on_the_same_bytes_are_refused(void **state) {
    (void)state;
    assert_refused("{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]},"
                   "\"b\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[1,3]}}",
                   3, "does not begin");
    assert_refused("{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]},"
                   "\"b\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]}}",
                   2, "does not begin");
}

static void deep_and_dense_headers_are_refused_before_they_cost_memory(void **state) {
    (void)state;
    int64_t length = 1 << 20;
    char *header = mt_malloc(length + 1);
    memset(header, '[', (size_t)length);
    header[length] = 0;
    assert_refused(header, 0, "brackets");
    for (int64_t i = 0; i < length; i++) header[i] = "{},"[i % 3];
    assert_refused(header, 0, "brackets");
    memset(header, ' ', (size_t)length); // few brackets for its length, but nested too deep
    for (int64_t i = 0; i < length; i += 32) header[i] = '[';
    assert_refused(header, 0, "JSON");
    free(header);
    // empty tensors take no data, so their number is bounded
    const char entry[] = "\"x\": {\"dtype\": \"F32\", \"shape\": [0], \"data_offsets\": [0, 0]},";
    int64_t count = (1 << 18) + 1, bytes = (int64_t)strlen(entry);
    header = mt_malloc(count * bytes + 2);
    header[0] = '{';
    for (int64_t i = 0; i < count; i++) memcpy(header + 1 + i * bytes, entry, (size_t)bytes);
    strcpy(header + count * bytes, "}");
    assert_refused(header, 0, "lists over 262144 tensors");
    free(header);
}

static void messages_stay_one_line_whatever_names_hold(void **state) {
    (void)state;
    assert_refused("{\"a\\nb\\u0007\":{\"dtype\":\"\\n\",\"shape\":[],\"data_offsets\":[0,0]}}", 0, "a?b?");
    char header[4096], name[2001];
    memset(name, 'n', sizeof name - 1);
    name[sizeof name - 1] = 0;
    snprintf(header, sizeof header, "{\"%s\":{}}", name);
    assert_refused(header, 0, "nnn\" has no dtype; get it again");
}

/* A header with a flipped byte, or truncated at any byte, never crashes; an accepted one is whole. */
static void damage_anywhere_is_refused_or_harmless(void **state) {
    (void)state;
    const char *header = "{\"__metadata__\":{\"format\":\"pt\"},"
                         "\"w.1\":{\"dtype\":\"F32\",\"shape\":[2,2],\"data_offsets\":[0,16]},"
                         "\"w.2\":{\"dtype\":\"F16\",\"shape\":[3],\"data_offsets\":[16,22]}}";
    int64_t bytes;
    mt_safetensors *file;
    mt_error error;
    char *image = make_image(header, 22, &bytes);
    for (int64_t cut = 0; cut < bytes; cut++) {
        char *copy = mt_malloc(cut);
        memcpy(copy, image, (size_t)cut);
        if (mt_safetensors_open_memory(&file, copy, cut, "image", &error) == 0) fail_msg("accepted %d bytes", (int)cut);
        assert_one_line(&error, "image:");
        free(copy);
    }
    int64_t refused = 0, header_end = bytes - 22;
    for (int64_t at = 0; at < header_end; at++)
        for (int flip = 1; flip < 256; flip++) {
            image[at] = (char)(image[at] ^ flip);
            if (mt_safetensors_open_memory(&file, image, bytes, "image", &error) == 0) {
                int64_t total = 0;
                for (int64_t i = 0; i < mt_safetensors_count(file); i++) total += mt_safetensors_get(file, i)->bytes;
                assert_int_equal(total, 22);
                mt_safetensors_close(file);
            } else {
                assert_one_line(&error, "image:");
                refused++;
            }
            image[at] = (char)(image[at] ^ flip);
        }
    assert_true(refused > header_end * 255 / 2);
    free(image);
}

static void what_is_not_a_readable_file_is_named(void **state) {
    (void)state;
    mt_safetensors *file;
    mt_error error;
    assert_int_equal(mt_safetensors_open(&file, "tests", &error), -1);
    assert_non_null(strstr(error.text, "tests: cannot be read: it is a folder"));
    assert_int_equal(mt_safetensors_open(&file, "tests/absent.safetensors", &error), -1);
    assert_non_null(strstr(error.text, "tests/absent.safetensors: cannot be read: No such file"));
    assert_int_equal(mt_safetensors_open(&file, "tests/golden/safetensors/bad_lfs_pointer.safetensors", &error), -1);
    assert_non_null(strstr(error.text, "git lfs pull"));
}

/* ---- folders */

static void write_file(const char *name, const void *data, int64_t bytes) {
    char path[512];
    snprintf(path, sizeof path, "%s/%s", root, name);
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(data, 1, (size_t)bytes, file), bytes);
    assert_int_equal(fclose(file), 0);
}

/* A file with one tensor of one byte. */
static void write_tensor(const char *name, const char *tensor) {
    char header[256];
    int64_t bytes;
    snprintf(header, sizeof header, "{\"%s\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", tensor);
    char *image = make_image(header, 1, &bytes);
    write_file(name, image, bytes);
    free(image);
}

static void write_index(const char *text) {
    write_file("model.safetensors.index.json", text, (int64_t)strlen(text));
}

static void assert_folder_refused(const char *words, const char *more_words) {
    mt_safetensors *file;
    mt_error error;
    assert_int_equal(mt_safetensors_open_folder(&file, root, "model", &error), -1);
    assert_one_line(&error, root);
    if (!strstr(error.text, words) || !strstr(error.text, more_words))
        fail_msg("\"%s\" does not say \"%s\" and \"%s\"", error.text, words, more_words);
}

static void a_folder_with_an_index_is_one_set_of_tensors(void **state) {
    (void)state;
    mt_safetensors *file;
    mt_error error;
    write_tensor("model-00001-of-00002.safetensors", "b");
    write_tensor("model-00002-of-00002.safetensors", "a");
    write_index("{\"weight_map\":{\"a\":\"model-00002-of-00002.safetensors\","
                "\"b\":\"model-00001-of-00002.safetensors\"}}");
    if (mt_safetensors_open_folder(&file, root, "model", &error) != 0) fail_msg("%s", error.text);
    assert_int_equal(mt_safetensors_count(file), 2);
    assert_non_null(strstr(mt_safetensors_find(file, "a")->file, "model-00002"));
    assert_non_null(strstr(mt_safetensors_find(file, "b")->file, "model-00001"));
    mt_safetensors_close(file);
}

static void an_index_that_does_not_fit_its_files_is_refused(void **state) {
    (void)state;
    write_tensor("x.safetensors", "a");
    write_tensor("y.safetensors", "a");
    write_index("{\"weight_map\":{\"a\":\"x.safetensors\",\"b\":\"x.safetensors\"}}");
    assert_folder_refused("\"b\" in x.safetensors", "does not hold it");
    write_index("{\"weight_map\":{\"b\":\"x.safetensors\"}}");
    assert_folder_refused("holds tensor \"a\"", "nowhere");
    write_index("{\"weight_map\":{\"a\":\"x.safetensors\",\"b\":\"y.safetensors\"}}");
    assert_folder_refused("holds tensor \"a\"", "in x.safetensors");
    write_index("{\"weight_map\":{\"a\":\"absent.safetensors\"}}");
    assert_folder_refused("absent.safetensors", "No such file");
    write_index("{\"weight_map\":{\"a\":5}}");
    assert_folder_refused("\"a\"", "no plain file name");
    write_index("{\"weight_map\":[]}");
    assert_folder_refused("index.json", "no object weight_map");
    write_index("{\"weight_map\"");
    assert_folder_refused("index.json", "not JSON");
    write_index("");
    assert_folder_refused("index.json", "not JSON");
}

static void file_names_in_an_index_do_not_leave_the_folder(void **state) {
    (void)state;
    static const char *const names[] = {"../x.safetensors", "/etc/passwd",     "..", ".", "",
                                        "a/b.safetensors",  "a\\n.safetensors"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char text[256];
        snprintf(text, sizeof text, "{\"weight_map\":{\"a\":\"%s\"}}", names[i]);
        write_index(text);
        assert_folder_refused("\"a\"", "no plain file name");
    }
}

static void folders_without_safetensors_say_what_to_do(void **state) {
    (void)state;
    assert_folder_refused("neither model.safetensors", "index.json");
    write_file("pytorch_model.bin", "", 0);
    assert_folder_refused("pytorch_model.bin", "save_pretrained");
}

/* ==== MXFP4 ====================================================================================================== */

/* Two stacked matrices of 3 rows and 64 columns; byte i of the values is i % 256, the scales are as given. */
static int open_mxfp4(mt_safetensors **file, char **image, const char *scales_type, const char *scales_shape) {
    char header[400];
    int64_t bytes;
    mt_error error;
    snprintf(header, sizeof header,
             "{\"w_blocks\":{\"dtype\":\"U8\",\"shape\":[2,3,2,16],\"data_offsets\":[0,192]},"
             "\"w_scales\":{\"dtype\":\"%s\",\"shape\":%s,\"data_offsets\":[192,204]}}",
             scales_type, scales_shape);
    *image = make_image(header, 204, &bytes);
    return mt_safetensors_open_memory(file, *image, bytes, "image", &error);
}

static void mxfp4_has_the_sixteen_values_of_e2m1_times_a_power_of_two(void **state) {
    (void)state;
    static const double values[16] = {0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6};
    static const int scales[12] = {127, 128, 126, 0, 1, 254, 255, 120, 130, 127, 64, 190};
    mt_safetensors *file;
    mt_error error;
    mt_mxfp4 w;
    char *image;
    float all[6 * 64], some[2 * 64];
    assert_int_equal(open_mxfp4(&file, &image, "U8", "[2,3,2]"), 0);
    char *data = (char *)(uintptr_t)mt_safetensors_find(file, "w_blocks")->data;
    for (int i = 0; i < 12; i++) data[192 + i] = (char)scales[i];
    assert_int_equal(mt_mxfp4_find(&w, file, "w", &error), 0);
    assert_true(w.rows == 6 && w.cols == 64 && w.matrices == 2 && w.row_count == 3);
    mt_mxfp4_to_f32(all, &w, 0, 6);
    for (int i = 0; i < 6 * 64; i++) {
        int byte = i / 2, code = i % 2 == 0 ? byte % 16 : byte / 16; // the low half is first
        float want = (float)(values[code] * pow(2, scales[i / 32] - 127));
        if (scales[i / 32] == 255)
            assert_true(isnan(all[i]));
        else
            assert_true(all[i] == want && signbit(all[i]) == signbit(want));
    }
    mt_mxfp4_to_f32(some, &w, 1, 2);
    assert_memory_equal(some, all + 64, sizeof some);
    assert_int_equal(mt_mxfp4_find(&w, file, "v", &error), 1);
    mt_safetensors_close(file);
    free(image);
}

static void mxfp4_with_parts_that_do_not_fit_is_refused(void **state) {
    (void)state;
    static const char *const cases[][2] = {{"I8", "[2,3,2]"}, {"U8", "[2,2,3]"}, {"U8", "[6,2]"}, {"U8", "[12]"}};
    mt_safetensors *file;
    mt_error error;
    mt_mxfp4 w;
    char *image;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_int_equal(open_mxfp4(&file, &image, cases[i][0], cases[i][1]), 0);
        assert_int_equal(mt_mxfp4_find(&w, file, "w", &error), -1);
        assert_one_line(&error, "image:");
        assert_non_null(strstr(error.text, "\"w_blocks\" and \"w_scales\" must be U8"));
        mt_safetensors_close(file);
        free(image);
    }
    const char *alone = "{\"w_blocks\":{\"dtype\":\"U8\",\"shape\":[3,2,16],\"data_offsets\":[0,96]}}";
    assert_int_equal(open_header(&file, alone, 96, &image, &error), 0);
    assert_int_equal(mt_mxfp4_find(&w, file, "w", &error), -1);
    assert_non_null(strstr(error.text, "\"w_scales\" is missing"));
    mt_safetensors_close(file);
    free(image);
}

int main(void) {
#define FOLDER_TEST(test) cmocka_unit_test_setup_teardown(test, make_root, remove_root)
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_file_is_accepted_or_refused_as_its_name_says),
        cmocka_unit_test(every_shared_file_is_accepted_or_refused_as_its_name_says),
        cmocka_unit_test(tensors_are_found_by_name_with_their_shape_and_bytes),
        cmocka_unit_test(what_a_header_may_not_say_is_refused_in_words),
        cmocka_unit_test(duplicate_names_are_refused),
        cmocka_unit_test(two_tensors_on_the_same_bytes_are_refused),
        cmocka_unit_test(deep_and_dense_headers_are_refused_before_they_cost_memory),
        cmocka_unit_test(messages_stay_one_line_whatever_names_hold),
        cmocka_unit_test(damage_anywhere_is_refused_or_harmless),
        cmocka_unit_test(what_is_not_a_readable_file_is_named),
        cmocka_unit_test(mxfp4_has_the_sixteen_values_of_e2m1_times_a_power_of_two),
        cmocka_unit_test(mxfp4_with_parts_that_do_not_fit_is_refused),
        FOLDER_TEST(a_folder_with_an_index_is_one_set_of_tensors),
        FOLDER_TEST(an_index_that_does_not_fit_its_files_is_refused),
        FOLDER_TEST(file_names_in_an_index_do_not_leave_the_folder),
        FOLDER_TEST(folders_without_safetensors_say_what_to_do),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
