/* train.c: trains a GPT-family model. Options: ./train --help. A step: mt_train_step in megatron.c §14. */
#include "megatron.h"

#include "data/checkpoint.h"
#include "data/dataset.h"
#include "data/file.h"
#include "data/host_memory.h"
#include "data/launch.h"
#include "data/options.h"
#include "data/profile.h"
#include "data/report.h"
#include "data/rl.h"
#include "data/stage.h"
#include "data/timeline.h"
#include "data/tokenizer.h"
#include "data/trace.h"
#include "data/watchdog.h"

#include <stdlib.h>
#include <string.h>

typedef struct run {
    mt_options options;
    mt_grid grid;
    const mt_ops *ops; // of the device
    mt_tokenizer *tokenizer;
    char *tokenizer_folder; // of the checkpoint that has it; NULL: --tokenizer-type
    mt_data_config data_config;
    mt_data *data;
    mt_loader *loaders[MT_NUM_SPLITS];
    mt_stage_loss loss;
    mt_model *model;
    mt_reference *reference; // NULL: the stage has none
    mt_rl *rl;               // NULL: not --stage rl
    mt_saver *saver;
    mt_batch batch;
    mt_run_state state;
    mt_report report;
    int64_t saved;      // iteration of the last checkpoint that was reported as saved
    int64_t last_saved; // of the last one that was saved, perhaps still under way; -1: none
    double start;
} run;

/* Reports the last checkpoint that came into its place. */
static void report_saved(run *r) {
    if (mt_saver_in_place(r->saver) == r->saved) return;
    r->saved = mt_saver_in_place(r->saver);
    mt_report_line(&r->report, "saved iteration %lld to %s", (long long)r->saved, r->options.save);
}

/* Ends the program if a function failed on any rank, before anything is saved. Every rank calls it. */
static void refuse(run *r, int status, mt_error *error) {
    mt_report_refusal(&r->grid, &r->options, status, error);
}

/* Ends the program with the error of the lowest rank that failed, after the save under way. Every rank calls it. */
static void fail(run *r, int status, mt_error *error) {
    mt_error other;
    (void)mt_agree(&r->grid.world, status != 0, error);
    (void)mt_saver_finish(r->saver, &other);
    report_saved(r);
    refuse(r, -1, error);
}

/* Ends the program if a function failed, whose status is the same on every rank. */
static void check(run *r, int status, mt_error *error) {
    if (status != 0) fail(r, status, error);
}

/* Takes the tokenizer of a checkpoint, if it has one; the run owns `folder`. */
static void take_tokenizer(run *r, char *folder) {
    mt_error error;
    mt_tokenizer_close(r->tokenizer);
    free(r->tokenizer_folder);
    r->tokenizer_folder = folder;
    if (mt_tokenizer_open_folder(&r->tokenizer, folder, &error) == 0) return;
    if (r->options.save && r->grid.world.rank == 0) printf("no tokenizer is taken along: %s\n", error.text);
    r->tokenizer = NULL;
}

/* The tokenizer gives the vocabulary's size and the end of document, unless options do. A loaded model's tokenizer is
 * saved with the checkpoints, so that they can generate text. */
static int open_tokenizer(run *r, mt_error *error) {
    mt_options *o = &r->options;
    if (o->tokenizer_type) {
        if (mt_tokenizer_open(&r->tokenizer, o->tokenizer_type, o->tokenizer_model, error) != 0) return -1;
    } else if (o->load) {
        char *folder = mt_options_load_folder(o, error);
        if (!folder) return -1;
        take_tokenizer(r, folder);
    }
    if (!r->tokenizer) return 0;
    if (o->save && mt_tokenizer_check_links(r->tokenizer, error) != 0) return -1;
    int64_t vocab_size = mt_tokenizer_vocab_size(r->tokenizer);
    if (o->vocab_size == 0) o->vocab_size = vocab_size;
    if (!o->tokenizer_type || o->vocab_size >= vocab_size) return 0;
    return mt_error_set(
        error, "--tokenizer-model has %lld tokens but the model's vocabulary only %lld: take the model's own tokenizer",
        (long long)vocab_size, (long long)o->vocab_size);
}

/* Every rank must have the same tokenizer, or none. */
static int agree_on_tokenizer(const run *r, mt_error *error) {
    const char *name = "tokenizer";
    uint64_t print = mt_tokenizer_fingerprint(r->tokenizer);
    return mt_fingerprints_agree(&print, &name, 1, &r->grid.world, error);
}

static void configure_data(run *r) {
    const mt_options *o = &r->options;
    r->data_config = mt_data_config_of(o, r->tokenizer ? mt_tokenizer_eod(r->tokenizer) : o->eos_token_id);
    r->data_config.tokenizer = r->tokenizer;
    r->data_config.tokenizer_path = o->tokenizer_type ? o->tokenizer_model : r->tokenizer_folder;
    r->data_config.log = r->grid.world.rank == 0 ? stdout : NULL;
}

static void open_data(run *r) {
    mt_error error;
    mt_options *o = &r->options;
    mt_data_config *config = &r->data_config;
    configure_data(r);
    refuse(r, mt_data_open(&r->data, config, &error), &error);
    refuse(r, mt_data_agree(r->data, &r->grid.world, &error), &error);
    if (o->train_epochs > 0) { // now their steps are known
        int64_t rows = mt_data_split(r->data, MT_SPLIT_TRAIN)->num_samples;
        o->train_iters = (rows + o->global_batch_size - 1) / o->global_batch_size;
        refuse(r, mt_options_finish(o, MT_PROGRAM_TRAIN, r->grid.world.size, &error), &error);
    }
    if (r->grid.world.rank == 0) mt_data_warn(r->data, config, stderr);
    for (int split = 0; split < MT_NUM_SPLITS; split++) {
        const mt_dataset *dataset = mt_data_split(r->data, split);
        int status = dataset ? mt_loader_open(&r->loaders[split], dataset, config, o->micro_batch_size,
                                              r->grid.data.rank, r->grid.data.size, &error)
                             : 0;
        refuse(r, status, &error);
    }
}

/* If the checkpoint that the tokenizer came from is damaged, all is taken from the one before. */
static void load(run *r) {
    char *found;
    mt_error error;
    int64_t eod = r->data_config.eod_id;
    int status = mt_checkpoint_load_found(r->model, &r->state, r->options.load, false, &found, &error);
    refuse(r, status, &error);
    if (!r->tokenizer_folder || strcmp(found, r->tokenizer_folder) == 0) {
        free(found);
        return;
    }
    take_tokenizer(r, found);
    if (r->data && r->tokenizer && mt_tokenizer_eod(r->tokenizer) != eod)
        status = mt_error_set(
            &error, "%s: its tokenizer has another end of document than the damaged checkpoint's; start again", found);
    refuse(r, status, &error);
}

static int save_tokenizer(void *context, const char *folder, mt_error *error) {
    const run *r = context;
    return r->tokenizer ? mt_tokenizer_save(r->tokenizer, folder, error) : 0;
}

/* Rank 0 prints what the run will do: a paragraph, the options that were given, and the grid. */
static void print_opening(const run *r) {
    const mt_options *o = &r->options;
    if (r->grid.world.rank != 0) return;
    mt_report_opening(o, r->ops, &r->grid, r->data ? mt_data_split(r->data, MT_SPLIT_TRAIN) : NULL, stdout);
    mt_options_print(o, MT_PROGRAM_TRAIN, stdout);
    mt_options_warn(o, stdout);
    if (r->data) mt_loader_print(r->loaders[MT_SPLIT_TRAIN], 0, mt_global_batch_size(o, 0), stdout);
    if (r->grid.world.size > 1) mt_grid_print(&r->grid, o, stdout);
}

/* The models beside an actor, and its prompts. */
static void open_rl(run *r, const mt_model_plan *plan) {
    mt_error error;
    mt_rl_config config = {&r->options, &r->grid, r->ops, r->tokenizer, .extra = save_tokenizer, .context = r};
    config.tokenizer_path = r->options.tokenizer_type ? r->options.tokenizer_model : r->tokenizer_folder;
    config.log = r->grid.world.rank == 0 ? stdout : NULL;
    refuse(r, mt_rl_open(&r->rl, &config, r->model, plan, &r->state, &error), &error);
}

static void open_model(run *r) {
    const mt_options *o = &r->options;
    mt_error error;
    int64_t here = o->dynamic_context_parallel ? o->max_seqlen_per_dp_cp_rank
                                               : mt_rank_tokens(o, o->micro_batch_size * mt_row_length(o));
    mt_model_plan plan = {.max_tokens = here, .max_logits = here, .max_position = o->seq_length, .train = true};
    plan.loss = mt_stage_loss_of(&r->loss, o);
    plan.host_memory = mt_host_memory_available("");
    if (o->stage == MT_STAGE_RL) mt_rl_plan(&plan, o);
    const mt_ops *ops = o->profile || o->trace || o->log_straggler ? mt_profile_open(r->ops) : r->ops;
    refuse(r, mt_model_create(&r->model, o, &r->grid, ops, &plan, &error), &error);
    int status = o->save && r->grid.world.rank == 0 ? mt_checkpoint_prepare(r->model, o->save, &error) : 0;
    refuse(r, status, &error);
    if (r->grid.world.rank == 0) mt_report_plan(r->model, stdout);
    if (o->load)
        load(r);
    else
        mt_model_init(r->model);
    if (!o->load && o->load_adapter)
        refuse(r, mt_checkpoint_load_adapter(r->model, &r->state, o->load_adapter, false, &error), &error);
    refuse(r, mt_reference_open(&r->reference, o, &r->state, &r->grid, r->ops, &plan, &error), &error);
    if (o->stage == MT_STAGE_RL) open_rl(r, &plan);
    if (o->save) mt_saver_open(&r->saver, r->model, o->save, save_tokenizer, r, o->async_save);
    mt_batch_alloc(&r->batch, here * o->context_parallel_size);
}

/* Saves nothing after a bad step, for which the run goes back to the checkpoint before. */
static void save(run *r) {
    mt_error error;
    if (!r->options.save) return;
    check(r, mt_train_finish(r->model, &error), &error);
    if (mt_train_bad_iteration(r->model) > 0) return;
    if (r->rl) check(r, mt_rl_save(r->rl, &r->state, &error), &error);
    check(r, mt_saver_save(r->saver, &r->state, &error), &error);
    report_saved(r);
    r->last_saved = r->state.iteration;
}

/* Saves what this run has trained since its last checkpoint. */
static void save_progress(run *r) {
    if (r->state.iteration > r->report.first_iteration && r->state.iteration != r->last_saved) save(r);
}

/* True when a signal or --exit-duration-in-mins ends the run early; every rank must see the same answer. Nothing is
 * printed before the save that follows: an ending mpirun no longer reads. */
static bool should_stop(const run *r) {
    double minutes = r->options.exit_duration_in_mins;
    double stop = mt_stop_requested() || (minutes > 0 && mt_time() - r->start > 60 * minutes);
    mt_all_reduce_max(&r->grid.world, &stop, 1, MT_F64);
    return stop > 0;
}

/* Samples of an evaluation of a split: --eval-iters batches. */
static int64_t evaluated_samples(const run *r, mt_split split) {
    return r->loaders[split] ? r->options.eval_iters * r->options.global_batch_size : 0;
}

/* Where the micro-batches of a feed come from. */
typedef struct source {
    mt_batch_source *read;
    void *context;
} source;

/* The feed itself, or the reference model, which scores its samples first. */
static source take_samples(run *r, mt_feed *feed) {
    mt_error error;
    if (!r->reference) return (source){mt_feed_batch, feed};
    check(r, mt_reference_score(r->reference, feed, &r->batch, &error), &error);
    return (source){mt_reference_batch, r->reference};
}

/* Mean loss over the batches of a split from a sample on. */
static void evaluate(run *r, mt_split split, const char *name, int64_t first) {
    mt_error error;
    double loss;
    if (evaluated_samples(r, split) == 0) return;
    check(r, mt_train_finish(r->model, &error), &error);
    if (mt_train_bad_iteration(r->model) > 0) return;
    mt_feed feed = mt_feed_begin(r->loaders[split], first, evaluated_samples(r, split), &r->grid);
    source from = take_samples(r, &feed);
    check(r, mt_evaluate(r->model, feed.micro_batches, from.read, from.context, &r->batch, &loss, &error), &error);
    check(r, mt_feed_check(&feed, &r->grid, r->state.iteration, &error), &error);
    mt_report_evaluation(&r->report, &r->state, name, loss);
}

/* As soon as its steps are over, or with the run. */
static void write_trace(run *r) {
    mt_error error;
    check(r, mt_trace_write(&error), &error);
    mt_report_line(&r->report, "wrote the trace to %s", r->options.trace);
}

/* One iteration of reinforcement learning, or none if a stop is requested first. A reward that fails ends the run, but
 * loses no iteration. */
static bool rl_step(run *r) {
    mt_error error;
    mt_metrics metrics;
    bool due = mt_report_is_due(&r->report, r->state.iteration + 1);
    int status = mt_rl_step(r->rl, &r->state, &r->batch, due ? &metrics : NULL, &error);
    if (status == MT_RL_STOPPED) return true;
    if (status == MT_RL_UNREWARDED) save_progress(r);
    check(r, status, &error);
    mt_rl_report(r->rl, &r->report);
    if (due) mt_report_iteration(&r->report, &r->state, &metrics);
    return true;
}

/* One step; false if the run went back to a checkpoint instead. */
static bool step(run *r) {
    const mt_options *o = &r->options;
    mt_error error;
    mt_metrics metrics;
    int64_t consumed = r->state.consumed_train_samples, batch_size = mt_global_batch_size(o, consumed);
    mt_feed feed = mt_feed_begin(r->loaders[MT_SPLIT_TRAIN], consumed, batch_size, &r->grid);
    bool due = mt_report_is_due(&r->report, r->state.iteration + 1);
    bool traced = mt_trace_step_begin(), timed = o->profile || traced || (o->log_straggler && due);
    bool reported = timed || due; // then the device is idle when the step ends
    if (timed) mt_profile_step_begin();
    source from = take_samples(r, &feed);
    int status = mt_train_step(r->model, &r->state, feed.micro_batches, from.read, from.context, &r->batch,
                               reported ? &metrics : NULL, &error);
    if (timed) mt_profile_step_end();
    if (traced) mt_trace_step_end();
    if (status == MT_REWIND) {
        check(r, mt_checkpoint_rewind(r->model, &r->state, r->saver, &error), &error);
        report_saved(r);
        r->last_saved = r->state.iteration;
        return false;
    }
    check(r, status, &error);
    r->state.consumed_train_samples = consumed + batch_size; // also where micro-batches hold other than whole rows
    check(r, mt_feed_check(&feed, &r->grid, r->state.iteration, &error), &error);
    if (mt_trace_is_complete()) write_trace(r);
    if (reported && feed.tokens > 0) metrics.tokens = feed.tokens;
    r->report.step_flops = feed.flops;
    if (reported) mt_report_iteration(&r->report, &r->state, &metrics);
    if (reported) mt_report_stragglers(&r->report, &r->grid, &r->state, &metrics);
    return true;
}

static void train(run *r) {
    const mt_options *o = &r->options;
    mt_error error;
    int64_t validated = r->state.iteration;
    bool stop = should_stop(r);
    mt_watch_enter(MT_WATCH_STEP);
    while ((r->state.iteration < o->num_iterations && !stop) || mt_train_bad_iteration(r->model) > 0) {
        check(r, mt_saver_poll(r->saver, &error), &error);
        report_saved(r);
        if (!(r->rl ? rl_step(r) : step(r))) continue;
        stop = should_stop(r);
        // Saved before the evaluation, which may fail; a run that resumes goes on with the samples after it.
        int64_t iteration = r->state.iteration, first = r->state.consumed_valid_samples;
        bool validates = o->eval_interval > 0 && iteration % o->eval_interval == 0;
        if (validates) r->state.consumed_valid_samples += evaluated_samples(r, MT_SPLIT_VALID);
        if (stop || (o->save_interval > 0 && iteration % o->save_interval == 0)) save_progress(r);
        if (!validates) continue;
        evaluate(r, MT_SPLIT_VALID, "validation", first);
        validated = iteration;
        stop = stop || should_stop(r);
        if (stop) save_progress(r);
    }
    check(r, mt_train_finish(r->model, &error), &error);
    if (mt_trace_is_open()) write_trace(r);
    if (stop) {
        mt_report_line(&r->report, "stopped early after iteration %lld", (long long)r->state.iteration);
        return;
    }
    // saved first, as in Megatron: a longer run, which skips this evaluation, resumes with its own validation samples
    if (r->last_saved != r->state.iteration) save(r); // also without a step: converts
    if (validated != r->state.iteration) evaluate(r, MT_SPLIT_VALID, "validation", r->state.consumed_valid_samples);
    evaluate(r, MT_SPLIT_TEST, "test", 0);
}

/* Every rank measures its ceilings, so that they share the machine as the steps did. */
static void print_profile(const run *r) {
    FILE *file = r->grid.world.rank == 0 ? stdout : NULL;
    if (r->options.profile) {
        mt_barrier(&r->grid.world);
        mt_profile_print(r->options.bf16 ? MT_BF16 : MT_F32, file);
        mt_profile_print_communication(&r->grid, file);
    }
    mt_profile_close();
}

/* --print-schedule, instead of training. */
static int print_schedule(run *r) {
    mt_error error;
    int status = r->options.dynamic_context_parallel ? open_tokenizer(r, &error) : 0; // to read samples
    if (status == 0) status = mt_options_finish(&r->options, MT_PROGRAM_TRAIN, r->grid.world.size, &error);
    refuse(r, status, &error);
    if (r->grid.world.rank == 0 && r->options.dynamic_context_parallel) {
        configure_data(r);
        status = mt_step_print(&r->options, &r->data_config, stdout, &error);
    } else if (r->grid.world.rank == 0) {
        status = mt_schedule_print(&r->options, stdout, &error);
    }
    refuse(r, status, &error);
    mt_options_free(&r->options);
    mt_grid_stop(&r->grid);
    return 0;
}

/* --print-config, instead of training. */
static int print_config(run *r) {
    mt_error error;
    int64_t ranks = mt_options_printed_ranks(&r->options, r->grid.world.size);
    int status = mt_options_read_shape(&r->options, &error);
    if (status == 0) status = open_tokenizer(r, &error);
    if (status == 0) status = mt_options_finish(&r->options, MT_PROGRAM_TRAIN, ranks, &error);
    if (r->grid.world.rank == 0)
        mt_options_print_config(&r->options, MT_PROGRAM_TRAIN, ranks, status != 0 ? &error : NULL, stdout);
    mt_tokenizer_close(r->tokenizer);
    free(r->tokenizer_folder);
    mt_options_free(&r->options);
    mt_grid_stop(&r->grid);
    return 0;
}

/* --print-launch, instead of training. */
static int print_launch(run *r) {
    mt_error error;
    r->grid = mt_grid_of_one;
    int status = open_tokenizer(r, &error);
    if (status == 0) status = mt_launch_print(&r->options, stdout, &error);
    if (status != 0) mt_options_name_typed(&r->options, &error);
    if (status != 0) mt_die("%s", error.text);
    mt_tokenizer_close(r->tokenizer);
    free(r->tokenizer_folder);
    mt_options_free(&r->options);
    return 0;
}

int main(int argc, char **argv) {
    run r = {.start = mt_time(), .saved = -1, .last_saved = -1};
    mt_error error;
    mt_signals_hold();
    if (mt_launch_check(argv, &error) != 0) mt_die("%s", error.text);
    int status = mt_options_parse(&r.options, MT_PROGRAM_TRAIN, argc, argv, &error);
    mt_signals_select(&r.options);
    if (status == 0 && r.options.print_launch > 0) return print_launch(&r);
    mt_watch_start(&r.options);
    mt_grid_start(&r.grid, &argc, &argv);
    refuse(&r, status, &error);
    if (r.options.print_config) return print_config(&r);
    if (r.options.print_schedule) return print_schedule(&r);
    refuse(&r, open_tokenizer(&r, &error), &error);
    refuse(&r, agree_on_tokenizer(&r, &error), &error);
    status = mt_options_finish(&r.options, MT_PROGRAM_TRAIN, r.grid.world.size, &error);
    refuse(&r, status, &error);
    refuse(&r, mt_options_agree(&r.options, &r.grid.world, &error), &error);
    refuse(&r, mt_grid_build(&r.grid, &r.options, &error), &error);
    refuse(&r, mt_checkpoint_claim(&r.options, &r.grid.world, &error), &error);
    r.ops = mt_backend_open(r.options.device, &r.grid, &error);
    refuse(&r, r.ops ? 0 : -1, &error);
    if (r.options.num_iterations > 0 && r.options.stage != MT_STAGE_RL) open_data(&r);
    print_opening(&r);
    open_model(&r);
    refuse(&r, mt_report_open(&r.report, r.model, &r.state, &error), &error);
    status = r.options.trace ? mt_trace_open(&r.options, &r.grid, &r.state, &error) : 0;
    refuse(&r, status, &error);
    train(&r);
    if (r.rl) check(&r, mt_rl_finish(r.rl, &error), &error);
    check(&r, mt_saver_finish(r.saver, &error), &error);
    report_saved(&r);
    mt_report_close(&r.report);
    for (int split = 0; split < MT_NUM_SPLITS; split++) mt_loader_close(r.loaders[split]);
    mt_data_close(r.data);
    mt_batch_free(&r.batch);
    mt_saver_close(r.saver);
    mt_rl_close(r.rl);
    mt_reference_close(r.reference);
    mt_model_destroy(r.model);
    print_profile(&r);
    mt_tokenizer_close(r.tokenizer);
    free(r.tokenizer_folder);
    mt_options_free(&r.options);
    mt_grid_stop(&r.grid);
    return 0;
}
