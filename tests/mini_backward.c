/* Runs each forward of notes/mini.c and its backward on random numbers, on one rank, and writes all operands and
 * results for notes/steps/autograd.py: a line "OPERATION ROLE NAME SHAPE: NUMBERS" each. Roles: input, fixed (an input
 * without a gradient), output, doutput (the gradient of the output that the backward reads), and dinput, in the order
 * of inputs.
 *
 *   mpicc -std=c11 tests/mini_backward.c -lm -o mini_backward && ./mini_backward | python3 notes/steps/autograd.py
 */
#ifndef MINI
#define MINI "../notes/mini.c"
#endif
#define main mini_main
#include MINI
#undef main

enum { TOPK = 2 };

/* Writes x[rows, columns]; a vector has no rows: 0. */
static void put(const char *operation, const char *role, const char *name, const double *x, int64_t rows,
                int64_t columns) {
    printf("%s %s %s", operation, role, name);
    if (rows) printf(" %lld", (long long)rows);
    printf(" %lld:", (long long)columns);
    for (int64_t i = 0; i < (rows ? rows : 1) * columns; i++) printf(" %.17g", x[i]);
    printf("\n");
}

/* Random numbers in [-1, 1) that depend on the name, x[rows, columns]. */
static double *draw(pass *p, const char *name, int64_t rows, int64_t columns) {
    double *x = take_rows(p, rows, columns);
    for (int64_t i = 0; i < rows * columns; i++) x[i] = 2 * random_number(name, i) - 1;
    return x;
}

static tensor draw_weight(pass *p, const char *name, int64_t rows, int64_t columns) {
    return (tensor){draw(p, name, rows, columns), take_rows(p, rows, columns), rows, columns};
}

static void run_linear(const model *m, pass *p) {
    tensor w = draw_weight(p, "linear w", 5, m->C);
    double *x = draw(p, "linear x", m->T, m->C), *dy = draw(p, "linear dy", m->T, 5);
    put("linear", "input", "x", x, m->T, m->C), put("linear", "input", "w", w.w, 5, m->C);
    put("linear", "output", "y", linear_forward(p, x, w, m->T), m->T, 5), put("linear", "doutput", "y", dy, m->T, 5);
    put("linear", "dinput", "x", linear_backward(p, w, dy, x, m->T), m->T, m->C);
    put("linear", "dinput", "w", w.dw, 5, m->C);
}

static void run_norm(const model *m, pass *p) {
    tensor w = draw_weight(p, "norm w", 1, m->C);
    double *x = draw(p, "norm x", m->T, m->C), *dy = draw(p, "norm dy", m->T, m->C);
    put("norm", "input", "x", x, m->T, m->C), put("norm", "input", "w", w.w, 0, m->C);
    put("norm", "output", "y", norm_forward(m, p, x, w), m->T, m->C), put("norm", "doutput", "y", dy, m->T, m->C);
    put("norm", "dinput", "x", norm_backward(m, p, w, dy, x), m->T, m->C), put("norm", "dinput", "w", w.dw, 0, m->C);
}

static void run_rope(const model *m, pass *p) {
    int64_t width = (m->H + 2 * m->G) * m->D;
    double *qkv = draw(p, "rope qkv", m->T, width), *dqkv = draw(p, "rope dqkv", m->T, width);
    put("rope", "input", "qkv", qkv, m->T, width), put("rope", "doutput", "qkv", dqkv, m->T, width);
    rope(m, qkv, 1), rope(m, dqkv, -1);
    put("rope", "output", "qkv", qkv, m->T, width), put("rope", "dinput", "qkv", dqkv, m->T, width);
}

static void run_attention(const model *m, pass *p) {
    int64_t width = (m->H + 2 * m->G) * m->D, out = m->H * m->D;
    saved s = {.qkv = draw(p, "attention qkv", m->T, width)};
    double *dattended = draw(p, "attention dattended", m->T, out);
    ring_attention_forward(m, p, &s);
    put("attention", "input", "qkv", s.qkv, m->T, width), put("attention", "output", "attended", s.attended, m->T, out);
    put("attention", "doutput", "attended", dattended, m->T, out);
    put("attention", "dinput", "qkv", ring_attention_backward(m, p, dattended, &s), m->T, width);
}

static void run_mlp(const model *m, pass *p) {
    mlp w = {draw_weight(p, "mlp gate_up", 2 * m->F, m->C), draw_weight(p, "mlp down", m->C, m->F)};
    mlp_saved s;
    double *x = draw(p, "mlp x", m->T, m->C), *dy = draw(p, "mlp dy", m->T, m->C);
    put("mlp", "input", "x", x, m->T, m->C), put("mlp", "input", "gate_up", w.gate_up.w, 2 * m->F, m->C);
    put("mlp", "input", "down", w.down.w, m->C, m->F);
    put("mlp", "output", "y", mlp_forward(p, &w, &s, x, m->T), m->T, m->C), put("mlp", "doutput", "y", dy, m->T, m->C);
    put("mlp", "dinput", "x", mlp_backward(p, &w, &s, dy, m->T), m->T, m->C);
    put("mlp", "dinput", "gate_up", w.gate_up.dw, 2 * m->F, m->C), put("mlp", "dinput", "down", w.down.dw, m->C, m->F);
}

static void run_route(const model *m, pass *p) {
    tensor router = draw_weight(p, "route router", m->o.num_experts, m->C);
    dispatch d = {0};
    double *x = draw(p, "route x", m->T, m->C), *dprob = draw(p, "route dprob", m->T, TOPK);
    route_forward(m, p, router, &d, x);
    put("route", "input", "x", x, m->T, m->C), put("route", "input", "router", router.w, m->o.num_experts, m->C);
    put("route", "output", "prob", d.prob, m->T, TOPK), put("route", "doutput", "prob", dprob, m->T, TOPK);
    put("route", "dinput", "x", route_backward(m, p, router, &d, dprob, x), m->T, m->C);
    put("route", "dinput", "router", router.dw, m->o.num_experts, m->C);
}

static void run_experts(const model *m, pass *p) {
    int64_t E = m->o.num_experts;
    tensor gate_up = draw_weight(p, "experts gate_up", E * 2 * m->F, m->C);
    tensor down = draw_weight(p, "experts down", E * m->C, m->F);
    layer l = {.router = draw_weight(p, "experts router", E, m->C), .mlps = take(p, E, sizeof *l.mlps)};
    dispatch d = {0};
    double *x = draw(p, "experts x", m->T, m->C), *dy = draw(p, "experts dy", m->T, m->C);
    for (int64_t e = 0; e < E; e++) {
        int64_t n = 2 * m->F * m->C, k = m->C * m->F;
        l.mlps[e].gate_up = (tensor){gate_up.w + e * n, gate_up.dw + e * n, 2 * m->F, m->C};
        l.mlps[e].down = (tensor){down.w + e * k, down.dw + e * k, m->C, m->F};
    }
    put("experts", "input", "x", x, m->T, m->C), put("experts", "input", "router", l.router.w, E, m->C);
    put("experts", "input", "gate_up", gate_up.w, E * 2 * m->F, m->C);
    put("experts", "input", "down", down.w, E * m->C, m->F);
    put("experts", "output", "y", experts_forward(m, p, &l, &d, x), m->T, m->C);
    put("experts", "doutput", "y", dy, m->T, m->C);
    put("experts", "dinput", "x", experts_backward(m, p, &l, &d, dy, x), m->T, m->C);
    put("experts", "dinput", "router", l.router.dw, E, m->C);
    put("experts", "dinput", "gate_up", gate_up.dw, E * 2 * m->F, m->C);
    put("experts", "dinput", "down", down.dw, E * m->C, m->F);
}

/* Writes the first sequence's tokens, T + 1. */
static void put_tokens(const model *m, pass *p, const char *operation) {
    double *tokens = take_rows(p, 1, m->T + 1);
    for (int64_t i = 0; i <= m->T; i++) tokens[i] = m->tokens[i];
    put(operation, "fixed", "tokens", tokens, 0, m->T + 1);
}

static void run_embedding(model *m, pass *p) {
    double *dx = draw(p, "embedding dx", m->T, m->C);
    m->embedding = draw_weight(p, "embedding w", m->V, m->C);
    put("embedding", "input", "w", m->embedding.w, m->V, m->C), put_tokens(m, p, "embedding");
    put("embedding", "output", "x", embedding_forward(m, p), m->T, m->C);
    put("embedding", "doutput", "x", dx, m->T, m->C);
    embedding_backward(m, p, dx);
    put("embedding", "dinput", "w", m->embedding.dw, m->V, m->C);
}

/* The loss of the sequence; the backward's is that of the mean over the step's tokens. */
static void run_loss(model *m, pass *p) {
    double *x = draw(p, "loss x", m->T, m->C), scale = 1 / (double)(m->o.global_batch_size * m->T);
    m->final_norm = draw_weight(p, "loss norm", 1, m->C), m->output = draw_weight(p, "loss output", m->V, m->C);
    put("loss", "input", "x", x, m->T, m->C), put("loss", "input", "norm", m->final_norm.w, 0, m->C);
    put("loss", "input", "output", m->output.w, m->V, m->C), put_tokens(m, p, "loss");
    double loss = loss_forward(m, p, x);
    put("loss", "output", "loss", &loss, 0, 1), put("loss", "doutput", "loss", &scale, 0, 1);
    put("loss", "dinput", "x", loss_backward(m, p), m->T, m->C);
    put("loss", "dinput", "norm", m->final_norm.dw, 0, m->C), put("loss", "dinput", "output", m->output.dw, m->V, m->C);
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    char *options[] = {"mini", "--num-layers",  "1",  "--hidden-size", "16", "--ffn-hidden-size",
                       "12",   "--vocab-size",  "20", "--seq-length",  "8",  "--global-batch-size",
                       "2",    "--num-experts", "4",  "--train-iters", "1",  NULL};
    model m = {.o = parse_options((int)(sizeof options / sizeof *options) - 1, options)};
    pass p = {.sequence = 0};
    build_grid(&m);
    create_model(&m);
    load_tokens(&m);
    run_linear(&m, &p), run_norm(&m, &p), run_rope(&m, &p), run_attention(&m, &p), run_mlp(&m, &p);
    run_route(&m, &p), run_experts(&m, &p), run_embedding(&m, &p), run_loss(&m, &p);
    MPI_Finalize();
    return 0;
}
