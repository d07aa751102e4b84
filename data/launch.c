/* launch.c: how a run starts and stops. */
#include "launch.h"

#include "layouts.h"
#include "option_table.h"
#include "options.h"
#include "planner.h"
#include "simulate.h"

#include <math.h>
#include <poll.h>
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

int mt_launch_ranks_here(void) {
    static const char *const names[] = {"OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_NTASKS_PER_NODE"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (getenv(names[i])) return mt_launch_variable(names[i], 0);
    return 0;
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
    int64_t returns = MT_GIVEN(o, num_return_sequences) ? o->num_return_sequences : 8;
    int64_t batch = o->global_batch_size > 0 ? o->global_batch_size : o->rollout_batch_size * returns;
    // a data-parallel rank has a sample of the batch
    if (fewest < ranks && model >= 1 && batch >= 1 && batch < ranks / model) ranks = batch * model;
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

enum { MT_HANGUP = 4, MT_NUM_SIGNALS };

/* Those of --exit-signal, and that of a terminal that is closed. */
static const int mt_signals[MT_NUM_SIGNALS] = {[MT_EXIT_SIGTERM] = SIGTERM,
                                               [MT_EXIT_SIGINT] = SIGINT,
                                               [MT_EXIT_SIGUSR1] = SIGUSR1,
                                               [MT_EXIT_SIGUSR2] = SIGUSR2,
                                               [MT_HANGUP] = SIGHUP};
static volatile sig_atomic_t mt_signal_counts[MT_NUM_SIGNALS];
static volatile sig_atomic_t mt_signal_ends;  // a first SIGTERM, SIGINT or SIGHUP came
static volatile sig_atomic_t mt_signal_noted; // its line is written
static bool mt_output_is_watched;             // a closed pipe of the standard output stops the run
static double mt_signal_first;                // when it came
static double mt_signal_grace;                // mt_launch_grace's

/* The line of the first signal: for one that mpirun follows by a SIGKILL, and for all others. The handler reads the
 * pair that is not being written. */
static char mt_signal_notes[2][2][400];
static volatile sig_atomic_t mt_signal_note;

enum { MT_KILLED, MT_GRACEFUL };

double mt_launch_grace(void) {
    static const char *const names[] = {"OMPI_MCA_odls_base_sigkill_timeout", "PRTE_MCA_odls_base_sigkill_timeout"};
    if (!getenv("OMPI_COMM_WORLD_SIZE")) return INFINITY;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (getenv(names[i])) return atof(getenv(names[i]));
    return 1;
}

/* SIGUSR1 saves and stops too where mpirun would kill the ranks after any other signal, unless --exit-signal names
 * another. */
static bool mt_signal_stops(const mt_options *o, int i) {
    bool spare = i == MT_EXIT_SIGUSR1 && !MT_GIVEN(o, exit_signal) && isfinite(mt_launch_grace());
    return i == MT_EXIT_SIGTERM || i == MT_EXIT_SIGINT || i == MT_HANGUP || i == (int)o->exit_signal || spare;
}

static const char *mt_signal_spare(const mt_options *o) {
    return o->exit_signal == MT_EXIT_SIGUSR2 ? "USR2" : "USR1";
}

void mt_launch_print_grace(const mt_options *o, FILE *file) {
    bool asked = o->exit_signal == MT_EXIT_SIGUSR1 || o->exit_signal == MT_EXIT_SIGUSR2; // so does launch.sh
    if (!isfinite(mt_launch_grace()) || !o->save || !o->exit_signal_handler || asked) return;
    fprintf(
        file,
        "Stopping: mpirun kills its ranks %g s after a SIGTERM or Ctrl-C, too soon to end a longer step and save it. "
        "Use kill -%s on\nmpirun, start by launch.sh, or set mpirun --mca odls_base_sigkill_timeout SECONDS.\n\n",
        mt_launch_grace(), mt_signal_spare(o));
}

void mt_signals_set_saved(const mt_options *o, int64_t iteration) {
    char saved[120];
    if (mt_launch_rank() > 0) return; // rank 0 alone writes the line
    int next = !mt_signal_note;
    char(*notes)[400] = mt_signal_notes[next];
    if (!o->save)
        snprintf(saved, sizeof saved, "nothing is saved without --save");
    else if (iteration < 0)
        snprintf(saved, sizeof saved, "this run has saved nothing so far");
    else
        snprintf(saved, sizeof saved, "saved so far: iteration %lld", (long long)iteration);
    snprintf(notes[MT_GRACEFUL], sizeof notes[0],
             "stopping after this step; %s; a second SIGTERM or Ctrl-C ends the run at once\n", saved);
    snprintf(notes[MT_KILLED], sizeof notes[0],
             "stopping after this step, but mpirun kills its ranks %g s after this signal; %s; kill -%s on mpirun "
             "would wait for the step and its save\n",
             mt_launch_grace(), saved, mt_signal_spare(o));
    mt_signal_note = next;
}

/* Only async-signal-safe calls. timeout(1), a terminal whose launcher forwards Ctrl-C, and systemd send one request
 * twice within a moment. */
static void mt_signal_count(int number) {
    const double moment = 0.25;
    bool ends = number == SIGTERM || number == SIGINT || number == SIGHUP;
    int i = 0;
    while (mt_signals[i] != number) i++;
    mt_signal_counts[i] = mt_signal_counts[i] + 1;
    if (ends && !mt_signal_ends) {
        mt_signal_first = mt_time();
        mt_signal_ends = true;
    } else if (ends && mt_time() - mt_signal_first > moment) {
        sigset_t all;
        sigemptyset(&all);
        signal(number, SIG_DFL);
        sigprocmask(SIG_SETMASK, &all, NULL);
        raise(number);
        _exit(128 + number); // the first process of a container, which signals do not end
    }
    const char *note = mt_signal_notes[mt_signal_note][ends && isfinite(mt_signal_grace) ? MT_KILLED : MT_GRACEFUL];
    if (mt_signal_noted || !*note) return;
    mt_signal_noted = true;
    if (isatty(STDERR_FILENO)) (void)!write(STDERR_FILENO, "\n", 1);
    (void)!write(STDERR_FILENO, note, strlen(note));
}

/* On a stack of its own: oneDNN 2.6 keeps values of a product below the stack pointer, where the frame of a handler on
 * the stack of the thread would overwrite them; its next stores then went anywhere. */
static void mt_signal_catch(int number, int flags) {
    static char stack[1 << 16]; // a frame with all registers of AVX-512 and AMX takes 11 kB
    const stack_t apart = {.ss_sp = stack, .ss_size = sizeof stack};
    struct sigaction action = {.sa_handler = mt_signal_count, .sa_flags = flags | SA_ONSTACK};
    sigaltstack(&apart, NULL);
    for (int i = 0; i < MT_NUM_SIGNALS; i++) sigaddset(&action.sa_mask, mt_signals[i]);
    sigaction(number, &action, NULL);
}

/* True for the signal of a closed terminal under nohup. */
static bool mt_signal_is_ignored(int number) {
    struct sigaction action;
    return number == SIGHUP && sigaction(number, NULL, &action) == 0 && action.sa_handler == SIG_IGN;
}

void mt_signals_hold(void) {
    mt_signal_grace = mt_launch_grace();
    for (int i = 0; i < MT_NUM_SIGNALS; i++)
        if (!mt_signal_is_ignored(mt_signals[i])) mt_signal_catch(mt_signals[i], SA_RESTART);
    signal(SIGXFSZ, SIG_IGN); // exceeding a file size limit is then a write error
}

void mt_signals_select(const mt_options *o) {
    bool saves = !o->plan && !o->explain && !o->print_config && !o->print_schedule && o->print_launch == 0;
    if (saves && o->exit_signal_handler) {
        mt_signals_set_saved(o, -1);
        mt_output_is_watched = !mt_signal_is_ignored(SIGHUP);
        signal(SIGPIPE, SIG_IGN);
    }
    for (int i = 0; i < MT_NUM_SIGNALS; i++) {
        if (mt_signal_is_ignored(mt_signals[i])) continue;
        if (saves && mt_signal_stops(o, i) && o->exit_signal_handler) {
            mt_signal_catch(mt_signals[i], 0); // ends a print to a terminal that an ending mpirun no longer reads
            continue;
        }
        signal(mt_signals[i], SIG_DFL);
        if (mt_signal_counts[i] > 0) raise(mt_signals[i]);
        mt_signal_counts[i] = 0;
    }
}

/* True once nobody reads the pipe of the standard output any more; the first time, says so. Not every closed pipe is
 * the user's wish to stop: Ctrl-C ends the tee behind a run before the run has saved. */
static bool mt_output_is_closed(void) {
    static bool closed;
    struct pollfd output = {.fd = STDOUT_FILENO};
    if (closed || !mt_output_is_watched) return closed;
    closed = poll(&output, 1, 0) > 0 && (output.revents & POLLERR) != 0;
    const char *note = mt_signal_notes[mt_signal_note][MT_GRACEFUL];
    if (!closed || mt_signal_noted || !*note) return closed;
    mt_signal_noted = true;
    fprintf(stderr, "nobody reads the standard output any more: %s", note);
    return true;
}

bool mt_stop_requested(void) {
    bool any = mt_output_is_closed();
    for (int i = 0; i < MT_NUM_SIGNALS; i++) any = any || mt_signal_counts[i] > 0;
    return any;
}
