#!/bin/sh
# The patches of notes/extending.md: each adds a part of a model to a copy of the sources and touches as many places as
# the page says. A build with all of them trains with each part. An SGD step without momentum and decay lowers the loss
# by lr * norm^2, up to the second order, if the gradient is that of the loss. Weights are large, so that a wrong slope
# in one part of a layer changes the gradients of others enough to be seen.
set -u
. tests/suite.sh
if ! command -v patch >/dev/null; then
    echo "skipped: patch is absent"
    exit 77
fi
export OMP_NUM_THREADS=1
parts='activation optimizer loss family mixer feed_forward placement'
libraries='mpi blas openmp dnnl yaml pcre2 utf8proc png jpeg cuda nccl cudnn gnuplot cmocka' # to do without
tree=$work/tree

# copy_with FOLDER FUZZ PART...: a copy of the sources with the patches of parts.
copy_with() {
    folder=$1 fuzz=$2
    shift 2
    mkdir "$folder" && cp -R megatron.c megatron.h train.c infer.c Makefile data cuda "$folder" || return 1
    for part; do
        (cd "$folder" && patch -p1 -s -F "$fuzz" --no-backup-if-mismatch) <"notes/extensions/$part.patch" \
            >"$work/out" 2>&1 || {
            echo "notes/extensions/$part.patch does not apply; make the same change in a copy, git diff" >>"$work/out"
            return 1
        }
    done
}

# All together, where one patch may change a line of another one's context.
patches_apply() {
    # shellcheck disable=SC2086
    copy_with "$tree" 2 $parts
}

# The table of the page has the files and places (changes more than two lines apart) of each patch, which applies to the
# sources as they are.
places_are_counted() {
    [ "$(ls notes/extensions)" = "$(for part in $parts; do echo "$part.patch"; done | sort)" ] || return 1
    for part in $parts; do
        patch=notes/extensions/$part.patch
        files=$(grep -c '^+++ ' "$patch")
        copy_with "$work/$part" 0 "$part" || return 1
        for file in $(sed -n 's|^+++ b/||p' "$patch"); do diff -U1 "$file" "$work/$part/$file"; done >"$work/changes"
        places=$(grep -c '^@@ ' "$work/changes")
        [ "$places" = 1 ] && one=place || one=places
        [ "$files" = 1 ] && of=file || of=files
        rm -r "${work:?}/$part"
        grep "^| \[$part\](extensions/$part.patch) " notes/extending.md >"$work/row"
        says "| $places $one in $files $of |$" "$work/row" || return 1
    done
}

the_copy_compiles() {
    (cd "$tree" && MAKEFLAGS='' make -s OPT=-O1 WERROR=1 WITHOUT="$libraries" all) >"$work/out" 2>&1 || return 1
    train=$(ls "$tree"/build/*/bin/train) infer=$(ls "$tree"/build/*/bin/infer)
}

small='--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --device cpu'
large_weights='--init-method-std 0.3'

# The steps see the same tokens: the sequence of 16 tokens and their labels, twice.
make_tokens() {
    # shellcheck disable=SC2059
    for i in 1 2; do
        for token in 3 14 15 9 26 5 35 8 9 7 9 32 38 4 62 6 43; do printf "\\$(printf '%03o' $token)\0\0\0"; done
    done >"$work/tokens.i32"
}

# two_steps LR ARGUMENTS...: writes the loss and the gradient's norm before each of two steps to $work/steps.
two_steps() {
    lr=$1
    shift
    rm -f "$work/metrics"
    # shellcheck disable=SC2086
    "$train" --micro-batch-size 1 --global-batch-size 1 --train-iters 2 --weight-decay 0 --clip-grad 0 \
        --hidden-dropout 0 --attention-dropout 0 --lr "$lr" --min-lr "$lr" --lr-decay-style constant \
        --lr-warmup-iters 0 --metrics "$work/metrics" "$@" >"$work/out" 2>"$work/err" &&
        sed 's/.*"lm_loss": \([^,]*\),.*"grad_norm": \([^,]*\),.*/\1 \2/' "$work/metrics" >"$work/steps"
}

# descends ERROR LR ARGUMENTS...: (loss before - loss after) / (lr norm^2) of an SGD step is 1.
descends() {
    error=$1
    shift
    two_steps "$@" --optimizer sgd --sgd-momentum 0 && awk -v lr="$1" -v error="$error" '
        { loss[NR] = $1; norm[NR] = $2 }
        END {
            ratio = (loss[1] - loss[2]) / (lr * norm[1] ^ 2)
            print "ratio " ratio
            exit !(ratio > 1 - error && ratio < 1 + error)
        }' "$work/steps" >>"$work/out"
}

# Of models with a part: the second order is 2e-4 of the first.
has_its_slope() {
    # shellcheck disable=SC2086
    descends 1e-3 1e-4 $small $large_weights --vocab-size 64 --tokens-file "$work/tokens.i32" "$@"
}

the_activation_has_its_slope() {
    has_its_slope --elu
}

# The first step changes each weight by lr / sqrt(1 - beta2) = 2 lr, so that the loss falls by 2 lr |g|_1, which is at
# least 2 lr |g|_2. The state has the row's name in the checkpoint. Without a kernel, the step is refused on a GPU.
the_optimizer_steps() {
    # shellcheck disable=SC2086
    two_steps 1e-5 $small --vocab-size 64 --tokens-file "$work/tokens.i32" --optimizer rmsprop --adam-beta2 0.75 &&
        awk '{ loss[NR] = $1; norm[NR] = $2 } END { exit !(loss[1] - loss[2] > 2e-5 * norm[1]) }' "$work/steps" ||
        return 1
    # shellcheck disable=SC2086
    "$train" $small --vocab-size 64 --mock-data --train-iters 2 --optimizer rmsprop --lr 1e-3 --save "$work/rmsprop" \
        --eval-iters 0 >"$work/out" 2>"$work/err" && grep -rqa '"[^"]*square_avg' "$work/rmsprop" || return 1
    # shellcheck disable=SC2086
    ! "$train" ${small% --device cpu} --vocab-size 64 --mock-data --train-iters 2 --lr 1e-3 --bf16 --optimizer rmsprop \
        --plan --gpus 1 --global-batch-size 1 >"$work/out" 2>"$work/err" &&
        says 'optimizer rmsprop runs on the CPU only' "$work/err"
}

the_loss_has_its_slope() {
    # shellcheck disable=SC2086
    "$train" $small --mock-data --tokenizer-type ByteLevel --train-iters 1 --lr 1e-3 --save "$work/bytes" \
        --eval-iters 0 >"$work/out" 2>"$work/err" || return 1
    for i in 1 2; do printf '{"prompt": "one", "chosen": "two", "rejected": "six"}\n'; done >"$work/pairs.jsonl"
    descends 1e-2 1e-5 --stage dpo --load "$work/bytes" --finetune --chat-template plain --eval-iters 0 --device cpu \
        --train-data-path "$work/pairs.jsonl" --seq-length 16 --preference-loss squared-hinge --beta 0.5
}

# A model that no other family's file can hold is written as one of this family, and is read again.
the_family_is_written_and_read() {
    # shellcheck disable=SC2086
    "$train" $small --vocab-size 64 --mock-data --train-iters 1 --lr 1e-3 --eval-iters 0 --squared-relu \
        --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --norm-epsilon 1e-5 \
        --hidden-dropout 0 --attention-dropout 0 --untie-embeddings-and-output-weights --save "$work/arcee" \
        >"$work/out" 2>"$work/err" || return 1
    says '"ArceeForCausalLM"' "$work/arcee/latest/config.json" && says '"relu2"' "$work/arcee/latest/config.json" &&
        grep -qa 'model.layers.1.mlp.up_proj.weight' "$work/arcee/latest/model.safetensors" &&
        continues arcee
}

# continues NAME: the most probable tokens after 3 tokens are those after 3 tokens and the first of these.
continues() {
    set -- "$infer" --load "$work/$1" --device cpu --temperature 0 --print-tokens
    first=$("$@" --max-new-tokens 8 --prompt-tokens 5,6,7 2>"$work/err") || return 1
    begin=$(echo "$first" | cut -d ' ' -f 1-4 | tr ' ' ,)
    again=$("$@" --max-new-tokens 4 --prompt-tokens "5,6,7,$begin" 2>"$work/err") || return 1
    echo "8 tokens: $first; after $begin: $again" >"$work/out"
    [ "$(echo "$first" | cut -d ' ' -f 5-8)" = "$again" ]
}

the_mixer_has_its_gradient() {
    has_its_slope --experimental-attention-variant moving_average --linear-attention-freq 2
}

the_feed_forward_has_its_gradient() {
    has_its_slope --hybrid-override-pattern '*L'
}

# Its state carries a text through generation. Its weights have the names of its rows in the checkpoint.
the_mixer_generates() {
    # shellcheck disable=SC2086
    "$train" $small $large_weights --vocab-size 64 --mock-data --train-iters 2 --lr 1e-2 --eval-iters 0 \
        --save "$work/mixer" --experimental-attention-variant moving_average --linear-attention-freq 2 \
        >"$work/out" 2>"$work/err" && grep -qa 'average.in_proj.weight' "$work/mixer/latest/model.safetensors" &&
        continues mixer
}

# Attention has a norm before, the MLP one after, whose weights have the names of their roles. The gradient is that of
# the loss; layers that are computed again have the same; generation reads what training wrote.
the_placement_has_its_gradient() {
    crossed='--norm-placement crossed --normalization RMSNorm'
    # shellcheck disable=SC2086
    has_its_slope $crossed || return 1
    cp "$work/steps" "$work/whole"
    for modules in "selective --recompute-modules layernorm,mlp" full; do
        # shellcheck disable=SC2086
        has_its_slope $crossed --recompute-granularity $modules && cmp "$work/steps" "$work/whole" || return 1
    done
    # shellcheck disable=SC2086
    "$train" $small $large_weights --vocab-size 64 --mock-data --train-iters 2 --lr 1e-2 --eval-iters 0 $crossed \
        --save "$work/crossed" >"$work/out" 2>"$work/err" || return 1
    weights=$work/crossed/latest/model.safetensors
    for norm in input_layernorm post_feedforward_layernorm; do
        grep -qa "layers.1.$norm.weight" "$weights" || return 1
    done
    for norm in post_attention_layernorm pre_feedforward_layernorm; do
        if grep -qa "layers.1.$norm.weight" "$weights"; then return 1; fi
    done
    continues crossed
}

for test in places_are_counted patches_apply the_copy_compiles; do
    check $test $test
    [ $failed = 0 ] || exit 1
done
make_tokens
for test in the_activation_has_its_slope the_optimizer_steps the_loss_has_its_slope the_family_is_written_and_read \
    the_mixer_has_its_gradient the_mixer_generates the_feed_forward_has_its_gradient \
    the_placement_has_its_gradient; do
    check $test $test
done
exit $failed
