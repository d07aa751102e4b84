/* packing.c: rows of samples of any length, and the micro-batches of a step with even work. */
#include "packing.h"

#include "random_order.h"
#include "sft.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- samples ----------------------------------------------------------------------------------------------------- */

/* Samples of an item. */
static int64_t mt_item_samples(const mt_samples *samples) {
    return samples->pairs ? 2 : 1;
}

int64_t mt_samples_items(const mt_samples *samples) {
    return samples->count / mt_item_samples(samples);
}

int64_t mt_sample_length(const mt_samples *samples, int64_t item) {
    int64_t count = mt_item_samples(samples);
    return samples->offsets[(item + 1) * count] - samples->offsets[item * count] - count;
}

/* The share of a row that an item takes, in positions: with inputs for an encoder at least that of the row's inputs,
 * rounded up, so that neither positions nor inputs of a row are too many. */
static int64_t mt_packed_length(const mt_samples *samples, int64_t item) {
    int64_t length = mt_sample_length(samples, item);
    if (!samples->inputs) return length;
    int64_t inputs = samples->input_offsets[item + 1] - samples->input_offsets[item];
    return mt_max(length, mt_divide_up(inputs * samples->target_length, samples->input_length));
}

/* Uniform in (0, 1]. */
static double mt_uniform(uint32_t word) {
    return ((double)word + 1) / 4294967296.0;
}

int64_t mt_lognormal_length(uint64_t key, int64_t index, int64_t median, double sigma, int64_t longest) {
    uint32_t word[4];
    mt_philox(word, key, (uint64_t)index, 0);
    double normal = sqrt(-2 * log(mt_uniform(word[0]))) * cos(2 * M_PI * mt_uniform(word[1])); // Box and Muller
    double length = (double)median * exp(sigma * normal);
    return length >= (double)longest ? longest : mt_max((int64_t)length, 1);
}

void mt_samples_mock(mt_samples *samples, int64_t count, const mt_data_config *config, mt_split split) {
    uint64_t key = mt_random_key((uint64_t)config->seed, UINT64_C(0x6d6f636b73667400), (uint64_t)split); // "mocksft"
    int64_t longest = config->seq_length / (config->pairs ? 2 : 1), median = mt_max(longest / 32, 1);
    *samples = (mt_samples){.count = count, .offsets = mt_calloc((count + 1) * 8), .pairs = config->pairs};
    for (int64_t s = 0; s < count; s++)
        samples->offsets[s + 1] = samples->offsets[s] + 1 + mt_lognormal_length(key, s, median, MT_MOCK_SIGMA, longest);
    samples->tokens = mt_malloc(samples->offsets[count] * 4);
    samples->is_trained = mt_malloc(samples->offsets[count]);
    for (int64_t s = 0; s < count; s++) {
        int64_t first = samples->offsets[s], end = samples->offsets[s + 1];
        uint32_t word[4];
        mt_philox(word, key, (uint64_t)s, 1);
        uint64_t step = config->pairs && s % 2 == 1 ? (uint64_t)config->vocab_size - 1 : 1;
        for (int64_t t = first; t < end; t++) {
            samples->tokens[t] = (int32_t)((word[0] + step * (uint64_t)(t - first)) % (uint64_t)config->vocab_size);
            samples->is_trained[t] = t - first > (end - first) / 4 || t == end - 1;
        }
    }
}

/* ---- rows -------------------------------------------------------------------------------------------------------- */

/* A number to sort by, and the index of its item. */
typedef struct mt_ranked {
    double by;
    int64_t index;
} mt_ranked;

/* Greatest first; equals in the order of their index. */
static int mt_ranked_compare(const void *a, const void *b) {
    const mt_ranked *one = a, *other = b;
    if (one->by != other->by) return one->by > other->by ? -1 : 1;
    return (one->index > other->index) - (one->index < other->index);
}

static void mt_ranked_sort(mt_ranked *items, int64_t count) {
    qsort(items, (size_t)count, sizeof *items, mt_ranked_compare);
}

/* One window of best-fit decreasing: row_of[i] of each sample shuffled[i]; returns the number of rows. `room` is
 * scratch [count]. */
static int64_t mt_window_pack(int64_t *row_of, const uint32_t *shuffled, int64_t count, const int64_t *lengths,
                              int64_t row_length, mt_ranked *sorted, int64_t *room) {
    int64_t rows = 0;
    for (int64_t i = 0; i < count; i++) sorted[i] = (mt_ranked){(double)lengths[shuffled[i]], i};
    mt_ranked_sort(sorted, count);
    for (int64_t i = 0; i < count; i++) {
        int64_t length = lengths[shuffled[sorted[i].index]], best = -1;
        for (int64_t r = 0; r < rows; r++) {
            if (room[r] < length || (best >= 0 && room[r] >= room[best])) continue;
            best = r;
            if (room[r] == length) break;
        }
        if (best < 0) best = rows++, room[best] = row_length;
        room[best] -= length;
        row_of[sorted[i].index] = best;
    }
    return rows;
}

void mt_rows_pack(mt_rows *rows, const int64_t *lengths, int64_t count, int64_t row_length, int64_t window,
                  int64_t seed, int64_t epoch) {
    MT_CHECK(count >= 0 && count < UINT32_MAX && window >= 1);
    mt_mt19937 random;
    *rows = (mt_rows){.first = mt_calloc((count + 1) * 8), .order = mt_malloc(count * 8)};
    uint32_t *shuffled = mt_malloc(count * 4), *turn = mt_malloc(window * 4);
    int64_t *row_of = mt_malloc(3 * window * 8), *room = row_of + window, *end = room + window, placed = 0;
    mt_ranked *sorted = mt_malloc(window * (int64_t)sizeof *sorted);
    for (int64_t i = 0; i < count; i++) shuffled[i] = (uint32_t)i;
    mt_mt19937_seed(&random, (uint32_t)mt_random_key((uint64_t)seed, UINT64_C(0x7061636b), (uint64_t)epoch)); // "pack"
    mt_numpy_shuffle(&random, shuffled, count);
    for (int64_t begin = 0; begin < count; begin += window) {
        int64_t here = mt_min(window, count - begin);
        int64_t made = mt_window_pack(row_of, shuffled + begin, here, lengths, row_length, sorted, room);
        for (int64_t r = 0; r < made; r++) turn[r] = (uint32_t)r;
        mt_numpy_shuffle(&random, turn, made); // best-fit decreasing leaves the longest samples in the first rows
        // Counting sort of the samples by the turn of their row; within a row they stay shuffled.
        int64_t *place = room;
        for (int64_t r = 0; r < made; r++) place[turn[r]] = r, end[r] = 0;
        for (int64_t i = 0; i < here; i++) end[place[row_of[i]]]++;
        for (int64_t r = 0; r < made; r++) {
            rows->first[++rows->count] = placed + end[r];
            end[r] = placed, placed = rows->first[rows->count];
        }
        for (int64_t i = 0; i < here; i++) rows->order[end[place[row_of[i]]]++] = (int64_t)shuffled[begin + i];
    }
    free(shuffled), free(turn), free(row_of), free(sorted);
}

void mt_rows_free(mt_rows *rows) {
    free(rows->first), free(rows->order);
    *rows = (mt_rows){0};
}

enum { MT_PACKING_WINDOW = 1024 };

/* Epoch e begins at row epochs[e] of the run, for e <= num_epochs; `rows` are those of one of them. */
struct mt_packing {
    const mt_samples *samples;
    int64_t begin, count, row_length, window, seed, last_row;
    int64_t *lengths;
    int64_t *epochs, num_epochs;
    mt_rows rows;
    int64_t epoch;
};

const mt_samples *mt_packing_samples(const mt_packing *packing) {
    return packing->samples;
}

static void mt_packing_epoch(mt_packing *p, int64_t epoch) {
    if (epoch == p->epoch) return;
    mt_rows_free(&p->rows);
    mt_rows_pack(&p->rows, p->lengths, p->count, p->row_length, p->window, p->seed, epoch);
    for (int64_t i = 0; i < p->count; i++) p->rows.order[i] += p->begin;
    p->epoch = epoch;
    if (epoch < p->num_epochs) return;
    p->epochs = mt_realloc(p->epochs, (epoch + 2) * 8);
    p->epochs[epoch + 1] = p->epochs[epoch] + p->rows.count;
    p->num_epochs = epoch + 1;
}

int64_t mt_packing_last(const mt_packing *p) {
    return p->last_row;
}

int64_t mt_packing_count(mt_packing *p, int64_t epochs) {
    while (p->num_epochs < epochs) mt_packing_epoch(p, p->num_epochs);
    return p->epochs[epochs];
}

int64_t mt_packing_row(mt_packing *p, int64_t row, const int64_t **order) {
    int64_t epoch = 0, past;
    if (row >= p->last_row) return 0;
    while (row >= p->epochs[p->num_epochs]) mt_packing_epoch(p, p->num_epochs);
    for (past = p->num_epochs; past - epoch > 1;) { // bisect
        int64_t middle = (epoch + past) / 2;
        if (row >= p->epochs[middle])
            epoch = middle;
        else
            past = middle;
    }
    mt_packing_epoch(p, epoch);
    const int64_t *first = p->rows.first + (row - p->epochs[epoch]);
    *order = p->rows.order + first[0];
    return first[1] - first[0];
}

static void mt_row_dataset_free(mt_dataset *dataset) {
    mt_packing *p = dataset->packing;
    mt_rows_free(&p->rows);
    free(p->lengths), free(p->epochs), free(p), free(dataset);
}

mt_dataset *mt_row_dataset_create(const mt_samples *samples, int64_t begin, int64_t end, mt_split split,
                                  const mt_data_config *config) {
    MT_CHECK(begin >= 0 && begin < end && end <= mt_samples_items(samples));
    mt_packing *p = mt_calloc(sizeof *p);
    *p = (mt_packing){.samples = samples,
                      .begin = begin,
                      .count = end - begin,
                      .row_length = config->seq_length,
                      .window = config->sequence_packing ? MT_PACKING_WINDOW : 1,
                      .seed = config->seed + split,
                      .last_row = INT64_MAX,
                      .lengths = mt_malloc((end - begin) * 8),
                      .epochs = mt_calloc(8),
                      .epoch = -1};
    int64_t positions = 0;
    for (int64_t i = 0; i < p->count; i++) {
        positions += mt_sample_length(samples, begin + i);
        p->lengths[i] = mt_packed_length(samples, begin + i);
        MT_CHECK(p->lengths[i] >= 1 && p->lengths[i] <= p->row_length);
    }
    bool ends = (config->train_epochs > 0 || (config->reads_once && !config->mock_data)) && split == MT_SPLIT_TRAIN;
    if (ends) p->last_row = mt_packing_count(p, mt_max(config->train_epochs, 1));
    mt_dataset *dataset = mt_calloc(sizeof *dataset);
    *dataset = (mt_dataset){.num_samples = ends ? p->last_row : config->sizes[split],
                            .seq_length = config->seq_length,
                            .free = mt_row_dataset_free,
                            .num_documents = p->count,
                            .num_tokens = positions,
                            .packing = p};
    return dataset;
}

/* ---- the micro-batches of a step --------------------------------------------------------------------------------- */

void mt_step_plan_free(mt_step_plan *plan) {
    free(plan->pieces), free(plan->batches), free(plan->batch_of);
    *plan = (mt_step_plan){0};
}

double mt_step_plan_imbalance(const mt_step_plan *plan) {
    double slowest = 0, sum = 0;
    for (int64_t rank = 0; rank < plan->num_ranks; rank++) {
        double work = 0;
        for (int64_t slot = 0; slot < plan->num_slots; slot++)
            work += plan->batches[plan->batch_of[slot * plan->num_ranks + rank]].work;
        slowest = fmax(slowest, work), sum += work;
    }
    return sum > 0 ? slowest * (double)plan->num_ranks / sum - 1 : 0;
}

static double mt_piece_work(const mt_piece *piece, const mt_token_work *work) {
    double length = (double)piece->length;
    return work->per_token * length + work->per_pair * length * length;
}

/* A set of pieces that stays together: a row, or the samples that one micro-batch takes. */
typedef struct mt_bundle {
    double work;
    int64_t first, count; // in a list of pieces
} mt_bundle;

/* Ranks of an assignment: the work and the number of bundles that each has. */
typedef struct mt_load {
    double work;
    int64_t count;
} mt_load;

/* Exchanges bundles of the slowest and the fastest rank while their work differs by more than `tolerance` of it: the
 * pair whose difference is closest to half the gap. rank_of[i] of bundle sorted[i]; sorted has the greatest work first.
 * With `pieces` the bundles are single pieces, which also move without an exchange, to ranks with room for
 * loads[rank].count more tokens. */
static void mt_assignment_refine(int64_t *rank_of, const mt_ranked *sorted, int64_t count, mt_load *loads,
                                 int64_t num_ranks, double tolerance, const mt_piece *pieces) {
    for (int64_t round = 0; round < 4 * num_ranks; round++) {
        int64_t slow = 0, fast = 0, from = -1, to = -1, more = 0;
        for (int64_t r = 1; r < num_ranks; r++) {
            if (loads[r].work > loads[slow].work) slow = r;
            if (loads[r].work < loads[fast].work) fast = r;
        }
        double gap = loads[slow].work - loads[fast].work, best = gap / 2, moved = 0;
        if (gap <= tolerance * loads[slow].work) return;
        for (int64_t i = 0, j = 0; i < count; i++) { // as i descends in work, so does the j that suits it
            if (rank_of[i] != slow) continue;
            for (; j < count + (pieces != NULL); j++) { // j = count: nothing comes back
                if (j < count && rank_of[j] != fast) continue;
                double difference = sorted[i].by - (j < count ? sorted[j].by : 0), off = difference - gap / 2;
                int64_t tokens = pieces ? pieces[sorted[i].index].length : 0;
                if (pieces && j < count) tokens -= pieces[sorted[j].index].length;
                if (fabs(off) < best && (!pieces || tokens <= loads[fast].count))
                    best = fabs(off), from = i, to = j, moved = difference, more = tokens;
                if (off >= 0 || j == count) break;
            }
        }
        if (from < 0) return;
        rank_of[from] = fast;
        if (to < count) rank_of[to] = slow;
        loads[slow].work -= moved, loads[fast].work += moved;
        if (pieces) loads[slow].count += more, loads[fast].count -= more;
    }
}

/* Gives each rank `each` bundles: the greatest first, to the rank with the least work that has room (Graham's longest
 * processing time first), then exchanges. */
static void mt_bundles_assign(int64_t *rank_of, const mt_ranked *sorted, int64_t count, int64_t num_ranks,
                              int64_t each) {
    mt_load *loads = mt_calloc(num_ranks * (int64_t)sizeof *loads);
    for (int64_t i = 0; i < count; i++) {
        int64_t least = -1;
        for (int64_t r = 0; r < num_ranks; r++)
            if (loads[r].count < each && (least < 0 || loads[r].work < loads[least].work)) least = r;
        rank_of[i] = least;
        loads[least].work += sorted[i].by, loads[least].count++;
    }
    mt_assignment_refine(rank_of, sorted, count, loads, num_ranks, 1e-4, NULL);
    free(loads);
}

/* Makes the batches of a plan from bundles: `each` of one rank and slot. bundle_at[slot, rank, each]. */
static void mt_step_plan_build(mt_step_plan *plan, const mt_piece *pieces, const mt_bundle *bundles,
                               const int64_t *bundle_at, int64_t each) {
    int64_t batches = plan->num_slots * plan->num_ranks, placed = 0;
    plan->num_batches = batches;
    plan->batches = mt_calloc(batches * (int64_t)sizeof *plan->batches);
    plan->batch_of = mt_malloc(batches * 8);
    plan->pieces = mt_malloc(plan->num_pieces * (int64_t)sizeof *plan->pieces);
    for (int64_t b = 0; b < batches; b++) {
        mt_plan_batch *batch = &plan->batches[b];
        batch->first = placed;
        for (int64_t i = 0; i < each; i++) {
            const mt_bundle *bundle = &bundles[bundle_at[b * each + i]];
            memcpy(plan->pieces + placed, pieces + bundle->first, (size_t)bundle->count * sizeof *pieces);
            placed += bundle->count, batch->work += bundle->work;
        }
        batch->count = placed - batch->first;
        for (int64_t i = batch->first; i < placed; i++) batch->num_tokens += plan->pieces[i].length;
        plan->batch_of[b] = b;
    }
}

/* Plans bundles that are whole: `each` of them make a micro-batch. The heaviest of a rank come first, so that the
 * ranks' micro-batches are alike in each slot. */
static void mt_step_plan_deal(mt_step_plan *plan, const mt_piece *pieces, const mt_bundle *bundles, int64_t count,
                              int64_t each, bool in_order) {
    int64_t num_ranks = plan->num_ranks, per_rank = plan->num_slots * each;
    mt_ranked *sorted = mt_malloc(count * (int64_t)sizeof *sorted);
    int64_t *rank_of = mt_malloc(count * 8), *bundle_at = mt_malloc(count * 8), *next = mt_calloc(num_ranks * 8);
    for (int64_t i = 0; i < count; i++) sorted[i] = (mt_ranked){bundles[i].work, i};
    if (in_order) {
        for (int64_t i = 0; i < count; i++) rank_of[i] = i / each % num_ranks;
    } else {
        mt_ranked_sort(sorted, count);
        mt_bundles_assign(rank_of, sorted, count, num_ranks, per_rank);
    }
    for (int64_t i = 0; i < count; i++) {
        int64_t rank = rank_of[i], at = next[rank]++;
        bundle_at[(at / each * num_ranks + rank) * each + at % each] = sorted[i].index;
    }
    mt_step_plan_build(plan, pieces, bundles, bundle_at, each);
    free(sorted), free(rank_of), free(bundle_at), free(next);
}

/* A bin in a heap. */
typedef struct mt_bin {
    double work;
    int64_t index, room;
} mt_bin;

/* The order of a heap: the least work, or the most room. */
static bool mt_bin_precedes(const mt_bin *a, const mt_bin *b, bool by_room) {
    if (by_room) return a->room > b->room || (a->room == b->room && a->index < b->index);
    return a->work < b->work || (a->work == b->work && a->index < b->index);
}

/* Moves the root down to its place. */
static void mt_heap_sink(mt_bin *heap, int64_t count, bool by_room) {
    for (int64_t at = 0, child; (child = 2 * at + 1) < count; at = child) {
        if (child + 1 < count && mt_bin_precedes(&heap[child + 1], &heap[child], by_room)) child++;
        if (!mt_bin_precedes(&heap[child], &heap[at], by_room)) return;
        mt_bin other = heap[at];
        heap[at] = heap[child], heap[child] = other;
    }
}

/* Moves the root of a heap to another one. */
static void mt_heap_move(mt_bin *from, int64_t *from_count, bool from_by_room, mt_bin *to, int64_t *to_count) {
    int64_t at = (*to_count)++;
    to[at] = from[0];
    from[0] = from[--*from_count];
    mt_heap_sink(from, *from_count, from_by_room);
    for (int64_t parent; at > 0 && mt_bin_precedes(&to[at], &to[parent = (at - 1) / 2], !from_by_room); at = parent) {
        mt_bin other = to[at];
        to[at] = to[parent], to[parent] = other;
    }
}

static int mt_bin_compare(const void *a, const void *b) {
    return mt_bin_precedes(a, b, false) ? -1 : 1;
}

/* bin_of[i] of piece sorted[i], which do not grow: the heaviest first, to the bin with the least work that has room.
 * Bin b begins with the work loads[b].work (loads NULL: 0) and has room for loads[b].count (1) times `capacity` tokens.
 * Bins without room wait in a second heap until pieces are short enough. False if a piece finds no room. */
static bool mt_pieces_spread(int64_t *bin_of, const mt_ranked *sorted, const mt_piece *pieces, int64_t count,
                             const mt_load *loads, int64_t num_bins, int64_t capacity) {
    mt_bin *heap = mt_malloc(2 * num_bins * (int64_t)sizeof *heap), *full = heap + num_bins;
    int64_t size = num_bins, num_full = 0, i = 0;
    for (int64_t b = 0; b < num_bins; b++)
        heap[b] = (mt_bin){loads ? loads[b].work : 0, b, (loads ? loads[b].count : 1) * capacity};
    if (loads) qsort(heap, (size_t)num_bins, sizeof *heap, mt_bin_compare);
    for (; i < count; i++) {
        int64_t length = pieces[sorted[i].index].length;
        while (num_full > 0 && full[0].room >= length) mt_heap_move(full, &num_full, true, heap, &size);
        while (size > 0 && heap[0].room < length) mt_heap_move(heap, &size, false, full, &num_full);
        if (size == 0) break;
        heap[0].work += sorted[i].by, heap[0].room -= length;
        bin_of[i] = heap[0].index;
        mt_heap_sink(heap, size, false);
    }
    free(heap);
    return i == count;
}

/* bundle_of[i] of piece sorted[i] of rank rank_of[i]: a micro-batch, which are numbered rank by rank. Rank r has
 * loads[r].count micro-batches of `capacity` tokens. False if the pieces of a rank do not fit. */
static bool mt_pieces_slot(int64_t *bundle_of, const int64_t *rank_of, const mt_ranked *sorted, const mt_piece *pieces,
                           int64_t count, const mt_load *loads, int64_t num_ranks, int64_t capacity) {
    mt_ranked *mine = mt_malloc(count * (int64_t)sizeof *mine);
    int64_t *place = mt_malloc(2 * count * 8), *slot_of = place + count, bundles = 0;
    int64_t *first = mt_calloc((num_ranks + 2) * 8); // of each rank's pieces
    bool fits = true;
    for (int64_t i = 0; i < count; i++) first[rank_of[i] + 2]++;
    for (int64_t r = 0; r < num_ranks; r++) first[r + 2] += first[r + 1];
    for (int64_t i = 0; i < count; i++) place[first[rank_of[i] + 1]++] = i;
    for (int64_t r = 0; fits && r < num_ranks; bundles += loads[r++].count) {
        int64_t here = first[r + 1] - first[r], *own = place + first[r];
        for (int64_t i = 0; i < here; i++) mine[i] = sorted[own[i]];
        fits = mt_pieces_spread(slot_of, mine, pieces, here, NULL, loads[r].count, capacity);
        for (int64_t i = 0; fits && i < here; i++) bundle_of[own[i]] = bundles + slot_of[i];
    }
    free(mine), free(place), free(first);
    return fits;
}

/* Chooses a rank, then one of its micro-batches for each piece: bundle_of as in mt_pieces_slot. Rank r begins with the
 * work loads[r].work. False if the pieces do not fit. */
static bool mt_pieces_place(int64_t *bundle_of, const mt_ranked *sorted, const mt_piece *pieces, int64_t count,
                            const mt_load *loads, int64_t num_ranks, int64_t capacity) {
    const double tolerance = 0.01; // many pieces are more even than that without exchanges
    int64_t *rank_of = mt_malloc(2 * count * 8), *refined = rank_of + count;
    mt_load *rest = mt_malloc(num_ranks * (int64_t)sizeof *rest);
    bool fits = mt_pieces_spread(rank_of, sorted, pieces, count, loads, num_ranks, capacity);
    for (int64_t r = 0; fits && r < num_ranks; r++) rest[r] = (mt_load){loads[r].work, loads[r].count * capacity};
    for (int64_t i = 0; fits && i < count; i++) {
        mt_load *rank = &rest[refined[i] = rank_of[i]];
        rank->work += sorted[i].by, rank->count -= pieces[sorted[i].index].length;
    }
    if (fits) mt_assignment_refine(refined, sorted, count, rest, num_ranks, tolerance, pieces);
    fits = fits && (mt_pieces_slot(bundle_of, refined, sorted, pieces, count, loads, num_ranks, capacity) ||
                    mt_pieces_slot(bundle_of, rank_of, sorted, pieces, count, loads, num_ranks, capacity));
    free(rank_of), free(rest);
    return fits;
}

/* Samples in micro-batches regardless of their rows. False if they do not fit; rows always do. */
static bool mt_step_plan_regroup(mt_step_plan *plan, const mt_piece *pieces, const mt_plan_shape *shape) {
    int64_t count = plan->num_pieces, slots = plan->num_slots, num_bundles = slots * plan->num_ranks;
    int64_t capacity = shape->micro_batch_size * shape->row_length;
    mt_ranked *sorted = mt_malloc(count * (int64_t)sizeof *sorted);
    int64_t *bundle_of = mt_malloc(count * 8);
    for (int64_t i = 0; i < count; i++) sorted[i] = (mt_ranked){mt_piece_work(&pieces[i], &shape->work), i};
    mt_ranked_sort(sorted, count);
    mt_load *loads = mt_calloc(plan->num_ranks * (int64_t)sizeof *loads);
    for (int64_t r = 0; r < plan->num_ranks; r++) loads[r].count = slots;
    bool fits = mt_pieces_place(bundle_of, sorted, pieces, count, loads, plan->num_ranks, capacity);
    free(loads);
    if (fits) {
        mt_bundle *bundles = mt_calloc(num_bundles * (int64_t)sizeof *bundles);
        mt_piece *grouped = mt_malloc(count * (int64_t)sizeof *grouped);
        mt_ranked *own = mt_malloc(slots * (int64_t)sizeof *own);
        int64_t *bundle_at = mt_malloc(num_bundles * 8);
        for (int64_t i = 0; i < count; i++) bundles[bundle_of[i]].count++, bundles[bundle_of[i]].work += sorted[i].by;
        for (int64_t b = 1; b < num_bundles; b++) bundles[b].first = bundles[b - 1].first + bundles[b - 1].count;
        for (int64_t i = 0; i < count; i++) grouped[bundles[bundle_of[i]].first++] = pieces[sorted[i].index];
        for (int64_t b = 0; b < num_bundles; b++) bundles[b].first -= bundles[b].count;
        for (int64_t r = 0; r < plan->num_ranks; r++) {
            for (int64_t s = 0; s < slots; s++) own[s] = (mt_ranked){bundles[r * slots + s].work, r * slots + s};
            mt_ranked_sort(own, slots);
            for (int64_t s = 0; s < slots; s++) bundle_at[s * plan->num_ranks + r] = own[s].index;
        }
        mt_step_plan_build(plan, grouped, bundles, bundle_at, 1);
        free(bundles), free(grouped), free(own), free(bundle_at);
    }
    free(sorted), free(bundle_of);
    return fits;
}

void mt_step_plan_balance(mt_step_plan *plan, const mt_piece *pieces, const int64_t *first, int64_t num_rows,
                          const mt_plan_shape *shape) {
    int64_t each = shape->micro_batch_size, ranks = shape->num_ranks;
    MT_CHECK(num_rows > 0 && num_rows % (each * ranks) == 0);
    *plan = (mt_step_plan){
        .num_slots = num_rows / (each * ranks), .num_ranks = ranks, .num_pieces = first[num_rows] - first[0]};
    if (shape->regroups && !shape->in_order && mt_step_plan_regroup(plan, pieces + first[0], shape)) return;
    mt_bundle *bundles = mt_calloc(num_rows * (int64_t)sizeof *bundles);
    for (int64_t r = 0; r < num_rows; r++) {
        int64_t tokens = 0;
        bundles[r].first = first[r], bundles[r].count = first[r + 1] - first[r];
        for (int64_t i = first[r]; i < first[r + 1]; i++) {
            bundles[r].work += mt_piece_work(&pieces[i], &shape->work);
            tokens += pieces[i].length;
        }
        if (shape->pads) bundles[r].work += shape->work.per_token * (double)(shape->row_length - tokens);
    }
    mt_step_plan_deal(plan, pieces, bundles, num_rows, each, shape->in_order);
    free(bundles);
}

/* ---- dynamic context parallelism. Pieces are sorted by length, and the size of a piece's block never decreases with
 * its length: the pieces of each size are a range of the list, and sums over a range are differences of prefix sums. */

double mt_shared_work(const mt_token_work *work, double tokens, double pairs, int64_t size) {
    double ranks = (double)size, shared = work->per_token * tokens + work->per_pair * pairs;
    return (shared + work->per_exchange * tokens * (ranks - 1)) / ranks;
}

double mt_step_plan_time(const mt_step_plan *plan, bool meets, double *start) {
    double *end = mt_calloc(plan->num_ranks * 8), last = 0;
    for (int64_t slot = 0; slot < plan->num_slots; slot++) {
        double met = last;
        for (int64_t rank = 0, size; rank < plan->num_ranks; rank += size) {
            int64_t index = plan->batch_of[slot * plan->num_ranks + rank];
            double begin = meets ? met : 0;
            size = mt_max(plan->batches[index].context_size, 1);
            for (int64_t i = 0; i < size; i++) begin = fmax(begin, end[rank + i]);
            for (int64_t i = 0; i < size; i++) end[rank + i] = begin + plan->batches[index].work;
            if (start) start[index] = begin;
            last = fmax(last, end[rank]);
        }
    }
    free(end);
    return last;
}

enum { MT_MAX_SIZES = 24 };

/* The pieces of a step by descending length, and for one candidate of a plan the blocks of each size 1 << k: pieces
 * [from[k], to[k]) in bins[k] batches. */
typedef struct mt_solver {
    const mt_plan_shape *shape;
    const mt_piece *pieces;
    mt_ranked *sorted;
    double *tokens, *pairs; // [count + 1] prefix sums of lengths and their squares
    int64_t count, num_slots;
    int64_t from[MT_MAX_SIZES], to[MT_MAX_SIZES], bins[MT_MAX_SIZES];
    int64_t *bin_of; // [count]
} mt_solver;

/* The predicted work of a range of pieces, shared by `size` ranks. */
static double mt_range_work(const mt_solver *v, int64_t from, int64_t to, int64_t size) {
    return mt_shared_work(&v->shape->work, v->tokens[to] - v->tokens[from], v->pairs[to] - v->pairs[from], size);
}

/* True if a piece needs more than `size` ranks: for its memory, or to finish within `limit`. */
static bool mt_piece_needs_more(const mt_solver *v, int64_t piece, int64_t size, double limit) {
    double length = v->sorted[piece].by;
    if (length > (double)(size * v->shape->rank_tokens)) return true;
    double here = mt_shared_work(&v->shape->work, length, length * length, size);
    return here > limit && mt_shared_work(&v->shape->work, length, length * length, 2 * size) < here;
}

/* Divides the pieces among sizes so that none takes longer than `limit` where more ranks help, and counts the batches
 * that memory and `limit` ask for. False if the slots have fewer ranks than that; otherwise idle ranks get batches of
 * the sizes with the most work in each. */
static bool mt_solver_divide(mt_solver *v, double limit) {
    int64_t left = v->num_slots * v->shape->num_ranks, begin = 0;
    for (int64_t k = MT_MAX_SIZES - 1; k >= 0; k--) {
        int64_t size = (int64_t)1 << k, low = begin, high = v->count;
        v->from[k] = v->to[k] = v->bins[k] = 0;
        if (size > v->shape->context_size || size < v->shape->min_context_size) continue;
        while (low < high && size > v->shape->min_context_size) { // the first piece that half the ranks can hold
            int64_t middle = (low + high) / 2;
            if (mt_piece_needs_more(v, middle, size / 2, limit))
                low = middle + 1;
            else
                high = middle;
        }
        v->from[k] = begin, v->to[k] = begin = high;
        double room = (double)(size * v->shape->rank_tokens);
        double memory = ceil((v->tokens[v->to[k]] - v->tokens[v->from[k]]) / room);
        v->bins[k] = (int64_t)fmax(memory, ceil(mt_range_work(v, v->from[k], v->to[k], size) / limit));
        left -= v->bins[k] * size;
    }
    while (left > 0) {
        int64_t best = -1;
        double most = 0;
        for (int64_t k = 0; k < MT_MAX_SIZES; k++) {
            if (v->bins[k] == 0 || (int64_t)1 << k > left || v->bins[k] >= v->to[k] - v->from[k]) continue;
            double each = mt_range_work(v, v->from[k], v->to[k], (int64_t)1 << k) / (double)v->bins[k];
            if (each > most) most = each, best = k;
        }
        if (best < 0) break;
        v->bins[best]++, left -= (int64_t)1 << best;
    }
    return left >= 0;
}

/* The pieces of one size with their work, to free. */
static mt_ranked *mt_solver_sort(const mt_solver *v, int64_t k) {
    int64_t from = v->from[k], count = v->to[k] - from;
    mt_ranked *sorted = mt_malloc(count * (int64_t)sizeof *sorted);
    for (int64_t i = 0; i < count; i++) {
        double length = v->sorted[from + i].by;
        double work = mt_shared_work(&v->shape->work, length, length * length, (int64_t)1 << k);
        sorted[i] = (mt_ranked){work, v->sorted[from + i].index};
    }
    return sorted;
}

/* Appends batches of one size to a plan; piece sorted[i] is in batch bin_of[i] of them. */
static void mt_solver_append(const mt_solver *v, mt_step_plan *plan, int64_t k, const mt_ranked *sorted,
                             int64_t num_bins) {
    int64_t count = v->to[k] - v->from[k], size = (int64_t)1 << k, placed = plan->num_pieces;
    mt_plan_batch *batches = plan->batches + plan->num_batches;
    for (int64_t b = 0; b < num_bins; b++) batches[b] = (mt_plan_batch){.context_size = size};
    for (int64_t i = 0; i < count; i++) batches[v->bin_of[i]].count++;
    for (int64_t b = 0; b < num_bins; b++) batches[b].first = placed, placed += batches[b].count, batches[b].count = 0;
    for (int64_t i = 0; i < count; i++) {
        mt_plan_batch *batch = &batches[v->bin_of[i]];
        const mt_piece *piece = &v->pieces[sorted[i].index];
        plan->pieces[batch->first + batch->count++] = *piece;
        batch->num_tokens += piece->length;
        batch->work += (double)piece->length * (double)piece->length; // pairs, until the loop below
    }
    for (int64_t b = 0; b < num_bins; b++)
        batches[b].work = mt_shared_work(&v->shape->work, (double)batches[b].num_tokens, batches[b].work, size);
    plan->num_pieces += count, plan->num_batches += num_bins;
}

/* Makes the batches of one size, evenly. False if the pieces do not fit. */
static bool mt_solver_fill(mt_solver *v, mt_step_plan *plan, int64_t k) {
    int64_t count = v->to[k] - v->from[k], capacity = v->shape->rank_tokens << k;
    mt_ranked *sorted = mt_solver_sort(v, k);
    bool fits = mt_pieces_spread(v->bin_of, sorted, v->pieces, count, NULL, v->bins[k], capacity);
    if (fits) mt_solver_append(v, plan, k, sorted, v->bins[k]);
    free(sorted);
    return fits;
}

/* Makes the batches of the smallest size in all places that are left, so that they even out the work of the larger
 * ones, end[rank]. False if the pieces do not fit. */
static bool mt_solver_level(mt_solver *v, mt_step_plan *plan, int64_t k, const double *end) {
    int64_t size = (int64_t)1 << k, ranks = plan->num_ranks, first = plan->num_batches;
    int64_t count = v->to[k] - v->from[k], bins = 0;
    mt_load *loads = mt_calloc(ranks / size * (int64_t)sizeof *loads);
    for (int64_t block = 0; block < ranks / size; block++) {
        for (int64_t i = 0; i < size; i++) loads[block].work = fmax(loads[block].work, end[block * size + i]);
        for (int64_t slot = 0; slot < plan->num_slots; slot++)
            loads[block].count += plan->batch_of[slot * ranks + block * size] < 0;
        bins += loads[block].count;
    }
    mt_ranked *sorted = mt_solver_sort(v, k);
    bool fits = mt_pieces_place(v->bin_of, sorted, v->pieces, count, loads, ranks / size, v->shape->rank_tokens << k);
    if (fits) mt_solver_append(v, plan, k, sorted, bins);
    for (int64_t block = 0; fits && block < ranks / size; block++)
        for (int64_t slot = 0; slot < plan->num_slots; slot++) {
            int64_t *batch_of = plan->batch_of + slot * ranks + block * size;
            if (batch_of[0] >= 0) continue;
            for (int64_t i = 0; i < size; i++) batch_of[i] = first;
            first++;
        }
    free(sorted), free(loads);
    return fits;
}

static int mt_batch_compare(const void *a, const void *b) {
    const mt_plan_batch *one = a, *other = b;
    if (one->context_size != other->context_size) return one->context_size > other->context_size ? -1 : 1;
    if (one->work != other->work) return one->work > other->work ? -1 : 1;
    return (one->first > other->first) - (one->first < other->first);
}

/* Gives `count` batches of one size places in a slot: the one with the most work where the least was computed so far.
 * end[rank]: work before this slot; -1: the rank has a batch here already. */
static void mt_slot_place(mt_step_plan *plan, int64_t slot, int64_t first, int64_t count, double *end,
                          mt_ranked *places) {
    int64_t size = plan->batches[first].context_size, found = 0, *batch_of = plan->batch_of + slot * plan->num_ranks;
    for (int64_t rank = 0; rank < plan->num_ranks; rank += size) {
        double latest = 0;
        if (batch_of[rank] >= 0) continue;
        for (int64_t i = 0; i < size; i++) latest = fmax(latest, end[rank + i]);
        places[found++] = (mt_ranked){-latest, rank};
    }
    MT_CHECK(found >= count);
    mt_ranked_sort(places, found);
    for (int64_t b = 0; b < count; b++)
        for (int64_t i = 0; i < size; i++) {
            batch_of[places[b].index + i] = first + b;
            end[places[b].index + i] = plan->batches[first + b].work - places[b].by;
        }
}

/* Lays the batches out over the slots: larger blocks first, so that every block is aligned, and of one size those with
 * the most work first, so that the batches of a slot are alike. end[rank]: zeros; then the work of each rank. */
static void mt_step_plan_tile(mt_step_plan *plan, bool meets, double *end) {
    int64_t ranks = plan->num_ranks, at = 0;
    mt_ranked *places = mt_malloc(ranks * (int64_t)sizeof *places);
    qsort(plan->batches, (size_t)plan->num_batches, sizeof *plan->batches, mt_batch_compare);
    for (int64_t i = 0; i < plan->num_slots * ranks; i++) plan->batch_of[i] = -1;
    for (int64_t b = 0, count; b < plan->num_batches; b += count) {
        int64_t size = plan->batches[b].context_size, slot = at / ranks, room = (slot + 1) * ranks - at;
        double latest = 0;
        if (at % ranks == 0 && meets) {
            for (int64_t r = 0; r < ranks; r++) latest = fmax(latest, end[r]);
            for (int64_t r = 0; r < ranks; r++) end[r] = latest;
        }
        for (count = 0; b + count < plan->num_batches && plan->batches[b + count].context_size == size; count++)
            if ((count + 1) * size > room) break;
        mt_slot_place(plan, slot, b, count, end, places);
        at += count * size;
    }
    free(places);
}

/* The plan of the divided pieces; false if some do not fit. If ranks do not meet in each slot, the smallest size comes
 * last, to even out the work. */
static bool mt_solver_plan(mt_solver *v, mt_step_plan *plan) {
    int64_t places = v->num_slots * v->shape->num_ranks, idle = places, size = v->shape->min_context_size, last = -1;
    *plan = (mt_step_plan){.num_slots = v->num_slots, .num_ranks = v->shape->num_ranks};
    plan->pieces = mt_malloc(v->count * (int64_t)sizeof *plan->pieces);
    plan->batches = mt_malloc(places * (int64_t)sizeof *plan->batches);
    plan->batch_of = mt_malloc(places * 8);
    double *end = mt_calloc(plan->num_ranks * 8);
    bool fits = true;
    for (int64_t k = MT_MAX_SIZES - 1; k >= 0 && !v->shape->meets; k--)
        if (v->bins[k] > 0) last = k;
    for (int64_t k = MT_MAX_SIZES - 1; k >= 0; k--) {
        if (v->bins[k] > 0 && k != last) fits = fits && mt_solver_fill(v, plan, k);
        idle -= v->bins[k] << k;
    }
    for (; last < 0 && idle > 0; idle -= size)
        plan->batches[plan->num_batches++] = (mt_plan_batch){.first = v->count, .context_size = size};
    if (fits) mt_step_plan_tile(plan, v->shape->meets, end);
    if (fits && last >= 0) fits = mt_solver_level(v, plan, last, end);
    free(end);
    return fits;
}

int64_t mt_step_plan_slots(const mt_plan_shape *shape, int64_t least) {
    int64_t group = mt_max(shape->slot_group, 1), slots = mt_max(least, group), rest = slots % group;
    return rest == 0 || rest >= shape->slot_rest ? slots : slots - rest + mt_min(shape->slot_rest, group);
}

void mt_step_plan_solve(mt_step_plan *plan, const mt_piece *pieces, int64_t count, const mt_plan_shape *shape) {
    static const double tightness[] = {1.02, 1.1, 1.25, 1.6, 2.5, 1e300}; // of the limit to the mean work of a slot
    enum { TRIED_SLOTS = 2 };
    MT_CHECK(shape->num_ranks % shape->context_size == 0 && shape->context_size < (int64_t)1 << MT_MAX_SIZES);
    mt_solver v = {.shape = shape, .pieces = pieces, .count = count};
    v.sorted = mt_malloc(count * (int64_t)sizeof *v.sorted);
    v.tokens = mt_calloc(2 * (count + 1) * 8), v.pairs = v.tokens + count + 1, v.bin_of = mt_malloc(count * 8);
    for (int64_t i = 0; i < count; i++) {
        MT_CHECK(pieces[i].length <= shape->context_size * shape->rank_tokens);
        v.sorted[i] = (mt_ranked){(double)pieces[i].length, i};
    }
    mt_ranked_sort(v.sorted, count);
    for (int64_t i = 0; i < count; i++) {
        double length = v.sorted[i].by;
        v.tokens[i + 1] = v.tokens[i] + length, v.pairs[i + 1] = v.pairs[i] + length * length;
    }
    double total = mt_shared_work(&shape->work, v.tokens[count], v.pairs[count], 1), best = INFINITY;
    int64_t memory = (int64_t)ceil(v.tokens[count] / (double)(shape->num_ranks * shape->rank_tokens));
    *plan = (mt_step_plan){0};
    for (int64_t tried = 0, slots = memory; tried < TRIED_SLOTS; slots++) {
        bool found = false;
        int64_t before[MT_MAX_SIZES] = {-1};
        slots = mt_step_plan_slots(shape, slots);
        v.num_slots = slots;
        for (size_t i = 0; i < sizeof tightness / sizeof *tightness; i++) {
            mt_step_plan candidate;
            if (!mt_solver_divide(&v, tightness[i] * fmax(total / (double)(slots * shape->num_ranks), 1))) continue;
            if (memcmp(before, v.bins, sizeof before) == 0) continue; // the same plan
            memcpy(before, v.bins, sizeof before);
            bool fits = mt_solver_plan(&v, &candidate);
            double span = fits ? mt_step_plan_time(&candidate, shape->meets, NULL) : INFINITY;
            found = found || fits;
            mt_step_plan *worse = span < best ? plan : &candidate, old = *worse;
            if (span < best) best = span, *plan = candidate;
            mt_step_plan_free(&old);
        }
        tried += found;
    }
    free(v.sorted), free(v.tokens), free(v.bin_of);
}

/* ---- batches ----------------------------------------------------------------------------------------------------- */

/* The encoder's sequence of a sample. Its token indices are those of no other sample, which begin at other positions of
 * the decoder. */
static void append_input(mt_batch *batch, const mt_samples *samples, int64_t sample, int64_t token_index) {
    mt_encoder_batch *e = &batch->encoder;
    int64_t from = samples->input_offsets[sample], length = samples->input_offsets[sample + 1] - from;
    int64_t first = e->num_tokens, index = token_index * samples->input_length;
    e->spans[e->num_spans++] = (mt_span){first, length, first, length, false};
    e->num_tokens += length;
    for (int64_t i = 0; i < length; i++)
        e->tokens[first + i] = samples->inputs[from + i], e->token_index[first + i] = index + i;
}

/* Where the next picture goes. */
static int64_t mt_patches_filled(const mt_image_batch *images) {
    int64_t patches = 0;
    for (int64_t i = 0; i < images->num_images; i++) patches += images->grids[i].height * images->grids[i].width;
    return patches;
}

int mt_batch_append_images(mt_batch *batch, const mt_samples *samples, int64_t sample, mt_error *error) {
    if (!samples->image_offsets) return 0;
    const mt_image_config *c = &samples->image_config;
    mt_image_batch *images = &batch->images;
    int64_t values = MT_IMAGE_CHANNELS * c->temporal_patch_size * c->patch_size * c->patch_size;
    for (int64_t i = samples->image_offsets[sample]; i < samples->image_offsets[sample + 1]; i++) {
        const mt_image *image = &samples->images.items[i];
        int64_t filled = mt_patches_filled(images);
        MT_CHECK(image->grid.height * image->grid.width <= images->max_patches - filled);
        if (mt_image_read(images->patches + filled * values, image, c, error) != 0) return -1;
        images->grids[images->num_images++] = image->grid;
    }
    return 0;
}

static int append_sample(mt_batch *batch, const mt_samples *samples, int64_t sample, int64_t token_index,
                         mt_error *error) {
    int64_t from = samples->offsets[sample], first = batch->num_tokens,
            length = samples->offsets[sample + 1] - from - 1;
    batch->spans[batch->num_spans++] = (mt_span){first, length, first, length, true};
    batch->num_tokens += length;
    for (int64_t i = 0; i < length; i++) {
        batch->tokens[first + i] = samples->tokens[from + i];
        batch->labels[first + i] = samples->tokens[from + i + 1];
        batch->loss_mask[first + i] = samples->is_trained[from + i + 1] ? 1 : 0;
        batch->positions[first + i] = (int32_t)i;
        batch->token_index[first + i] = token_index + i;
    }
    if (samples->inputs) append_input(batch, samples, sample, token_index);
    if (mt_batch_append_images(batch, samples, sample, error) != 0) return -1;
    if (!samples->ref_logps) return 0;
    float *logps = batch->loss_inputs[MT_REF_LOGP] + first; // the loss reads their sum over the trained tokens
    int64_t last = length - 1;
    while (last > 0 && batch->loss_mask[first + last] == 0) last--;
    for (int64_t i = 0; i < length; i++) logps[i] = i == last ? (float)samples->ref_logps[sample] : 0;
    return 0;
}

static int append_item(mt_batch *batch, const mt_piece *piece, const mt_samples *samples, mt_error *error) {
    int64_t count = mt_item_samples(samples), first = batch->num_tokens;
    for (int64_t i = 0; i < count; i++) {
        int64_t index = piece->token_index + batch->num_tokens - first;
        if (append_sample(batch, samples, piece->sample * count + i, index, error) != 0) return -1;
    }
    return 0;
}

/* A batch of one token of padding, for a rank that has no sample. */
static void fill_empty(mt_batch *batch) {
    batch->tokens[0] = batch->labels[0] = batch->positions[0] = 0;
    batch->loss_mask[0] = 0;
    batch->token_index[0] = -1;
    batch->spans[0] = (mt_span){0, 1, 0, 1, true};
    batch->num_tokens = batch->num_spans = 1;
    if (!batch->encoder.tokens) return;
    batch->encoder.tokens[0] = 0, batch->encoder.token_index[0] = -1;
    batch->encoder.spans[0] = (mt_span){0, 1, 0, 1, false};
    batch->encoder.num_tokens = batch->encoder.num_spans = 1;
}

int mt_step_plan_fill(const mt_step_plan *plan, int64_t slot, int64_t rank, const mt_samples *samples,
                      int64_t num_tokens, mt_batch *batch, mt_error *error) {
    const mt_plan_batch *from = &plan->batches[plan->batch_of[slot * plan->num_ranks + rank]];
    batch->num_tokens = batch->num_spans = batch->encoder.num_tokens = batch->encoder.num_spans = 0;
    batch->images.num_images = 0;
    batch->context_size = from->context_size;
    for (int64_t i = 0; i < from->count; i++)
        if (append_item(batch, &plan->pieces[from->first + i], samples, error) != 0) return -1;
    if (from->count == 0) fill_empty(batch);
    if (num_tokens > 0) mt_batch_pad(batch, num_tokens);
    return 0;
}

int64_t mt_samples_max_patches(const mt_samples *samples, int64_t tokens) {
    int64_t most = 0, square = samples->image_config.merge_size * samples->image_config.merge_size;
    for (int64_t s = 0; s < samples->count && samples->image_offsets; s++) {
        int64_t patches = 0;
        for (int64_t i = samples->image_offsets[s]; i < samples->image_offsets[s + 1]; i++)
            patches += samples->images.items[i].grid.height * samples->images.items[i].grid.width;
        if (patches == 0) continue; // a text, which may have one token
        int64_t merged = patches / square, length = samples->offsets[s + 1] - samples->offsets[s] - 1;
        most = mt_max(most, mt_divide_up(tokens * merged, length) * square);
    }
    return most;
}
