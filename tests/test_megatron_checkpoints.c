/* Checkpoints of Megatron-LM: archives and pickles are read into values or refused in words, and nothing of them runs;
 * tensors of several ranks become whole matrices. */
#include "../data/base/file.h"
#include "../data/checkpoint/megatron_args.h"
#include "../data/checkpoint/megatron_folder.h"
#include "../data/checkpoint/torch_pickle.h"
#include "../data/checkpoint/torch_write.h"
#include "../data/checkpoint/torch_zip.h"
#include "../data/options/option_table.h"
#include "folder.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define GOLDEN        "tests/golden/megatron_dist/"
#define TEXT(literal) literal, sizeof literal - 1

static void assert_one_line(const mt_error *error, const char *name) {
    assert_null(strchr(error->text, '\n'));
    if (strncmp(error->text, name, strlen(name)) != 0) fail_msg("\"%s\" does not begin with %s", error->text, name);
}

/* A pickle in memory of exactly its size, so that a sanitizer sees reads past it. */
static int read_pickle(mt_pickle **pickle, const char *bytes, size_t length, mt_error *error) {
    char *copy = mt_malloc(mt_max((int64_t)length, 1));
    memcpy(copy, bytes, length);
    int status = mt_pickle_read(pickle, copy, (int64_t)length, "file", error);
    free(copy);
    return status;
}

static void what_a_pickle_may_not_have_is_refused_in_words(void **state) {
    (void)state;
    static const struct {
        const char *bytes;
        size_t length;
        const char *words;
    } rows[] = {
        {TEXT(""), "ends too early"},
        {TEXT("."), "more than one value"},
        {TEXT("N"), "ends too early"},
        {TEXT("NN."), "more than one value"},
        {TEXT("\x80\x06N."), "protocol"},
        {TEXT("cos\nsystem\n(X\x04\0\0\0true\x85R."), "\"os.system\""},
        {TEXT("cposix\nsystem\nN."), "\"posix.system\""},
        {TEXT("cbuiltins\neval\n."), "\"builtins.eval\""},
        {TEXT("c__builtin__\neval\n."), "\"__builtin__.eval\""},
        {TEXT("ctorch\nload\n."), "\"torch.load\""},
        {TEXT("ctorch._utils\n_rebuild_tensor\n."), "\"torch._utils._rebuild_tensor\""},
        {TEXT("ctorch.Siz\ne\n."), "\"torch.Siz.e\""},
        {TEXT("cco\x01ns\nx\n."), "\"co?ns.x\""},
        {TEXT("\x8c\x02os\x8c\x06system\x93."), "\"os.system\""},
        {TEXT("\x8c\x05posix\x8c\x06system\x93)R."), "\"posix.system\""},
        {TEXT("K\x01K\x02\x93."), "no text"},
        {TEXT("ctorch\nSize"), "ends too early"},
        {TEXT("ctorch"), "ends too early"},
        {TEXT("ios\nsystem\n."), "opcode 0x69"},
        {TEXT("I1\n."), "opcode 0x49"},
        {TEXT("P1\n."), "opcode 0x50"},
        {TEXT("\x82\x01."), "opcode 0x82"},
        {TEXT("N2."), "opcode 0x32"},
        {TEXT("NR."), "stack is empty"},
        {TEXT("NNR."), "no class"},
        {TEXT("ctorch\nSize\nNR."), "no class"},
        {TEXT("N)R."), "no class"},
        {TEXT("0."), "stack is empty"},
        {TEXT("1."), "mark is missing"},
        {TEXT("t."), "mark is missing"},
        {TEXT("(N0N0N00."), "stack is empty"},
        {TEXT("Na."), "stack is empty"},
        {TEXT("NNa."), "has none"},
        {TEXT("](Ns."), "stack is empty"},
        {TEXT("}Ns."), "stack is empty"},
        {TEXT("}(Nu."), "no value"},
        {TEXT("](NNu."), "has none"},
        {TEXT("(Ne."), "stack is empty"},
        {TEXT("N}b."), "plain value"},
        {TEXT("}b."), "stack is empty"},
        {TEXT("h\x00."), "no such number"},
        {TEXT("Nq\x05."), "skipped"},
        {TEXT("Nr\xff\xff\xff\xff."), "skipped"},
        {TEXT("q\x00."), "stack is empty"},
        {TEXT("NQ."), "no storage"},
        {TEXT("(X\x07\0\0\0storageNNNtQ."), "no storage"},
        {TEXT("X\xff\xff\xff\xff"
              "a."),
         "ends too early"},
        {TEXT("\x8d\xff\xff\xff\xff\xff\xff\xff\xff"
              "a."),
         "ends too early"},
        {TEXT("\x8b\xff\xff\xff\x7f."), "ends too early"},
        {TEXT("G\0\0."), "ends too early"},
        {TEXT("\x87."), "stack is empty"},
        {TEXT("ccollections\nOrderedDict\n]NaaN\x85R."), "has none"},
        {TEXT("ccollections\nOrderedDict\n]Na\x85R."), "no value"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        mt_error error = {{0}};
        mt_pickle *pickle;
        assert_int_equal(read_pickle(&pickle, rows[i].bytes, rows[i].length, &error), -1);
        assert_null(pickle);
        assert_one_line(&error, "file: ");
        if (!strstr(error.text, rows[i].words))
            fail_msg("row %d: \"%s\" does not say \"%s\"", (int)i, error.text, rows[i].words);
    }
}

static void a_pickle_becomes_values(void **state) {
    (void)state;
    static const char bytes[] =
        "\x80\x02}q\x00(X\x01\0\0\0aK\x07X\x01\0\0\0bJ\xff\xff\xff\xffX\x01\0\0\0c]q\x01(G\x3f\xf8\0\0\0\0"
        "\0\0\x88Nh\x01\x8a\x09\0\0\0\0\0\0\0\0\x01\x65X\x01\0\0\0d\x8a\x02\x00\x80X\x01\0\0\0e"
        "cargparse\nNamespace\n)\x81}X\x01\0\0\0xM\x00\x01sbu.";
    mt_error error;
    mt_pickle *pickle;
    int64_t number;
    if (read_pickle(&pickle, TEXT(bytes), &error) != 0) fail_msg("%s", error.text);
    const mt_pickled *root = mt_pickle_root(pickle), *list = mt_pickled_get(root, "c");
    assert_true(mt_pickled_int(mt_pickled_get(root, "a"), 0, 10, &number) && number == 7);
    assert_true(mt_pickled_int(mt_pickled_get(root, "b"), -1, 10, &number) && number == -1);
    assert_true(mt_pickled_int(mt_pickled_get(root, "d"), -40000, 0, &number) && number == -32768);
    assert_false(mt_pickled_int(mt_pickled_get(root, "a"), 8, 10, &number));
    assert_int_equal(list->count, 5);
    assert_true(list->items[0]->real == 1.5);
    assert_ptr_equal(list->items[3], list); // a list may have itself
    assert_true(list->items[4]->kind == MT_PICKLED_REAL && list->items[4]->real == 18446744073709551616.0);
    assert_string_equal(mt_pickled_class(mt_pickled_get(root, "e")), "argparse.Namespace");
    assert_true(mt_pickled_int(mt_pickled_get(mt_pickled_get(root, "e"), "x"), 0, 999, &number) && number == 256);
    assert_null(mt_pickled_get(root, "f"));
    mt_pickle_free(pickle);
}

/* A tensor's numbers are compared with its storage's. */
static void a_tensor_lies_in_its_storage(void **state) {
    (void)state;
    static const struct {
        char first, rows, stride;
        bool is_tensor, contiguous;
    } rows[] = {{0, 3, 2, true, true},  {4, 1, 2, true, true}, {5, 1, 2, false, false}, {0, 4, 2, false, false},
                {0, 3, 1, true, false}, {6, 0, 2, true, true}, {7, 0, 2, false, false}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char bytes[] =
            "ctorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\0000X\x03\0"
            "\0\0cpuK\x06tQK\x00K\x00K\x02\x86K\x00K\x01\x86\x89}tR.";
        size_t at = sizeof bytes - 1 - strlen("K0K0K2\x86K0K1\x86\x89}tR.");
        bytes[at + 1] = rows[i].first, bytes[at + 3] = rows[i].rows, bytes[at + 8] = rows[i].stride;
        mt_error error;
        mt_pickle *pickle;
        mt_torch_tensor tensor;
        if (read_pickle(&pickle, bytes, sizeof bytes - 1, &error) != 0) fail_msg("%s", error.text);
        assert_int_equal(mt_pickled_tensor(mt_pickle_root(pickle), &tensor), rows[i].is_tensor);
        if (rows[i].is_tensor) assert_int_equal(tensor.contiguous, rows[i].contiguous);
        mt_pickle_free(pickle);
    }
}

static void a_deep_pickle_is_refused_and_a_long_one_read(void **state) {
    (void)state;
    enum { LONG = 3 << 20 };
    char *bytes = mt_malloc(LONG + 8);
    mt_error error;
    mt_pickle *pickle;
    memset(bytes, '(', LONG);
    assert_int_equal(read_pickle(&pickle, bytes, LONG, &error), -1);
    assert_non_null(strstr(error.text, "nested too deep"));
    memset(bytes, 'N', LONG);
    assert_int_equal(read_pickle(&pickle, bytes, LONG, &error), -1);
    assert_non_null(strstr(error.text, "stack is too deep"));
    bytes[0] = ']';
    for (int i = 1; i < LONG; i += 2) bytes[i] = ']', bytes[i + 1] = 'a'; // one in another would need its own stack
    bytes[LONG - 1] = '.';
    if (read_pickle(&pickle, bytes, LONG, &error) != 0) fail_msg("%s", error.text);
    assert_int_equal(mt_pickle_root(pickle)->count, LONG / 2 - 1);
    mt_pickle_free(pickle);
    free(bytes);
}

/* The archive of torch.save, with any of its bytes changed or its end cut off, is read or refused in one line. */
static void damage_anywhere_in_an_archive_is_refused_or_harmless(void **state) {
    (void)state;
    int64_t bytes;
    mt_error error;
    char *file = mt_file_read(GOLDEN "torch_tp2/iter_0000007/mp_rank_00/model_optim_rng.pt", 1 << 20, &bytes, &error);
    if (!file) fail_msg("%s", error.text);
    mt_zip zip;
    if (mt_zip_open(&zip, file, bytes, "file", &error) != 0) fail_msg("%s", error.text);
    const mt_zip_entry *data = mt_zip_find(&zip, "data.pkl");
    assert_non_null(data);
    assert_null(mt_zip_find(&zip, "data.pk"));
    mt_zip_entry known = {.name = "x", .name_bytes = 1, .data = (const unsigned char *)"123456789", .bytes = 9};
    for (int i = 0; i < 3; i++) { // the check value of CRC-32's definition; another; none
        known.sum = i == 0 ? 0xcbf43926u : i == 1 ? 0xcbf43927u : 0;
        assert_int_equal(mt_zip_verify(&known, "file", &error), i == 1 ? -1 : 0);
    }
    mt_zip_free(&zip);
    int64_t refused = 0, tried = 0;
    for (int64_t i = 0; i < bytes; i += bytes - i < 8000 ? 1 : 199, tried++) {
        char *copy = mt_malloc(bytes);
        memcpy(copy, file, (size_t)bytes);
        copy[i] ^= (char)(1 << i % 8);
        error.text[0] = 0;
        if (mt_zip_open(&zip, copy, bytes, "file", &error) != 0) {
            assert_one_line(&error, "file: ");
            refused++;
        }
        mt_zip_free(&zip);
        free(copy);
        copy = mt_malloc(mt_max(i, 1));
        memcpy(copy, file, (size_t)i);
        assert_int_equal(mt_zip_open(&zip, copy, i, "file", &error), -1);
        assert_one_line(&error, "file: ");
        mt_zip_free(&zip);
        free(copy);
    }
    assert_true(refused > 100 && refused < tried);
    free(file);
}

/* An archive that is written is read, with the sum of values that came in parts. */
static void an_archive_that_is_written_is_read(void **state) {
    (void)state;
    enum { ROWS = 7, COLS = 13, LINE = 5 };
    const int64_t shape[] = {ROWS, COLS};
    float values[ROWS][COLS], right[ROWS][COLS - LINE], left[ROWS][LINE];
    mt_zip_sums sums;
    mt_pickler p;
    mt_archive archive;
    mt_error error;
    mt_zip zip;
    mt_pickle *pickle;
    mt_torch_tensor tensor;
    for (int i = 0; i < ROWS * COLS; i++) values[i / COLS][i % COLS] = (float)i * 0.37F;
    for (int r = 0; r < ROWS; r++)
        memcpy(left[r], values[r], sizeof left[r]), memcpy(right[r], values[r] + LINE, sizeof right[r]);
    mt_zip_sums_init(&sums);
    uint32_t sum = mt_zip_sum_lines(&sums, (char *)right, sizeof right[0], ROWS, sizeof values[0], 0) ^
                   mt_zip_sum_lines(&sums, (char *)left, sizeof left[0], ROWS, sizeof values[0], sizeof right[0]);
    assert_int_equal(mt_zip_sum_finish(mt_zip_sum_lines(&sums, "123456789", 9, 1, 9, 0), 9), 0xcbf43926u);
    mt_pickler_begin(&p);
    mt_pickle_tensor(&p, MT_F32, shape, 2);
    mt_pickler_end(&p);
    mt_archive_make(&archive, &p.out, sizeof values, mt_zip_sum_finish(sum, sizeof values));
    assert_int_equal(archive.head.count % 64, 0);
    mt_bytes_add(&archive.head, values, sizeof values);
    mt_bytes_add(&archive.head, archive.tail.data, archive.tail.count);
    if (mt_zip_open(&zip, archive.head.data, archive.head.count, "file", &error) != 0) fail_msg("%s", error.text);
    for (int64_t i = 0; i < zip.count; i++)
        if (zip.entries[i].sum == 0 || mt_zip_verify(&zip.entries[i], "file", &error) != 0) fail_msg("%s", error.text);
    const mt_zip_entry *data = mt_zip_find(&zip, "data/0"), *text = mt_zip_find(&zip, "data.pkl");
    assert_true(data && text && data->bytes == sizeof values && memcmp(data->data, values, sizeof values) == 0);
    if (mt_pickle_read(&pickle, text->data, text->bytes, "file", &error) != 0) fail_msg("%s", error.text);
    assert_true(mt_pickled_tensor(mt_pickle_root(pickle), &tensor) && tensor.contiguous && tensor.dtype == MT_F32);
    assert_true(tensor.num_dims == 2 && tensor.shape[0] == ROWS && tensor.shape[1] == COLS);
    mt_pickle_free(pickle);
    mt_zip_free(&zip);
    mt_archive_free(&archive);
    free(p.out.data);
}

/* A tensor of over 4 GiB has numbers of 64 bits. Its file is a hole; where that is not possible there is no test. */
static void an_archive_of_over_4_gib_has_wide_numbers(void **state) {
    (void)state;
    const int64_t shape[] = {5, (int64_t)1 << 28}, bytes = 5 * ((int64_t)1 << 30);
    mt_pickler p;
    mt_archive archive;
    mt_mapping mapping;
    mt_error error;
    mt_zip zip;
    mt_pickler_begin(&p);
    mt_pickle_tensor(&p, MT_F32, shape, 2);
    mt_pickler_end(&p);
    mt_archive_make(&archive, &p.out, bytes, 1);
    const char *path = at("hole");
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    bool made = fwrite(archive.head.data, 1, (size_t)archive.head.count, file) == (size_t)archive.head.count &&
                fseeko(file, bytes, SEEK_CUR) == 0 &&
                fwrite(archive.tail.data, 1, (size_t)archive.tail.count, file) == (size_t)archive.tail.count;
    made = fclose(file) == 0 && made;
    if (made && mt_mapping_open(&mapping, path, &error) == 0) {
        if (mt_zip_open(&zip, mapping.bytes, mapping.size, "file", &error) != 0) fail_msg("%s", error.text);
        const mt_zip_entry *data = mt_zip_find(&zip, "data/0");
        assert_true(data && data->bytes == bytes && data->data == mapping.bytes + archive.head.count);
        assert_true(mt_zip_find(&zip, "version") && mt_zip_verify(mt_zip_find(&zip, "version"), "file", &error) == 0);
        mt_zip_free(&zip);
        mt_mapping_close(&mapping);
    } else {
        print_message("skipped: no file of 5 GiB can be made here\n");
    }
    remove(path);
    mt_archive_free(&archive);
    free(p.out.data);
}

static mt_megatron *opened(const char *folder, bool weights) {
    mt_error error;
    mt_megatron *checkpoint;
    if (mt_megatron_open(&checkpoint, folder, weights, &error) != 0) fail_msg("%s", error.text);
    return checkpoint;
}

static float element(const mt_megatron_matrix *matrix, int64_t row, int64_t col) {
    for (int64_t i = 0; i < matrix->count; i++) {
        mt_rectangle part = matrix->pieces[i].part;
        if (row < part.row || row >= part.row + part.rows || col < part.col || col >= part.col + part.cols) continue;
        float value;
        const char *data = matrix->pieces[i].tensor.data;
        memcpy(&value, data + ((row - part.row) * part.cols + col - part.col) * 4, sizeof value);
        return value;
    }
    fail_msg("%s has no element %d %d", matrix->name, (int)row, (int)col);
    return 0;
}

/* The same model, written by two ranks in both formats. */
static void both_formats_hold_the_same_matrices(void **state) {
    (void)state;
    mt_megatron *dist = opened(GOLDEN "dense_tp2/iter_0000007", true);
    mt_megatron *torch = opened(GOLDEN "torch_tp2/iter_0000007", true);
    assert_int_equal(mt_megatron_count(dist), 15);
    assert_int_equal(mt_megatron_count(torch), 15);
    for (int64_t i = 0; i < mt_megatron_count(dist); i++) {
        const mt_megatron_matrix *a = mt_megatron_get(dist, i);
        const mt_megatron_matrix *b = mt_megatron_find(torch, MT_STATE_WEIGHTS, a->name, a->layer, a->expert);
        if (!b) { // sharded names are those of Transformer Engine
            const char *name = strstr(a->name, ".mlp.") ? "decoder.layers.pre_mlp_layernorm.weight"
                                                        : "decoder.layers.input_layernorm.weight";
            assert_true(mt_text_ends_with(a->name, ".layer_norm_weight"));
            b = mt_megatron_find(torch, MT_STATE_WEIGHTS, name, a->layer, -1);
        }
        if (!b) fail_msg("%s is in one format", a->name);
        assert_true(a->rows == b->rows && a->cols == b->cols);
        for (int64_t row = 0; row < a->rows; row++)
            for (int64_t col = 0; col < a->cols; col++)
                if (element(a, row, col) != element(b, row, col)) fail_msg("%s differs", a->name);
    }
    mt_megatron_close(dist);
    mt_megatron_close(torch);
}

/* The script's gradient of a parameter of n elements is n even steps from -1 to 1, so that after one step of Adam the
 * moments name their elements. */
static void moments_are_those_of_their_elements(void **state) {
    (void)state;
    mt_megatron *c = opened(GOLDEN "dense/iter_0000007", false);
    int64_t checked = 0;
    for (int64_t i = 0; i < mt_megatron_count(c); i++) {
        const mt_megatron_matrix *matrix = mt_megatron_get(c, i);
        if (matrix->state != MT_STATE_EXP_AVG && matrix->state != MT_STATE_EXP_AVG_SQ) continue;
        int64_t count = matrix->rows * matrix->cols;
        for (int64_t k = 0; k < count; k++, checked++) {
            double g = -1 + 2.0 * (double)k / (double)(count - 1);
            double wanted = matrix->state == MT_STATE_EXP_AVG ? 0.1 * g : 0.001 * g * g;
            double got = (double)element(matrix, k / matrix->cols, k % matrix->cols);
            if (fabs(got - wanted) > 1e-6) fail_msg("%s[%d] is %g, not %g", matrix->name, (int)k, got, wanted);
        }
    }
    assert_true(checked > 2000);
    mt_megatron_close(c);
}

static void the_run_goes_on_from_its_numbers(void **state) {
    (void)state;
    static const char *const folders[] = {GOLDEN "dense/iter_0000007", GOLDEN "torch_tp2/iter_0000007"};
    for (int i = 0; i < 2; i++) {
        mt_megatron *c;
        mt_error error;
        int64_t hidden;
        if (mt_megatron_open_common(&c, folders[i], &error) != 0) fail_msg("%s", error.text);
        mt_megatron_run run = mt_megatron_read_run(c);
        assert_int_equal(run.iteration, 7);
        assert_int_equal(run.consumed_train_samples, 112);
        assert_int_equal(run.consumed_valid_samples, 32);
        assert_int_equal(run.has_optimizer, i == 0);
        assert_int_equal(run.optimizer_step, i == 0 ? 1 : 7);
        assert_true(mt_pickled_int(mt_pickled_get(mt_megatron_args(c), "hidden_size"), 1, 99, &hidden));
        assert_int_equal(hidden, i == 0 ? 8 : 16);
        mt_megatron_close(c);
    }
}

/* Copies a golden folder's iteration into the test's folder. */
static void copy_golden(const char *name) {
    char command[512];
    snprintf(command, sizeof command, "cp -R " GOLDEN "%s/iter_0000007 %s/copy", name, root);
    assert_int_equal(system(command), 0);
}

static void refused_after(const char *name, const char *change, const char *words) {
    char command[512];
    mt_error error;
    mt_megatron *c;
    copy_golden(name);
    snprintf(command, sizeof command, "cd %s/copy && %s", root, change);
    assert_int_equal(system(command), 0);
    assert_int_equal(mt_megatron_open(&c, at("copy"), true, &error), -1);
    assert_one_line(&error, at("copy"));
    if (!strstr(error.text, words)) fail_msg("\"%s\" does not say \"%s\"", error.text, words);
    snprintf(command, sizeof command, "rm -r %s/copy", root);
    assert_int_equal(system(command), 0);
}

/* One bit of one weight: the rank whose share has the tensor says so. */
static void a_changed_weight_is_found_by_one_rank(void **state) {
    (void)state;
    static const char *const names[] = {"dense_tp2", "torch_tp2"};
    static const char *const files[] = {"copy/__1_0.distcp", "copy/mp_rank_01/model_optim_rng.pt"};
    for (int i = 0; i < 2; i++) {
        mt_megatron *c;
        mt_error error;
        char path[512], command[600];
        copy_golden(names[i]);
        snprintf(path, sizeof path, "%s/%s", root, files[i]);
        if (mt_megatron_open(&c, at("copy"), true, &error) != 0) fail_msg("%s", error.text);
        for (int rank = 0; rank < 2; rank++)
            if (mt_megatron_verify(c, rank, 2, &error) != 0) fail_msg("%s", error.text);
        const mt_megatron_piece *piece =
            &mt_megatron_find(c, MT_STATE_WEIGHTS, "decoder.layers.mlp.linear_fc1.weight", 0, -1)->pieces[1];
        int64_t place = -1, count;
        const mt_safetensors_file *opened_files = mt_megatron_files(c, &count);
        for (int64_t k = 0; k < count; k++)
            if (strcmp(opened_files[k].path, path) == 0)
                place = (const char *)piece->tensor.data - (const char *)opened_files[k].base;
        assert_true(place > 0 && strcmp(piece->tensor.file, path) == 0);
        mt_megatron_close(c);
        FILE *file = fopen(path, "r+b");
        assert_non_null(file);
        fseek(file, (long)place, SEEK_SET);
        int byte = fgetc(file);
        fseek(file, (long)place, SEEK_SET);
        fputc(byte ^ 1, file);
        fclose(file);
        if (mt_megatron_open(&c, at("copy"), true, &error) != 0) fail_msg("%s", error.text);
        int found = 0;
        for (int rank = 0; rank < 2; rank++)
            if (mt_megatron_verify(c, rank, 2, &error) != 0) found++;
        assert_int_equal(found, 1);
        assert_one_line(&error, path);
        assert_non_null(strstr(error.text, "damaged"));
        mt_megatron_close(c);
        snprintf(command, sizeof command, "rm -r %s/copy", root);
        assert_int_equal(system(command), 0);
    }
}

static void a_rank_whose_file_is_missing_is_named(void **state) {
    (void)state;
    refused_after("dense_tp2", "rm __1_0.distcp", "__1_0.distcp");
    refused_after("torch_tp2", "rm -r mp_rank_01", "mp_rank_01/model_optim_rng.pt");
}

static void a_rank_whose_file_is_another_ranks_is_named(void **state) {
    (void)state;
    refused_after("torch_tp2", "cp mp_rank_00/* mp_rank_01", "mp_rank_01/model_optim_rng.pt: is the same file as ");
    refused_after("torch_vpp2", "cp mp_rank_00_000/* mp_rank_00_001", "is the same file as ");
}

/* Latent attention has YaRN unless its run says otherwise, as in MLATransformerConfig. */
/* Arguments of a run in a folder are refused with these words, or with NULL accepted. */
static void check_args(const char *folder, const char *bytes, size_t length, const char *words) {
    mt_pickle *pickle;
    mt_error error;
    mt_run_options options;
    if (read_pickle(&pickle, bytes, length, &error) != 0) fail_msg("%s: %s", words ? words : bytes, error.text);
    mt_options_default(&options);
    int status = mt_args_set(&options, mt_pickle_root(pickle), folder, &error);
    assert_int_equal(status, words ? -1 : 0);
    if (words && !strstr(error.text, words)) fail_msg("%s: %s", words, error.text);
    if (words) assert_one_line(&error, folder);
    mt_options_free(&options);
    mt_pickle_free(pickle);
}

static void arguments_of_other_models_are_refused(void **state) {
    (void)state;
#define DELTA_NET                                                                                                      \
    TEXT("}(U\x1e"                                                                                                     \
         "experimental_attention_variantU\x0fgated_delta_netu.")
    static const struct {
        const char *bytes;
        size_t length;
        const char *words; // NULL: accepted
    } rows[] = {
        {TEXT("}(U\x11glu_linear_offsetG\0\0\0\0\0\0\0\0U\x07use_mup\x89u."), NULL},
        {TEXT("}(U\x07use_mup\x88u."), "\"use_mup\""},
        {TEXT("}(U\x0dmrope_section](K\x01K\x02"
              "eu."),
         "\"mrope_section\""},
        {TEXT("}(U\x1amoe_expert_capacity_factorG\x3f\xf0\0\0\0\0\0\0u."), "\"moe_expert_capacity_factor\""},
        {TEXT("}(U\x16multi_latent_attention\x88u."), NULL}, // YaRN's default factor
        {TEXT("}(U\x16multi_latent_attention\x88U\x09rope_typeU\x04yarnu."), NULL},
        {TEXT("}(U\x16multi_latent_attention\x88U\x20original_max_position_embeddingsG\x40\xb0\0\x80\0\0\0\0u."),
         "YaRN of its latent attention is not taken here"},
        {TEXT("}(U\x16multi_latent_attention\x88U\x09rope_typeU\x04ropeu."), NULL},
        {TEXT("}(U\x16multi_latent_attention\x88U\x15rotary_scaling_factorG\x3f\xf0\0\0\0\0\0\0u."), NULL},
        {TEXT("}(U\x16multi_latent_attention\x89U\x09rope_typeU\x04yarnu."), NULL},
        {DELTA_NET, NULL},
        {TEXT("}(U\x1e"
              "experimental_attention_variantU\x03"
              "dsau."),
         "\"experimental_attention_variant\""},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        check_args("folder", rows[i].bytes, rows[i].length, rows[i].words);
    check_args(GOLDEN "torch_tp2/iter_0000007", DELTA_NET, "are read from the format torch_dist alone");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(arguments_of_other_models_are_refused),
        cmocka_unit_test(what_a_pickle_may_not_have_is_refused_in_words),
        cmocka_unit_test(a_pickle_becomes_values),
        cmocka_unit_test(a_tensor_lies_in_its_storage),
        cmocka_unit_test(a_deep_pickle_is_refused_and_a_long_one_read),
        cmocka_unit_test(an_archive_that_is_written_is_read),
        cmocka_unit_test(an_archive_of_over_4_gib_has_wide_numbers),
        cmocka_unit_test(damage_anywhere_in_an_archive_is_refused_or_harmless),
        cmocka_unit_test(both_formats_hold_the_same_matrices),
        cmocka_unit_test(moments_are_those_of_their_elements),
        cmocka_unit_test(the_run_goes_on_from_its_numbers),
        cmocka_unit_test_setup_teardown(a_changed_weight_is_found_by_one_rank, make_root, remove_root),
        cmocka_unit_test_setup_teardown(a_rank_whose_file_is_missing_is_named, make_root, remove_root),
        cmocka_unit_test_setup_teardown(a_rank_whose_file_is_another_ranks_is_named, make_root, remove_root),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
