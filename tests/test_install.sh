#!/bin/sh
# make install puts programs, headers, both libraries and megatron.pc below PREFIX; a program builds with the flags of
# pkg-config against the shared and against the static library, and runs; make uninstall leaves nothing.
set -u
. tests/suite.sh
if ! command -v pkg-config >/dev/null; then
    echo "skipped: pkg-config is absent"
    exit 77
fi
if [ -n "${SANITIZE:-}" ]; then
    echo "skipped: the library of a build with sanitizers needs their flags"
    exit 77
fi

# The settings of the make that runs this suite, without its jobs.
MAKEFLAGS=$(echo "${MAKEFLAGS:-}" | sed 's/--jobserver-[^ ]*//; s/ -j[0-9]*//')
export MAKEFLAGS MAKELEVEL=0
prefix=$work/usr

cat >"$work/program.c" <<'C'
#include "megatron.h"

#include "data/options/options.h"

#include <string.h>

int main(void) {
    printf("%s %s %d\n", mt_version(), MT_VERSION, MT_VERSION_MAJOR);
    const mt_ops *ops = &mt_cpu_ops;
    return strcmp(mt_version(), MT_VERSION) != 0 || strcmp(ops->name, "cpu") != 0;
}
C

installs() {
    make install PREFIX="$prefix" DESTDIR="$1" >"$work/out" 2>"$work/err" || return 1
    for file in bin/megatron-train bin/megatron-infer bin/megatron-preprocess include/megatron/megatron.h \
        include/megatron/data/options/options.h share/man/man1/megatron-train.1 share/man/man1/megatron-infer.1 \
        share/bash-completion/completions/megatron-train share/bash-completion/completions/megatron-infer \
        share/megatron/machines/h200.json lib/libmegatron.a lib/libmegatron.so lib/pkgconfig/megatron.pc; do
        [ -s "$1$prefix/$file" ] || { echo "no $file" && return 1; }
    done
}

programs_run() {
    "$prefix/bin/megatron-train" --help >"$work/out" 2>"$work/err" &&
        "$prefix/bin/megatron-infer" --help >"$work/out" 2>"$work/err" || return 1
    # its machines are found from any folder
    (cd "$work" && "$prefix/bin/megatron-train" --num-layers 1 --hidden-size 64 --num-attention-heads 1 \
        --vocab-size 64 --seq-length 64 --bf16 --global-batch-size 1 --gpus 1 --explain) >"$work/out" 2>"$work/err"
}

# build [--static]: compiles the program with the flags of pkg-config.
build() {
    # The flags are lists of words.
    # shellcheck disable=SC2046
    ${CC:-cc} -std=c11 "${source:-$work/program.c}" -o "${output:-$work/program}" \
        $(PKG_CONFIG_PATH=$prefix/lib/pkgconfig pkg-config --cflags --libs "$@" megatron) >"$work/out" 2>"$work/err"
}

shared_library_links() {
    build && LD_LIBRARY_PATH=$prefix/lib "$work/program" >"$work/out" 2>"$work/err" &&
        LD_LIBRARY_PATH=$prefix/lib ldd "$work/program" |
        grep -q "$prefix/lib/libmegatron.so.$(sed -n 's/^#define MT_VERSION_MAJOR *//p' megatron.h) "
}

examples_link() {
    for example in notes/examples/*.c; do
        source=$example output=$work/example build || { echo "$example" && return 1; }
    done
}

static_library_links() {
    rm -f "$prefix"/lib/libmegatron.so*
    build --static && "$work/program" >"$work/out" 2>"$work/err" && ! ldd "$work/program" | grep -q libmegatron
}

version_is_the_header_s() {
    PKG_CONFIG_PATH=$prefix/lib/pkgconfig pkg-config --exact-version="$("$work/program" | cut -d' ' -f1)" megatron
}

# The numbers of the version and its text are the same.
version_numbers_agree() {
    numbers=$(sed -n 's/^#define MT_VERSION_[A-Z]* *\([0-9]*\)$/\1/p' megatron.h | tr '\n' .)
    says "^#define MT_VERSION *\"${numbers%.}\(-dev\)*\"\$" megatron.h
}

uninstall_leaves_nothing() {
    make uninstall PREFIX="$prefix" >"$work/out" 2>"$work/err" && left=$(find "$prefix" ! -type d) && [ -z "$left" ] &&
        left=$(find "$prefix" -name '*megatron*') && [ -z "$left" ]
}

check installs installs ''
check installs_below_destdir installs "$work/stage"
check programs_run programs_run
check shared_library_links shared_library_links
check examples_link examples_link
check static_library_links static_library_links
check version_is_the_header_s version_is_the_header_s
check version_numbers_agree version_numbers_agree
check uninstall_leaves_nothing uninstall_leaves_nothing
exit $failed
