# Each operation of notes/mini.c in PyTorch, whose autograd finds the backward by itself. Reads what tests/mini_backward.c
# writes: operands of each operation, and the results of its forward and its backward. Prints the largest difference of
# each result from PyTorch's, relative to the largest number, and fails if one is more than rounding.
import sys

try:
    import torch
    import torch.nn.functional as F
except ImportError:
    sys.exit("error: this Python has no torch: pip install torch")

H, G, D, E, TOPK = 4, 2, 4, 4, 2  # query heads, key heads, channels of a head; experts, chosen ones


def linear(x, w):
    return x @ w.T


def norm(x, w):
    return w * x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def rope(qkv):
    heads = qkv.unflatten(1, (H + 2 * G, D))
    frequency = 10000.0 ** (-2 * torch.arange(D // 2) / D)
    angle = torch.arange(len(qkv))[:, None, None] * frequency
    a, b = heads[:, :H + G].chunk(2, -1)
    rotated = torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)
    return torch.cat([rotated, heads[:, H + G:]], 1).flatten(1)


def attention(qkv):
    q, k, v = qkv.unflatten(1, (H + 2 * G, D)).transpose(0, 1).split([H, G, G])
    k, v = k.repeat_interleave(H // G, 0), v.repeat_interleave(H // G, 0)
    scores = (q @ k.transpose(1, 2) / D ** 0.5).masked_fill(~torch.ones(len(qkv), len(qkv)).tril().bool(), -torch.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)


def mlp(x, gate_up, down):
    gate, up = (x @ gate_up.T).chunk(2, -1)
    return (F.silu(gate) * up) @ down.T


def route(x, router):
    return (x @ router.T).topk(TOPK).values.softmax(-1)


def experts(x, router, gate_up, down):
    expert, prob, y = (x @ router.T).topk(TOPK).indices, route(x, router), torch.zeros_like(x)
    for e, (gate_up_e, down_e) in enumerate(zip(gate_up.chunk(E), down.chunk(E))):
        token, k = (expert == e).nonzero(as_tuple=True)
        y = y.index_add(0, token, prob[token, k, None] * mlp(x[token], gate_up_e, down_e))
    return y


def embedding(w, tokens):
    return w[tokens[:-1].long()]


def loss(x, norm_w, output, tokens):
    logits = norm(x, norm_w) @ output.T
    return F.cross_entropy(logits, tokens[1:].long(), reduction="sum")[None]


def difference(ours, theirs):
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


def main():
    torch.set_default_dtype(torch.float64)
    cases, failed = {}, False
    for line in sys.stdin:
        (operation, role, name, *shape), numbers = (part.split() for part in line.split(":"))
        x = torch.tensor([float(number) for number in numbers]).reshape([int(n) for n in shape])
        cases.setdefault(operation, []).append((role, name, x))
    for operation, operands in cases.items():
        of = {role: [(name, x) for r, name, x in operands if r == role] for role, _, _ in operands}
        inputs = [x.requires_grad_() for _, x in of["input"]]
        y = globals()[operation](*inputs, *(x for _, x in of.get("fixed", [])))
        gradients = torch.autograd.grad(y, inputs, of["doutput"][0][1])
        results = [(of["output"][0][0], of["output"][0][1], y.detach())]
        results += [("d" + name, x, gradient) for (name, x), gradient in zip(of["dinput"], gradients)]
        for name, ours, theirs in results:
            wrong = not difference(ours, theirs) <= 1e-10
            failed |= wrong
            print(f"{operation:10} {name:9} {difference(ours, theirs):.0e}{'  differs' if wrong else ''}")
    sys.exit(failed or len(cases) != 9)


main()
