/* engine.c: the sequences that a server generates, on all of its ranks. */
#include "engine.h"

#include <stdlib.h>
#include <string.h>

/* Begins a message to the other ranks. */
typedef struct plan_head {
    int64_t num_ends, num_begins, bytes; // sequences that end and begin; bytes that follow
    int64_t stops;                       // 1: the server ends
    int64_t limits;                      // 1: `prefill` is the most work on prompts in a step; 0: as before
    mt_prefill prefill;
} plan_head;

/* A sequence that begins; its prompt follows. */
typedef struct plan_entry {
    int64_t id, num_prompt, max_new_tokens;
    mt_sampling sampling;
    int64_t views, views_prompt, adapter;
    int64_t image_bytes; // of its pictures, behind the prompt; -1: they are those of the entry before
} plan_entry;

/* A sequence of the list. `sampling` has an address of its own, which the sequence holds. */
typedef struct entry {
    mt_sampling *sampling;
    mt_text_images *images;
    void *owner;
} entry;

/* The part of a request that rank 0 keeps until the next step. */
typedef struct newcomer {
    mt_logits_view *view;
    void *view_context, *owner;
    mt_text_images *images;
} newcomer;

struct mt_engine {
    mt_generator *generator;
    const mt_grid *grid;
    mt_sequence *sequences;
    entry *entries;
    int64_t count, capacity;
    /* the plan of the next step; ends and begins follow one another in a message */
    plan_head head;
    int64_t *ends;
    char *begins;
    newcomer *newcomers;
    int64_t ends_capacity, begins_capacity, newcomers_capacity, begins_bytes;
};

static void *grow(void *array, int64_t *capacity, int64_t wanted, int64_t size) {
    if (wanted <= *capacity) return array;
    *capacity = mt_max(wanted, 2 * *capacity);
    return mt_realloc(array, *capacity * size);
}

mt_engine *mt_engine_open(mt_generator *generator, const mt_grid *grid) {
    mt_engine *e = mt_calloc(sizeof *e);
    *e = (mt_engine){.generator = generator, .grid = grid};
    return e;
}

static void free_sequence(mt_sequence *sequence, entry *at) {
    free(sequence->tokens);
    free(at->sampling);
    mt_text_images_close(at->images);
}

void mt_engine_close(mt_engine *e) {
    if (!e) return;
    for (int64_t i = 0; i < e->count; i++) free_sequence(&e->sequences[i], &e->entries[i]);
    for (int64_t i = 0; i < e->head.num_begins && e->grid->world.rank == 0; i++)
        mt_text_images_close(e->newcomers[i].images);
    free(e->sequences), free(e->entries), free(e->ends), free(e->begins), free(e->newcomers), free(e);
}

/* ---- the plan of a step */

/* Bytes of an entry of the plan. */
static int64_t entry_bytes(const plan_entry *plan) {
    int64_t images = mt_max(plan->image_bytes, 0);
    return (int64_t)sizeof *plan + mt_divide_up(plan->num_prompt, 2) * 8 + mt_divide_up(images, 8) * 8;
}

void mt_engine_add(mt_engine *e, const mt_engine_request *r) {
    plan_entry new = {.id = r->id, .num_prompt = r->num_prompt, .max_new_tokens = r->max_new_tokens};
    int64_t at = e->begins_bytes, last = e->head.num_begins - 1, bytes;
    bool again = r->images && last >= 0 && e->newcomers[last].images == r->images;
    mt_text images = {0};
    if (r->images && !again && e->grid->world.size > 1) mt_text_images_pack(r->images, &images);
    new.image_bytes = again ? -1 : images.bytes, bytes = entry_bytes(&new);
    MT_CHECK(r->num_prompt > 0 && r->max_new_tokens >= 0);
    new.sampling = r->sampling, new.views = r->view != NULL, new.views_prompt = r->views_prompt;
    new.adapter = r->adapter;
    e->begins = grow(e->begins, &e->begins_capacity, at + bytes, 1);
    memset(e->begins + at, 0, (size_t)bytes);
    memcpy(e->begins + at, &new, sizeof new);
    memcpy(e->begins + at + sizeof new, r->prompt, (size_t)r->num_prompt * 4);
    if (images.bytes > 0)
        memcpy(e->begins + at + sizeof new + mt_divide_up(r->num_prompt, 2) * 8, images.data, (size_t)images.bytes);
    free(images.data);
    e->begins_bytes = at + bytes;
    e->newcomers = grow(e->newcomers, &e->newcomers_capacity, e->head.num_begins + 1, (int64_t)sizeof *e->newcomers);
    e->newcomers[e->head.num_begins++] =
        (newcomer){r->view, r->view_context, r->owner, mt_text_images_share(r->images)};
}

void mt_engine_end(mt_engine *e, int64_t index) {
    MT_CHECK(index >= 0 && index < e->count);
    e->ends = grow(e->ends, &e->ends_capacity, e->head.num_ends + 1, 8);
    e->ends[e->head.num_ends++] = index;
}

void mt_engine_limit_prefill(mt_engine *e, const mt_prefill *limit) {
    e->head.limits = 1, e->head.prefill = *limit;
}

/* Gives rank 0's plan to all ranks. */
static void share_plan(mt_engine *e) {
    const mt_group *world = &e->grid->world;
    if (world->size == 1) return;
    if (world->rank == 0) e->head.bytes = e->begins_bytes;
    mt_broadcast(world, &e->head, sizeof e->head, 0);
    e->ends = grow(e->ends, &e->ends_capacity, e->head.num_ends, 8);
    e->begins = grow(e->begins, &e->begins_capacity, e->head.bytes, 1);
    if (e->head.num_ends > 0) mt_broadcast(world, e->ends, e->head.num_ends * 8, 0);
    if (e->head.bytes > 0) mt_broadcast(world, e->begins, e->head.bytes, 0);
}

/* Of a rank that has no viewer: all ranks must take logits to the host in the same steps. */
static void view_nothing(void *context, const mt_sequence *sequence, int64_t position, const float *logits) {
    (void)context, (void)sequence, (void)position, (void)logits;
}

/* Appends a sequence of the plan to the list; returns the bytes that it takes there. */
static int64_t begin_sequence(mt_engine *e, const char *from, const newcomer *new) {
    plan_entry plan;
    memcpy(&plan, from, sizeof plan);
    int64_t wanted = e->count + 1, capacity = e->capacity;
    e->sequences = grow(e->sequences, &capacity, wanted, (int64_t)sizeof *e->sequences);
    e->entries = grow(e->entries, &e->capacity, wanted, (int64_t)sizeof *e->entries);
    mt_sequence *s = &e->sequences[e->count];
    entry *at = &e->entries[e->count++];
    *at = (entry){.sampling = mt_malloc(sizeof *at->sampling), .owner = new ? new->owner : NULL};
    if (new)
        at->images = new->images; // which it owns
    else if (plan.image_bytes > 0)
        at->images = mt_text_images_unpack(from + sizeof plan + mt_divide_up(plan.num_prompt, 2) * 8);
    else if (plan.image_bytes < 0)
        at->images = mt_text_images_share(at[-1].images);
    *at->sampling = plan.sampling;
    *s = (mt_sequence){.id = plan.id, .num_prompt = plan.num_prompt, .num_tokens = plan.num_prompt, .slot = -1};
    s->max_tokens = plan.num_prompt + plan.max_new_tokens, s->sampling = at->sampling;
    s->tokens = mt_malloc(s->max_tokens * 4);
    memcpy(s->tokens, from + sizeof plan, (size_t)plan.num_prompt * 4);
    s->views_prompt = plan.views_prompt != 0, s->adapter = plan.adapter, s->images = mt_text_images_list(at->images);
    if (plan.views) s->view = new &&new->view ? new->view : view_nothing, s->view_context = new ? new->view_context : 0;
    return entry_bytes(&plan);
}

/* Leaves out what has ended, then ends and begins what the plan says: on every rank in the same order. */
static void apply_plan(mt_engine *e) {
    bool first = e->grid->world.rank == 0;
    int64_t kept = 0;
    if (e->head.limits) mt_generator_limit_prefill(e->generator, &e->head.prefill);
    for (int64_t i = 0; i < e->head.num_ends; i++) e->sequences[e->ends[i]].finish = MT_FINISH_STOP;
    for (int64_t i = 0; i < e->count; i++) {
        if (e->sequences[i].finish != MT_UNFINISHED) {
            free_sequence(&e->sequences[i], &e->entries[i]);
        } else {
            e->sequences[kept] = e->sequences[i], e->entries[kept++] = e->entries[i];
        }
    }
    e->count = kept;
    for (int64_t i = 0, at = 0; i < e->head.num_begins; i++)
        at += begin_sequence(e, e->begins + at, first ? &e->newcomers[i] : NULL);
    e->head = (plan_head){.num_ends = 0};
    e->begins_bytes = 0;
}

/* ---- steps */

static int64_t take_step(mt_engine *e, mt_error *error) {
    apply_plan(e);
    if (e->count == 0) return 0;
    return mt_generator_step(e->generator, e->sequences, e->count, error) < 0 ? -1 : e->count;
}

int64_t mt_engine_step(mt_engine *e, mt_error *error) {
    share_plan(e);
    return take_step(e, error);
}

const mt_sequence *mt_engine_sequences(const mt_engine *e, int64_t *count) {
    *count = e->count;
    return e->sequences;
}

void *mt_engine_owner(const mt_engine *e, int64_t index) {
    return e->entries[index].owner;
}

void mt_engine_disown(mt_engine *e, const void *from, const void *to) {
    for (int64_t i = 0; i < e->count; i++) {
        uintptr_t owner = (uintptr_t)e->entries[i].owner;
        if (owner >= (uintptr_t)from && owner < (uintptr_t)to) e->entries[i].owner = NULL;
    }
}

void mt_engine_stop(mt_engine *e) {
    e->head = (plan_head){.stops = 1};
    e->begins_bytes = 0;
    share_plan(e);
}

int mt_engine_follow(mt_engine *e, mt_error *error) {
    for (;;) {
        share_plan(e);
        if (e->head.stops) return 0;
        if (take_step(e, error) < 0) return -1;
    }
}
