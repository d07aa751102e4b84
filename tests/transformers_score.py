#!/usr/bin/env python3
"""Opens Hugging Face folders with transformers, as they are, and holds its log-probabilities and entropies of some
sequences against the files that infer --score wrote, in fp32.

  usage: transformers_score.py SEQ_LENGTH NAME FOLDER TOKENS LOGPROBS ENTROPY [NAME ...]

TOKENS are int32 [N, SEQ_LENGTH + 1], LOGPROBS and ENTROPY fp32 [N, SEQ_LENGTH]. A line for each folder, "ok NAME" or
"not ok NAME: WHY"; the exit status is 1 where one is not ok, and 77 where torch or transformers is absent.
"""
import sys

TOLERANCE = 1e-4


def read(path, dtype, columns):
    with open(path, "rb") as file:
        return torch.frombuffer(bytearray(file.read()), dtype=dtype).view(-1, columns)


def opened(folder):
    """The model of a folder, of which every tensor is in its place, and no other is there."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True, output_loading_info=True)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        assert not info.get(kind), f"{kind}: {sorted(map(str, info[kind]))[:4]}"
    return model.eval()


def compare(what, ours, theirs):
    assert ours.shape == theirs.shape, f"{what}: {tuple(ours.shape)} here, {tuple(theirs.shape)} there"
    off = (ours - theirs).abs().max().item()
    assert off <= TOLERANCE, f"{what}: off by {off:.2g}"  # NaN is not
    return f"{what} off by {off:.1e} at most"


def score(seq_length, folder, tokens, logprobs, entropy):
    tokens = read(tokens, torch.int32, seq_length + 1).long()
    with torch.no_grad():
        logits = opened(folder)(input_ids=tokens[:, :-1], use_cache=False).logits
    all_logprobs = torch.log_softmax(logits.float(), -1)
    of_labels = all_logprobs.gather(-1, tokens[:, 1:, None])[..., 0]
    spread = of_labels.std().item()
    assert spread > 0.5, f"the model tells tokens apart by {spread:.2g} only"
    of_all = -(all_logprobs.exp() * all_logprobs).sum(-1)
    return ", ".join((compare("log-probabilities", read(logprobs, torch.float32, seq_length), of_labels),
                      compare("entropies", read(entropy, torch.float32, seq_length), of_all)))


def main(arguments):
    seq_length, failed = int(arguments[0]), False
    for i in range(1, len(arguments), 5):
        name, *files = arguments[i:i + 5]
        try:
            print(f"ok {name}: {score(seq_length, *files)}", flush=True)
        except Exception as why:  # whatever transformers says
            print(f"not ok {name}: {type(why).__name__}: {why}", flush=True)
            failed = True
    return 1 if failed else 0


try:
    import torch
    import transformers
except ImportError as absent:
    print(f"skipped: {absent}")
    sys.exit(77)
transformers.logging.set_verbosity_error()
torch.set_num_threads(2)
sys.exit(main(sys.argv[1:]))
