/* five_steps.h: trains a model of a golden folder, and compares with that folder's expected.json, and gradients with
 * its reference. A suite's header includes it behind STEPS, SEQUENCES, fixture, open_model, close_model and fill_batch.
 */
#ifndef MT_TESTS_FIVE_STEPS_H
#define MT_TESTS_FIVE_STEPS_H

typedef struct source {
    const fixture *fixture;
    int64_t micro_batch_size, first, stride; // stride: sequences of one micro-batch over all ranks
} source;

static int next_micro_batch(void *context, int64_t index, mt_batch *batch, mt_error *error) {
    (void)error;
    const source *from = context;
    fill_batch(from->fixture, from->first + index * from->stride, from->micro_batch_size, batch);
    return 0;
}

/* True if each rank of the world has a GPU, which is `backend` from then on. */
__attribute__((unused)) static bool take_gpus(const mt_group *ranks) {
    mt_error error;
    if (mt_cuda_num_gpus() < ranks->size) return false;
    backend = mt_cuda_open(ranks->rank, &error);
    if (!backend) mt_die("%s", error.text);
    return true;
}

/* Builds a grid, and on GPUs the communicators of its groups. */
__attribute__((unused)) static void build_grid(mt_grid *grid, const mt_options *options) {
    mt_error error;
    if (mt_grid_build(grid, options, &error) != 0) fail_msg("%s", error.text);
    if (backend->on_device && !mt_backend_open(MT_DEVICE_CUDA, grid, &error)) fail_msg("%s", error.text);
}

/* Five steps of AdamW; losses and gradient norms before clipping. */
__attribute__((unused)) static void train_five_steps(const char *name, const mt_grid *grid, int64_t micro_batch_size,
                                                     const char *words, double losses[STEPS], double norms[STEPS]) {
    fixture f;
    mt_run_state run = {0};
    mt_error error;
    open_model(&f, name, grid, micro_batch_size, words);
    int64_t stride = micro_batch_size * grid->data.size;
    for (int64_t step = 0; step < STEPS; step++) {
        source from = {&f, micro_batch_size, grid->data.rank * micro_batch_size, stride};
        mt_metrics metrics;
        if (mt_train_step(f.model, &run, SEQUENCES / stride, next_micro_batch, &from, &f.batch, &metrics, &error) != 0)
            fail_msg("%s%s: %s", name, words, error.text);
        losses[step] = metrics.loss, norms[step] = metrics.grad_norm;
    }
    close_model(&f);
}

/* Adds the squared distance of one parameter's gradient from the reference, and the squared norm of the reference. */
__attribute__((unused)) static void add_gradient_error(const fixture *f, const mt_param *param, const float *grads,
                                                       const mt_tensor_info *reference, double *distance,
                                                       double *norm) {
    int64_t bytes = param->rows_stored * param->cols * 4;
    mt_placement place = mt_tensor_placement(param, MT_STATE_WEIGHTS, reference);
    const float *expected = (const float *)reference->data + place.slice * (reference->bytes / 4 / place.slices);
    float *grad = mt_malloc(bytes); // the bucket may be on a GPU
    mt_model_ops(f->model)->memory_copy(grad, grads + param->offset, bytes, mt_model_stream(f->model));
    mt_model_ops(f->model)->stream_synchronize(mt_model_stream(f->model));
    for (int64_t row = 0; row < param->rows_stored; row++)
        for (int64_t col = 0; col < param->cols; col++) {
            int64_t line = mt_placement_row(&place, row);
            double e = expected[place.transposed ? col * place.width + line : line * place.width + col];
            double d = (double)grad[row * param->cols + col] / (double)f->num_labels - e;
            *distance += d * d, *norm += e * e;
        }
    free(grad);
}

/* Fails unless the losses, and the first `norm_steps` gradient norms, equal those of FOLDER/NAME/expected.json to a
 * relative tolerance. */
__attribute__((unused)) static void assert_five_steps(const char *folder, const char *name, const char *words,
                                                      double tolerance, int norm_steps, const double losses[STEPS],
                                                      const double norms[STEPS]) {
    char path[512];
    snprintf(path, sizeof path, "%s/%s/expected.json", folder, name);
    json_t *expected = json_load_file(path, 0, NULL);
    assert_non_null(expected);
    for (int i = 0; i < STEPS; i++) {
        double loss = json_real_value(json_array_get(json_object_get(expected, "losses"), (size_t)i));
        double norm = json_real_value(json_array_get(json_object_get(expected, "grad_norms"), (size_t)i));
        bool compares = i < norm_steps;
        if (!(fabs(losses[i] - loss) <= tolerance * loss) || (compares && !(fabs(norms[i] - norm) <= tolerance * norm)))
            fail_msg("%s%s step %d: loss %.9f, expected %.9f; norm %.9f, expected %.9f", name, words, i + 1, losses[i],
                     loss, norms[i], norm);
    }
    json_decref(expected);
}

#endif
