/* launch.c: how a run starts and stops. */
#include "launch.h"

#include "../base/signals.h"
#include "../options/option_rules.h"
#include "../options/option_table.h"
#include "../plan/balance.h"
#include "../plan/planner.h"
#include "../plan/simulate.h"

#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- threads */

/* A thread that has no work spins, for milliseconds in libgomp and a fifth of a second in libomp, and takes the core
 * from other processes and ranks; where none wait, spinning for a tenth of a millisecond costs least. Both libraries
 * read these variables before main. */
void mt_launch_threads(char **argv) {
#ifdef MT_HAVE_OPENMP
    static const char *const names[] = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"};
    const char *threads = getenv("OMP_NUM_THREADS"), *preload = getenv("LD_PRELOAD");
    char program[4096];
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (getenv(names[i])) return; // the user's choice, or this function's
    if (threads && strcmp(threads, "1") == 0) return;
    if (preload && strstr(preload, "vgpreload")) return; // valgrind does not follow a program that starts anew
    ssize_t length = readlink("/proc/self/exe", program, sizeof program - 1);
    if (length <= 0) return;
    program[length] = '\0';
    setenv("GOMP_SPINCOUNT", mt_launched_by_mpi() ? "1000" : "10000", 1);
    setenv("KMP_BLOCKTIME", mt_launched_by_mpi() ? "0" : "1", 1); // milliseconds
    execv(program, argv);                                         // returns only if it fails; then threads spin
#else
    (void)argv;
#endif
}

/* ---- launchers */

extern char **environ;

/* A variable of torchrun as a number. */
static int mt_launch_variable(const char *name, int missing) {
    const char *text = getenv(name);
    return text ? atoi(text) : missing;
}

/* Refuses more threads than any machine has: their stacks and buffers would exceed its memory. */
static int mt_launch_check_threads(mt_error *error) {
    const char *text = getenv("OMP_NUM_THREADS");
    long cores = sysconf(_SC_NPROCESSORS_ONLN), most = cores > 128 ? 8 * cores : 1024;
    if (!text || strtoll(text, NULL, 10) <= most) return 0;
    return mt_error_set(error, "OMP_NUM_THREADS is %.40s, and this machine has %ld cores; set it to at most %ld", text,
                        cores, most);
}

static bool mt_word_is_listed(const char *words, const char *word) {
    size_t length = strlen(word);
    for (const char *at = words; *at; at += strspn(at, " ")) {
        size_t listed = strcspn(at, " ");
        if (listed == length && strncmp(at, word, length) == 0) return true;
        at += listed;
    }
    return false;
}

void mt_launch_answer_environment(FILE *file) {
    static const struct {
        const char *names, *answer;
    } rows[] = {
        {"NVTE_FLASH_ATTN NVTE_FUSED_ATTN NVTE_UNFUSED_ATTN NVTE_FUSED_ATTN_BACKEND", "take --attention-backend"},
        {"NVTE_ALLOW_NONDETERMINISTIC_ALGO", "take --deterministic-mode"},
        {"NVTE_DEBUG NVTE_DEBUG_LEVEL", "the first lines of a run have its kernels"},
        {"NVTE_BATCH_MHA_P2P_COMM", "messages choose their order themselves"},
    };
    enum { NUM_ROWS = sizeof rows / sizeof *rows };
    bool is_first = true;
    for (int row = 0; row <= NUM_ROWS; row++) { // the last one: variables without an answer
        bool is_named = false;
        for (char **entry = environ; *entry; entry++) {
            int of = 0, length = (int)strcspn(*entry, "=");
            if (strncmp(*entry, "NVTE_", 5) != 0) continue;
            char name[100];
            snprintf(name, sizeof name, "%.*s", length, *entry);
            while (of < NUM_ROWS && !mt_word_is_listed(rows[of].names, name)) of++;
            if (of != row) continue;
            fprintf(file, "%s%s", is_named ? ", " : is_first ? "Transformer Engine does not run here: " : "; ", name);
            is_named = true, is_first = false;
        }
        if (is_named) fprintf(file, " (%s)", row < NUM_ROWS ? rows[row].answer : "nothing stands in for it");
    }
    if (!is_first) fputs("\n", file);
}

int mt_launch_check(char **argv, mt_error *error) {
    if (mt_launch_check_threads(error) != 0) return -1;

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
static void mt_launch_print_option(const mt_run_options *o, size_t offset, FILE *file) {
    char key[80], *text = mt_option_text(o, mt_option_of(offset));
    mt_option_key(key, mt_option_of(offset));
    fprintf(file, "%s %s\n", key, text);
    free(text);
}

/* Finishes the options for a number of ranks; with --gpu its GPUs must have room for the model too. Returns 0,
 * MT_DOES_NOT_FIT or -1, with error. */
static int mt_launch_try(mt_run_options *o, int64_t ranks, mt_error *error) {
    // derived for the number tried before: other numbers may share experts in another way
    if (!MT_GIVEN(o, stack.expert_tensor_parallel_size)) o->stack.expert_tensor_parallel_size = 0;
    if (mt_train_options_finish(o, ranks, error) != 0) return -1;
    return MT_GIVEN(o, gpu) && !mt_plan_has_room(o, ranks, error) ? MT_DOES_NOT_FIT : 0;
}

/* Other numbers are refused whatever the remaining options are; few numbers divide a batch. */
static bool mt_launch_divides(int64_t ranks, int64_t model, int64_t batch) {
    return model >= 1 && ranks % model == 0 && batch % (ranks / model) == 0;
}

/* Where no number is accepted, the error is that of the largest one that has too little memory, else of the largest one
 * that is a multiple of a model's ranks: it names more than that. */
int mt_launch_print(mt_run_options *o, FILE *file, mt_error *error) {
    bool same_batch =
        o->stack.global_batch_size > 0 || (o->stack.stage == MT_STAGE_RL && o->gradient_accumulation_steps == 0);
    int64_t ranks = o->print_launch, fewest = same_batch ? 1 : ranks; // fewer ranks do not make the batch smaller
    int64_t model =
        o->stack.tensor_model_parallel_size * o->stack.pipeline_model_parallel_size * o->stack.context_parallel_size;
    int64_t returns = MT_GIVEN(o, num_return_sequences) ? o->num_return_sequences : 8;
    int64_t batch = o->stack.global_batch_size > 0 ? o->stack.global_batch_size : o->rollout_batch_size * returns;
    // a data-parallel rank has a sample of the batch
    if (fewest < ranks && model >= 1 && batch >= 1 && batch < ranks / model) ranks = batch * model;
    int64_t named = fewest < ranks && model >= 1 && model <= ranks ? ranks - ranks % model : ranks;
    mt_error other;
    bool fits = true;
    for (;; ranks--) {
        if (ranks < fewest) return -1;
        if (ranks != named && !mt_launch_divides(ranks, model, batch)) continue;
        int status = mt_launch_try(o, ranks, &other);
        if (status == 0) break;
        if (fits && (status == MT_DOES_NOT_FIT || ranks == named)) *error = other;
        if (status == MT_DOES_NOT_FIT) fits = false;
    }
    if (MT_GIVEN(o, gpu) && mt_simulate_check(&o->stack, &other) != 0)
        fprintf(stderr, "warning: --gpu %s: whether it has room is not checked: %s\n", o->gpu, other.text);
    fprintf(file, "ranks %lld\n", (long long)ranks);
    mt_launch_print_option(o, MT_AT(stack.global_batch_size), file);
    mt_launch_print_option(o, MT_AT(device), file);
    mt_launch_print_option(o, MT_AT(exit_signal), file);
    mt_launch_print_option(o, MT_AT(save), file);
    return 0;
}

/* ---- signals */

/* SIGUSR1 saves and stops too where mpirun would kill the ranks after any other signal, unless --exit-signal names
 * another. */
static bool mt_signal_stops(const mt_run_options *o, int i) {
    bool spare = i == MT_EXIT_SIGUSR1 && !MT_GIVEN(o, exit_signal) && isfinite(mt_launch_grace());
    return i == MT_EXIT_SIGTERM || i == MT_EXIT_SIGINT || i == MT_HANGUP || i == (int)o->exit_signal || spare;
}

static const char *mt_signal_spare(const mt_run_options *o) {
    return o->exit_signal == MT_EXIT_SIGUSR2 ? "USR2" : "USR1";
}

void mt_launch_print_grace(const mt_run_options *o, FILE *file) {
    bool asked = o->exit_signal == MT_EXIT_SIGUSR1 || o->exit_signal == MT_EXIT_SIGUSR2; // so does launch.sh
    if (!isfinite(mt_launch_grace()) || !o->save || !o->exit_signal_handler || asked) return;
    fprintf(
        file,
        "Stopping: mpirun kills its ranks %g s after a SIGTERM or Ctrl-C, too soon to end a longer step and save it. "
        "Use kill -%s on\nmpirun, start by launch.sh, or set mpirun --mca odls_base_sigkill_timeout SECONDS.\n\n",
        mt_launch_grace(), mt_signal_spare(o));
}

void mt_signals_set_saved(const mt_run_options *o, int64_t iteration) {
    char saved[120], graceful[400], killed[400];
    if (mt_launch_rank() > 0) return; // rank 0 alone writes the line
    if (!o->save)
        snprintf(saved, sizeof saved, "nothing is saved without --save");
    else if (iteration < 0)
        snprintf(saved, sizeof saved, "this run has saved nothing so far");
    else
        snprintf(saved, sizeof saved, "saved so far: iteration %lld", (long long)iteration);
    snprintf(graceful, sizeof graceful,
             "stopping after this step; %s; the second SIGTERM or Ctrl-C ends the run at once\n", saved);
    snprintf(killed, sizeof killed,
             "stopping after this step, but mpirun kills its ranks %g s after this signal; %s; kill -%s on mpirun "
             "would wait for the step and its save\n",
             mt_launch_grace(), saved, mt_signal_spare(o));
    mt_signals_note(graceful, killed);
}

void mt_signals_select(const mt_run_options *o) {
    bool saves = !o->plan && !o->explain && !o->print_config && !o->print_schedule && o->print_launch == 0;
    bool stops[MT_NUM_SIGNALS];
    if (saves && o->exit_signal_handler) mt_signals_set_saved(o, -1);
    for (int i = 0; i < MT_NUM_SIGNALS; i++) stops[i] = saves && mt_signal_stops(o, i) && o->exit_signal_handler;
    mt_signals_keep(stops);
}
