#!/bin/sh
# Each operation of notes/mini.c, forward and backward, against PyTorch's autograd (notes/steps/autograd.py); an error
# in any backward is seen. Skipped where python3 has no torch. PYTHON names another interpreter.
set -u
. tests/suite.sh
python=${PYTHON:-python3}
if ! command -v mpicc >/dev/null || ! "$python" -c 'import torch' 2>/dev/null; then
    echo "skipped: mpicc is absent, or $python has no torch"
    exit 77
fi

# compares SOURCE: the operations of a copy of mini.c, and PyTorch's.
compares() {
    mpicc -std=c11 -O1 -w -DMINI="\"$1\"" tests/mini_backward.c -lm -o "$work/run" >"$work/out" 2>"$work/err" &&
        "$work/run" >"$work/numbers" 2>"$work/err" </dev/null &&
        "$python" notes/steps/autograd.py <"$work/numbers" >"$work/out" 2>"$work/err"
}

# sees OPERATION EDIT: with the edit, results of this operation differ.
sees() {
    sed "$2" notes/mini.c >"$work/wrong.c"
    if cmp -s notes/mini.c "$work/wrong.c"; then
        echo "the edit changes nothing: $2"
        return 1
    fi
    ! compares "$work/wrong.c" && says "^$1 .*differs" "$work/out"
}

check all_operations_equal_pytorch compares "$(pwd)/notes/mini.c"
check linear_backward_is_compared sees linear 's/add(w.dw + n \* K, dy\[t \* N + n\], x/add(w.dw + n * K, 1, x/'
check norm_backward_is_compared sees norm 's/ - row\[c\] \/ r \* mean) \/ r/) \/ r/'
check rope_is_compared sees rope 's/\*b = old_a \* sin(angle)/*b = -old_a * sin(angle)/'
check attend_backward_is_compared sees attention 's/dot(dhead, v, D) - delta\[t \* m->H + h\]/dot(dhead, v, D)/'
check mlp_backward_is_compared sees mlp 's/sigmoid \* (1 + gate \* (1 - sigmoid))/sigmoid/'
check route_backward_is_compared sees route 's/prob\[k\] \* (dp\[k\] - mean)/prob[k] * dp[k]/'
check experts_backward_is_compared sees experts \
    's/add(sent + i \* C, d->prob\[d->order\[i\]\], dtoken/add(sent + i * C, 1, dtoken/'
check embedding_backward_is_compared sees embedding \
    's/add(m->embedding.dw + token \* m->C, 1,/add(m->embedding.dw + token * m->C, 2,/'
check loss_backward_is_compared sees loss 's/if (label >= 0) dlogits\[t \* m->V + label\] -= scale;/(void)label;/'
exit $failed
