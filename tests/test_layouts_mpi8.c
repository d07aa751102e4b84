/* test_layouts_mpi8.c: the layouts of tests/layouts.h on the CPU. Run by mpirun. */
// Sections of megatron.c: §6 §7 §7a §9f §9h §10c §11 §12a §14 §15b
#include "layouts.h"

int main(int argc, char **argv) {
    // Every message waits for its receiver (rendezvous), as large ones do, so a schedule with too few buffers hangs.
    setenv("OMPI_MCA_btl_vader_eager_limit", "256", 1);
    mt_grid_start(&world, &argc, &argv);
    if (!world.world.comm) mt_die("start me with mpirun");
    jobs_open();
    int failures = run_layout_tests();
    mt_grid_stop(&world);
    return failures;
}
