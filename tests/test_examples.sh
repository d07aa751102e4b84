#!/bin/sh
# The programs of notes/examples run and print the results that they promise. MT_EXAMPLES is their folder.
set -u
. tests/suite.sh
examples=${MT_EXAMPLES:-}
golden=tests/golden/hf/llama
story=${MT_SHARED:-../shared}/models/stories260K-hf
export OMP_NUM_THREADS=1

# The loss falls far below that of a guess, log 64 = 4.16.
trains_from_arrays() {
    "$examples/train_from_arrays" >"$work/out" 2>"$work/err" &&
        awk '/^step +1 / { first = $4 } /^step 30 / { last = $4 } END { exit !(first > 4 && last < 1 && last > 0) }' \
            "$work/out"
}

# A loss of the program's own: its gradients are finite differences, and it falls.
trains_with_its_own_loss() {
    "$examples/focal_loss" >"$work/out" 2>"$work/err" && says '^largest relative distance .*: ok$' "$work/out" &&
        awk '/^step +1 / { first = $4 } /^step 60 / { last = $4 } END { exit !(first > 3 && last != "" && last < 1) }' \
            "$work/out"
}

# A mixer of the program's own: its gradients are right, queries and keys have none, and the model learns.
trains_with_its_own_mixer() {
    "$examples/average_layer" >"$work/out" 2>"$work/err" && says '^largest relative distance .*: ok$' "$work/out" &&
        awk '/q_proj|k_proj/ && $3 != 0 { exit 1 }
            /^average +step +1 / { first = $5 } /^average +step 60 / { last = $5 }
            END { exit !(first > 3 && last != "" && last < 1) }' "$work/out"
}

# streams_alike VALUES OPTION VALUE...: whole tensors of four ranks are those of one, by name, shape and norm.
streams_alike() {
    values=$1
    shift
    "$examples/stream_tensors" $golden "$values" >"$work/one" 2>"$work/err" &&
        [ "$(grep -c '^model\..*  norm [0-9]' "$work/one")" -gt 10 ] && on_ranks 4 "$examples/stream_tensors" $golden \
        "$values" "$@" && awk 'FNR == NR { norm[$1] = $NF; shape[$1] = NF; names++; next }
            { d = $NF - norm[$1]; if (d < 0) d = -d }
            !($1 in norm) || shape[$1] != NF || d > 1e-4 * norm[$1] { print; bad = 1 }
            END { exit bad || FNR != names }' "$work/one" "$work/out"
}

# make needs prints the files of an example, and these are enough: they alone are compiled in an empty folder. An object
# serves all examples that have the files from which it was made.
needs_are_enough() {
    rm -rf "$work/objects" "$work/alone" && mkdir "$work/objects" || return 1
    for example in notes/examples/*.c; do
        needed=$(basename "$example" .c)
        MAKEFLAGS='' make -s needs EXAMPLE="$needed" >"$work/needs" 2>"$work/err" &&
            [ "$(wc -l <"$work/needs")" = 1 ] || return 1
        rm -rf "$work/alone" && mkdir "$work/alone" && objects=''
        # File names of the project have no spaces.
        # shellcheck disable=SC2013
        for file in $(cat "$work/needs"); do
            mkdir -p "$work/alone/$(dirname "$file")" && cp "$file" "$work/alone/$file" || return 1
        done
        # shellcheck disable=SC2013
        for file in $(tr ' ' '\n' <"$work/needs" | grep '\.c$'); do
            object=$work/objects/$(echo "$file" | tr / -).o
            objects="$objects $object"
            if [ -e "$object" ]; then # its files, without the rule's target, must be among the example's
                tr -d '\\\n' <"$object.d" | sed 's/^[^:]*://' | tr -s ' ' '\n' | grep . >"$work/made_of"
                while read -r part; do [ -e "$work/alone/$part" ] || { echo "$needed: $part" && return 1; }; done \
                    <"$work/made_of"
                continue
            fi
            (cd "$work/alone" && ${CC:-cc} -std=c11 -D_GNU_SOURCE -Wall -Wextra -Werror -O0 -I. -MMD -MF "$object.d" \
                -c "$file" -o "$object") >"$work/out" 2>"$work/err" || return 1
        done
        case " $(cat "$work/needs") " in *' data/'*) json=-ljansson ;; *) json='' ;; esac
        # shellcheck disable=SC2086
        ${CC:-cc} $objects -o "$work/program" $json -pthread -lm >"$work/out" 2>"$work/err" || return 1
    done
    if MAKEFLAGS='' make -s needs EXAMPLE=nothing >"$work/out" 2>"$work/err"; then return 1; fi
    says '^make needs EXAMPLE=name: of associative_memory .* train_from_arrays$' "$work/err"
}

# The tokens after the prompt are those of infer.
generates() {
    "$examples/load_and_generate" $golden >"$work/out" 2>"$work/err" &&
        "$infer" --load $golden --prompt-tokens 1 --max-new-tokens 31 --temperature 0 --print-tokens --device cpu \
            >"$work/infer" 2>>"$work/err" && [ "$(wc -w <"$work/out")" -gt 2 ] || return 1
    cat "$work/infer" >>"$work/err"
    grep -qxF "$(cut -d" " -f2- "$work/out")" "$work/infer"
}

generates_text() {
    "$examples/load_and_generate" "$story" 'Once upon a time' >"$work/out" 2>"$work/err" &&
        says '^Once upon a time, there was a' "$work/out"
}

refuses_what_is_no_model() {
    refused 'config.json' "$examples/load_and_generate" "$work"
}

attends() {
    "$examples/one_attention_call" >"$work/out" 2>"$work/err" && says ': ok$' "$work/out"
}

# The operation is the recurrence, and remembers the newest pairs better than the oldest, which a sum does not.
remembers() {
    "$examples/associative_memory" >"$work/out" 2>"$work/err" && says ': ok$' "$work/out" &&
        awk '$1 == "0" { sum = $2; newest = $3 } $1 == "64" { oldest = $3 }
            END { exit !(newest < 0.6 && oldest > 1 && sum > 1.5) }' "$work/out"
}

# The scan is its recurrence and its attention; a large step clears the memory of a slow head, which else has most.
fades() {
    "$examples/state_space" >"$work/out" 2>"$work/err" && says ': ok$' "$work/out" &&
        awk '$1 == "30" { slow = $2; fast = $4; cleared = $5 }
            END { exit !(slow > 0.7 && fast < 0.01 && cleared < 0.02) }' "$work/out"
}

# The text goes on behind the picture's longer side, and scores depend on differences.
rotates_in_two_dimensions() {
    "$examples/picture_positions" >"$work/out" 2>"$work/err" && says ': ok$' "$work/out" &&
        says '^column .* 5   3   4   5   6   7   8$' "$work/out"
}

# linear RANKS
linear() {
    # shellcheck disable=SC2046
    $([ "$1" = 1 ] || echo "$(mpirun_here) -np $1") "$examples/tensor_parallel_linear" >"$work/out" 2>"$work/err" &&
        says "^$1 ranks, .*: ok\$" "$work/out"
}

# Every step's result is the CPU's; without a GPU it says that it measures nothing.
climbs() {
    "$examples/norm_ladder" >"$work/out" 2>"$work/err" || return 1
    says ' skipped: no GPU answers' "$work/out" || [ "$(grep -c 'of the copy rate$' "$work/out")" = 8 ]
}

check train_from_arrays trains_from_arrays
check focal_loss trains_with_its_own_loss
check average_layer trains_with_its_own_mixer
check needs_are_enough needs_are_enough
check load_and_generate_tokens generates
if [ -r "$story/config.json" ]; then
    check load_and_generate_text generates_text
else
    echo "skipped: load_and_generate_text, $story is absent"
fi
check load_and_generate_refuses_a_folder_without_a_model refuses_what_is_no_model
check one_attention_call attends
check associative_memory remembers
check state_space fades
check picture_positions rotates_in_two_dimensions
if [ -x "$examples/norm_ladder" ]; then
    check norm_ladder climbs
else
    echo "skipped: norm_ladder, built without CUDA"
fi
check tensor_parallel_linear_on_1_rank linear 1
if [ -n "${HAVE_MPI:-}" ] && command -v mpirun >/dev/null; then
    check tensor_parallel_linear_on_2_ranks linear 2
    check stream_weights_of_4_ranks streams_alike weights tensor_model_parallel_size 2 pipeline_model_parallel_size 2
    check stream_gradients_of_4_ranks streams_alike gradients tensor_model_parallel_size 2 \
        data_parallel_sharding_strategy optim_grads_params
else
    echo "skipped: tensor_parallel_linear_on_2_ranks, MPI is absent"
fi
exit $failed
