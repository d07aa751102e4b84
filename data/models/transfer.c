/* transfer.c: weights from model to model, in memory. Every rank lists the elements that it has of each parameter of
 * both models; from all lists together every rank computes the same plan alone. Invariants: sender and receiver list
 * the pieces of a message in the same order; an element reaches a rank once, and never if the rank has it; scratch is
 * bounded. */
#include "transfer.h"

#include <stdlib.h>
#include <string.h>

/* ---- parts of parameters */

mt_rectangle mt_param_rectangle(const mt_param *param) {
    return (mt_rectangle){param->first_row, mt_param_rows_stored(param), param->first_col, param->cols};
}

mt_rectangle mt_rectangle_intersect(mt_rectangle a, mt_rectangle b) {
    int64_t row = mt_max(a.row, b.row), col = mt_max(a.col, b.col);
    int64_t rows = mt_min(a.row + a.rows, b.row + b.rows) - row, cols = mt_min(a.col + a.cols, b.col + b.cols) - col;
    return (mt_rectangle){row, mt_max(rows, 0), col, mt_max(cols, 0)};
}

int mt_rectangles_of_run(mt_rectangle out[3], int64_t begin, int64_t end, int64_t width) {
    int count = 0;
    while (begin < end) {
        mt_rectangle *r = &out[count++];
        *r = (mt_rectangle){begin / width, (end - begin) / width, 0, width};
        if (begin % width > 0 || r->rows == 0)
            *r = (mt_rectangle){begin / width, 1, begin % width, mt_min(width - begin % width, end - begin)};
        begin += r->rows * r->cols;
    }
    return count;
}

/* ---- holdings: the parts of each rank */

/* The elements of one state of a parameter that a rank has. */
typedef struct mt_holding {
    int64_t key; // layer, of the decoder or the tower, expert and role; of an adapter also the role that it adapts
    int64_t whole_rows, whole_cols; // of the parameter, without the vocabulary's padding
    mt_rectangle part;              // of the parameter; elements [begin, end) of the part, row after row
    int64_t begin, end;
    int64_t bucket, offset; // of element 0 of the part
    int64_t index;          // in the rank's table
    int rank;
    mt_param_state state;
    mt_dtype dtype;
    bool is_module; // of multi-token prediction
} mt_holding;

typedef struct mt_holdings {
    mt_holding *items;
    int64_t count;
} mt_holdings;

/* By parameter, state and elements: copies of the same elements are neighbours. */
static int mt_holding_compare(const void *a, const void *b) {
    const mt_holding *x = a, *y = b;
    const int64_t order[][2] = {{x->key, y->key},           {x->state, y->state}, {x->part.row, y->part.row},
                                {x->part.col, y->part.col}, {x->begin, y->begin}, {x->rank, y->rank}};
    for (size_t i = 0; i < sizeof order / sizeof *order; i++)
        if (order[i][0] != order[i][1]) return order[i][0] < order[i][1] ? -1 : 1;
    return 0;
}

/* Fills `h` with this rank's weights, or master weights, of a parameter; false: none. */
static bool mt_holding_of(mt_holding *h, mt_model *m, const mt_param *param, mt_param_state state) {
    const mt_bucket *b = mt_bucket_get(m, param->bucket);
    bool has_master = mt_model_get_plan(m)->train && b->trained && b->dtype != MT_F32;
    if (state == MT_STATE_MASTER && !has_master) return false;
    mt_shard shard = mt_state_shard(m, param, state);
    *h = (mt_holding){.whole_rows = param->rows_stored, .whole_cols = param->whole_cols, .state = state};
    int64_t adapts = mt_param_is_adapter(param) ? (int64_t)param->adapts + 1 : 0;
    int64_t part = (param->layer + 1) + (param->vision_part + 1); // one of them is 0, and a tower has roles of its own
    h->key = part << 40 | (param->expert + 1) << 16 | adapts << 8 | param->role;
    h->part = mt_param_rectangle(param);
    mt_param_part(param, &shard, &h->begin, &h->end);
    h->end = mt_min(h->end, h->part.rows * h->part.cols);
    h->bucket = param->bucket, h->offset = param->offset, h->dtype = shard.dtype;
    h->is_module = param->layer >= mt_model_options(m)->num_layers;
    return h->begin < h->end;
}

/* Collects the weights and master weights of all ranks, or those of adapters. */
static mt_holdings mt_holdings_collect(mt_model *m, const mt_group *world, bool adapters_only) {
    mt_holdings all = {0};
    int64_t num_params = 0, count = 0;
    const mt_param *params = m ? mt_model_params(m, &num_params) : NULL;
    mt_holding *own = mt_calloc(mt_max(2 * num_params, 1) * (int64_t)sizeof *own);
    if (m) mt_model_lend(m, false, mt_model_stream(m)); // a part may rest
    for (int64_t i = 0; i < 2 * num_params; i++) {
        if (adapters_only && !mt_param_is_adapter(&params[i / 2])) continue;
        if (!mt_holding_of(&own[count], m, &params[i / 2], i % 2 ? MT_STATE_MASTER : MT_STATE_WEIGHTS)) continue;
        own[count].rank = world->rank, own[count++].index = i / 2;
    }
    if (m) mt_model_return(m, mt_model_stream(m));
    for (int rank = 0; rank < world->size; rank++) {
        int64_t theirs = count;
        mt_broadcast(world, &theirs, sizeof theirs, rank);
        all.items = mt_realloc(all.items, mt_max(all.count + theirs, 1) * (int64_t)sizeof *all.items);
        if (rank == world->rank && count > 0) memcpy(all.items + all.count, own, (size_t)count * sizeof *own);
        mt_broadcast(world, all.items + all.count, theirs * (int64_t)sizeof *own, rank);
        all.count += theirs;
    }
    free(own);
    if (all.count > 0) qsort(all.items, (size_t)all.count, sizeof *all.items, mt_holding_compare);
    return all;
}

/* ---- the plan */

/* Rows that this rank sends or receives in one message of a round. */
typedef struct mt_piece {
    int64_t round, order;       // order: in the plan
    int64_t bucket, at, stride; // this rank's elements: number of the first in the bucket; between rows
    int64_t rows, cols;
    mt_param_state state;
    mt_dtype dtype; // of the message
    int peer;       // world rank; the world's size: this rank itself, behind the others
} mt_piece;

typedef struct mt_pieces {
    mt_piece *items;
    int64_t count, capacity;
    int64_t *rounds, *filled; // [world size] the last round of each peer's messages, and its bytes so far
    int64_t largest;          // bytes of the messages of a round
} mt_pieces;

struct mt_transfer {
    mt_model *to, *from; // NULL: it is on other ranks
    const mt_group *world;
    const mt_ops *ops; // of `to`, or else of `from`; so is the stream
    mt_stream *stream;
    int64_t *loads; // [world size] bytes that each rank sends
    int64_t limit;  // bytes of a message
    mt_pieces sends, receives;
    char *send_memory, *receive_memory, *converted;
    mt_transfer_counts counts;
};

enum { MT_PIECE_ALIGNMENT = 16 };

static int64_t mt_piece_bytes(const mt_piece *piece) {
    int64_t bytes = piece->rows * piece->cols * mt_dtype_size(piece->dtype);
    return mt_divide_up(bytes, MT_PIECE_ALIGNMENT) * MT_PIECE_ALIGNMENT;
}

/* Appends a rectangle, which `h` has on this rank, to the messages with a peer: as many rows as fit into the round, the
 * others in the next ones. */
static void mt_pieces_add(mt_pieces *p, const mt_transfer *t, mt_rectangle r, const mt_holding *h, mt_dtype dtype,
                          int peer) {
    int64_t width = r.cols * mt_dtype_size(dtype);
    for (int64_t row = 0, rows; row < r.rows; row += rows) {
        if (p->filled[peer] > 0 && p->filled[peer] + width > t->limit) p->rounds[peer]++, p->filled[peer] = 0;
        rows = mt_min(mt_max((t->limit - p->filled[peer]) / width, 1), r.rows - row);
        if (p->count == p->capacity)
            p->items = mt_realloc(p->items, (p->capacity = 2 * p->capacity + 64) * (int64_t)sizeof *p->items);
        mt_piece *piece = &p->items[p->count];
        *piece = (mt_piece){.round = p->rounds[peer], .order = p->count++, .dtype = dtype, .state = h->state};
        piece->at = h->offset + (r.row + row - h->part.row) * h->part.cols + r.col - h->part.col;
        piece->bucket = h->bucket, piece->stride = h->part.cols, piece->rows = rows, piece->cols = r.cols;
        piece->peer = peer == t->world->rank ? t->world->size : peer;
        p->filled[peer] += mt_piece_bytes(piece);
    }
}

/* Plans the elements that `to` gets from `from`, an owner of them; returns their number. */
static int64_t mt_transfer_add(mt_transfer *t, const mt_holding *to, const mt_holding *from) {
    mt_rectangle in[3], out[3];
    int num_in = mt_rectangles_of_run(in, to->begin, to->end, to->part.cols), own = t->world->rank;
    int num_out = mt_rectangles_of_run(out, from->begin, from->end, from->part.cols);
    int64_t elements = 0;
    for (int i = 0; i < num_in * num_out; i++) {
        mt_rectangle a = in[i / num_out], b = out[i % num_out];
        a.row += to->part.row, a.col += to->part.col, b.row += from->part.row, b.col += from->part.col;
        mt_rectangle r = mt_rectangle_intersect(a, b);
        int64_t bytes = r.rows * r.cols * mt_dtype_size(from->dtype);
        if (bytes == 0) continue;
        elements += r.rows * r.cols;
        if (from->rank != to->rank) t->loads[from->rank] += bytes;
        if (to->rank == own) *(from->rank == own ? &t->counts.kept : &t->counts.received) += bytes;
        if (from->rank == own) mt_pieces_add(&t->sends, t, r, from, from->dtype, to->rank);
        if (to->rank == own) mt_pieces_add(&t->receives, t, r, to, from->dtype, from->rank);
    }
    return elements;
}

/* Plans the messages to `to` from holdings [first, end), all of one state of its parameter. If several ranks have the
 * same elements, their owner is the rank itself, or else the rank that sends least so far. */
static void mt_transfer_plan_holding(mt_transfer *t, const mt_holding *to, const mt_holding *first,
                                     const mt_holding *end) {
    int64_t planned = 0;
    for (const mt_holding *h = first, *next; h < end; h = next) {
        const mt_holding *owner = h;
        for (next = h; next < end && next->begin == h->begin && memcmp(&next->part, &h->part, sizeof h->part) == 0;
             next++)
            if (next->rank == to->rank || (owner->rank != to->rank && t->loads[next->rank] < t->loads[owner->rank]))
                owner = next;
        planned += mt_transfer_add(t, to, owner);
    }
    MT_CHECK(planned == to->end - to->begin);
}

/* The error of a holding that the other model lacks, or with master weights that have a scale; its rank names it. */
static int mt_transfer_refuse(const mt_transfer *t, const mt_holding *h, bool is_target, const char *reason,
                              mt_error *error) {
    int64_t count;
    if (h->rank == t->world->rank)
        mt_error_set(error, "weights cannot be transferred: %s of the %s, %lld x %lld, %s",
                     mt_model_params(is_target ? t->to : t->from, &count)[h->index].hf_name,
                     is_target ? "target" : "source", (long long)h->whole_rows, (long long)h->whole_cols, reason);
    mt_broadcast(t->world, error->text, sizeof error->text, h->rank);
    return -1;
}

/* The end of the neighbours of `h` that have its parameter and, if `same_state`, its state. */
static const mt_holding *mt_holdings_skip(const mt_holdings *all, const mt_holding *h, bool same_state) {
    const mt_holding *next = h, *end = all->items + all->count;
    while (next < end && next->key == h->key && (!same_state || next->state == h->state)) next++;
    return next;
}

/* Plans all parameters. Both lists ascend by key. */
static int mt_transfer_plan(mt_transfer *t, const mt_holdings *targets, const mt_holdings *sources, mt_error *error) {
    const mt_holding *to = targets->items, *to_end = to + targets->count;
    const mt_holding *from = sources->items, *from_end = from + sources->count;
    while (to < to_end || from < from_end) {
        bool has_target = to < to_end && (from == from_end || to->key <= from->key);
        bool has_source = from < from_end && (to == to_end || from->key <= to->key);
        if (!has_target && !from->is_module)
            return mt_transfer_refuse(t, from, false, "is not in the target: both must be one model", error);
        if (has_target && (!has_source || from->whole_rows != to->whole_rows || from->whole_cols != to->whole_cols))
            return mt_transfer_refuse(t, to, true, "is not in the source: both must be one model", error);
        const mt_holding *next = mt_holdings_skip(targets, to, false), *end = mt_holdings_skip(sources, from, false);
        const mt_holding *masters = has_source ? mt_holdings_skip(sources, from, true) : end;
        for (; has_target && to < next; to++) {
            bool from_master = masters < end && (to->state == MT_STATE_MASTER || to->dtype != from->dtype);
            const mt_holding *first = from_master ? masters : from;
            if (mt_state_has_scale(to->dtype) || mt_state_has_scale(first->dtype))
                return mt_transfer_refuse(t, to, true, "needs master weights without a scale: take fp32 ones", error);
            mt_transfer_plan_holding(t, to, first, from_master ? end : masters);
        }
        from = has_source ? end : from;
    }
    return 0;
}

/* By round and peer. */
static int mt_piece_compare(const void *a, const void *b) {
    const mt_piece *x = a, *y = b;
    if (x->round != y->round) return x->round < y->round ? -1 : 1;
    if (x->peer != y->peer) return x->peer < y->peer ? -1 : 1;
    return x->order < y->order ? -1 : 1;
}

/* Sorts the pieces, and measures the rounds and the largest piece. */
static void mt_pieces_sort(mt_pieces *p, mt_transfer *t) {
    int64_t bytes = 0;
    if (p->count > 0) qsort(p->items, (size_t)p->count, sizeof *p->items, mt_piece_compare);
    for (int64_t i = 0; i < p->count; i++) {
        if (i == 0 || p->items[i].round != p->items[i - 1].round) bytes = 0;
        if (p == &t->receives || p->items[i].peer < t->world->size) bytes += mt_piece_bytes(&p->items[i]);
        p->largest = mt_max(p->largest, bytes);
        t->limit = mt_max(t->limit, mt_piece_bytes(&p->items[i]));
        t->counts.rounds = mt_max(t->counts.rounds, p->items[i].round + 1);
    }
}

static void mt_transfer_allocate(mt_transfer *t) {
    mt_pieces_sort(&t->sends, t), mt_pieces_sort(&t->receives, t);
    double rounds = (double)t->counts.rounds;
    mt_all_reduce_max(t->world, &rounds, 1, MT_F64);
    t->counts.rounds = (int64_t)rounds;
    bool knows_both = t->to && t->from;
    int64_t converts =
        !knows_both || mt_model_dtype(t->to) != mt_model_dtype(t->from) || mt_model_get_plan(t->to)->train;
    int64_t limit = mt_divide_up(t->limit, MT_PIECE_ALIGNMENT) * MT_PIECE_ALIGNMENT;
    t->counts.scratch = t->sends.largest + t->receives.largest + converts * 2 * limit;
    t->send_memory = t->ops->memory_alloc(mt_max(t->counts.scratch, 1));
    t->receive_memory = t->send_memory + t->sends.largest;
    t->converted = t->receive_memory + t->receives.largest;
}

static int mt_transfer_open_on(mt_transfer **out, mt_model *to, mt_model *from, const mt_group *world,
                               bool adapters_only, int64_t scratch_bytes, mt_error *error) {
    int size = world->size;
    mt_transfer *t = mt_calloc(sizeof *t);
    t->to = to, t->from = from, t->world = world;
    t->ops = mt_model_ops(to ? to : from), t->stream = mt_model_stream(to ? to : from);
    t->limit = scratch_bytes / (2 * size + 1);
    int64_t *numbers = t->loads = mt_calloc(5 * size * (int64_t)sizeof *numbers);
    t->sends.rounds = numbers + size, t->sends.filled = numbers + 2 * size;
    t->receives.rounds = numbers + 3 * size, t->receives.filled = numbers + 4 * size;
    mt_holdings targets = mt_holdings_collect(to, world, adapters_only);
    mt_holdings sources = mt_holdings_collect(from, world, adapters_only);
    int status = mt_transfer_plan(t, &targets, &sources, error); // the same on every rank
    t->counts.sent = t->loads[world->rank];
    free(numbers);
    free(targets.items);
    free(sources.items);
    if (status == 0)
        mt_transfer_allocate(t);
    else
        mt_transfer_close(t);
    *out = status == 0 ? t : NULL;
    return status;
}

int mt_transfer_open(mt_transfer **out, mt_model *to, mt_model *from, bool adapters_only, int64_t scratch_bytes,
                     mt_error *error) {
    const mt_group *world = &mt_model_grid(to)->world;
    MT_CHECK(to != from && mt_model_grid(from)->world.size == world->size);
    MT_CHECK(mt_model_ops(to)->on_device == mt_model_ops(from)->on_device);
    return mt_transfer_open_on(out, to, from, world, adapters_only,
                               scratch_bytes > 0 ? scratch_bytes : MT_TRANSFER_BYTES, error);
}

int mt_transfer_open_between(mt_transfer **out, mt_model *to, mt_model *from, const mt_group *ranks, mt_error *error) {
    MT_CHECK(!to != !from);
    return mt_transfer_open_on(out, to, from, ranks, false, MT_TRANSFER_BYTES, error);
}

void mt_transfer_close(mt_transfer *t) {
    if (!t) return;
    if (t->send_memory) {
        t->ops->stream_synchronize(t->stream);
        t->ops->memory_free(t->send_memory);
    }
    free(t->sends.items);
    free(t->receives.items);
    free(t);
}

mt_transfer_counts mt_transfer_get_counts(const mt_transfer *t) {
    return t->counts;
}

/* ---- a run, on the stream of `to` */

/* Copies a piece from this rank's parameters to a message, or from a message, converted, to them. */
static void mt_piece_copy(const mt_transfer *t, const mt_piece *piece, char *message, bool sends) {
    const mt_ops *ops = t->ops;
    mt_stream *stream = t->stream;
    mt_shard shard = mt_bucket_shard(sends ? t->from : t->to, piece->bucket, piece->state);
    int64_t size = mt_dtype_size(shard.dtype), stride = piece->stride * size, width = piece->cols * size;
    int64_t rows = piece->rows;
    char *own = (char *)shard.data + (piece->at - shard.first) * size;
    if (shard.dtype != piece->dtype) {
        ops->convert(t->converted, shard.dtype, message, piece->dtype, rows * piece->cols, stream);
        message = t->converted;
    }
    if (width == stride) width *= rows, stride = width, rows = 1;
    if (sends)
        ops->memory_copy_rows(message, width, own, stride, rows, width, stream);
    else
        ops->memory_copy_rows(own, stride, message, width, rows, width, stream);
}

/* One round: packs, exchanges and unpacks. Moves *out and *in from the first piece of the round behind its last. */
static void mt_transfer_round(const mt_transfer *t, int64_t round, const mt_piece **out, const mt_piece **in,
                              int64_t *counts) {
    int size = t->world->size;
    const mt_piece *sends_end = t->sends.items + t->sends.count, *end = t->receives.items + t->receives.count, *piece;
    int64_t *sent = counts, *received = counts + size + 1, packed = 0, unpacked = 0, kept = 0;
    memset(counts, 0, (size_t)(2 * size + 2) * sizeof *counts);
    for (piece = *in; piece < end && piece->round == round; piece++) received[piece->peer] += mt_piece_bytes(piece);
    for (int rank = 0; rank < size; rank++) kept += received[rank]; // own elements lie behind those of the others
    for (; *out < sends_end && (*out)->round == round; ++*out) {
        bool stays = (*out)->peer == size;
        mt_piece_copy(t, *out, stays ? t->receive_memory + kept : t->send_memory + packed, true);
        *(stays ? &kept : &packed) += mt_piece_bytes(*out);
        sent[(*out)->peer] += mt_piece_bytes(*out);
    }
    t->ops->all_to_all_v(t->receive_memory, received, t->send_memory, sent, MT_U8, t->world, t->stream);
    for (; *in < end && (*in)->round == round; ++*in) {
        mt_piece_copy(t, *in, t->receive_memory + unpacked, false);
        unpacked += mt_piece_bytes(*in);
    }
}

void mt_transfer_run(mt_transfer *t) {
    const mt_piece *out = t->sends.items, *in = t->receives.items;
    int64_t *counts = mt_malloc(2 * (t->world->size + 1) * (int64_t)sizeof *counts);
    if (t->to) mt_model_lend(t->to, true, t->stream);
    if (t->from) mt_model_lend(t->from, false, t->stream);
    for (int64_t round = 0; round < t->counts.rounds; round++) mt_transfer_round(t, round, &out, &in, counts);
    if (t->from) mt_model_return(t->from, t->stream);
    if (t->to) mt_model_return(t->to, t->stream);
    free(counts);
}
