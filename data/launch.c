/* launch.c: how a run starts and stops. */
#include "launch.h"

#include "layouts.h"
#include "option_table.h"
#include "options.h"
#include "planner.h"
#include "simulate.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- launchers */

/* A variable of torchrun as a number. */
static int mt_launch_variable(const char *name, int missing) {
    const char *text = getenv(name);
    return text ? atoi(text) : missing;
}

int mt_launch_check(char **argv, mt_error *error) {
    int size = mt_launch_variable("WORLD_SIZE", 1), here = mt_launch_variable("LOCAL_WORLD_SIZE", size);
    bool torchrun = getenv("TORCHELASTIC_RUN_ID") != NULL; // under srun, its ranks inherit PMIX_RANK or PMI_RANK
    if ((mt_launched_by_mpi() && !torchrun) || size <= 1 || !getenv("RANK") || !getenv("MASTER_ADDR")) return 0;
    signal(SIGTERM, SIG_DFL);
    if (mt_launch_variable("RANK", 0) > 0) sleep(2); // rank 0 prints the error; its exit ends the others
    return mt_error_set(error,
                        "torchrun started this (RANK, WORLD_SIZE and MASTER_ADDR are set), but ranks are connected by "
                        "MPI; use: mpirun -np %d %s%s ...   or: srun --mpi=pmix -n %d %s ...",
                        size, here < size ? "--hostfile HOSTS " : "", argv[0], size, argv[0]);
}

/* Prints an option's name and value. */
static void mt_launch_print_option(const mt_options *o, size_t offset, FILE *file) {
    char key[80], *text = mt_option_text(o, mt_option_of(offset));
    mt_option_key(key, mt_option_of(offset));
    fprintf(file, "%s %s\n", key, text);
    free(text);
}

/* Finishes the options for a number of ranks; with --gpu its GPUs must have room for the model too. Returns 0,
 * MT_DOES_NOT_FIT or -1, with error. */
static int mt_launch_try(mt_options *o, int64_t ranks, mt_error *error) {
    // derived for the number tried before: other numbers may share experts in another way
    if (!MT_GIVEN(o, expert_tensor_parallel_size)) o->expert_tensor_parallel_size = 0;
    if (mt_train_options_finish(o, ranks, error) != 0) return -1;
    return MT_GIVEN(o, gpu) && !mt_plan_has_room(o, ranks, error) ? MT_DOES_NOT_FIT : 0;
}

/* Where no number is accepted, the error is that of the largest one that has too little memory, else of the largest one
 * that is a multiple of a model's ranks: it names more than that. */
int mt_launch_print(mt_options *o, FILE *file, mt_error *error) {
    bool same_batch = o->global_batch_size > 0 || (o->stage == MT_STAGE_RL && o->gradient_accumulation_steps == 0);
    int64_t ranks = o->print_launch, fewest = same_batch ? 1 : ranks; // fewer ranks do not make the batch smaller
    int64_t model = o->tensor_model_parallel_size * o->pipeline_model_parallel_size * o->context_parallel_size;
    int64_t named = fewest < ranks && model >= 1 && model <= ranks ? ranks - ranks % model : ranks;
    mt_error other;
    bool fits = true;
    int status = mt_launch_try(o, ranks, &other);
    for (; status != 0; status = mt_launch_try(o, ranks, &other)) {
        if (fits && (status == MT_DOES_NOT_FIT || ranks == named)) *error = other;
        if (status == MT_DOES_NOT_FIT) fits = false;
        if (ranks-- <= fewest) return -1;
    }
    if (MT_GIVEN(o, gpu) && mt_simulate_check(o, &other) != 0)
        fprintf(stderr, "warning: --gpu %s: whether it has room is not checked: %s\n", o->gpu, other.text);
    fprintf(file, "ranks %lld\n", (long long)ranks);
    mt_launch_print_option(o, MT_AT(global_batch_size), file);
    mt_launch_print_option(o, MT_AT(device), file);
    mt_launch_print_option(o, MT_AT(exit_signal), file);
    mt_launch_print_option(o, MT_AT(save), file);
    return 0;
}

/* ---- signals */

enum { MT_NUM_SIGNALS = 4 };

static const int mt_signals[MT_NUM_SIGNALS] = {
    [MT_EXIT_SIGTERM] = SIGTERM, [MT_EXIT_SIGINT] = SIGINT, [MT_EXIT_SIGUSR1] = SIGUSR1, [MT_EXIT_SIGUSR2] = SIGUSR2};
static volatile sig_atomic_t mt_signal_counts[MT_NUM_SIGNALS];

/* Only async-signal-safe calls. */
static void mt_signal_count(int number) {
    static const char note[] = "\nstopping: the last step will be saved; a second Ctrl-C ends the run at once\n";
    int i = 0;
    while (mt_signals[i] != number) i++;
    mt_signal_counts[i] = mt_signal_counts[i] + 1;
    if (number != SIGINT) return;
    if (mt_signal_counts[i] > 1) {
        signal(SIGINT, SIG_DFL);
        raise(SIGINT); // takes effect when the handler returns
    } else if (isatty(STDERR_FILENO)) {
        (void)!write(STDERR_FILENO, note, sizeof note - 1);
    }
}

static void mt_signal_catch(int number, int flags) {
    struct sigaction action = {.sa_handler = mt_signal_count, .sa_flags = flags};
    sigaction(number, &action, NULL);
}

void mt_signals_hold(void) {
    for (int i = 0; i < MT_NUM_SIGNALS; i++) mt_signal_catch(mt_signals[i], SA_RESTART);
    signal(SIGXFSZ, SIG_IGN); // exceeding a file size limit is then a write error
}

void mt_signals_select(const mt_options *o) {
    bool saves = !o->plan && !o->explain && !o->print_config && !o->print_schedule && o->print_launch == 0;
    for (int i = 0; i < MT_NUM_SIGNALS; i++) {
        bool stops = i == MT_EXIT_SIGTERM || i == MT_EXIT_SIGINT || i == (int)o->exit_signal;
        if (saves && stops && o->exit_signal_handler) {
            mt_signal_catch(mt_signals[i], 0); // ends a print to a terminal that an ending mpirun no longer reads
            continue;
        }
        signal(mt_signals[i], SIG_DFL);
        if (mt_signal_counts[i] > 0) raise(mt_signals[i]);
        mt_signal_counts[i] = 0;
    }
}

bool mt_stop_requested(void) {
    bool any = false;
    for (int i = 0; i < MT_NUM_SIGNALS; i++) any = any || mt_signal_counts[i] > 0;
    return any;
}
