/* The equivalence matrix on the CPU: tests/layouts.h. Run by mpirun. */
#include "layouts.h"

int main(int argc, char **argv) {
    // Messages wait for their receivers, as large ones do, so that a schedule with too little room for them hangs.
    setenv("OMPI_MCA_btl_vader_eager_limit", "256", 1);
    mt_grid_start(&world, &argc, &argv);
    if (!world.world.comm) mt_die("start me with mpirun");
    int failures = run_layout_tests();
    mt_grid_stop(&world);
    return failures;
}
