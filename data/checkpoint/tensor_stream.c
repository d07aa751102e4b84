/* tensor_stream.c: the whole tensors of a model one after another. Each rank describes its part of a tensor as runs of
 * elements and sends them to the root, which puts them in their places. Invariants: exactly one rank sends an element;
 * every rank walks the same list of tensors. */
#include "tensor_stream.h"

#include "checkpoint_plan.h"
#include "checkpoint_tensors.h"

#include <stdlib.h>
#include <string.h>

/* Elements first, first + stride, ... of a tensor. */
typedef struct mt_run {
    int64_t first, stride, count;
} mt_run;

/* A rank's part of a tensor: runs, and the values of all of them. */
typedef struct mt_runs {
    mt_run *items;
    float *values;
    int64_t num_runs, num_values, run_room, value_room;
} mt_runs;

struct mt_tensor_stream {
    mt_model *model;
    mt_streamed streamed;
    int root;
    mt_saved_set set;
    bool *trained; // [set.count]
    int64_t next;  // number in the set
    float *values; // the root's tensor
    mt_runs runs;
};

static void mt_runs_reserve(mt_runs *r, int64_t num_runs, int64_t num_values) {
    if (num_runs > r->run_room) r->items = mt_realloc(r->items, (r->run_room = num_runs) * (int64_t)sizeof *r->items);
    if (num_values > r->value_room)
        r->values = mt_realloc(r->values, (r->value_room = num_values) * (int64_t)sizeof *r->values);
}

/* The elements of a parameter's bucket, or of the parameter, that this rank sends: weights, or the sums of gradients.
 * Of copies that all ranks of the bucket's group have, the first rank sends its own. data NULL: none. */
static mt_shard mt_streamed_shard(const mt_tensor_stream *s, const mt_param *param) {
    const mt_bucket *b = mt_bucket_get(s->model, param->bucket);
    bool is_cut = b->strategy == MT_SHARD_PARAMS || (b->strategy != MT_NO_SHARD && s->streamed == MT_STREAM_GRADIENTS);
    if (!is_cut && b->group->rank > 0) return (mt_shard){0};
    if (s->streamed == MT_STREAM_WEIGHTS) return mt_state_shard(s->model, param, MT_STATE_WEIGHTS);
    if (is_cut) return (mt_shard){b->grad_shard, b->shard_first, b->shard_count, b->grad_dtype};
    return (mt_shard){b->main_grads, 0, b->count, b->grad_dtype};
}

/* values[n] = elements [at, at + n) of a shard. */
static void mt_shard_values(const mt_model *m, const mt_shard *shard, int64_t at, float *values, int64_t n) {
    int64_t size = mt_dtype_size(shard->dtype);
    void *stored = mt_malloc(n * size);
    mt_model_ops(m)->memory_copy(stored, (const char *)shard->data + (at - shard->first) * size, n * size,
                                 mt_model_stream(m));
    mt_model_ops(m)->stream_synchronize(mt_model_stream(m));
    mt_stored_to_f32(values, 1, stored, shard->dtype, n);
    free(stored);
}

/* Appends a run; one that continues the last one makes it longer. */
static void mt_runs_add(mt_runs *r, mt_run run) {
    mt_run *last = r->num_runs > 0 ? &r->items[r->num_runs - 1] : NULL;
    if (last && last->stride == run.stride && last->first + last->count * last->stride == run.first) {
        last->count += run.count;
        return;
    }
    if (r->num_runs == r->run_room) mt_runs_reserve(r, mt_max(2 * r->run_room, 64), 0);
    r->items[r->num_runs++] = run;
}

/* Appends this rank's elements of a parameter. */
static void mt_runs_add_param(const mt_tensor_stream *s, mt_runs *r, const mt_saved_tensor *tensor,
                              const mt_param *param) {
    if (!param->counted) return;
    mt_shard shard = mt_streamed_shard(s, param);
    int64_t begin, end, cols = param->cols;
    if (!shard.data) return;
    mt_param_part(param, &shard, &begin, &end);
    end = mt_min(end, mt_param_rows_stored(param) * cols);
    if (begin >= end) return;
    mt_placement place = mt_param_placement(param, MT_STATE_WEIGHTS);
    int64_t elements = param->hf_rows_total * param->whole_cols, slice = place.slice * (elements / place.slices);
    MT_CHECK(tensor->bytes % elements == 0);
    mt_runs_reserve(r, 0, r->num_values + end - begin);
    if (param->in_fp8)
        mt_state_read(s->model, param, MT_STATE_WEIGHTS, begin, r->values + r->num_values, end - begin);
    else
        mt_shard_values(s->model, &shard, param->offset + begin, r->values + r->num_values, end - begin);
    r->num_values += end - begin;
    for (int64_t i = begin, n; i < end; i += n) {
        int64_t row = mt_placement_row(&place, param->first_row + i / cols), col = param->first_col + i % cols;
        n = mt_min(cols - i % cols, end - i);
        mt_runs_add(r, place.transposed ? (mt_run){slice + col * place.width + row, place.width, n}
                                        : (mt_run){slice + row * place.width + col, 1, n});
    }
}

/* The root's tensor gets the values of runs. */
static void mt_runs_place(const mt_runs *r, float *to) {
    const float *from = r->values;
    for (int64_t i = 0; i < r->num_runs; i++) {
        const mt_run *run = &r->items[i];
        for (int64_t k = 0; k < run->count; k++) to[run->first + k * run->stride] = *from++;
    }
}

/* A message of each rank to the root: two numbers, runs, values. */
static void mt_runs_send(const mt_runs *r, const mt_group *world, int root) {
    int64_t numbers[2] = {r->num_runs, r->num_values};
    mt_send(world, numbers, sizeof numbers, root);
    if (r->num_runs == 0) return;
    mt_send(world, r->items, r->num_runs * (int64_t)sizeof *r->items, root);
    mt_send(world, r->values, r->num_values * (int64_t)sizeof *r->values, root);
}

static void mt_runs_receive(mt_runs *r, const mt_group *world, int from) {
    int64_t numbers[2];
    mt_receive(world, numbers, sizeof numbers, from);
    mt_runs_reserve(r, numbers[0], numbers[1]);
    r->num_runs = numbers[0], r->num_values = numbers[1];
    if (r->num_runs == 0) return;
    mt_receive(world, r->items, r->num_runs * (int64_t)sizeof *r->items, from);
    mt_receive(world, r->values, r->num_values * (int64_t)sizeof *r->values, from);
}

/* True if this rank has the gradients that it would send. */
static bool mt_has_gradients(const mt_tensor_stream *s) {
    int64_t count;
    const mt_param *params = mt_model_params(s->model, &count);
    for (int64_t i = 0; i < count; i++) {
        const mt_bucket *b = mt_bucket_get(s->model, params[i].bucket);
        if (params[i].trained && b->shard_count > 0 && !b->grad_shard && !b->main_grads) return false;
    }
    return true;
}

static int mt_compare_names(const void *name, const void *tensor) {
    return strcmp(name, ((const mt_saved_tensor *)tensor)->name);
}

/* Notes which tensors the optimizer trains: known to every rank, also of parameters that others have. */
static void mt_stream_note_trained(mt_tensor_stream *s) {
    mt_param *rows;
    int64_t count = mt_params_build(&rows, mt_model_options(s->model), NULL);
    s->trained = mt_calloc(mt_max(s->set.count, 1) * (int64_t)sizeof *s->trained);
    for (int64_t i = 0; i < count; i++) {
        const mt_saved_tensor *found =
            bsearch(rows[i].hf_name, s->set.tensors, (size_t)s->set.count, sizeof *s->set.tensors, mt_compare_names);
        if (found && rows[i].trained) s->trained[found - s->set.tensors] = true;
    }
    free(rows);
}

int mt_tensor_stream_open(mt_tensor_stream **out, mt_model *model, mt_streamed streamed, int root, mt_error *error) {
    const mt_group *world = &mt_model_grid(model)->world;
    if (root < 0 || root >= world->size)
        return mt_error_set(error, "a stream of tensors to rank %d: the job has ranks 0 to %d", root, world->size - 1);
    mt_tensor_stream *s = mt_calloc(sizeof *s);
    s->model = model, s->streamed = streamed, s->root = root;
    int status = 0;
    if (streamed == MT_STREAM_GRADIENTS && (!mt_model_get_plan(model)->train || !mt_has_gradients(s)))
        status =
            mt_error_set(error, "a stream of gradients needs a model that trains, after a step, with its gradients "
                                "awake (mt_model_wake)");
    if (mt_agree(world, status != 0, error) != 0) {
        free(s);
        return -1;
    }
    bool of_adapters = streamed == MT_STREAM_GRADIENTS && mt_model_options(model)->lora_rank > 0;
    mt_saved_plan(&s->set, model, of_adapters ? "adapter_model" : "model", 0, INT64_MAX, "");
    mt_stream_note_trained(s);
    if (streamed == MT_STREAM_WEIGHTS) mt_model_lend(model, false, mt_model_stream(model));
    *out = s;
    return 0;
}

bool mt_tensor_stream_next(mt_tensor_stream *s, mt_whole_tensor *tensor) {
    const mt_group *world = &mt_model_grid(s->model)->world;
    bool is_root = world->rank == s->root;
    free(s->values);
    s->values = NULL;
    while (s->streamed == MT_STREAM_GRADIENTS && s->next < s->set.count && !s->trained[s->next]) s->next++;
    if (s->next == s->set.count) return false;
    const mt_saved_tensor *saved = &s->set.tensors[s->next++];
    *tensor = (mt_whole_tensor){.name = saved->name, .num_dims = saved->num_dims, .count = 1};
    for (int64_t i = 0; i < saved->num_dims; i++) tensor->count *= tensor->shape[i] = saved->shape[i];
    s->runs.num_runs = s->runs.num_values = 0;
    for (int64_t i = 0; saved->params && i < saved->num_params; i++)
        mt_runs_add_param(s, &s->runs, saved, &saved->params[i]);
    if (!is_root) {
        mt_runs_send(&s->runs, world, s->root);
    } else {
        tensor->values = s->values = mt_calloc(tensor->count * (int64_t)sizeof *s->values);
        mt_runs_place(&s->runs, s->values);
        for (int rank = 0; rank < world->size; rank++) {
            if (rank == world->rank) continue;
            mt_runs_receive(&s->runs, world, rank);
            mt_runs_place(&s->runs, s->values);
        }
    }
    return true;
}

void mt_tensor_stream_close(mt_tensor_stream *s) {
    if (!s) return;
    if (s->streamed == MT_STREAM_WEIGHTS) mt_model_return(s->model, mt_model_stream(s->model));
    mt_saved_free(&s->set);
    free(s->values), free(s->trained), free(s->runs.items), free(s->runs.values);
    free(s);
}
