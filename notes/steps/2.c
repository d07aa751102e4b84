/* 2.c: data parallelism, step 2 of 8. The last is mini.c.
 *
 * It trains a small Llama (RMSNorm, RoPE, grouped-query attention, SwiGLU, or experts). Every forward stands beside its
 * backward, written by hand. It needs a C compiler and MPI:
 *
 *   mpicc -O2 -std=c11 notes/steps/2.c -lm -o 2        (or make mini: build/default/notes/steps/2)
 *   mpirun -np 2 ./2
 *
 * All numbers are doubles, so layouts of ranks agree to about 12 digits: a larger difference is an error, not rounding.
 * Options have the names that ./train gives them. A micro-batch is one sequence; the output layer is untied.
 *
 * Shapes: w[N, K] has N rows of K numbers, as in torch.nn.Linear: y[T, N] = x[T, K] w^T. The letters:
 *   T     tokens of a sequence      B  sequences of a step         C  hidden size         V  vocabulary
 *   H, G  query heads, key heads    D  channels of a head          F  width of the MLP    E  experts
 * Cuts: tokens[B/dp, T + 1] is tokens[B, T + 1] with B/dp of its rows on each data rank; dw[n]+dp is a sum, with a
 * summand on each data rank.
 *
 * The parts of a layer return their result in memory of the micro-batch (take); backward functions return dx and add to
 * w.dw. */
#include <math.h>
#include <mpi.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ==== options, errors, memory ===================================================================================== */

typedef struct options {
    int64_t num_layers, hidden_size, ffn_hidden_size, num_attention_heads, num_query_groups, vocab_size, seq_length;
    int64_t num_experts, moe_router_topk; // num_experts 0: a dense MLP
    int64_t global_batch_size, train_iters;
    double norm_epsilon, rotary_base, lr, adam_beta1, adam_beta2, adam_eps, weight_decay, clip_grad;
    const char *load, *tokens_file; // NULL: random weights; synthetic tokens
} options;

/* Ends the job if some rank has an error text, which the lowest such rank prints. Every rank calls it. */
static void stop_on_error(const char *error) {
    int rank, size, first;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    first = error[0] ? rank : size;
    MPI_Allreduce(MPI_IN_PLACE, &first, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
    if (first == size) return;
    if (rank == first) fprintf(stderr, "error: %s\n", error);
    MPI_Finalize();
    exit(1);
}

/* Memory that begins with zeros; ends the job if there is none. */
static void *allocate(int64_t count, size_t size) {
    void *memory = calloc((size_t)count + 1, size);
    if (!memory) fprintf(stderr, "error: no memory\n"), MPI_Abort(MPI_COMM_WORLD, 1);
    return memory;
}

/* ==== groups of ranks ============================================================================================= */

/* Ranks that communicate with each other, and this rank's place among them. */
typedef struct group {
    MPI_Comm comm;
    int rank, size;
} group;

static group all_ranks(void) {
    group g = {.comm = MPI_COMM_WORLD};
    MPI_Comm_rank(g.comm, &g.rank);
    MPI_Comm_size(g.comm, &g.size);
    return g;
}

static void all_reduce(const group *g, double *x, int64_t n, MPI_Op operation) {
    MPI_Allreduce(MPI_IN_PLACE, x, (int)n, MPI_DOUBLE, operation, g->comm);
}

/* ==== the model =================================================================================================== */

/* A parameter, or several whose rows follow each other, and the gradient. */
typedef struct tensor {
    double *w, *dw;
    int64_t rows, columns;
} tensor;

typedef struct mlp {
    tensor gate_up; // [2 F, C]: the rows of gate, then those of up
    tensor down;    // [C, F]
} mlp;

typedef struct layer {
    tensor input_norm; // [C]
    tensor qkv;        // [(H + 2 G) D, C]
    tensor out;        // [C, H D]
    tensor mlp_norm;   // [C]
    tensor router;     // [E, C]
    mlp *mlps;         // the dense one, or [E] experts
} layer;

/* The memory of all parameters. */
typedef struct buffer {
    int64_t count;              // n
    double *w, *dw, *moment[2]; // [n]
} buffer;

/* A row of the parameter table: the name in a Hugging Face folder, and the shape. */
typedef struct parameter {
    char name[96];
    int64_t rows, columns;
    tensor *tensor;        // several parameters may share one
    int64_t offset, count; // in the buffer
} parameter;

typedef struct model {
    options o;
    group data;
    int64_t T, C, H, G, D, F, V;
    int64_t micro_batches;                // of this rank and step
    int32_t *tokens;                      // [global_batch_size train_iters, seq_length + 1]
    tensor embedding, final_norm, output; // [V, C], [C], [V, C]
    layer *layers;                        // [num_layers]
    parameter *parameters;
    int64_t num_parameters;
    buffer buffer;
} model;

/* The values of an MLP that its backward reads. */
typedef struct mlp_saved {
    double *x, *gate_up, *activated;
} mlp_saved;

/* Rows on their way through the experts. */
typedef struct dispatch {
    int *expert;     // [T, topk]
    double *prob;    // [T, topk]
    int *order;      // [T topk] places in `expert`, sorted by expert
    int *load;       // [E] rows of each expert
    mlp_saved *mlps; // [E] of their rows
    double *y;       // [T topk, C] the experts' outputs, in `order`
} dispatch;

/* The values of a layer that its backward reads. */
typedef struct saved {
    double *x, *normed, *qkv, *attended, *lse; // lse [T, H]: log of the sum of exponentials of attention's scores
    double *middle, *mlp_in;                   // `middle`: the residual stream between attention and MLP
    mlp_saved mlp;
    dispatch dispatch;
} saved;

typedef struct block {
    struct block *next;
    double values[];
} block;

/* A micro-batch, from its forward to its backward. */
typedef struct pass {
    block *memory;                              // everything that take() returned
    int64_t sequence;                           // its row of `tokens`
    saved *layers;                              // [num_layers]
    double *last, *last_normed, *probabilities; // probabilities [T, V]
} pass;

/* Memory that begins with zeros and lives until release(). */
static void *take(pass *p, int64_t count, size_t size) {
    block *b = allocate(1, sizeof *b + (size_t)count * size);
    b->next = p->memory;
    p->memory = b;
    return b->values;
}

static double *take_rows(pass *p, int64_t rows, int64_t width) {
    return take(p, rows * width, sizeof(double));
}

static void release(pass *p) {
    for (block *b = p->memory, *next; b; b = next) next = b->next, free(b);
    p->memory = NULL;
}

/* ==== products, norm, RoPE ======================================================================================== */

static double dot(const double *a, const double *b, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

/* y += factor x */
static void add(double *y, double factor, const double *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] += factor * x[i];
}

/* y[T, N] = x[T, K] w[N, K]^T */
static double *linear_forward(pass *p, const double *x, tensor w, int64_t T) {
    int64_t N = w.rows, K = w.columns;
    double *y = take_rows(p, T, N);
    for (int64_t t = 0; t < T; t++)
        for (int64_t n = 0; n < N; n++) y[t * N + n] = dot(x + t * K, w.w + n * K, K);
    return y;
}

/* dx = dy w, dw += dy^T x */
static double *linear_backward(pass *p, tensor w, const double *dy, const double *x, int64_t T) {
    int64_t N = w.rows, K = w.columns;
    double *dx = take_rows(p, T, K);
    for (int64_t t = 0; t < T; t++)
        for (int64_t n = 0; n < N; n++) {
            add(dx + t * K, dy[t * N + n], w.w + n * K, K);
            add(w.dw + n * K, dy[t * N + n], x + t * K, K);
        }
    return dx;
}

/* RMSNorm: y = w x / r with r = sqrt(mean of x^2 + epsilon), for each row. */
static double *norm_forward(const model *m, pass *p, const double *x, tensor w) {
    double *y = take_rows(p, m->T, m->C);
    for (int64_t t = 0; t < m->T; t++) {
        const double *row = x + t * m->C;
        double r = sqrt(dot(row, row, m->C) / (double)m->C + m->o.norm_epsilon);
        for (int64_t c = 0; c < m->C; c++) y[t * m->C + c] = w.w[c] * row[c] / r;
    }
    return y;
}

/* With u = x / r and du = w dy: dx = (du - u mean(u du)) / r, dw += u dy. */
static double *norm_backward(const model *m, pass *p, tensor w, const double *dy, const double *x) {
    double *dx = take_rows(p, m->T, m->C);
    for (int64_t t = 0; t < m->T; t++) {
        const double *row = x + t * m->C, *drow = dy + t * m->C;
        double r = sqrt(dot(row, row, m->C) / (double)m->C + m->o.norm_epsilon), mean = 0;
        for (int64_t c = 0; c < m->C; c++) mean += row[c] / r * w.w[c] * drow[c] / (double)m->C;
        for (int64_t c = 0; c < m->C; c++) {
            dx[t * m->C + c] = (w.w[c] * drow[c] - row[c] / r * mean) / r;
            w.dw[c] += row[c] / r * drow[c];
        }
    }
    return dx;
}

/* RoPE: rotates channels (d, d + D/2) of queries and keys by position / base^(2d/D). The backward is the rotation by
 * the opposite angle: direction -1. */
static void rope(const model *m, double *qkv, double direction) {
    int64_t width = (m->H + 2 * m->G) * m->D, half = m->D / 2;
    for (int64_t t = 0; t < m->T; t++)
        for (int64_t h = 0; h < m->H + m->G; h++)
            for (int64_t d = 0; d < half; d++) {
                double frequency = pow(m->o.rotary_base, -2.0 * (double)d / (double)m->D);
                double angle = direction * frequency * (double)t;
                double *a = qkv + t * width + h * m->D + d, *b = a + half, old_a = *a, old_b = *b;
                *a = old_a * cos(angle) - old_b * sin(angle);
                *b = old_a * sin(angle) + old_b * cos(angle);
            }
}

/* ==== attention =================================================================================================== */

/* A query attends to its own key and those of earlier tokens; query head h to key head h G / H. For a query and head,
 * lse is the log of the sum of exp(score) over these keys, and attended[D] the mean of their values, weighted with
 * exp(score - lse). Sets s->attended[T, H D] and s->lse. */
static void attend_forward(const model *m, pass *p, saved *s) {
    int64_t width = (m->H + 2 * m->G) * m->D, D = m->D;
    double *score = take_rows(p, 1, m->T);
    s->attended = take_rows(p, m->T * m->H, D), s->lse = take_rows(p, m->T, m->H);
    for (int64_t t = 0; t < m->T; t++)
        for (int64_t h = 0; h < m->H; h++) {
            const double *q = s->qkv + t * width + h * D, *k = s->qkv + (m->H + h * m->G / m->H) * D, *v = k + m->G * D;
            double max = -INFINITY, sum = 0, *lse = s->lse + t * m->H + h;
            for (int64_t j = 0; j <= t; j++) {
                score[j] = dot(q, k + j * width, D) / sqrt((double)D);
                max = fmax(max, score[j]);
            }
            for (int64_t j = 0; j <= t; j++) sum += exp(score[j] - max);
            *lse = max + log(sum);
            for (int64_t j = 0; j <= t; j++)
                add(s->attended + (t * m->H + h) * D, exp(score[j] - *lse), v + j * width, D);
        }
}

/* Returns dqkv[T, (H + 2 G) D]. exp(score - lse) is the probability. `delta` is the sum over keys of probability x
 * dprobability, which is dattended attended. */
static double *attend_backward(const model *m, pass *p, const double *dattended, const saved *s) {
    int64_t width = (m->H + 2 * m->G) * m->D, D = m->D;
    double *dqkv = take_rows(p, m->T, width);
    for (int64_t t = 0; t < m->T; t++)
        for (int64_t h = 0; h < m->H; h++) {
            const double *q = s->qkv + t * width + h * D, *dhead = dattended + (t * m->H + h) * D;
            double delta = dot(dhead, s->attended + (t * m->H + h) * D, D);
            for (int64_t j = 0; j <= t; j++) {
                int64_t at_k = j * width + (m->H + h * m->G / m->H) * D, at_v = at_k + m->G * D;
                const double *k = s->qkv + at_k, *v = s->qkv + at_v;
                double prob = exp(dot(q, k, D) / sqrt((double)D) - s->lse[t * m->H + h]);
                double dscore = prob * (dot(dhead, v, D) - delta) / sqrt((double)D);
                add(dqkv + t * width + h * D, dscore, k, D);
                add(dqkv + at_k, dscore, q, D);
                add(dqkv + at_v, prob, dhead, D);
            }
        }
    return dqkv;
}

/* y = x + attention(norm(x)) */
static double *attention_forward(const model *m, pass *p, const layer *l, saved *s, double *x) {
    s->x = x;
    s->normed = norm_forward(m, p, x, l->input_norm);    // [T, C]
    s->qkv = linear_forward(p, s->normed, l->qkv, m->T); // [T, (H + 2 G) D]
    rope(m, s->qkv, 1);
    attend_forward(m, p, s);                                  // attended[T, H D]
    double *y = linear_forward(p, s->attended, l->out, m->T); // [T, C]
    add(y, 1, x, m->T * m->C);
    return y;
}

static double *attention_backward(const model *m, pass *p, const layer *l, const saved *s, double *dy) {
    double *dattended = linear_backward(p, l->out, dy, s->attended, m->T); // [T, H D]
    double *dqkv = attend_backward(m, p, dattended, s);                    // [T, (H + 2 G) D]
    rope(m, dqkv, -1);
    double *dnormed = linear_backward(p, l->qkv, dqkv, s->normed, m->T); // [T, C]
    double *dx = norm_backward(m, p, l->input_norm, dnormed, s->x);
    add(dx, 1, dy, m->T * m->C); // the residual connection
    return dx;
}

/* ==== MLP and experts ============================================================================================= */

/* y[n, C] = (silu(x gate^T) (x up^T)) down^T for n rows, with silu(x) = x / (1 + exp(-x)). */
static double *mlp_forward(pass *p, const mlp *w, mlp_saved *s, double *x, int64_t n) {
    int64_t F = w->down.columns;
    s->x = x, s->gate_up = linear_forward(p, x, w->gate_up, n), s->activated = take_rows(p, n, F);
    for (int64_t i = 0; i < n * F; i++) {
        double *gate = s->gate_up + i / F * 2 * F + i % F, *up = gate + F;
        s->activated[i] = *gate / (1 + exp(-*gate)) * *up;
    }
    return linear_forward(p, s->activated, w->down, n);
}

static double *mlp_backward(pass *p, const mlp *w, const mlp_saved *s, const double *dy, int64_t n) {
    int64_t F = w->down.columns;
    double *dactivated = linear_backward(p, w->down, dy, s->activated, n), *dgate_up = take_rows(p, n, 2 * F);
    for (int64_t i = 0; i < n * F; i++) {
        int64_t at = i / F * 2 * F + i % F;
        double gate = s->gate_up[at], up = s->gate_up[at + F], sigmoid = 1 / (1 + exp(-gate));
        dgate_up[at] = dactivated[i] * up * sigmoid * (1 + gate * (1 - sigmoid));
        dgate_up[at + F] = dactivated[i] * gate * sigmoid;
    }
    return linear_backward(p, w->gate_up, dgate_up, s->x, n);
}

/* The experts with the topk largest logits of each row, and their probabilities: a softmax over these logits. */
static void route_forward(const model *m, pass *p, tensor router, dispatch *d, const double *x) {
    int64_t E = m->o.num_experts, topk = m->o.moe_router_topk;
    double *logits = linear_forward(p, x, router, m->T);
    d->expert = take(p, m->T * topk, sizeof(int)), d->prob = take_rows(p, m->T, topk);
    for (int64_t t = 0; t < m->T; t++) {
        double *logit = logits + t * E, *prob = d->prob + t * topk, sum = 0;
        for (int64_t k = 0; k < topk; k++) {
            int best = 0;
            for (int e = 1; e < E; e++)
                if (logit[e] > logit[best]) best = e;
            d->expert[t * topk + k] = best;
            prob[k] = logit[best];
            logit[best] = -INFINITY; // not chosen again
        }
        for (int64_t k = topk - 1; k >= 0; k--) sum += prob[k] = exp(prob[k] - prob[0]);
        for (int64_t k = 0; k < topk; k++) prob[k] /= sum;
    }
}

static double *route_backward(const model *m, pass *p, tensor router, const dispatch *d, const double *dprob,
                              const double *x) {
    int64_t E = m->o.num_experts, topk = m->o.moe_router_topk;
    double *dlogits = take_rows(p, m->T, E);
    for (int64_t t = 0; t < m->T; t++) {
        const double *prob = d->prob + t * topk, *dp = dprob + t * topk;
        double mean = dot(prob, dp, topk);
        for (int64_t k = 0; k < topk; k++) dlogits[t * E + d->expert[t * topk + k]] = prob[k] * (dp[k] - mean);
    }
    return linear_backward(p, router, dlogits, x, m->T);
}

/* Sorts the chosen experts: sets d->order and d->load. */
static void plan_dispatch(const model *m, pass *p, dispatch *d) {
    int64_t slots = m->T * m->o.moe_router_topk, E = m->o.num_experts;
    d->order = take(p, slots, sizeof(int)), d->load = take(p, E, sizeof(int));
    for (int e = 0, place = 0; e < E; e++)
        for (int slot = 0; slot < slots; slot++)
            if (d->expert[slot] == e) d->order[place++] = slot, d->load[e]++;
}

/* y[T, C] = the sum over a row's experts of probability x expert(x) */
static double *experts_forward(const model *m, pass *p, const layer *l, dispatch *d, const double *x) {
    int64_t topk = m->o.moe_router_topk, slots = m->T * topk, C = m->C, row = 0;
    route_forward(m, p, l->router, d, x);
    plan_dispatch(m, p, d);
    double *sorted = take_rows(p, slots, C), *y = take_rows(p, m->T, C);
    d->y = take_rows(p, slots, C), d->mlps = take(p, m->o.num_experts, sizeof *d->mlps);
    for (int64_t i = 0; i < slots; i++) add(sorted + i * C, 1, x + d->order[i] / topk * C, C);
    for (int64_t e = 0; e < m->o.num_experts; row += d->load[e++]) {
        double *of_expert = mlp_forward(p, &l->mlps[e], &d->mlps[e], sorted + row * C, d->load[e]);
        add(d->y + row * C, 1, of_expert, d->load[e] * C);
    }
    for (int64_t i = 0; i < slots; i++) add(y + d->order[i] / topk * C, d->prob[d->order[i]], d->y + i * C, C);
    return y;
}

static double *experts_backward(const model *m, pass *p, const layer *l, const dispatch *d, const double *dy,
                                const double *x) {
    int64_t topk = m->o.moe_router_topk, slots = m->T * topk, C = m->C, row = 0;
    double *dprob = take_rows(p, m->T, topk), *dy_sorted = take_rows(p, slots, C), *dsorted = take_rows(p, slots, C);
    for (int64_t i = 0; i < slots; i++) {
        const double *dtoken = dy + d->order[i] / topk * C;
        dprob[d->order[i]] = dot(dtoken, d->y + i * C, C);
        add(dy_sorted + i * C, d->prob[d->order[i]], dtoken, C);
    }
    for (int64_t e = 0; e < m->o.num_experts; row += d->load[e++]) {
        double *of_expert = mlp_backward(p, &l->mlps[e], &d->mlps[e], dy_sorted + row * C, d->load[e]);
        add(dsorted + row * C, 1, of_expert, d->load[e] * C);
    }
    double *dx = route_backward(m, p, l->router, d, dprob, x);
    for (int64_t i = 0; i < slots; i++) add(dx + d->order[i] / topk * C, 1, dsorted + i * C, C);
    return dx;
}

/* y = x + mlp(norm(x)), or the experts in the mlp's place */
static double *mlp_block_forward(const model *m, pass *p, const layer *l, saved *s, double *x) {
    double *y;
    s->middle = x, s->mlp_in = norm_forward(m, p, x, l->mlp_norm);
    if (m->o.num_experts) {
        y = experts_forward(m, p, l, &s->dispatch, s->mlp_in);
    } else {
        y = mlp_forward(p, l->mlps, &s->mlp, s->mlp_in, m->T);
    }
    add(y, 1, x, m->T * m->C);
    return y;
}

static double *mlp_block_backward(const model *m, pass *p, const layer *l, const saved *s, double *dy) {
    double *dnormed;
    if (m->o.num_experts) {
        dnormed = experts_backward(m, p, l, &s->dispatch, dy, s->mlp_in);
    } else {
        dnormed = mlp_backward(p, l->mlps, &s->mlp, dy, m->T);
    }
    double *dx = norm_backward(m, p, l->mlp_norm, dnormed, s->middle);
    add(dx, 1, dy, m->T * m->C);
    return dx;
}

/* ==== embedding and loss ========================================================================================== */

static double *embedding_forward(const model *m, pass *p) {
    const int32_t *tokens = m->tokens + p->sequence * (m->T + 1);
    double *x = take_rows(p, m->T, m->C);
    for (int64_t t = 0; t < m->T; t++) add(x + t * m->C, 1, m->embedding.w + tokens[t] * m->C, m->C);
    return x;
}

static void embedding_backward(const model *m, const pass *p, const double *dx) {
    const int32_t *tokens = m->tokens + p->sequence * (m->T + 1);
    for (int64_t t = 0; t < m->T; t++) add(m->embedding.dw + tokens[t] * m->C, 1, dx + t * m->C, m->C);
}

/* Cross-entropy of the next token, summed over the sequence. Sets p->probabilities. */
static double loss_forward(const model *m, pass *p, double *x) {
    const int32_t *tokens = m->tokens + p->sequence * (m->T + 1);
    double loss = 0;
    p->last = x, p->last_normed = norm_forward(m, p, x, m->final_norm);
    double *logits = linear_forward(p, p->last_normed, m->output, m->T);
    p->probabilities = take_rows(p, m->T, m->V);
    for (int64_t t = 0; t < m->T; t++) {
        double *logit = logits + t * m->V, *prob = p->probabilities + t * m->V, max = logit[0], sum = 0;
        for (int64_t v = 1; v < m->V; v++) max = fmax(max, logit[v]);
        for (int64_t v = 0; v < m->V; v++) sum += prob[v] = exp(logit[v] - max);
        for (int64_t v = 0; v < m->V; v++) prob[v] /= sum;
        loss += log(sum) - (logit[tokens[t + 1]] - max);
    }
    return loss;
}

/* dx of the loss's mean over all tokens of the step: dlogits = (probability - 1 at the label) / tokens. */
static double *loss_backward(const model *m, pass *p) {
    const int32_t *tokens = m->tokens + p->sequence * (m->T + 1);
    double *dlogits = take_rows(p, m->T, m->V), scale = 1 / (double)(m->o.global_batch_size * m->o.seq_length);
    add(dlogits, scale, p->probabilities, m->T * m->V);
    for (int64_t t = 0; t < m->T; t++) dlogits[t * m->V + tokens[t + 1]] -= scale;
    double *dnormed = linear_backward(p, m->output, dlogits, p->last_normed, m->T);
    return norm_backward(m, p, m->final_norm, dnormed, p->last);
}

/* ==== parameters ================================================================================================== */

/* Adds a row to the table. `tensor` receives its memory later, in allocate_buffer(). */
static void add_parameter(model *m, tensor *tensor, int64_t rows, int64_t columns, const char *format, ...) {
    parameter *p = &m->parameters[m->num_parameters++];
    *p = (parameter){.rows = rows, .columns = columns, .tensor = tensor};
    p->offset = m->buffer.count, p->count = rows * columns;
    m->buffer.count += p->count;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(p->name, sizeof p->name, format, arguments);
    va_end(arguments);
}

/* Layer `n` of the model, with the names of Llama, and of Mixtral for experts. */
static void add_layer(model *m, layer *l, int n) {
    const options *o = &m->o;
    int64_t C = m->C, D = m->D, E = o->num_experts;
    const char *attention = "model.layers.%d.self_attn.%s_proj.weight", *dense = "model.layers.%d.mlp.%s_proj.weight";
    const char *moe = "model.layers.%d.block_sparse_moe.experts.%d.w%d.weight";
    add_parameter(m, &l->input_norm, 1, C, "model.layers.%d.input_layernorm.weight", n);
    add_parameter(m, &l->qkv, o->num_attention_heads * D, C, attention, n, "q");
    add_parameter(m, &l->qkv, o->num_query_groups * D, C, attention, n, "k");
    add_parameter(m, &l->qkv, o->num_query_groups * D, C, attention, n, "v");
    add_parameter(m, &l->out, C, o->num_attention_heads * D, attention, n, "o");
    add_parameter(m, &l->mlp_norm, 1, C, "model.layers.%d.post_attention_layernorm.weight", n);
    l->mlps = allocate(E + 1, sizeof *l->mlps);
    if (E) add_parameter(m, &l->router, E, C, "model.layers.%d.block_sparse_moe.gate.weight", n);
    for (int64_t e = 0; e < E; e++) {
        add_parameter(m, &l->mlps[e].gate_up, m->F, C, moe, n, (int)e, 1);
        add_parameter(m, &l->mlps[e].gate_up, m->F, C, moe, n, (int)e, 3);
        add_parameter(m, &l->mlps[e].down, C, m->F, moe, n, (int)e, 2);
    }
    if (E) return;
    add_parameter(m, &l->mlps->gate_up, o->ffn_hidden_size, C, dense, n, "gate");
    add_parameter(m, &l->mlps->gate_up, o->ffn_hidden_size, C, dense, n, "up");
    add_parameter(m, &l->mlps->down, C, o->ffn_hidden_size, dense, n, "down");
}

/* Weights, gradients and the optimizer's state. */
static void allocate_buffer(model *m) {
    buffer *b = &m->buffer;
    b->w = allocate(b->count, sizeof *b->w), b->dw = allocate(b->count, sizeof *b->dw);
    for (int i = 0; i < 2; i++) b->moment[i] = allocate(b->count, sizeof *b->moment[i]);
    for (const parameter *p = m->parameters; p < m->parameters + m->num_parameters; p++) {
        if (!p->tensor->w) *p->tensor = (tensor){b->w + p->offset, b->dw + p->offset, 0, p->columns};
        p->tensor->rows += p->rows;
    }
}

static void create_model(model *m) {
    const options *o = &m->o;
    m->C = o->hidden_size, m->D = o->hidden_size / o->num_attention_heads;
    m->T = o->seq_length;
    m->H = o->num_attention_heads, m->G = o->num_query_groups, m->V = o->vocab_size, m->F = o->ffn_hidden_size;
    m->micro_batches = o->global_batch_size / m->data.size;
    m->layers = allocate(o->num_layers, sizeof *m->layers);
    m->parameters = allocate(o->num_layers * (9 + 3 * o->num_experts) + 3, sizeof *m->parameters);
    add_parameter(m, &m->embedding, o->vocab_size, m->C, "model.embed_tokens.weight");
    for (int64_t i = 0; i < o->num_layers; i++) add_layer(m, &m->layers[i], (int)i);
    add_parameter(m, &m->final_norm, 1, m->C, "model.norm.weight");
    add_parameter(m, &m->output, o->vocab_size, m->C, "lm_head.weight");
    allocate_buffer(m);
}

/* A number in [0, 1) that depends on its arguments only (splitmix64). */
static double random_number(const char *name, int64_t index) {
    uint64_t x = (uint64_t)index;
    for (; *name; name++) x = (x + (unsigned char)*name) * UINT64_C(0x9e3779b97f4a7c15);
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return (double)((x ^ x >> 31) >> 11) / 9007199254740992.0; // 2^53
}

/* Fills a parameter from the file's fp32 numbers, or without a file with 1 for norms and random numbers with standard
 * deviation 0.02 for matrices. */
static void fill_parameter(model *m, const parameter *p, const float *file) {
    for (int64_t i = 0; i < p->count; i++) {
        double initial = p->rows == 1 ? 1 : 0.02 * sqrt(12) * (random_number(p->name, i) - 0.5);
        m->buffer.w[p->offset + i] = file ? (double)file[i] : initial;
    }
}

/* The bytes of a file, with a 0 after them; ends the job if some rank cannot read it. */
static char *read_file(const char *path, int64_t *size) {
    char error[256] = "", *bytes = NULL;
    FILE *file = fopen(path, "rb");
    if (file && fseek(file, 0, SEEK_END) == 0 && (*size = ftell(file)) >= 0) bytes = calloc((size_t)*size + 1, 1);
    if (!bytes || fseek(file, 0, SEEK_SET) != 0 || fread(bytes, 1, (size_t)*size, file) != (size_t)*size)
        snprintf(error, sizeof error, "%.200s: cannot be read; check the path", path);
    if (file) fclose(file);
    stop_on_error(error);
    return bytes;
}

/* The numbers of an fp32 tensor in a safetensors file: 8 bytes with the length of the header, the header (JSON), the
 * data. NULL if there is no such tensor with `count` numbers. */
static const float *find_tensor(const char *file, int64_t size, const char *name, int64_t count) {
    char key[128];
    long long begin, end;
    uint64_t header;
    if (size < 8) return NULL;
    memcpy(&header, file, 8);
    snprintf(key, sizeof key, "\"%s\":{", name);
    const char *entry = strstr(file + 8, key);
    const char *format = "\"dtype\":\"F32\",\"shape\":[%*[0-9,]],\"data_offsets\":[%lld,%lld]";
    if (!entry || sscanf(entry + strlen(key), format, &begin, &end) != 2 || end - begin != count * 4) return NULL;
    if (header > (uint64_t)size - 8 || header % 4 || begin < 0 || begin % 4 || end > size - 8 - (int64_t)header)
        return NULL;
    return (const float *)(const void *)(file + 8 + header + begin);
}

/* Weights from --load, a Hugging Face folder with one fp32 safetensors file, or random ones. */
static void load_weights(model *m) {
    char error[256] = "", path[1024], *file = NULL;
    int64_t size = 0;
    snprintf(path, sizeof path, "%s/model.safetensors", m->o.load ? m->o.load : "");
    if (m->o.load) file = read_file(path, &size);
    for (const parameter *p = m->parameters; p < m->parameters + m->num_parameters && !error[0]; p++) {
        const float *data = file ? find_tensor(file, size, p->name, p->rows * p->columns) : NULL;
        if (file && !data)
            snprintf(error, sizeof error,
                     "%.100s: has no %.40s of %lld x %lld numbers in F32; give its shape by the options", path, p->name,
                     (long long)p->rows, (long long)p->columns);
        else
            fill_parameter(m, p, data);
    }
    free(file);
    stop_on_error(error);
}

/* Tokens from --tokens-file (int32, as ./train reads them), or synthetic: each sequence counts in steps of its own. */
static void load_tokens(model *m) {
    int64_t row = m->o.seq_length + 1, wanted = m->o.global_batch_size * m->o.train_iters, size = wanted * row * 4;
    char error[256] = "", *file = m->o.tokens_file ? read_file(m->o.tokens_file, &size) : NULL;
    if (size / 4 / row < wanted)
        snprintf(error, sizeof error, "%.100s: holds %lld sequences of %lld tokens, training needs %lld",
                 m->o.tokens_file, (long long)(size / 4 / row), (long long)row, (long long)wanted);
    m->tokens = file ? (int32_t *)(void *)file : allocate(size, 1);
    for (int64_t i = 0; i < wanted * row && !error[0]; i++) {
        int64_t start = (int64_t)(random_number("start", i / row) * 1000);
        int64_t step = 1 + (int64_t)(random_number("step", i / row) * 3);
        if (!file) m->tokens[i] = (int32_t)((start + step * (i % row)) % m->o.vocab_size);
        if (m->tokens[i] < 0 || m->tokens[i] >= m->o.vocab_size)
            snprintf(error, sizeof error, "%.100s: token %d is not below --vocab-size", m->o.tokens_file, m->tokens[i]);
    }
    stop_on_error(error);
}

/* ==== forward and backward ======================================================================================== */

/* Returns the loss, summed over the micro-batch's tokens. */
static double model_forward(const model *m, pass *p) {
    double *x = embedding_forward(m, p);
    p->layers = take(p, m->o.num_layers, sizeof *p->layers);
    for (int64_t i = 0; i < m->o.num_layers; i++) {
        x = attention_forward(m, p, &m->layers[i], &p->layers[i], x);
        x = mlp_block_forward(m, p, &m->layers[i], &p->layers[i], x);
    }
    return loss_forward(m, p, x);
}

static void model_backward(const model *m, pass *p) {
    double *dx = loss_backward(m, p);
    for (int64_t i = m->o.num_layers - 1; i >= 0; i--) {
        dx = mlp_block_backward(m, p, &m->layers[i], &p->layers[i], dx);
        dx = attention_backward(m, p, &m->layers[i], &p->layers[i], dx);
    }
    embedding_backward(m, p, dx);
    release(p);
}

/* Forwards and backwards of all micro-batches of step `step`, counted from 0; returns this rank's sum of losses. */
static double run_micro_batches(const model *m, int64_t step) {
    double loss = 0;
    for (int64_t i = 0; i < m->micro_batches; i++) {
        pass p = {.sequence = step * m->o.global_batch_size + i * m->data.size + m->data.rank};
        loss += model_forward(m, &p);
        model_backward(m, &p);
    }
    return loss;
}

/* ==== optimizer =================================================================================================== */

/* dw[n]+dp becomes dw[n]: the sums over all tokens of the step. */
static void reduce_gradients(model *m) {
    all_reduce(&m->data, m->buffer.dw, m->buffer.count, MPI_SUM);
}

/* The norm of the whole gradient. */
static double gradient_norm(const model *m) {
    return sqrt(dot(m->buffer.dw, m->buffer.dw, m->buffer.count));
}

/* AdamW, with gradients times `scale`. Norms do not decay. */
static void adamw_step(model *m, double scale, int64_t step) {
    const options *o = &m->o;
    buffer *b = &m->buffer;
    double correction1 = 1 - pow(o->adam_beta1, (double)step), correction2 = 1 - pow(o->adam_beta2, (double)step);
    for (const parameter *p = m->parameters; p < m->parameters + m->num_parameters; p++) {
        double *w = b->w, *m1 = b->moment[0], *m2 = b->moment[1], decay = p->rows == 1 ? 0 : o->weight_decay;
        for (int64_t i = p->offset; i < p->offset + p->count; i++) {
            double g = b->dw[i] * scale;
            m1[i] = o->adam_beta1 * m1[i] + (1 - o->adam_beta1) * g;
            m2[i] = o->adam_beta2 * m2[i] + (1 - o->adam_beta2) * g * g;
            w[i] -= o->lr * (m1[i] / correction1 / (sqrt(m2[i] / correction2) + o->adam_eps) + decay * w[i]);
        }
    }
}

/* ==== the command line =========================================================================================== */

/* Names, fields and defaults. */
typedef struct option_row {
    const char *name;
    enum { INTEGER, REAL, TEXT } kind;
    size_t field;
    double value;
} option_row;

static const option_row option_rows[] = {
    {"--num-layers", INTEGER, offsetof(options, num_layers), 4},
    {"--hidden-size", INTEGER, offsetof(options, hidden_size), 32},
    {"--ffn-hidden-size", INTEGER, offsetof(options, ffn_hidden_size), 80},
    {"--num-attention-heads", INTEGER, offsetof(options, num_attention_heads), 4},
    {"--num-query-groups", INTEGER, offsetof(options, num_query_groups), 2},
    {"--vocab-size", INTEGER, offsetof(options, vocab_size), 160},
    {"--seq-length", INTEGER, offsetof(options, seq_length), 32},
    {"--num-experts", INTEGER, offsetof(options, num_experts), 0},
    {"--moe-router-topk", INTEGER, offsetof(options, moe_router_topk), 2},
    {"--global-batch-size", INTEGER, offsetof(options, global_batch_size), 8},
    {"--train-iters", INTEGER, offsetof(options, train_iters), 5},
    {"--norm-epsilon", REAL, offsetof(options, norm_epsilon), 1e-5},
    {"--rotary-base", REAL, offsetof(options, rotary_base), 10000},
    {"--lr", REAL, offsetof(options, lr), 1e-3},
    {"--adam-beta1", REAL, offsetof(options, adam_beta1), 0.9},
    {"--adam-beta2", REAL, offsetof(options, adam_beta2), 0.999},
    {"--adam-eps", REAL, offsetof(options, adam_eps), 1e-8},
    {"--weight-decay", REAL, offsetof(options, weight_decay), 0.01},
    {"--clip-grad", REAL, offsetof(options, clip_grad), 1},
    {"--load", TEXT, offsetof(options, load), 0},
    {"--tokens-file", TEXT, offsetof(options, tokens_file), 0},
};
enum { NUM_OPTIONS = sizeof option_rows / sizeof *option_rows };

static int print_help(void) {
    printf("the options, with their defaults; ./train --help says what they mean:\n");
    for (const option_row *row = option_rows; row < option_rows + NUM_OPTIONS; row++)
        if (row->kind == INTEGER || row->kind == REAL)
            printf("  %s %g\n", row->name, row->value);
        else
            printf("  %s%s\n", row->name, row->kind == TEXT ? " PATH" : "");
    return 0;
}

/* Writes why the options do not fit together, or to `ranks` ranks, into `error`. */
static void check_options(const options *o, int64_t ranks, char error[256]) {
    int64_t E = o->num_experts;
    double C = (double)o->hidden_size, of_layer = C * (4 * C + 3 * (double)((E ? E : 1) * o->ffn_hidden_size));
    const struct {
        bool wrong;
        const char *message;
    } rules[] = {
        {o->global_batch_size % ranks != 0, "--global-batch-size must divide by the ranks"},
        {o->hidden_size % (2 * o->num_attention_heads) != 0,
         "--hidden-size must divide by twice --num-attention-heads"},
        {o->num_attention_heads % o->num_query_groups != 0, "--num-attention-heads must divide by --num-query-groups"},
        {E && o->moe_router_topk > E, "--moe-router-topk exceeds --num-experts"},
        {o->adam_beta1 >= 1 || o->adam_beta2 >= 1, "--adam-beta1 and --adam-beta2 must be less than 1"},
        {of_layer * (double)o->num_layers + C * (double)o->vocab_size > 1e8,
         "too large a model: lower --num-layers, --hidden-size or --vocab-size"},
        {C * (double)o->seq_length > 2e7, "too large a sequence: lower --seq-length"}};
    for (size_t i = 0; i < sizeof rules / sizeof *rules && !error[0]; i++)
        if (rules[i].wrong) snprintf(error, 256, "%s", rules[i].message);
}

static void set_option(options *o, const option_row *row, double number, const char *text) {
    void *field = (char *)o + row->field;
    if (row->kind == INTEGER) *(int64_t *)field = (int64_t)number;
    if (row->kind == REAL) *(double *)field = number;
    if (row->kind == TEXT) *(const char **)field = text;
}

static options parse_options(int argc, char **argv) {
    options o = {0};
    char error[256] = "";
    int ranks;
    for (int r = 0; r < NUM_OPTIONS; r++) set_option(&o, &option_rows[r], option_rows[r].value, NULL);
    for (int i = 1, r = 0; i < argc && !error[0]; i += 2, r = 0) {
        while (r < NUM_OPTIONS && strcmp(argv[i], option_rows[r].name) != 0) r++;
        const option_row *row = &option_rows[r < NUM_OPTIONS ? r : 0];
        const char *text = argv[i + 1] ? argv[i + 1] : "";
        char *end;
        double number = strtod(text, &end);
        bool is_number = end != text && !*end && number >= 0 && number <= 1 << 20;
        if (r == NUM_OPTIONS)
            snprintf(error, sizeof error, "%.99s: unknown option; --help lists them", argv[i]);
        else if (row->kind == TEXT ? !text[0] : !is_number)
            snprintf(error, sizeof error, "%s: needs %s, not '%.99s'", argv[i],
                     row->kind == TEXT ? "a path" : "a number from 0 to 2^20", text);
        else if (row->kind == INTEGER && !(number >= 1 && number == floor(number)))
            snprintf(error, sizeof error, "%s: needs a whole number from 1 to 2^20, not '%.99s'", argv[i], text);
        else
            set_option(&o, row, number, text);
    }
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    if (!error[0]) check_options(&o, ranks, error);
    stop_on_error(error);
    return o;
}

/* ==== main ======================================================================================================== */

/* Step `step`, counted from 1. */
static void train_step(model *m, int64_t step) {
    memset(m->buffer.dw, 0, (size_t)m->buffer.count * sizeof *m->buffer.dw);
    double loss = run_micro_batches(m, step - 1) / (double)(m->o.global_batch_size * m->o.seq_length);
    all_reduce(&m->data, &loss, 1, MPI_SUM);
    reduce_gradients(m);
    double norm = gradient_norm(m), clip = m->o.clip_grad > 0 ? m->o.clip_grad / (norm + 1e-6) : 1;
    adamw_step(m, clip < 1 ? clip : 1, step);
    if (m->data.rank == 0) printf("step %3lld  loss %.12f  grad norm %.12f\n", (long long)step, loss, norm);
}

int main(int argc, char **argv) {
    if (argc > 1 && strcmp(argv[1], "--help") == 0) return print_help();
    MPI_Init(&argc, &argv);
    model m = {.o = parse_options(argc, argv), .data = all_ranks()};
    create_model(&m);
    load_weights(&m);
    load_tokens(&m);
    if (m.data.rank == 0) printf("ranks: DP %d\n", m.data.size);
    for (int64_t step = 1; step <= m.o.train_iters; step++) train_step(&m, step);
    MPI_Finalize();
    return 0;
}
