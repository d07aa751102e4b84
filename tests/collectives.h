/* Shared by the tests of collectives: every operation on a group of a backend against a plain computation on the host,
 * which knows the input of each rank. Include once, after megatron.h. */
#ifndef COLLECTIVES_H
#define COLLECTIVES_H

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static const int64_t counts[] = {0, 1, 7, 4099, 1000003};
static const mt_dtype dtypes[] = {MT_F32, MT_BF16, MT_F64, MT_F16};
enum { NUM_COUNTS = 5, NUM_DTYPES = 4 };

/* The backend under test, and a stream and buffers of it. */
static const mt_ops *ops;
static mt_stream *stream;
static bool rounds_like_the_host; // sums must have the host's bits; else they only are near and alike on every rank

/* Element i of a rank's input. Magnitudes differ much, so that the order of a sum changes its bits. */
static double input(int rank, int64_t i, mt_dtype dtype) {
    uint64_t hash = ((uint64_t)i + 1) * 0x9E3779B97F4A7C15 ^ ((uint64_t)rank + 1) * 0xC2B2AE3D27D4EB4F;
    hash = (hash ^ hash >> 29) * 0xBF58476D1CE4E5B9;
    hash ^= hash >> 32;
    float value = (float)((int32_t)hash / 2147483648.0) * (float)(1 << (hash >> 40) % 12);
    if (mt_dtype_is_half(dtype)) return mt_half_to_f32(mt_f32_to_half(value, dtype), dtype);
    return dtype == MT_F32 ? value : value * 1.000000001;
}

static double get(const void *x, int64_t i, mt_dtype dtype) {
    return mt_dtype_is_half(dtype) ? mt_half_to_f32(((const uint16_t *)x)[i], dtype)
           : dtype == MT_F32       ? ((const float *)x)[i]
                                   : ((const double *)x)[i];
}

static void put(void *x, int64_t i, mt_dtype dtype, double value) {
    if (mt_dtype_is_half(dtype))
        ((uint16_t *)x)[i] = mt_f32_to_half((float)value, dtype);
    else if (dtype == MT_F32)
        ((float *)x)[i] = (float)value;
    else
        ((double *)x)[i] = value;
}

/* A host copy of input first ... first + n - 1. */
static void fill(void *x, int rank, int64_t first, int64_t n, mt_dtype dtype) {
    for (int64_t i = 0; i < n; i++) put(x, i, dtype, input(rank, first + i, dtype));
}

static void *to_device(const void *host, int64_t bytes) {
    void *device = ops->memory_alloc(bytes + 8);
    ops->memory_copy(device, host, bytes, stream);
    return device;
}

static void to_host(void *host, const void *device, int64_t bytes) {
    ops->memory_copy(host, device, bytes, stream);
    ops->stream_synchronize(stream);
}

/* The sum over ranks of input i as the CPU makes it, its exact value, and the sum of magnitudes. */
static double expected_sum(int size, int64_t i, mt_dtype dtype, double *exact, double *magnitude) {
    float sum = 0;
    *exact = *magnitude = 0;
    for (int r = 0; r < size; r++) {
        double x = input(r, i, dtype);
        sum = r == 0 ? (float)x : sum + (float)x;
        *exact += x, *magnitude += fabs(x);
    }
    if (dtype == MT_F64) return *exact;
    return dtype == MT_F32 ? sum : mt_half_to_f32(mt_f32_to_half(sum, dtype), dtype);
}

/* out[i] is the sum of input first + i. */
static void expect_sums(const void *out, int64_t first, int64_t n, mt_dtype dtype, const mt_group *group) {
    double epsilon = dtype == MT_BF16 ? 0x1p-8 : dtype == MT_F16 ? 0x1p-11 : dtype == MT_F32 ? 0x1p-23 : 0x1p-52;
    for (int64_t i = 0; i < n; i++) {
        double exact, magnitude, got = get(out, i, dtype);
        double expected = expected_sum(group->size, first + i, dtype, &exact, &magnitude);
        bool good =
            rounds_like_the_host ? got == expected : fabs(got - exact) <= epsilon * group->size * magnitude + 1e-300;
        if (!good)
            fail_msg("%s of %d: element %lld is %.17g and not %.17g", mt_dtype_name(dtype), group->size, (long long)i,
                     got, expected);
    }
}

/* out[i] is input first + i of a rank. */
static void expect_inputs(const char *out, int rank, int64_t first, int64_t n, mt_dtype dtype) {
    for (int64_t i = 0; i < n; i++)
        if (get(out, i, dtype) != input(rank, first + i, dtype))
            fail_msg("%s: element %lld of rank %d is %.17g and not %.17g", mt_dtype_name(dtype), (long long)i, rank,
                     get(out, i, dtype), input(rank, first + i, dtype));
}

/* Every rank holds the same bits as the group's first. */
static void expect_same_bits(const mt_group *group, const void *host, int64_t bytes) {
    void *of_first = mt_malloc(bytes);
    memcpy(of_first, host, (size_t)bytes);
    mt_broadcast(group, of_first, bytes, 0);
    assert_int_equal(memcmp(of_first, host, (size_t)bytes), 0);
    free(of_first);
}

static void check_all_reduce(const mt_group *group, int64_t n, mt_dtype dtype) {
    int64_t bytes = n * mt_dtype_size(dtype);
    void *host = mt_malloc(bytes), *again = mt_malloc(bytes);
    fill(host, group->rank, 0, n, dtype);
    void *first = to_device(host, bytes), *second = to_device(host, bytes), *max = to_device(host, bytes);
    ops->all_reduce(first, n, MT_SUM, dtype, group, stream);
    ops->all_reduce(second, n, MT_SUM, dtype, group, stream);
    ops->all_reduce(max, n, MT_MAX, dtype, group, stream);
    to_host(host, first, bytes);
    to_host(again, second, bytes);
    expect_sums(host, 0, n, dtype, group);
    expect_same_bits(group, host, bytes);
    assert_int_equal(memcmp(host, again, (size_t)bytes), 0);
    to_host(host, max, bytes);
    for (int64_t i = 0; i < n; i++) {
        double expected = input(0, i, dtype);
        for (int r = 1; r < group->size; r++) expected = fmax(expected, input(r, i, dtype));
        if (get(host, i, dtype) != expected) fail_msg("maximum %lld is %g", (long long)i, get(host, i, dtype));
    }
    ops->memory_free(first);
    ops->memory_free(second);
    ops->memory_free(max);
    free(host);
    free(again);
}

/* Both ways: into a buffer of its own, and from where the own part belongs. */
static void check_all_gather(const mt_group *group, int64_t n, mt_dtype dtype) {
    int64_t bytes = n * mt_dtype_size(dtype);
    char *host = mt_calloc(group->size * bytes);
    fill(host + group->rank * bytes, group->rank, 0, n, dtype);
    char *out = to_device(host, group->size * bytes), *in = to_device(host + group->rank * bytes, bytes);
    for (int in_place = 0; in_place < 2; in_place++) {
        if (!in_place) ops->memory_zero(out, group->size * bytes, stream);
        if (in_place) ops->memory_copy(out + group->rank * bytes, in, bytes, stream);
        ops->all_gather(out, in_place ? out + group->rank * bytes : in, n, dtype, group, stream);
        to_host(host, out, group->size * bytes);
        for (int r = 0; r < group->size; r++) expect_inputs(host + r * bytes, r, 0, n, dtype);
    }
    ops->memory_free(out);
    ops->memory_free(in);
    free(host);
}

static void check_reduce_scatter(const mt_group *group, int64_t n, mt_dtype dtype) {
    int64_t bytes = n * mt_dtype_size(dtype);
    char *host = mt_malloc(group->size * bytes);
    fill(host, group->rank, 0, group->size * n, dtype);
    char *in = to_device(host, group->size * bytes), *out = to_device(host, bytes);
    for (int in_place = 0; in_place < 2; in_place++) {
        char *to = in_place ? in + group->rank * bytes : out;
        ops->reduce_scatter(to, in, n, dtype, group, stream);
        to_host(host, to, bytes);
        expect_sums(host, group->rank * n, n, dtype, group);
    }
    ops->memory_free(in);
    ops->memory_free(out);
    free(host);
}

static void check_all_to_all(const mt_group *group, int64_t n, mt_dtype dtype) {
    int64_t bytes = n * mt_dtype_size(dtype);
    char *host = mt_malloc(group->size * bytes);
    fill(host, group->rank, 0, group->size * n, dtype);
    char *in = to_device(host, group->size * bytes), *out = to_device(host, group->size * bytes);
    ops->memory_zero(out, group->size * bytes, stream);
    ops->all_to_all(out, in, n, dtype, group, stream);
    to_host(host, out, group->size * bytes);
    for (int r = 0; r < group->size; r++) expect_inputs(host + r * bytes, r, group->rank * n, n, dtype);
    ops->memory_free(in);
    ops->memory_free(out);
    free(host);
}

/* Elements that rank `from` sends to rank `to`: uneven, for some ranks none. */
static int64_t uneven(int from, int to, int64_t n) {
    return (from + 2 * to) % 3 == 0 ? 0 : n / (1 + (5 * from + to) % 4) + from;
}

static void check_all_to_all_v(const mt_group *group, int64_t n, mt_dtype dtype) {
    int64_t width = mt_dtype_size(dtype), sent = 0, received = 0;
    int64_t *in_counts = mt_malloc(group->size * 8), *out_counts = mt_malloc(group->size * 8);
    for (int r = 0; r < group->size; r++) {
        sent += in_counts[r] = uneven(group->rank, r, n);
        received += out_counts[r] = uneven(r, group->rank, n);
    }
    char *host = mt_malloc((sent + received) * width), *part = host;
    fill(host, group->rank, 0, sent, dtype);
    char *in = to_device(host, sent * width), *out = to_device(host, received * width);
    ops->all_to_all_v(out, out_counts, in, in_counts, dtype, group, stream);
    to_host(host, out, received * width);
    for (int r = 0; r < group->size; r++) {
        int64_t first = 0; // where rank r keeps what it sends here
        for (int to = 0; to < group->rank; to++) first += uneven(r, to, n);
        expect_inputs(part, r, first, out_counts[r], dtype);
        part += out_counts[r] * width;
    }
    ops->memory_free(in);
    ops->memory_free(out);
    free(host);
    free(in_counts);
    free(out_counts);
}

static void check_broadcast(const mt_group *group, int64_t n, mt_dtype dtype) {
    int64_t bytes = n * mt_dtype_size(dtype);
    char *host = mt_malloc(bytes);
    for (int root = 0; root < group->size; root++) {
        fill(host, group->rank, 0, n, dtype);
        char *buffer = to_device(host, bytes);
        ops->broadcast(buffer, n, dtype, root, group, stream);
        to_host(host, buffer, bytes);
        expect_inputs(host, root, 0, n, dtype);
        ops->memory_free(buffer);
    }
    free(host);
}

/* Messages both ways between neighbours of a ring, more than a channel has tickets; waits in another order. */
static void check_channels(const mt_group *group) {
    enum { MESSAGES = 2 * MT_CHANNEL_TICKETS + 5, LARGEST = 60000 };
    if (group->size == 1) return;
    int next = (group->rank + 1) % group->size, before = (group->rank + group->size - 1) % group->size;
    mt_channel *out[2] = {NULL}, *in[2] = {NULL};
    for (int id = 0; id < 2; id++) // in one order on every rank: id, then the sender
        for (int from = 0; from < group->size; from++) {
            int to = (from + (id == 0 ? 1 : group->size - 1)) % group->size;
            mt_channel *channel = ops->channel_open(group, from, to, id);
            if (group->rank == from)
                out[id] = channel;
            else if (group->rank == to)
                in[id] = channel;
            else
                assert_null(channel);
        }
    char *host = mt_malloc(LARGEST * 4), *sent[2], *received[2];
    for (int id = 0; id < 2; id++) {
        fill(host, group->rank * 2 + id, 0, LARGEST, MT_F32);
        sent[id] = to_device(host, LARGEST * 4);
        received[id] = ops->memory_alloc((int64_t)MT_CHANNEL_TICKETS * LARGEST * 4);
    }
    for (int64_t first = 0; first < MESSAGES; first += MT_CHANNEL_TICKETS) {
        int64_t last = first + MT_CHANNEL_TICKETS < MESSAGES ? first + MT_CHANNEL_TICKETS : MESSAGES;
        for (int64_t i = first; i < last; i++)
            for (int id = 0; id < 2; id++) { // message i: from element i on, every fifth one empty, sizes awkward
                int64_t n = i % 5 == 4 ? 0 : (i * 7919) % (LARGEST - MESSAGES) + 1;
                assert_int_equal(ops->channel_send(out[id], sent[id] + i * 4, n, MT_F32, stream), i);
                char *to = received[id] + (i - first) * LARGEST * 4;
                assert_int_equal(ops->channel_recv(in[id], to, n, MT_F32, stream), i);
            }
        for (int64_t i = last - 1; i >= first; i--)
            for (int id = 0; id < 2; id++) {
                int64_t n = i % 5 == 4 ? 0 : (i * 7919) % (LARGEST - MESSAGES) + 1;
                ops->channel_wait(in[id], i, stream);
                ops->channel_wait(out[id], i, stream);
                to_host(host, received[id] + (i - first) * LARGEST * 4, n * 4);
                expect_inputs(host, (id == 0 ? before : next) * 2 + id, i, n, MT_F32);
            }
    }
    for (int id = 0; id < 2; id++) {
        ops->memory_free(sent[id]);
        ops->memory_free(received[id]);
    }
    // Channels close in one order too.
    for (int id = 0; id < 2; id++)
        for (int from = 0; from < group->size; from++) {
            int to = (from + (id == 0 ? 1 : group->size - 1)) % group->size;
            ops->channel_close(group->rank == from ? out[id] : group->rank == to ? in[id] : NULL);
        }
    free(host);
}

/* Every rank puts a piece into the mailbox of every other, round after round, each when the last has been read. */
static void check_mailbox(const mt_group *group) {
    enum { ROUNDS = 20, PIECE = 40001, FIRST = 11 };
    if (group->size == 1) return;
    mt_error error = {{0}};
    mt_mailbox *mailbox;
    int64_t bytes = (FIRST + group->size * PIECE + 1) / 2 * 4 + MT_MAILBOX_OWN;
    char *memory = ops->memory_alloc(bytes), *host = mt_malloc(PIECE * 2), *in[ROUNDS];
    if (ops->mailbox_open(&mailbox, group, memory, bytes, &error) != 0) fail_msg("%s", error.text);
    for (int round = 0; round < ROUNDS; round++) {
        fill(host, group->rank, round, PIECE, MT_BF16);
        in[round] = to_device(host, PIECE * 2);
    }
    char *seen = ops->memory_alloc((int64_t)ROUNDS * group->size * PIECE * 2);
    for (int round = 0; round < ROUNDS; round++) {
        int64_t n = round % 3 == 2 ? 1 : PIECE - round * 7;
        for (int step = 1; step < group->size; step++)
            ops->mailbox_exchange(&(mt_mailbox_args){mailbox, in[round], .count = n, .first = FIRST, .stride = PIECE,
                                                     .to = (group->rank + step) % group->size,
                                                     .from = (group->rank + group->size - step) % group->size},
                                  MT_BF16, stream);
        int64_t whole = group->size * PIECE * 2; // of the next round nothing may come before this is read
        ops->memory_copy(seen + round * whole, memory + FIRST * 2, whole, stream);
    }
    for (int round = 0; round < ROUNDS; round++)
        for (int r = 0; r < group->size; r++) {
            int64_t n = round % 3 == 2 ? 1 : PIECE - round * 7;
            if (r == group->rank) continue;
            to_host(host, seen + (int64_t)(round * group->size + r) * PIECE * 2, n * 2);
            expect_inputs(host, r, round, n, MT_BF16);
        }
    ops->mailbox_close(mailbox);
    for (int round = 0; round < ROUNDS; round++) ops->memory_free(in[round]);
    ops->memory_free(seen);
    ops->memory_free(memory);
    free(host);
}

/* The group's result of every operation, for all types and awkward counts. The long count goes with one type each. */
static void check_group(const mt_group *group) {
    static void (*const checks[])(const mt_group *, int64_t, mt_dtype) = {check_all_reduce,     check_all_gather,
                                                                          check_reduce_scatter, check_all_to_all,
                                                                          check_all_to_all_v,   check_broadcast};
    for (int k = 0; k < 6; k++)
        for (int c = 0; c < NUM_COUNTS; c++)
            for (int d = 0; d < NUM_DTYPES; d++)
                if (counts[c] < 1000000 || d == k % NUM_DTYPES) checks[k](group, counts[c], dtypes[d]);
    check_channels(group);
    check_mailbox(group);
}

#endif
