/* train.c: trains a GPT-family model. Options: ./train --help. A step: mt_train_step in megatron.c §14; what a run
 * opens, saves and closes: data/run/run.c. */
#include "data/base/signals.h"
#include "data/base/watchdog.h"
#include "data/options/option_rules.h"
#include "data/report/profile.h"
#include "data/report/trace.h"
#include "data/run/launch.h"
#include "data/run/run.h"

#include <math.h>

/* True when a signal or a number of minutes (0: none) ends the run early; every rank must see the same answer. Nothing
 * is printed before the save that follows: an ending mpirun no longer reads. */
static bool is_over(const mt_run *r, double minutes) {
    double stop = mt_stop_requested() || (minutes > 0 && mt_time() - r->start > 60 * minutes);
    mt_all_reduce_max(&r->grid.world, &stop, 1, MT_F64);
    return stop > 0;
}

static bool should_stop(const mt_run *r) {
    return is_over(r, r->options.exit_duration_in_mins);
}

/* True for an iteration after which --exit-interval ends a run that would go on. */
static bool exits_after(const mt_run_options *o, int64_t iteration) {
    return o->exit_interval > 0 && iteration % o->exit_interval == 0 && iteration < o->stack.num_iterations;
}

/* --check-weight-hash-across-dp-replicas-interval. */
static void check_replicas(mt_run *r) {
    mt_error error;
    int64_t interval = r->options.check_weight_hash_across_dp_replicas_interval;
    if (interval == 0 || r->state.iteration % interval != 0) return;
    mt_run_check(r, mt_train_finish(r->model, &error), &error);
    if (mt_train_bad_iteration(r->model) == 0) mt_run_check(r, mt_train_check_replicas(r->model, &error), &error);
}

/* Samples that an evaluation of a split takes from it: --eval-iters batches; with --full-validation always the same. */
static int64_t evaluated_samples(const mt_run *r, mt_split split) {
    bool whole = split == MT_SPLIT_VALID && r->options.full_validation;
    return r->loaders[split] && !whole ? r->options.eval_iters * mt_eval_batch_size(&r->options) : 0;
}

/* Where the micro-batches of a feed come from. */
typedef struct source {
    mt_batch_source *read;
    void *context;
} source;

/* The feed itself, or the reference model, which scores its samples first. */
static source take_samples(mt_run *r, mt_feed *feed) {
    mt_error error;
    if (!r->reference) return (source){mt_feed_batch, feed};
    mt_run_check(r, mt_reference_score(r->reference, feed, &r->batch, &error), &error);
    return (source){mt_reference_batch, r->reference};
}

/* Mean loss over whole batches of `samples` samples from a sample on. It may take long, so a stop ends it after a
 * batch; true then. */
static bool evaluate(mt_run *r, mt_loader *loader, const char *name, int64_t first, int64_t samples) {
    mt_error error;
    double sums[2] = {0};
    int64_t end = first + samples, batch = mt_eval_batch_size(&r->options);
    if (end == first) return false;
    mt_run_check(r, mt_train_finish(r->model, &error), &error);
    if (mt_train_bad_iteration(r->model) > 0) return false;
    for (; first < end; first += batch) {
        mt_feed feed = mt_feed_begin(loader, first, batch, &r->grid);
        source from = take_samples(r, &feed);
        int64_t count = feed.micro_batches;
        mt_run_check(r, mt_evaluate_sums(r->model, count, from.read, from.context, &r->batch, sums, &error), &error);
        mt_run_check(r, mt_feed_check(&feed, &r->grid, r->state.iteration, &error), &error);
        if (first + batch < end && should_stop(r)) return true;
    }
    mt_report_evaluation(&r->report, &r->state, name, sums[1] > 0 ? sums[0] / sums[1] : NAN);
    return false;
}

/* Evaluates the validation data: batches from a sample on, or, with --full-validation, every set. */
static bool validate(mt_run *r, int64_t first) {
    mt_loader *loader = r->loaders[MT_SPLIT_VALID];
    const mt_strings *names = &r->options.validation_set_names;
    if (!loader || !r->options.full_validation)
        return evaluate(r, loader, "validation", first, evaluated_samples(r, MT_SPLIT_VALID));
    for (int64_t i = 0; i <= r->num_more_loaders; i++) {
        char name[120] = "validation";
        if (names->count > 0)
            snprintf(name, sizeof name, "validation-%.90s", names->items[i]);
        else if (r->options.multiple_validation_sets)
            snprintf(name, sizeof name, "validation-%lld", (long long)i);
        if (i > 0) loader = r->more_loaders[i - 1];
        int64_t batch = mt_eval_batch_size(&r->options), count = mt_loader_count(loader);
        if (evaluate(r, loader, name, 0, mt_divide_up(count, batch) * batch)) return true;
    }
    return false;
}

/* As soon as its steps are over, or with the run. Like other reports, a trace without room does not end the run. */
static void write_trace(mt_run *r, bool goes_on) {
    mt_error error;
    if (mt_trace_write(&error) == 0)
        mt_report_line(&r->report, "wrote the trace to %s", r->options.trace);
    else if (r->grid.world.rank == 0)
        fprintf(stderr, "warning: %s; %s\n", error.text,
                goes_on ? "training goes on without the trace" : "this run leaves no trace");
}

/* One iteration of reinforcement learning, or none if a stop is requested first. A reward that fails ends the run, but
 * loses no iteration. */
static bool rl_step(mt_run *r) {
    mt_error error;
    mt_metrics metrics;
    bool due = mt_report_is_due(&r->report, r->state.iteration + 1);
    int status = mt_rl_step(r->rl, &r->state, &r->batch, due ? &metrics : NULL, &error);
    if (status == MT_RL_STOPPED) return true;
    if (status == MT_RL_UNREWARDED) mt_run_save_progress(r);
    mt_run_check(r, status, &error);
    mt_rl_report(r->rl, &r->report);
    if (due) mt_report_iteration(&r->report, &r->state, &metrics);
    return true;
}

/* One step; false if the run went back to a checkpoint instead. */
static bool step(mt_run *r) {
    const mt_run_options *o = &r->options;
    mt_error error;
    mt_metrics metrics;
    int64_t consumed = r->state.consumed_train_samples, batch_size = mt_global_batch_size(o, consumed);
    int64_t skipped = r->state.skipped_samples;
    mt_feed feed = mt_feed_begin(r->loaders[MT_SPLIT_TRAIN], consumed, batch_size, &r->grid);
    bool due = mt_report_is_due(&r->report, r->state.iteration + 1);
    bool traced = mt_trace_step_begin(),
         timed = o->profile || traced || ((o->log_straggler || o->timing_log_level > 0) && due);
    bool reported = timed || due; // then the device is idle when the step ends
    if (timed) mt_profile_step_begin();
    source from = take_samples(r, &feed);
    int status = mt_train_step(r->model, &r->state, feed.micro_batches, from.read, from.context, &r->batch,
                               reported ? &metrics : NULL, &error);
    if (timed) mt_profile_step_end();
    if (traced) mt_trace_step_end();
    if (status == MT_REWIND) {
        mt_run_check(r, mt_checkpoint_rewind(r->model, &r->options, &r->state, r->saver, &error), &error);
        mt_run_report_saved(r);
        r->last_saved = r->state.iteration;
        return false;
    }
    mt_run_check(r, status, &error);
    r->state.consumed_train_samples = consumed + feed.read; // also where micro-batches hold other than whole rows
    if (r->state.skipped_samples > skipped) r->state.skipped_samples = skipped + feed.read;
    mt_run_check(r, mt_feed_check(&feed, &r->grid, r->state.iteration, &error), &error);
    if (mt_trace_is_complete()) write_trace(r, r->state.iteration < o->stack.num_iterations);
    if (reported && feed.tokens > 0) metrics.tokens = feed.tokens;
    r->report.step_flops = feed.flops;
    if (reported) mt_report_iteration(&r->report, &r->state, &metrics);
    if (reported) mt_report_stragglers(&r->report, &r->grid, &r->state, &metrics);
    if (reported) mt_report_times(&r->report, &r->grid, &r->state, &metrics);
    return true;
}

static void train(mt_run *r) {
    const mt_run_options *o = &r->options;
    mt_error error;
    int64_t validated = r->state.iteration;
    bool saved = mt_run_is_finished(r);
    bool stop = is_over(r, 0); // a run that starts slowly takes one step, or it would never get on
    mt_watch_enter(MT_WATCH_STEP);
    while ((r->state.iteration < o->stack.num_iterations && !stop) || mt_train_bad_iteration(r->model) > 0) {
        mt_run_check(r, mt_saver_poll(r->saver, &error), &error);
        mt_run_report_saved(r);
        if (!(r->rl ? rl_step(r) : step(r))) continue;
        check_replicas(r);
        stop = should_stop(r) || exits_after(o, r->state.iteration);
        // Saved before the evaluation, which may fail; a run that resumes goes on with the samples after it.
        int64_t iteration = r->state.iteration, first = r->state.consumed_valid_samples;
        bool validates = mt_validates_after(o, iteration);
        if (validates) r->state.consumed_valid_samples += evaluated_samples(r, MT_SPLIT_VALID);
        if (stop || (o->save_interval > 0 && iteration % o->save_interval == 0)) mt_run_save_progress(r);
        if (!validates) continue;
        stop = validate(r, first) || stop || should_stop(r);
        validated = iteration;
        if (stop) mt_run_save_progress(r);
    }
    mt_run_check(r, mt_train_finish(r->model, &error), &error);
    if (mt_trace_is_open()) write_trace(r, false);
    if (stop) {
        mt_report_line(&r->report, "stopped early after iteration %lld", (long long)r->state.iteration);
        return;
    }
    // saved first, as in Megatron: a longer run, which skips this evaluation, resumes with its own validation samples
    if (r->last_saved != r->state.iteration && !saved) mt_run_save(r); // also without a step: converts
    if (validated != r->state.iteration) stop = validate(r, r->state.consumed_valid_samples);
    if (stop || evaluate(r, r->loaders[MT_SPLIT_TEST], "test", 0, evaluated_samples(r, MT_SPLIT_TEST)))
        mt_report_line(&r->report, "stopped early, in an evaluation after iteration %lld",
                       (long long)r->state.iteration);
}

int main(int argc, char **argv) {
    mt_run r;
    if (!mt_run_open(&r, &argc, &argv)) return 0;
    train(&r);
    mt_run_close(&r);
    return 0;
}
