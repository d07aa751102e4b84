#!/bin/sh
# Finds libraries by compiling and linking a small program with each. Prints a line for each library: its use, or the
# effect of its absence. Writes the flags to FILE, which the Makefile includes.
#
#   usage: CC=gcc WITHOUT="mpi blas" data/scripts/probe.sh FILE      from the root of the project
#
# WITHOUT names libraries to leave out. NVCC and CUDA_HOME say where CUDA is, unless it is in the PATH or in
# /usr/local/cuda. CUDA_ARCH names the architectures that the user asked for; without it, CUDA is compiled only where a
# GPU answers.
set -u
config=$1
CC=${CC:-cc}
without=" ${WITHOUT:-} "
work=$config.probe
failed=no
cflags='' libs=''

mkdir -p "$work"
trap 'rm -rf "$work"' EXIT

# package NAME: the flags of a package by pkg-config, as CFLAGS|LIBS.
package() {
    printf '%s|%s' "$(pkg-config --cflags "$1" 2>/dev/null)" "$(pkg-config --libs "$1" 2>/dev/null)"
}

# compile_words WORDS...: the words of a compiler's command line that the preprocessor and the compiler need.
compile_words() {
    for word in "$@"; do
        case $word in -I* | -D* | -pthread) printf '%s ' "$word" ;; esac
    done
}

# program HEADERS STATEMENT: writes the next program to try.
program() {
    for header in $1; do echo "#include <$header>"; done >"$work/probe.c"
    echo "int main(void) { $2 }" >>"$work/probe.c"
}

# links CFLAGS|LIBS...: succeeds if the program compiles and links with one of the candidates, and leaves that one in
# found_cflags and found_libs. Headers of libraries become system headers, so that they give no warnings.
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
# no_line NAME EFFECT [REMEDY]
no_line() {
    if wanted "$(lower "$1")"; then remedy=${3:+; $3}; else remedy=" (switched off)"; fi
    printf '  ✗ %-9s %s%s\n' "$1" "$2" "$remedy"
}

# look NAME IF_FOUND IF_NOT CANDIDATE...: tries the program, prints the line and writes HAVE_NAME.
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

# keep MACRO: compiles and links every program with the library that was found last.
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
echo "# Written by data/scripts/probe.sh" >"$work/config"

advice='make deps installs it'
program mpi.h 'return MPI_Init(0, 0);'
shown=$(mpicc -show 2>/dev/null | cut -d' ' -f2-)
# shellcheck disable=SC2086
look MPI 'several ranks, started by mpirun' 'one rank only' \
    "$(mpicc --showme:compile 2>/dev/null)|$(mpicc --showme:link 2>/dev/null)" \
    "$(compile_words $shown)|$shown" "$(package ompi-c)" "$(package mpich)" && keep MT_HAVE_MPI

program cblas.h 'return cblas_isamax(0, 0, 1) != 0;'
if look BLAS 'matrix products on the CPU' 'kernels of megatron.c multiply matrices' \
    '|-lopenblas' "$(package openblas)" '|-lcblas -lblas' "$(package cblas)" '|-lblas'; then
    keep MT_HAVE_BLAS
    # An OpenBLAS that does not know the processor takes kernels of an older one: the answer of megatron.c.
    {
        echo '#include <cblas.h>'
        echo '#include <stdbool.h>'
        echo '#include <stdio.h>'
        echo '#include <string.h>'
        awk '/^static bool mt_openblas_is_old/, /^}/' megatron.c
        echo '#if defined OPENBLAS_THREAD && (defined __x86_64__ || defined __i386__)'
        echo 'int main(void) {'
        echo '    if (__builtin_cpu_supports("avx2") && mt_openblas_is_old()) puts(openblas_get_corename());'
        echo '}'
        echo '#else'
        echo 'int main(void) { return mt_openblas_is_old(); }'
        echo '#endif'
    } >"$work/probe.c"
    if links "$found_cflags|$found_libs" && core=$("$work/probe" 2>/dev/null) && [ -n "$core" ]; then
        echo "              OpenBLAS does not know this processor and takes kernels of $core: kernels of megatron.c" \
            "replace them"
    fi
fi

program omp.h 'return omp_get_max_threads() < 1;'
look OpenMP 'threads within a rank' "one thread in each rank" \
    '-fopenmp|-fopenmp' && keep MT_HAVE_OPENMP

if grep -q HAVE_BLAS "$work/config" && grep -q HAVE_OPENMP "$work/config"; then
    # A oneDNN with other threads than OpenMP's would start them in each thread of a parallel region.
    program dnnl.h "_Static_assert(DNNL_CPU_RUNTIME == DNNL_RUNTIME_OMP, \"threads\");
        return dnnl_sgemm('N', 'N', 1, 1, 1, 1, 0, 1, 0, 1, 0, 0, 1);"
    look dnnl 'faster matrix products on the CPU (oneDNN)' 'BLAS alone multiplies matrices on the CPU' \
        '|-ldnnl' "$(package dnnl)" && keep MT_HAVE_DNNL
fi

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

program microhttpd.h '_Static_assert(MHD_VERSION >= 0x00096900, "0.9.69 or later"); return MHD_get_version() == 0;'
look http 'infer --serve (libmicrohttpd)' 'infer --serve is refused' \
    '|-lmicrohttpd' "$(package libmicrohttpd)" && keep MT_HAVE_HTTP

program png.h 'return png_access_version_number() == 0;'
look png 'pictures in PNG (libpng)' 'pictures in PNG are refused' '|-lpng' "$(package libpng)" && keep MT_HAVE_PNG

program 'stdio.h jpeglib.h' 'struct jpeg_error_mgr errors; return jpeg_std_error(&errors) == 0;'
look jpeg 'pictures in JPEG (libjpeg)' 'pictures in JPEG are refused' '|-ljpeg' "$(package libjpeg)" &&
    keep MT_HAVE_JPEG

program 'stdarg.h stddef.h stdint.h setjmp.h cmocka.h' 'cmocka_set_message_output(CM_OUTPUT_STDOUT);'
if look cmocka 'make test' 'make test is refused' '|-lcmocka' "$(package cmocka)"; then
    echo "CMOCKA_LIBS = $found_libs" >>"$work/config"
    echo "CMOCKA_CFLAGS = $found_cflags" >>"$work/config"
fi

# CUDA: nvcc compiles a kernel and links it with cuBLAS. NCCL and cuDNN are C libraries.
nvcc=${NVCC:-$(command -v nvcc || echo "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc")}
cuda=$(dirname "$(dirname "$nvcc")")
cuda_libs="-L$cuda/lib64 -Wl,-rpath,$cuda/lib64 -lcublasLt -lcublas -lcudart"
advice=''
cat >"$work/probe.cu" <<'CUDA'
#include <cublas_v2.h>
__global__ void kernel(float *x) { *x = 1; }
int main(void) { cublasHandle_t handle; kernel<<<1, 1>>>(0); return cublasCreate(&handle); }
CUDA
# A driver that does not answer is reported on the same output.
capabilities=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | grep -x '[0-9.]*' | sort -u)
if [ -n "${CUDA_ARCH:-}" ] || echo "$capabilities" | awk '$1 + 0 >= 7.5 { found = 1 } END { exit !found }'; then
    compiled=''
elif [ -n "$capabilities" ]; then
    compiled="not compiled: compute capability $(echo $capabilities), below 7.5, is not supported"
else
    compiled='no GPU answers, so it is not compiled; make CUDA_ARCH=90a compiles it'
fi
if wanted cuda && "$nvcc" "$work/probe.cu" -o "$work/probe" -lcublasLt -lcublas >"$work/log" 2>&1; then
    yes_line CUDA "${compiled:---device cuda}"
    {
        echo "HAVE_CUDA = 1"
        echo "NVCC = $nvcc"
        echo "CUDA_CFLAGS = -isystem $cuda/include"
        echo "CUDA_LIBS = $cuda_libs -lstdc++"
    } >>"$work/config"
    program nccl.h 'int v; return ncclGetVersion(&v);'
    look NCCL "${compiled:+with CUDA: }several GPUs" 'one GPU only' "-I$cuda/include|-lnccl $cuda_libs" &&
        echo "NCCL_LIBS = $found_libs" >>"$work/config"
    program cudnn.h '_Static_assert(CUDNN_VERSION >= 91000, "9.10 or later"); return cudnnGetVersion() == 0;'
    look cuDNN "${compiled:+with CUDA: }attention by cuDNN" 'the attention kernels of cuda/' \
        "-I$cuda/include|-lcudnn $cuda_libs" &&
        echo "CUDNN_LIBS = $found_libs" >>"$work/config"
else
    no_line CUDA '--device cuda is refused: everything runs on the CPU'
    no_line NCCL 'one GPU only'
    no_line cuDNN 'the attention kernels of cuda/'
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
