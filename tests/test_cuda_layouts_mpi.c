/* The equivalence matrix on GPUs, a GPU for each rank: tests/layouts.h. Run by mpirun with as many ranks as there are
 * GPUs: layouts of more ranks are skipped. */
#include "layouts.h"

int main(int argc, char **argv) {
    mt_error error;
    mt_grid_start(&world, &argc, &argv);
    if (!world.world.comm) mt_die("start me with mpirun");
    int answers = mt_cuda_open(world.world.rank, &error) != NULL;
    mt_broadcast(&world.world, &answers, sizeof answers, 0); // without one for every rank some layouts are tried
    if (!answers) {
        printf("skipped: %s\n", error.text);
        mt_grid_stop(&world);
        return 77;
    }
    backend_name = "cuda";
    int failures = run_layout_tests();
    mt_grid_stop(&world);
    return failures;
}
