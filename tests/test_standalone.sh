#!/bin/sh
# megatron.c compiles with no package installed and no -D, under gcc and clang, and includes headers of libc alone;
# megatron.h, its macros and the headers of data/ serve C++ as well. The companions in data/ call megatron.c, never the
# other way round, and no companion calls another that needs it.
set -u
. tests/suite.sh
strict='-Wall -Wextra -pedantic -Werror'

cat >"$work/macros.cc" <<'E2'
#include "megatron.h"

int main() {
    const mt_grid *grid = &mt_grid_of_one;
    mt_error error;
    MT_CHECK(grid->world.size == 1);
    return mt_error_set(&error, "%s", MT_VERSION) == -1 ? 0 : 1;
}
E2

compiles_alone() {
    # shellcheck disable=SC2086
    "$1" -std=c11 $strict -c megatron.c -o "$work/megatron.o" >"$work/out" 2>"$work/err"
}

# An example trains with megatron.c alone: its loss falls below 1.
trains_alone() {
    # shellcheck disable=SC2086
    "$1" -std=c11 $strict -I. notes/examples/train_from_arrays.c "$work/megatron.o" -lm -o "$work/program" \
        >"$work/out" 2>"$work/err" && "$work/program" >"$work/out" 2>"$work/err" &&
        awk '/^step/ { loss = $4 } END { exit !(loss != "" && loss < 1) }' "$work/out"
}

# So do all examples that include nothing of data/.
builds_alone() {
    examples=$(grep -L '"data/' notes/examples/*.c) && [ "$(echo "$examples" | wc -w)" -gt 4 ] || return 1
    for example in $examples; do
        # shellcheck disable=SC2086
        "$1" -std=c11 $strict -I. "$example" "$work/megatron.o" -lm -o "$work/program" >"$work/out" 2>"$work/err" ||
            return 1
    done
}

# Files of data/ copied out, with the other files that README names, compile with jansson alone: no -D of another
# library, no header of the build.
companions_compile_alone() {
    mkdir -p "$work/copy/cuda" && cp megatron.h "$work/copy" && cp cuda/limits.h "$work/copy/cuda" || return 1
    for wing in data/*/; do mkdir -p "$work/copy/$wing" && cp "$wing"*.[ch] "$work/copy/$wing" 2>/dev/null; done
    rm "$work/copy/data/datasets/preprocess.c"
    # shellcheck disable=SC2086
    (cd "$work/copy" && ${CC:-cc} -std=c11 -D_GNU_SOURCE -Wall -Wextra -Werror -I. -fsyntax-only data/*/*.c) \
        >"$work/out" 2>"$work/err"
}

# The headers that the compiler reads: none of a package, and none of data/ or cuda/.
includes_libc_alone() {
    "$1" -std=c11 -M megatron.c >"$work/out" 2>"$work/err" || return 1
    packages='jansson|yaml|mpi\.h|cblas|omp\.h|pcre2|utf8proc|cuda|nccl|cudnn|data/'
    ! grep -oE "[^ ]*($packages)[^ ]*" "$work/out" >"$work/err" || { : >"$work/out" && return 1; }
}

header_is_cxx() {
    # shellcheck disable=SC2086
    "$1" -std=c++17 $strict -I. -c "$work/macros.cc" -o "$work/macros.o" >"$work/out" 2>"$work/err"
}

# The headers that make install copies.
companions_are_cxx() {
    for header in data/*/*.h; do echo "#include \"$header\""; done >"$work/companions.cc"
    # shellcheck disable=SC2086
    "$1" -std=c++17 $strict -I. -fsyntax-only "$work/companions.cc" >"$work/out" 2>"$work/err"
}

# megatron.c opens no file and reads no folder.
opens_no_file() {
    ! grep -nE '\b(fopen|fdopen|open|openat|creat|opendir|mkstemp|mmap|popen)\(' megatron.c >"$work/out"
}

# The trunk walks the string of layers and asks tables. §9 to §16 name no kind but none, no variant, modality or letter,
# and do not ask options whether a kind is there; no more do §2 to §4, without the defaults. §8 builds the string. That
# latent attention is the model's stands in its row.
trunk_names_no_kind() {
    kinds='MT_MIXER_[A-Z]|MT_FEED_FORWARD_[A-Z]|MT_VARIANT_[A-Z]|MT_VISION_[A-Z]'
    asked='multi_latent_attention|(o|options)->num_experts *[><=!]|->vision[.]|(o|options)->layernorm_zero'
    asked="$asked|num_sources *(>|==|!=)"
    awk -v kinds="$kinds|$asked|(hybrid|moe|linear)_layers\\[" '
        /^[/][*] ==== §/ { section = $3; gsub(/[^0-9]/, "", section); section += 0 }
        (section >= 2 && section <= 4 || section >= 9 && section <= 16) && !/^ *[/ ][*]/ {
            line = $0
            gsub(/MT_(MIXER|FEED_FORWARD)_NONE|MT_VARIANT_MIXERS|return o->multi_latent_attention;/, "", line)
            if (line ~ kinds) print FILENAME ":" FNR ": " $0
        }' megatron.c >"$work/out"
    sed 's/MT_\(MIXER\|FEED_FORWARD\)_NONE//g' megatron.c | grep -q 'MT_MIXER_[A-Z]' || return 1
    [ ! -s "$work/out" ]
}

# Nor do wings and kernels. Options know their own rows, Mamba-2's options, the letters of patterns, and, before layers
# are listed, the number of experts that they are given; files of others have their names of arguments and modules.
wings_name_no_kind() {
    : >"$work/out"
    for file in data/*/*.[ch] cuda/*.cu cuda/*.cuh; do
        case $file in
        data/options/option_finish.c | data/checkpoint/megatron_tensors.c) continue ;;
        data/options/option_table.c | data/models/hf_config.c | data/checkpoint/megatron_args.c) kinds='' ;;
        data/checkpoint/megatron_written.c) kinds='' ;;
        *) kinds='|MT_VARIANT_[A-Z]|multi_latent_attention' ;;
        esac
        case $file in # of options that are not finished
        data/options/option_roles.c | data/options/role_sizes.c | data/plan/layouts.c) ;;
        data/models/hf_config.c | data/learn/rl.c | data/learn/stage.c) ;;
        *) kinds="$kinds|(stack[.]|o->|options->|s->)num_experts *[><=!]" ;;
        esac
        sed 's/MT_\(MIXER\|FEED_FORWARD\)_NONE//g' "$file" |
            grep -nE "MT_MIXER_[A-Z]|MT_FEED_FORWARD_[A-Z]$kinds" | sed "s|^|$file:|" >>"$work/out"
    done
    [ ! -s "$work/out" ]
}

# Writes a line "CALLER CALLEE" for every pair of objects of the library where one uses a symbol of the other.
list_calls() {
    sources=$(echo data/*/*.c) # an object of a source that has moved may be left
    # File names of the project have no spaces.
    # shellcheck disable=SC2046
    (cd "$1" && nm -A -g megatron.o $(echo "$sources" | sed 's/\.c\( \|$\)/.o\1/g')) | awk '{
        split($1, place, /:/)
        if ($(NF - 1) == "U") calls[place[1] " " $NF] = 1
        else home[$NF] = place[1]
    } END {
        for (call in calls) {
            split(call, part, " ")
            if (part[2] in home && home[part[2]] != part[1]) print part[1], home[part[2]]
        }
    }' | sort -u
}

# Every field of mt_options is read by the stack: by megatron.c outside of mt_options_plain, or, for the limits of
# waiting, by the hooks of mt_watch. Fields that a list declares are read by its rows. Options that only data/ reads are
# in mt_run_options.
stack_reads_its_options() {
    sed -n '/^typedef struct mt_options {/,/^} mt_options;/p' megatron.h |
        sed -e 's|//.*||' -e 's|/\*.*\*/||' -e '/^typedef/d' -e '/^}/d' -e '/^ *MT_/d' |
        sed -e 's/ \*/ /g' -e 's/\[[0-9]*\]//g' -e 's/^ *[a-z_0-9]* //' |
        tr -s ',; \n' '\n' | grep -v '^$' >"$work/fields"
    { sed '/^mt_options mt_options_plain/,/^}/d' megatron.c | grep -o '[>.][a-z_0-9]*' | cut -c2-
        printf '%s\n' distributed_timeout_minutes distributed_timeout_seconds save_timeout_seconds; } |
        sort -u >"$work/read"
    [ "$(wc -l <"$work/fields")" -gt 150 ] && ! grep -vxF -f "$work/read" "$work/fields"
}

# A circle of calls fails here: tsort finds no order.
calls_have_an_order() {
    list_calls "$objects" >"$work/calls"
    grep -q '^data/checkpoint/checkpoint_load.o megatron.o$' "$work/calls" || return 1 # the list is not empty
    tsort "$work/calls" >"$work/out" 2>"$work/err"
}

# The wings of data/ in their order are those of tests/lint: an object uses no symbol of a later wing.
wings_use_earlier_ones() {
    wings=$(sed -n "s/^wings='\(.*\)'$/\1/p" tests/lint)
    grep -q '^data/run/run.o data/base/' "$work/calls" && [ -n "$wings" ] || return 1
    awk -v wings="$wings" 'BEGIN { n = split(wings, name, " "); for (i = 1; i <= n; i++) wing[name[i]] = i }
        {
            split($1, from, "/"); split($2, to, "/")
            for (i = 1; i <= 2; i++)
                if ($i ~ /^data\// && !((i == 1 ? from[2] : to[2]) in wing)) print $i " is in no wing"
            if (to[1] == "data" && from[1] == "data" && wing[to[2]] > wing[from[2]]) print
        }' "$work/calls" >"$work/out"
    [ ! -s "$work/out" ]
}

# A symbol that an object of data/ defines is declared in the header of its source and in no other one.
headers_declare_their_own() {
    sources=$(echo data/*/*.c)
    # File names of the project have no spaces.
    # shellcheck disable=SC2046
    (cd "$objects" && nm -A -g --defined-only $(echo "$sources" | sed 's/\.c\( \|$\)/.o\1/g')) |
        sed 's/\.o:.* / /' >"$work/homes"
    grep -q '^data/base/file mt_file_read$' "$work/homes" || return 1
    awk 'FNR == NR { home[$2] = $1; next }
        /^[A-Za-z]/ && match($0, /mt_[a-z0-9_]+[(\[]/) {
            name = substr($0, RSTART, RLENGTH - 1)
            if (name in home && FILENAME != home[name] ".h") print FILENAME ": " name " is defined in " home[name] ".c"
        }' "$work/homes" data/*/*.h >"$work/out"
    [ ! -s "$work/out" ]
}

# A circle of wings fails here.
wings_have_no_circle() {
    sed -n 's|^data/\([a-z]*\)/[^ ]* data/\([a-z]*\)/.*|\1 \2|p' "$work/calls" | awk '$1 != $2' | sort -u \
        >"$work/wings"
    [ "$(wc -l <"$work/wings")" -gt 9 ] && tsort "$work/wings" >"$work/out" 2>"$work/err"
}

calls_no_companion() {
    ! grep '^megatron.o ' "$work/calls" >"$work/out"
}

# with_gpus CAPABILITIES ARGUMENTS...: flags and messages of make on a machine with such GPUs, in a copy of the tree.
with_gpus() {
    mkdir -p "$work/bin" "$work/tree/data/scripts" && printf '#!/bin/sh\nprintf "%s"\n' "$1" >"$work/bin/nvidia-smi" &&
        chmod +x "$work/bin/nvidia-smi" && cp Makefile megatron.c megatron.h "$work/tree" &&
        cp data/scripts/probe.sh "$work/tree/data/scripts" || return 1
    shift
    # without the settings of the make that runs the suite
    (PATH=$work/bin:$PATH && cd "$work/tree" && unset SANITIZE WITHOUT CC OPT DRAFT &&
        MAKEFLAGS='' MAKEOVERRIDES='' MAKELEVEL=0 make -n "$@" build/default/flags) >"$work/out" 2>&1
}

# GPUs below 7.5 have no kernels: the CPU is built for, or those of the GPUs that have kernels.
old_gpus_are_left_out() {
    with_gpus '7.0\n' &&
        says '^a GPU of compute capability 7.0 is not supported: building for the CPU' "$work/out" || return 1
    if grep -q sm_70 "$work/out"; then return 1; fi
    if with_gpus '' CUDA_ARCH='80 70'; then return 1; fi
    says 'CUDA_ARCH=80 70: GPUs below compute capability 7.5 are not supported; leave out 70' "$work/out" ||
        return 1
    rm -rf "$work/tree/build" # so that it looks for libraries again
    with_gpus 'NVIDIA-SMI has failed: the driver does not answer.\n' && ! grep 'below 7.5\|not supported' "$work/out" ||
        return 1
    with_gpus '7.0\n8.6\n' &&
        says 'capability 7.0 is not supported: building for CUDA_ARCH=86$' "$work/out"
}

for compiler in gcc clang; do
    if command -v $compiler >/dev/null; then
        check "compiles_alone_$compiler" compiles_alone $compiler
        check "trains_alone_$compiler" trains_alone $compiler
        check "builds_alone_$compiler" builds_alone $compiler
        check "includes_libc_alone_$compiler" includes_libc_alone $compiler
    else
        echo "skipped: $compiler is absent"
    fi
done
for compiler in g++ clang++; do
    if command -v $compiler >/dev/null; then
        check "header_is_cxx_$compiler" header_is_cxx $compiler
        check "companions_are_cxx_$compiler" companions_are_cxx $compiler
    else
        echo "skipped: $compiler is absent"
    fi
done
check companions_compile_alone companions_compile_alone
check opens_no_file opens_no_file
check trunk_names_no_kind trunk_names_no_kind
check wings_name_no_kind wings_name_no_kind
check stack_reads_its_options stack_reads_its_options
check old_gpus_are_left_out old_gpus_are_left_out
objects=${MT_TESTS:-build/tests}/..
if [ -f "$objects/megatron.o" ] && command -v nm >/dev/null; then
    check calls_have_an_order calls_have_an_order
    check calls_no_companion calls_no_companion
    check wings_use_earlier_ones wings_use_earlier_ones
    check wings_have_no_circle wings_have_no_circle
    check headers_declare_their_own headers_declare_their_own
else
    echo "skipped: no object files, or no nm, to find who calls whom"
fi
exit $failed
