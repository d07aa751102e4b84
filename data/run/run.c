/* run.c: start, checkpoints and end of a run of train. */
#include "run.h"

#include "../base/file.h"
#include "../base/host_memory.h"
#include "../base/signals.h"
#include "../base/watchdog.h"
#include "../options/option_agree.h"
#include "../options/option_finish.h"
#include "../options/option_help.h"
#include "../options/option_rules.h"
#include "../options/option_table.h"
#include "../options/option_typed.h"
#include "../options/option_warn.h"
#include "../tokens/chat.h"
#include "../models/special_tokens.h"
#include "../datasets/fim.h"
#include "../datasets/t5_dataset.h"
#include "../checkpoint/adapter.h"
#include "../checkpoint/checkpoint_buckets.h"
#include "../checkpoint/checkpoint_folder.h"
#include "../checkpoint/checkpoint_load.h"
#include "../checkpoint/checkpoint_trainer.h"
#include "../checkpoint/resume.h"
#include "../checkpoint/run_options.h"
#include "../report/profile.h"
#include "../report/timeline.h"
#include "../report/trace.h"
#include "../plan/balance.h"
#include "../plan/layouts.h"
#include "../plan/planner.h"
#include "launch.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- errors */

/* Ends the program if a function failed on any rank, before anything is saved. Every rank calls it. */
static void refuse(mt_run *r, int status, mt_error *error) {
    if (r->writers && mt_agree(&r->grid.world, status != 0, error) != 0) {
        status = -1;
        mt_rollout_ranks_close(r->writers); // or they would wait for the next responses to write
        r->writers = NULL;
    }
    mt_report_refusal(&r->grid, &r->options, status, error);
}

void mt_run_report_saved(mt_run *r) {
    if (mt_saver_in_place(r->saver) == r->saved) return;
    r->saved = mt_saver_in_place(r->saver);
    mt_signals_set_saved(&r->options, r->saved);
    mt_report_line(&r->report, "saved iteration %lld to %s", (long long)r->saved, r->options.save);
}

void mt_run_check(mt_run *r, int status, mt_error *error) {
    mt_error other;
    if (status == 0) return;
    (void)mt_saver_finish(r->saver, &other);
    mt_run_report_saved(r);
    refuse(r, -1, error);
}

/* ---- tokenizer and data */

/* Takes the tokenizer of a checkpoint, if it has one; the run owns `folder`. One that this program cannot open is saved
 * with the checkpoints all the same; damaged files are an error. */
static int take_tokenizer(mt_run *r, char *folder, mt_error *error) {
    mt_error why;
    mt_tokenizer_close(r->tokenizer), mt_tokenizer_close(r->kept);
    r->tokenizer = r->kept = NULL;
    r->kept_note.text[0] = 0;
    free(r->tokenizer_folder);
    r->tokenizer_folder = folder;
    if (mt_tokenizer_open_folder(&r->tokenizer, folder, &why) == 0) return 0;
    r->tokenizer = NULL;
    if (!mt_folder_has_tokenizer(folder)) {
        mt_error_set(&r->kept_note,
                     "note: %s has no tokenizer, so the checkpoints of this run have none; infer then needs "
                     "--tokenizer-type and --tokenizer-model",
                     folder);
        return 0;
    }
    if (mt_tokenizer_keep_folder(&r->kept, folder, error) != 0) return -1;
    mt_error_set(&r->kept_note, "note: the tokenizer is taken along as it is, but cannot be used here: %.3000s",
                 why.text);
    return r->options.save ? mt_tokenizer_check_links(r->kept, error) : 0;
}

static void print_kept_note(const mt_run *r) {
    if (r->options.save && r->grid.world.rank == 0 && r->kept_note.text[0]) printf("%s\n", r->kept_note.text);
}

/* The tokenizer gives the vocabulary's size and the end of document, unless options do. A loaded model's tokenizer is
 * saved with the checkpoints, so that they can generate text. */
static int open_tokenizer(mt_run *r, mt_error *error) {
    mt_run_options *o = &r->options;
    if (o->tokenizer_type) {
        if (mt_options_open_tokenizer(&r->tokenizer, o, error) != 0) return -1;
    } else if (o->load) {
        char *model = mt_options_load_folder(o, error);
        char *folder = model ? mt_adapter_tokenizer_folder(o, model, error) : NULL;
        free(model);
        if (!folder) return -1;
        if (take_tokenizer(r, folder, error) != 0) return -1;
    }
    if (!r->tokenizer) return 0;
    if (o->save && mt_tokenizer_check_links(r->tokenizer, error) != 0) return -1;
    int64_t vocab_size = mt_tokenizer_vocab_size(r->tokenizer);
    bool extends = o->tokenizer_type && mt_tokenizer_find(r->tokenizer, "<extra_id_0>", 12) < 0; // or it has sentinels
    if (extends) vocab_size += o->vocab_extra_ids;
    if (o->stack.vocab_size == 0) o->stack.vocab_size = vocab_size;
    if (!o->tokenizer_type || o->stack.vocab_size >= vocab_size) return 0;
    const char *tokenizer =
        o->tokenizer_model ? "--tokenizer-model" : "--tokenizer-type ByteLevel"; // the one type without files
    if (MT_GIVEN(o, stack.vocab_size))
        return mt_error_set(error,
                            "%s has %lld tokens, more than --vocab-size %lld; give --vocab-size %lld or leave it out",
                            tokenizer, (long long)vocab_size, (long long)o->stack.vocab_size, (long long)vocab_size);
    return mt_error_set(error,
                        "%s has %lld tokens but the model's vocabulary only %lld: take the model's own tokenizer",
                        tokenizer, (long long)vocab_size, (long long)o->stack.vocab_size);
}

/* Every rank must have the same tokenizer, or none. */
static int agree_on_tokenizer(const mt_run *r, mt_error *error) {
    const char *name = "tokenizer";
    uint64_t print = mt_tokenizer_fingerprint(r->tokenizer);
    return mt_fingerprints_agree(&print, &name, 1, &r->grid.world, error);
}

/* The models beside the trained one read its tokens: the tokenizer in a folder must be the same. */
static int check_partner(const mt_run *r, const char *option, const char *folder, mt_error *error) {
    mt_error cause;
    char *path = folder ? mt_checkpoint_resolve(folder, &cause) : NULL; // reported where it is loaded
    mt_tokenizer *own = NULL;
    int status = path ? mt_tokenizer_open_folder(&own, path, &cause) : 0;
    if (status != 0)
        printf("--%s %s has no tokenizer to compare with the trained model's, which must be the same\n", option,
               folder);
    if (own && mt_tokenizer_compare(own, r->tokenizer, &cause) != 0)
        status = mt_error_set(error, "--%s %s: %s; take a model with the same tokenizer", option, folder, cause.text);
    else
        status = 0;
    mt_tokenizer_close(own);
    free(path);
    return status;
}

static int check_partners(const mt_run *r, mt_error *error) {
    const mt_run_options *o = &r->options;
    if (!r->tokenizer || r->grid.world.rank != 0) return 0;
    if (check_partner(r, "critic-load", o->critic_load, error) != 0) return -1;
    if (check_partner(r, "reward-load", o->reward_load, error) != 0) return -1;
    for (int64_t i = 0; i < o->teachers.count; i++) {
        const char *equals = strchr(o->teachers.items[i], '='); // NULL: the rules report it
        if (equals && check_partner(r, "teachers", equals + 1, error) != 0) return -1;
    }
    return check_partner(r, "teacher-load", o->teacher_load, error);
}

static void configure_data(mt_run *r) {
    const mt_run_options *o = &r->options;
    r->data_config = mt_data_config_of(o, r->tokenizer ? mt_tokenizer_eod(r->tokenizer) : o->eos_token_id);
    r->data_config.tokenizer = r->tokenizer;
    r->data_config.tokenizer_path = o->tokenizer_type ? o->tokenizer_model : r->tokenizer_folder;
    r->data_config.log = r->grid.world.rank == 0 ? stdout : NULL;
}

static void open_loaders(mt_run *r) {
    mt_error error;
    const mt_group *data = &r->grid.data;
    int64_t of_evaluation = mt_eval_micro_batch_size(&r->options.stack);
    for (int split = 0; split < MT_NUM_SPLITS; split++) {
        const mt_dataset *dataset = mt_data_split(r->data, split);
        bool whole = split == MT_SPLIT_VALID && r->options.full_validation;
        int64_t size = split == MT_SPLIT_TRAIN ? r->options.stack.micro_batch_size : of_evaluation;
        if (!dataset) continue;
        int status = (whole ? mt_loader_open_whole : mt_loader_open)(&r->loaders[split], dataset, &r->data_config, size,
                                                                     data->rank, data->size, &error);
        refuse(r, status, &error);
    }
    for (const mt_dataset *set; (set = mt_data_validation_set(r->data, r->num_more_loaders + 1));) {
        int64_t bytes = (r->num_more_loaders + 1) * (int64_t)sizeof *r->more_loaders;
        r->more_loaders = mt_realloc(r->more_loaders, bytes);
        int status = mt_loader_open_whole(&r->more_loaders[r->num_more_loaders], set, &r->data_config, of_evaluation,
                                          data->rank, data->size, &error);
        refuse(r, status, &error);
        r->num_more_loaders++;
    }
}

static void close_data(mt_run *r) {
    for (int split = 0; split < MT_NUM_SPLITS; split++) {
        mt_loader_close(r->loaders[split]);
        r->loaders[split] = NULL;
    }
    for (int64_t i = 0; i < r->num_more_loaders; i++) mt_loader_close(r->more_loaders[i]);
    free(r->more_loaders);
    r->more_loaders = NULL, r->num_more_loaders = 0;
    mt_data_close(r->data);
    r->data = NULL;
}

/* After the checkpoint: a run that resumes keeps its data and their order. */
static void resume_data(mt_run *r) {
    mt_error error;
    bool reorders;
    if (!r->data) return;
    FILE *log = r->grid.world.rank == 0 ? stdout : NULL;
    int64_t group = r->options.stack.micro_batch_size * r->grid.data.size;
    refuse(r, mt_data_resume(r->data, &r->data_config, &r->state, group, &reorders, log, &error), &error);
    if (!reorders) return;
    close_data(r);
    refuse(r, mt_data_open(&r->data, &r->data_config, &error), &error);
    open_loaders(r);
}

/* The steps of --train-epochs, which --train-iters may state too. */
static int take_epochs(mt_run_options *o, int64_t iterations, mt_error *error) {
    if (MT_GIVEN(o, stack.train_iters) && o->stack.train_iters != iterations)
        return mt_error_set(error,
                            "--train-epochs %lld are %lld steps, and --train-iters is %lld: --train-epochs and "
                            "--train-iters exclude each other unless they agree; leave one out",
                            (long long)o->train_epochs, (long long)iterations, (long long)o->stack.train_iters);
    o->stack.train_iters = iterations;
    return 0;
}

static void open_data(mt_run *r) {
    mt_error error;
    mt_run_options *o = &r->options;
    mt_data_config *config = &r->data_config;
    configure_data(r);
    refuse(r, o->fim_data ? mt_fim_open(&r->fim, o, r->tokenizer, &error) : 0, &error);
    config->fim = r->fim;
    bool masks = o->stack.decoder_num_layers > 0 && !o->sft;
    refuse(r, masks ? mt_span_masking_open(&r->spans, o, r->tokenizer, &error) : 0, &error);
    config->spans = r->spans;
    refuse(r, mt_data_open(&r->data, config, &error), &error);
    refuse(r, mt_data_agree(r->data, &r->grid.world, &error), &error);
    if (o->train_epochs > 0) { // now their steps are known
        int64_t rows = mt_data_split(r->data, MT_SPLIT_TRAIN)->num_samples;
        int64_t left = mt_max(rows - r->begin.consumed_train_samples, 0);
        int64_t iterations = r->begin.iteration + mt_divide_up(left, o->stack.global_batch_size);
        refuse(r, take_epochs(o, iterations, &error), &error);
        refuse(r, mt_train_options_finish(o, r->grid.world.size, &error), &error);
    }
    if (r->grid.world.rank == 0) mt_data_warn(r->data, config, stderr);
    open_loaders(r);
}

/* ---- models */

/* If the checkpoint that the tokenizer came from is damaged, all is taken from the one before. */
static void load(mt_run *r) {
    char *found;
    mt_error error;
    int64_t eod = r->data_config.eod_id;
    int status = mt_checkpoint_load_found(r->model, &r->options, &r->state, r->options.load, false, &found, &error);
    refuse(r, status, &error);
    if (r->state.iteration > 0) mt_signals_set_saved(&r->options, r->state.iteration);
    if (!r->tokenizer_folder || strcmp(found, r->tokenizer_folder) == 0) {
        free(found);
        return;
    }
    bool noted = r->kept_note.text[0]; // by the opening
    status = take_tokenizer(r, found, &error);
    if (status == 0 && !noted) print_kept_note(r);
    bool has_tokens = r->data || r->options.stack.stage == MT_STAGE_RL;
    if (status == 0 && has_tokens && r->tokenizer && mt_tokenizer_eod(r->tokenizer) != eod)
        status = mt_error_set(
            &error, "%s: its tokenizer has another end of document than the damaged checkpoint's; start again", found);
    refuse(r, status, &error);
}

static int save_tokenizer(void *context, const char *folder, mt_error *error) {
    const mt_run *r = context;
    const mt_tokenizer *saved = r->tokenizer ? r->tokenizer : r->kept;
    if (!saved) return 0;
    int status = mt_tokenizer_save(saved, folder, error);
    if (status == 0 && r->drops_template) {
        char *path = mt_path_join(folder, "chat_template.jinja");
        unlink(path);
        free(path);
    }
    if (status != 0 || !r->chat_program || mt_folder_has(folder, "chat_template.jinja")) return status;
    char *path = mt_path_join(folder, "chat_template.jinja");
    status = mt_file_write(path, r->chat_program, (int64_t)strlen(r->chat_program), "--save", error);
    free(path);
    return status;
}

/* The files of the trained model's checkpoint. */
static int save_extras(void *context, const char *folder, mt_error *error) {
    const mt_run *r = context;
    if (save_tokenizer(context, folder, error) != 0) return -1;
    return r->rl ? mt_rl_write(r->rl, folder, error) : 0;
}

static mt_rl_config rl_config_of(mt_run *r) {
    mt_rl_config config = {&r->options, &r->grid, r->ops, r->tokenizer, .extra = save_tokenizer, .context = r};
    config.writers = r->writers;
    config.tokenizer_path = r->options.tokenizer_type ? r->options.tokenizer_model : r->tokenizer_folder;
    config.log = r->grid.world.rank == 0 ? stdout : NULL;
    return config;
}

/* The iterations of --train-epochs, each with --rollout-batch-size prompts. */
static void count_iterations(mt_run *r) {
    mt_error error;
    mt_run_options *o = &r->options;
    mt_rl_config config = rl_config_of(r);
    int64_t prompts = mt_rl_count_prompts(&config, &error);
    refuse(r, prompts < 0 ? -1 : 0, &error);
    refuse(r, take_epochs(o, mt_divide_up(o->train_epochs * prompts, o->rollout_batch_size), &error), &error);
    refuse(r, mt_train_options_finish(o, r->grid.world.size, &error), &error);
}

/* The models beside an actor; takes its prompts over. */
static void open_rl(mt_run *r, const mt_model_plan *plan, const mt_samples *prompts) {
    mt_error error;
    mt_rl_config config = rl_config_of(r);
    config.prompts = *prompts;
    refuse(r, mt_rl_open(&r->rl, &config, r->model, plan, &r->state, &error), &error);
}

/* A model that was trained on conversations without marks remembers this, if its tokenizer has no other template. */
static void keep_chat_program(mt_run *r, const mt_chat *chat, const char *path) {
    mt_error ignored;
    mt_chat *own = NULL;
    bool has_own = path && mt_chat_open(&own, MT_CHAT_AUTO, r->tokenizer, path, &ignored) == 0;
    if (!has_own || mt_chat_program(own)) r->chat_program = mt_chat_program(chat);
    r->drops_template = has_own && mt_chat_program(own) && !r->chat_program; // plain's, and now one without a program
    mt_chat_close(own);
}

/* The folders that a fine-tuning saves name the token that ends a response, so that other programs end there too. */
static void name_turn_end(mt_run *r) {
    mt_run_options *o = &r->options;
    mt_error error; // whoever reads the samples reports it
    mt_chat *chat;
    bool has_turns = o->sft || o->stack.stage == MT_STAGE_RL;
    if (!o->save || !has_turns || !r->tokenizer || r->grid.world.rank != 0) return;
    const char *path = o->tokenizer_type ? o->tokenizer_model : r->tokenizer_folder;
    if (mt_chat_open(&chat, o->chat_template, r->tokenizer, path, &error) != 0) return;
    keep_chat_program(r, chat, path);
    int status = mt_chat_set_variables(chat, o->chat_template_kwargs, &error);
    if (status == 0) status = mt_chat_prepare(chat, &error);
    mt_stops stops;
    if (status == 0) status = mt_stops_of_options(&stops, o, &error);
    if (status == 0 && stops.count == 0) mt_generation_config_add_end(o, mt_tokenizer_eod(r->tokenizer));
    if (status == 0) mt_generation_config_add_end(o, mt_chat_end(chat));
    mt_chat_close(chat);
}

static void open_model(mt_run *r) {
    const mt_run_options *o = &r->options;
    mt_error error;
    int64_t here = o->stack.dynamic_context_parallel
                       ? o->max_seqlen_per_dp_cp_rank
                       : mt_rank_tokens(&o->stack, mt_largest_micro_batch_size(&o->stack) * mt_row_length(&o->stack));
    bool encodes = o->stack.decoder_num_layers > 0;
    int64_t inputs = mt_rank_tokens(&o->stack, mt_largest_micro_batch_size(&o->stack) * o->stack.encoder_seq_length);
    int64_t most = encodes ? mt_max(here, inputs) : here;
    mt_model_plan plan = {.max_tokens = most, .max_logits = here, .max_position = o->stack.seq_length, .train = true};
    plan.loss = mt_stage_loss_of(&r->loss, o);
    if (plan.loss && plan.loss->distillation) {
        plan.num_taps = r->loss.distillation.num_pairs;
        for (int64_t k = 0; k < plan.num_taps; k++) plan.taps[k] = r->loss.distillation.pairs[k].student;
    }
    int64_t whole = here * o->stack.context_parallel_size; // tokens of a micro-batch
    if (r->data) plan.max_patches = mt_data_max_patches(r->data, whole);
    plan.host_memory = mt_host_memory_available("");
    mt_samples prompts = {0};
    if (o->stack.stage == MT_STAGE_RL) {
        mt_rl_config config = rl_config_of(r);
        refuse(r, mt_rl_read_prompts(&prompts, &config, &error), &error);
        mt_rl_plan(&plan, o, &prompts);
    }
    bool checks = o->load && r->grid.world.rank == 0 && !mt_options_falls_back(o); // or a damaged one is passed over
    refuse(r, checks ? mt_checkpoint_check(o, o->load, &error) : 0, &error);
    bool timed = o->profile || o->trace || o->log_straggler || o->timing_log_level > 0;
    const mt_ops *ops = timed ? mt_profile_open(r->ops) : r->ops;
    if (timed) r->options.stack.cuda_graph_impl = MT_GRAPHS_NONE; // events stand between the operations
    refuse(r, mt_model_create(&r->model, &o->stack, &r->grid, ops, &plan, &error), &error);
    int status = o->save && r->grid.world.rank == 0 ? mt_checkpoint_prepare(r->model, &r->options, o->save, &error) : 0;
    refuse(r, status, &error);
    if (r->grid.world.rank == 0) mt_report_plan(r->model, stdout);
    if (o->load)
        load(r);
    else
        mt_model_init(r->model);
    if (!o->load && o->load_adapter)
        refuse(r, mt_checkpoint_load_adapter(r->model, &r->options, &r->state, o->load_adapter, false, &error), &error);
    FILE *log = r->grid.world.rank == 0 ? stdout : NULL;
    refuse(r, mt_reference_open(&r->reference, r->model, o, r->ops, &r->state, log, &error), &error);
    if (o->stack.stage == MT_STAGE_RL) open_rl(r, &plan, &prompts);
    if (o->save) mt_saver_open(&r->saver, r->model, &r->options, o->save, save_extras, r, o->async_save);
    mt_batch_alloc(&r->batch, whole);
    if (encodes) mt_batch_alloc_encoder(&r->batch, most);
    if (plan.max_patches > 0) mt_batch_alloc_images(&r->batch, &o->stack, plan.max_patches);
}

/* ---- saving */

void mt_run_save(mt_run *r) {
    mt_error error;
    if (!r->options.save) return;
    mt_run_check(r, mt_train_finish(r->model, &error), &error);
    if (mt_train_bad_iteration(r->model) > 0) return;
    // the save under way reads what mt_rl_save replaces
    bool waits = r->rl && (r->options.rollout_lag > 0 || r->options.partial_rollout_max_split > 1);
    if (waits) mt_run_check(r, mt_saver_finish(r->saver, &error), &error);
    if (r->rl) mt_run_check(r, mt_rl_save(r->rl, &r->state, &error), &error);
    mt_run_check(r, mt_saver_save(r->saver, &r->state, &error), &error);
    mt_run_report_saved(r);
    r->last_saved = r->state.iteration;
}

void mt_run_save_progress(mt_run *r) {
    if (r->state.iteration > r->report.first_iteration && r->state.iteration != r->last_saved) mt_run_save(r);
}

bool mt_run_is_finished(mt_run *r) {
    const mt_run_options *o = &r->options;
    int64_t iteration = r->state.iteration;
    if (o->stack.num_iterations == 0 || iteration < o->stack.num_iterations || iteration == 0) return false;
    mt_report_line(&r->report,
                   "nothing is left to train: iteration %lld is loaded, and the run ends at %lld; to go on, "
                   "raise --train-%s",
                   (long long)iteration, (long long)o->stack.num_iterations,
                   o->train_epochs > 0          ? "epochs"
                   : o->stack.train_samples > 0 ? "samples"
                                                : "iters");
    char *path = o->save ? mt_iteration_path(o->save, iteration) : NULL;
    bool saved = path && !o->finetune && mt_checkpoint_continues(o) && mt_folder_has_weights(path);
    mt_broadcast(&r->grid.world, &saved, sizeof saved, 0); // rank 0's folder decides
    free(path);
    return saved;
}

/* ---- options that print something instead of training */

static void print_schedule(mt_run *r) {
    mt_error error;
    int status = r->options.stack.dynamic_context_parallel ? open_tokenizer(r, &error) : 0; // to read samples
    if (status == 0) status = mt_train_options_finish(&r->options, r->grid.world.size, &error);
    refuse(r, status, &error);
    if (r->grid.world.rank == 0 && r->options.stack.dynamic_context_parallel) {
        configure_data(r);
        status = mt_step_print(&r->options, &r->data_config, stdout, &error);
    } else if (r->grid.world.rank == 0) {
        status = mt_schedule_print(&r->options, stdout, &error);
    }
    refuse(r, status, &error);
}

static void print_config(mt_run *r) {
    mt_error error;
    int64_t ranks = mt_options_printed_ranks(&r->options, r->grid.world.size);
    int status = mt_options_find_checkpoint(&r->options, &error);
    if (status == 0) status = mt_options_read_shape(&r->options, &error);
    if (status == 0) status = open_tokenizer(r, &error);
    if (status == 0) status = mt_train_options_finish(&r->options, ranks, &error);
    if (r->grid.world.rank == 0)
        mt_options_print_config(&r->options, MT_PROGRAM_TRAIN, ranks, status != 0 ? &error : NULL, stdout);
}

static void print_launch(mt_run *r) {
    mt_error error;
    r->grid = mt_grid_of_one;
    int status = open_tokenizer(r, &error);
    if (status == 0) status = mt_launch_print(&r->options, stdout, &error);
    if (status != 0) mt_options_name_typed(&r->options, &error);
    if (status != 0) mt_die("%s", error.text);
}

/* Without --gpus the ranks are the job's. */
static bool imagines_gpus(const mt_run_options *o) {
    return o->plan || (o->explain && o->gpus > 0);
}

/* GPUs are imagined. */
static void print_plan(mt_run *r) {
    mt_error error;
    mt_run_options *o = &r->options;
    if (imagines_gpus(o)) r->grid = mt_grid_of_one;
    mt_options_assume_run(o);
    int64_t ranks = o->gpus > 0 ? o->gpus : mt_options_printed_ranks(o, r->grid.world.size);
    int status = o->plan && o->explain ? mt_error_set(&error, "--plan and --explain exclude each other; leave one out")
                                       : open_tokenizer(r, &error);
    if (status == 0 && o->plan) status = mt_plan_print(o, stdout, &error);
    if (status == 0 && o->explain) status = mt_train_options_finish(o, ranks, &error);
    if (status == 0 && o->explain && r->grid.world.rank == 0) status = mt_plan_explain(o, ranks, stdout, &error);
    refuse(r, status, &error);
}

/* ---- the whole */

/* The opening: a paragraph, the options that were given, and the grid. */
static void print_opening_lines(const mt_run *r, const int *hosts) {
    const mt_run_options *o = &r->options;
    mt_report_opening(o, &r->begin, r->ops, &r->grid, r->data ? mt_data_split(r->data, MT_SPLIT_TRAIN) : NULL, stdout);
    mt_launch_print_grace(o, stdout);
    mt_options_print(o, MT_PROGRAM_TRAIN, stdout);
    mt_options_warn(o, MT_PROGRAM_TRAIN, stdout);
    if (r->ops == &mt_cpu_ops) mt_options_warn_cpu(o, MT_PROGRAM_TRAIN, stdout);
    print_kept_note(r);
    mt_stops_warn(o, stdout);
    mt_adapter_print_left_out(o, stdout);
    if (o->save) mt_adapter_warn(&o->stack, stdout);
    mt_launch_answer_environment(stdout);
    int64_t consumed = r->begin.consumed_train_samples, left = o->stack.num_iterations - r->begin.iteration;
    if (r->data && left > 0)
        mt_loader_print(r->loaders[MT_SPLIT_TRAIN], consumed, mt_global_batch_size(o, consumed), stdout);
    if (r->grid.world.size > 1) mt_grid_print(&r->grid, &o->stack, hosts, stdout);
}

/* Rank 0 prints the opening. */
static void print_opening(const mt_run *r) {
    int *hosts = mt_malloc(r->grid.world.size * (int64_t)sizeof(int));
    mt_grid_hosts(&r->grid.world, hosts);
    if (r->grid.world.rank == 0) print_opening_lines(r, hosts);
    free(hosts);
}

/* Closes everything that is open in all runs, printing ones too. */
static void stop(mt_run *r) {
    mt_tokenizer_close(r->tokenizer);
    mt_tokenizer_close(r->kept);
    free(r->tokenizer_folder);
    mt_options_free(&r->options);
    mt_grid_stop(&r->grid);
}

/* True if the options ask to print something; after mt_grid_start, except --print-launch and plans of imagined GPUs. */
static bool prints(mt_run *r) {
    mt_error error;
    if (r->options.print_launch > 0)
        print_launch(r);
    else if (r->options.plan || r->options.explain)
        print_plan(r);
    else if (r->options.print_config)
        print_config(r);
    else if (r->options.print_schedule)
        print_schedule(r);
    else
        return false;
    refuse(r, mt_file_flush_output(&error), &error);
    stop(r);
    return true;
}

/* Divides the ranks. True on a rank that writes responses, at the end of the run. */
static bool writes_responses(mt_run *r) {
    mt_error error;
    bool writes = false;
    refuse(r, mt_rollout_ranks_split(&r->writers, &r->grid, &r->options, &writes, &error), &error);
    if (!writes) return false;
    mt_rollout_ranks_serve(r->writers, &r->options, &r->grid, r->tokenizer);
    stop(r);
    return true;
}

bool mt_run_open(mt_run *r, int *argc, char ***argv) {
    *r = (mt_run){.start = mt_time(), .saved = -1, .last_saved = -1};
    mt_error error;
    mt_launch_threads(*argv);
    mt_signals_hold();
    if (mt_launch_check(*argv, &error) != 0) mt_die("%s", error.text);
    int status = mt_options_parse(&r->options, MT_PROGRAM_TRAIN, *argc, *argv, &error);
    mt_signals_select(&r->options);
    bool alone = r->options.print_launch > 0 || imagines_gpus(&r->options); // needs no other rank
    if (status == 0 && alone && mt_launch_rank() > 0) {
        mt_options_free(&r->options);
        return false;
    }
    if (status == 0 && alone && prints(r)) return false;
    mt_watch_start(&r->options.stack, &r->options.typed_names);
    mt_grid_start(&r->grid, argc, argv);
    refuse(r, status, &error);
    if (prints(r)) return false;
    refuse(r, open_tokenizer(r, &error), &error);
    refuse(r, agree_on_tokenizer(r, &error), &error);
    refuse(r, check_partners(r, &error), &error);
    status = mt_train_options_finish(&r->options, mt_max(r->grid.world.size - r->options.rollout_ranks, 1), &error);
    refuse(r, status, &error);
    refuse(r, mt_options_agree(&r->options, &r->grid.world, &error), &error);
    refuse(r, mt_checkpoint_take_schedule(&r->options, &error), &error);
    if (r->options.rollout_ranks > 0 && writes_responses(r)) return false;
    refuse(r, mt_grid_build(&r->grid, &r->options.stack, &error), &error);
    refuse(r, mt_checkpoint_claim(&r->options, &r->grid.world, &error), &error);
    r->ops = mt_backend_open(r->options.device, &r->grid, &error);
    refuse(r, r->ops ? 0 : -1, &error);
    if (r->ops->limits.one_attention) mt_options_drop_attention_backend(&r->options);
    mt_report_backend(&r->grid);
    if (r->grid.world.rank == 0) mt_checkpoint_peek(&r->options, &r->begin);
    mt_broadcast(&r->grid.world, &r->begin, sizeof r->begin, 0);
    if (r->options.stack.num_iterations > 0 && r->options.stack.stage != MT_STAGE_RL) open_data(r);
    if (r->options.stack.stage == MT_STAGE_RL && r->options.train_epochs > 0) count_iterations(r);
    print_opening(r);
    name_turn_end(r);
    open_model(r);
    resume_data(r);
    refuse(r, mt_report_open(&r->report, r->model, &r->options, &r->state, &error), &error);
    mt_report_long_step(&r->report, &r->state);
    status = r->options.trace ? mt_trace_open(&r->options, &r->grid, &r->state, &error) : 0;
    refuse(r, status, &error);
    mt_report_flush(); // the first step may take long
    return true;
}

/* Every rank measures its ceilings, so that they share the machine as the steps did. */
static void print_profile(const mt_run *r) {
    FILE *file = r->grid.world.rank == 0 ? stdout : NULL;
    if (r->options.profile) {
        mt_barrier(&r->grid.world);
        mt_profile_print(mt_options_dtype(&r->options.stack), file);
        mt_profile_print_communication(&r->grid, file);
    }
    mt_profile_close();
}

void mt_run_close(mt_run *r) {
    mt_error error;
    if (r->rl) mt_rl_print_times(r->rl, r->grid.world.rank == 0 ? stdout : NULL);
    if (r->rl) mt_run_check(r, mt_rl_finish(r->rl, &error), &error);
    mt_run_check(r, mt_saver_finish(r->saver, &error), &error);
    mt_run_report_saved(r);
    mt_report_close(&r->report);
    close_data(r);
    mt_fim_close(r->fim);
    mt_span_masking_free(r->spans);
    mt_batch_free(&r->batch);
    mt_saver_close(r->saver);
    mt_rollout_ranks_close(r->writers);
    mt_rl_close(r->rl);
    mt_reference_close(r->reference);
    mt_model_destroy(r->model);
    print_profile(r);
    mt_report_flush();
    stop(r);
}
