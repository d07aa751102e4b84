#!/bin/sh
# Finds what this machine has by compiling and linking a small program with each library, prints a line for each with
# what is done without it, and writes the flags to FILE, which the Makefile includes.
#
#   usage: CC=gcc WITHOUT="mpi blas" ./probe.sh FILE
#
# WITHOUT names libraries to leave out although they are here. NVCC and CUDA_HOME say where CUDA is, if not in its usual
# place.
set -u
config=$1
CC=${CC:-cc}
without=" ${WITHOUT:-} "
work=$config.probe
failed=no
cflags='' libs=''

mkdir -p "$work"
trap 'rm -rf "$work"' EXIT

# What pkg-config knows of a package, as CFLAGS|LIBS.
package() {
    printf '%s|%s' "$(pkg-config --cflags "$1" 2>/dev/null)" "$(pkg-config --libs "$1" 2>/dev/null)"
}

# The words of a compiler's command line that compiling needs.
compile_words() {
    for word in "$@"; do
        case $word in -I* | -D* | -pthread) printf '%s ' "$word" ;; esac
    done
}

# program HEADERS STATEMENT: the next program to try.
program() {
    for header in $1; do echo "#include <$header>"; done >"$work/probe.c"
    echo "int main(void) { $2 }" >>"$work/probe.c"
}

# links CFLAGS|LIBS...: whether the program compiles and links with one of the candidates, which is then in found_cflags
# and found_libs. Headers of libraries are system headers: their warnings are not ours.
links() {
    for candidate in "$@"; do
        found_cflags=$(echo "${candidate%%|*}" | sed 's/-I */-isystem /g')
        found_libs=${candidate#*|}
        # The flags are lists of words.
        # shellcheck disable=SC2086
        $CC -std=c11 -D_GNU_SOURCE -Werror=implicit-function-declaration $found_cflags "$work/probe.c" \
            -o "$work/probe" $found_libs >"$work/log" 2>&1 && return 0
    done
    return 1
}

wanted() {
    case $without in *" $1 "*) return 1 ;; esac
}

lower() { echo "$1" | tr '[:upper:]' '[:lower:]'; }
upper() { echo "$1" | tr '[:lower:]' '[:upper:]'; }
yes_line() { printf '  ✓ %-9s %s\n' "$1" "$2"; }
# no_line NAME WHAT_IS_DONE_WITHOUT [REMEDY]
no_line() {
    if wanted "$(lower "$1")"; then remedy=${3:+; $3}; else remedy=" (switched off)"; fi
    printf '  ✗ %-9s %s%s\n' "$1" "$2" "$remedy"
}

# look NAME IF_FOUND IF_NOT CANDIDATE...: tries the program, prints the line and remembers the flags.
look() {
    name=$1 if_found=$2 if_not=$3
    shift 3
    if wanted "$(lower "$name")" && links "$@"; then
        yes_line "$name" "$if_found"
        echo "HAVE_$(upper "$name") = 1" >>"$work/config"
        return 0
    fi
    no_line "$name" "$if_not" "$advice"
    return 1
}

# keep MACRO: the library just found becomes part of every program.
keep() {
    cflags="$cflags $found_cflags ${1:+-D$1}"
    libs="$libs $found_libs"
}

program stdio.h 'return puts("");'
if ! links '|'; then
    echo "  ✗ compiler  $CC does not build a C11 program: make deps installs one, or name another with CC=..." >&2
    cat "$work/log" >&2
    exit 1
fi
echo "What this machine has ($CC; make probe looks again):"
echo "# Written by probe.sh" >"$work/config"

advice='make deps installs it'
program mpi.h 'return MPI_Init(0, 0);'
shown=$(mpicc -show 2>/dev/null | cut -d' ' -f2-)
# shellcheck disable=SC2086
look MPI 'several ranks, started by mpirun' 'one rank only' \
    "$(mpicc --showme:compile 2>/dev/null)|$(mpicc --showme:link 2>/dev/null)" \
    "$(compile_words $shown)|$shown" "$(package ompi-c)" "$(package mpich)" && keep MT_HAVE_MPI

program cblas.h 'return cblas_isamax(0, 0, 1) != 0;'
if look BLAS 'matrix products on the CPU' 'plain C loops multiply matrices, many times slower' \
    '|-lopenblas' "$(package openblas)" '|-lcblas -lblas' "$(package cblas)" '|-lblas'; then
    keep MT_HAVE_BLAS
fi

program omp.h 'return omp_get_max_threads() < 1;'
look OpenMP 'threads within a rank' "one thread in each rank" \
    '-fopenmp|-fopenmp' && keep MT_HAVE_OPENMP

program jansson.h 'return json_null() == 0;'
if look jansson 'JSON' 'REQUIRED and not found' '|-ljansson' "$(package jansson)"; then
    keep ""
else
    failed=yes
fi

program yaml.h 'return yaml_get_version_string() == 0;'
look yaml '--config FILE.yaml' '--config FILE.yaml is refused' \
    '|-lyaml' "$(package yaml-0.1)" && keep MT_HAVE_YAML

program pcre2.h 'return pcre2_config_8(PCRE2_CONFIG_VERSION, 0) < 0;'
look pcre2 'tokenizer patterns' 'tokenizers with a pattern (GPT-2, Llama 3, Qwen) are refused' \
    '-DPCRE2_CODE_UNIT_WIDTH=8|-lpcre2-8' "-DPCRE2_CODE_UNIT_WIDTH=8 $(package libpcre2-8)" && keep MT_HAVE_PCRE2

program utf8proc.h 'return utf8proc_version() == 0;'
look utf8proc 'Unicode normal forms' 'tokenizers with a Unicode normal form (Qwen) are refused' \
    '|-lutf8proc' "$(package libutf8proc)" && keep MT_HAVE_UTF8PROC

program 'stdarg.h stddef.h stdint.h setjmp.h cmocka.h' 'cmocka_set_message_output(CM_OUTPUT_STDOUT);'
if look cmocka 'make test' 'make test is refused' '|-lcmocka' "$(package cmocka)"; then
    echo "CMOCKA_LIBS = $found_libs" >>"$work/config"
    echo "CMOCKA_CFLAGS = $found_cflags" >>"$work/config"
fi

# CUDA: nvcc compiles a kernel and links it with the matrix library; then its companions, as C libraries beside it.
nvcc=${NVCC:-$(command -v nvcc || echo "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc")}
cuda=$(dirname "$(dirname "$nvcc")")
cuda_libs="-L$cuda/lib64 -Wl,-rpath,$cuda/lib64 -lcublasLt -lcublas -lcudart"
advice=''
backend=no
for source in cuda/*.cu; do [ -e "$source" ] && backend=yes; done
cat >"$work/probe.cu" <<'CUDA'
#include <cublas_v2.h>
__global__ void kernel(float *x) { *x = 1; }
int main(void) { cublasHandle_t handle; kernel<<<1, 1>>>(0); return cublasCreate(&handle); }
CUDA
if [ $backend = yes ]; then
    cuda_used='--device cuda' cuda_missing='--device cuda is refused: everything runs on the CPU'
    nccl_used='several GPUs' nccl_missing='one GPU only'
    cudnn_used="cuDNN's attention" cudnn_missing='our own attention kernels'
else
    cuda_used='found, not used: this version has no CUDA backend yet'
    cuda_missing='nothing lost: this version has no CUDA backend yet'
    nccl_used=$cuda_used nccl_missing=$cuda_missing cudnn_used=$cuda_used cudnn_missing=$cuda_missing
fi
if wanted cuda && "$nvcc" "$work/probe.cu" -o "$work/probe" -lcublasLt -lcublas >"$work/log" 2>&1; then
    yes_line CUDA "$cuda_used"
    {
        echo "HAVE_CUDA = 1"
        echo "NVCC = $nvcc"
        echo "CUDA_CFLAGS = -isystem $cuda/include"
        echo "CUDA_LIBS = $cuda_libs -lstdc++"
    } >>"$work/config"
    program nccl.h 'int v; return ncclGetVersion(&v);'
    look NCCL "$nccl_used" "$nccl_missing" "-I$cuda/include|-lnccl $cuda_libs" &&
        echo "NCCL_LIBS = $found_libs" >>"$work/config"
    program cudnn.h '_Static_assert(CUDNN_VERSION >= 91000, "9.10 or later"); return cudnnGetVersion() == 0;'
    look cuDNN "$cudnn_used" "$cudnn_missing" "-I$cuda/include|-lcudnn $cuda_libs" &&
        echo "CUDNN_LIBS = $found_libs" >>"$work/config"
else
    no_line CUDA "$cuda_missing"
    no_line NCCL "$nccl_missing"
    no_line cuDNN "$cudnn_missing"
fi

if wanted gnuplot && gnuplot -e 'set terminal svg; set terminal dumb' >/dev/null 2>&1; then
    yes_line gnuplot 'make plot'
else
    no_line gnuplot 'no loss curve is drawn' 'make deps installs it'
fi

[ $failed = no ] || exit 1
{
    echo "FOUND_CFLAGS =$cflags"
    echo "FOUND_LIBS =$libs"
} >>"$work/config"
mv "$work/config" "$config"
