#!/bin/sh
# notes/examples/kernels.cu, the program of notes/gpus.md: it is compiled where nvcc is, its results are right where a
# GPU answers, and the page has its steps and the rows of the lab notes. MT_EXAMPLES is its folder.
set -u
. tests/suite.sh
kernels=${MT_EXAMPLES:-}/kernels
nvcc=${NVCC:-$(command -v nvcc || echo "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc")}

# Names of the steps in the source, in its order.
steps_of_the_source() {
    sed -n 's/^ *{"\([1-9] [^"]*\)", (const void \*).*/\1/p' notes/examples/kernels.cu
}

# rows_of PAGE: its table of steps, "| 1 a thread for each row | 1.234 | ...".
rows_of() {
    grep '^| [1-4] [a-zA-Z]' "$1"
}

# Registers that do not fit are written to memory; no step may need that, on any kind of card.
compiles_without_spills() {
    for arch in 80 90a; do
        "$nvcc" -std=c++17 -O3 -arch="sm_$arch" -cubin -Xptxas -v -Werror all-warnings -o "$work/cubin" \
            notes/examples/kernels.cu >"$work/out" 2>"$work/err" || return 1
        cat "$work/out" >>"$work/err"
        [ "$(grep -c 'Compiling entry function' "$work/err")" -ge 10 ] &&
            ! grep 'bytes spill stores' "$work/err" | grep -qv ' 0 bytes spill stores, 0 bytes spill loads' || return 1
    done
}

# Every step's result is that of float64; a card without wgmma leaves out the last one, and no GPU all, in words.
is_right() {
    "$kernels" >"$work/out" 2>"$work/err" || return 1
    ! grep -q WRONG "$work/out" || return 1
    grep -q '^kernels: skipped: ' "$work/out" && return
    steps_of_the_source | while read -r step; do
        grep -F "$step" "$work/out" | grep -q '% \|: skipped: needs a card' || exit 1
    done && [ "$(grep -c '%' "$work/out")" -ge 7 ]
}

# The page shows each step of the source, in this order, and the numbers of the lab notes.
page_has_the_steps() {
    rows_of notes/gpus.md >"$work/out"
    steps_of_the_source >"$work/steps"
    [ "$(wc -l <"$work/steps")" = 8 ] && sed 's/^| //; s/ *|.*//' "$work/out" | diff "$work/steps" - >"$work/err" &&
        awk '/^## / { on = /^## Kernels from naive to fast/ } on' notes/lab.md >"$work/lab" &&
        rows_of "$work/lab" | diff - "$work/out" >"$work/err"
}

# Occupancy of the page's experiment: the threads and the shared memory of its rows are those of the source.
page_has_the_sizes() {
    awk '$1 ~ /^(softmax|product)_[a-z]+$/ && NF == 4 { print $1, $2, $4 }' notes/gpus.md | sort -u >"$work/out"
    cat >"$work/sizes.c" <<END
#include <stdio.h>
$(grep '^static constexpr int' notes/examples/kernels.cu | sed 's/^static constexpr int/enum {/; s/;.*/ };/')
int main(void) {
    printf("product_mma %d %g\n", THREADS, MMA_SHARED / 1024.0);
    printf("product_shared %d %g\n", THREADS, 2 * SLAB * PADDED * 4 / 1024.0);
    printf("product_wgmma %d %g\n", WORKERS + 32, HOPPER_SHARED / 1024.0);
    printf("softmax_registers %d 0\nsoftmax_thread 64 0\nsoftmax_warp 256 0\n", THREADS);
    return 0;
}
END
    ${CC:-cc} -o "$work/sizes" "$work/sizes.c" 2>"$work/err" && "$work/sizes" | diff - "$work/out" >"$work/err"
}

if [ -x "$nvcc" ]; then
    check kernels_compile_without_spills compiles_without_spills
else
    echo "skipped: kernels_compile_without_spills, nvcc is absent"
fi
if [ -x "$kernels" ]; then
    check kernels_are_right is_right
    sed -n 's/^kernels: skipped/skipped: the results/p' "$work/out" 2>/dev/null
else
    echo "skipped: kernels_are_right, built without nvcc"
fi
check page_has_the_steps page_has_the_steps
check page_has_the_sizes page_has_the_sizes
exit $failed
