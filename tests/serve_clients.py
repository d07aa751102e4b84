"""Real clients of a server: python3 serve_clients.py PORT FOLDER WORK INFER NAME. NAME is openai or lm_eval.

FOLDER holds the model that is served; INFER is the program, whose scores lm-eval's must equal. Status 77: the package
is absent.
"""
import json
import os
import struct
import subprocess
import sys

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
os.environ.setdefault("OPENAI_API_KEY", "none")
PORT, FOLDER, WORK, INFER, NAME = sys.argv[1:6]
ADDRESS = "http://127.0.0.1:%s/v1" % PORT
MODEL = os.path.basename(FOLDER)
END = "<|endoftext|>"  # a special token, which ends an answer


def openai():
    try:
        import openai as package
    except ImportError:
        return 77
    client = package.OpenAI(base_url=ADDRESS, api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == [MODEL]

    # Completions: whole, as a stream, with log-probabilities.
    ask = dict(model=MODEL, prompt="One day", max_tokens=12, temperature=0)
    whole = client.completions.create(logprobs=3, **ask)
    choice = whole.choices[0]
    assert 1 <= whole.usage.completion_tokens == len(choice.logprobs.tokens) <= 12, whole
    joined = "".join(choice.logprobs.tokens).removesuffix(END)
    assert joined == choice.text or "bytes:" in joined, whole  # a token may be a part of a character
    assert all(len(top) >= 3 for top in choice.logprobs.top_logprobs)
    assert choice.finish_reason == ("stop" if choice.logprobs.tokens[-1] == END else "length"), whole
    parts = list(client.completions.create(stream=True, stream_options={"include_usage": True}, **ask))
    assert "".join(part.choices[0].text for part in parts if part.choices) == choice.text
    assert parts[-1].usage == whole.usage

    # Conversations with tools, which the template writes into the prompt.
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
    talk = [{"role": "user", "content": "What is the weather?"}]
    ask = dict(model=MODEL, messages=talk, max_tokens=9, temperature=0)
    bare, tooled = (client.chat.completions.create(logprobs=True, top_logprobs=2, **more, **ask)
                    for more in ({}, {"tools": tools}))
    assert tooled.usage.prompt_tokens > bare.usage.prompt_tokens
    content = bare.choices[0].logprobs.content
    assert 1 <= len(content) <= 9 and all(len(token.top_logprobs) == 2 for token in content)
    said = bytes(b for token in content for b in token.bytes).decode(errors="replace").removesuffix(END)
    assert said == bare.choices[0].message.content or "\ufffd" in said, bare
    stream = client.chat.completions.create(stream=True, **ask)
    assert "".join(part.choices[0].delta.content or "" for part in stream) == bare.choices[0].message.content
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"place": "here"}'}}
    talk += [{"role": "assistant", "content": None, "tool_calls": [call]},
             {"role": "tool", "tool_call_id": "c", "content": "rain"}]
    client.chat.completions.create(tools=tools, **ask)
    for wrong in [1], [{}], [{"type": "function"}], [{"type": "function", "function": {"name": 5}}]:
        try:
            client.chat.completions.create(tools=wrong, **ask)
            raise AssertionError("accepted: %s" % wrong)
        except package.BadRequestError as refusal:
            assert refusal.body["param"] == "tools", refusal.body
    try:
        client.chat.completions.create(**dict(ask, messages=[dict(talk[1], tool_calls="none")]))
        raise AssertionError("accepted a text as calls of tools")
    except package.BadRequestError as refusal:  # the template's own words, without the folder that it lies in
        assert "chat_template.jinja" in refusal.body["message"] and "/" not in refusal.body["message"], refusal.body

    # Errors are the package's own.
    for error, more in ((package.BadRequestError, {"temperature": -1}), (package.NotFoundError, {"model": "other"})):
        try:
            client.chat.completions.create(**dict(ask, **more))
            raise AssertionError("accepted: %s" % more)
        except error as refusal:
            assert refusal.body["message"] and refusal.body["type"]
            assert refusal.body["code"] == ("model_not_found" if "model" in more else None), refusal.body
    return 0


CHOICES = [("The cat sat on the", [" mat", " moon and sang"]), ("Two and two are", [" four", " five", " a tree"]),
           ("She opened the door and", [" went in", " zzz"]), ("Water is", [" wet", " made of stone"])]


def write_tasks():
    """Two tasks of files: choices by log-likelihood, and the log-likelihood of whole texts."""
    folder = os.path.join(WORK, "tasks")
    os.makedirs(folder)
    with open(os.path.join(folder, "choices.jsonl"), "w", encoding="utf-8") as out:
        for question, choices in CHOICES:
            out.write(json.dumps({"question": question, "choices": choices, "gold": 0}) + "\n")
    with open("README.md", encoding="utf-8") as text, open(os.path.join(folder, "texts.jsonl"), "w",
                                                           encoding="utf-8") as out:
        for part in text.read().split("\n\n")[:6]:
            out.write(json.dumps({"page": part}) + "\n")
    files = {name: os.path.join(folder, name + ".jsonl") for name in ("choices", "texts")}
    common = "dataset_path: json\ntest_split: test\ndataset_kwargs:\n  data_files:\n    test: %s\n"
    with open(os.path.join(folder, "house_choices.yaml"), "w", encoding="utf-8") as out:
        out.write("task: house_choices\noutput_type: multiple_choice\n" + common % files["choices"] +
                  'doc_to_text: "{{question}}"\ndoc_to_choice: choices\ndoc_to_target: gold\ntarget_delimiter: ""\n'
                  "metric_list:\n  - metric: acc\n")
    with open(os.path.join(folder, "house_texts.yaml"), "w", encoding="utf-8") as out:
        out.write("task: house_texts\noutput_type: loglikelihood_rolling\n" + common % files["texts"] +
                  'doc_to_text: ""\ndoc_to_target: "{{page}}"\nmetric_list:\n  - metric: word_perplexity\n')
    return folder


def infer_scores(rows):
    """Log-probabilities of tokens 1... of each row, by infer --score of rows of one length."""
    length = max(len(row) for row in rows)
    path, out = os.path.join(WORK, "rows.i32"), os.path.join(WORK, "rows.f32")
    with open(path, "wb") as file:
        for row in rows:
            file.write(struct.pack("<%di" % length, *row, *[0] * (length - len(row))))
    subprocess.run([INFER, "--load", FOLDER, "--device", "cpu", "--score", path, "--seq-length", str(length - 1),
                    "--out", out], check=True, stderr=subprocess.DEVNULL)
    with open(out, "rb") as file:
        data = file.read()
    flat = struct.unpack("<%df" % (len(data) // 4), data)
    return [flat[i * (length - 1):i * (length - 1) + len(row) - 1] for i, row in enumerate(rows)]


def lm_eval():
    try:
        import lm_eval as package
        from lm_eval.tasks import TaskManager
        from transformers import AutoTokenizer
    except ImportError:
        return 77
    manager = TaskManager(include_path=write_tasks(), include_defaults=False)
    arguments = {"model": MODEL, "base_url": ADDRESS + "/completions", "tokenizer": FOLDER, "num_concurrent": 4,
                 "tokenized_requests": True, "max_length": 256}
    results = package.simple_evaluate(model="local-completions", model_args=arguments, log_samples=True,
                                      tasks=["house_choices", "house_texts"], task_manager=manager, bootstrap_iters=0)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    rows, firsts, found = [], [], []
    for sample in results["samples"]["house_choices"]:
        for (context, continuation), answer in zip(
                (argument for argument in sample["arguments"]), sample["filtered_resps"]):
            whole = tokenizer.encode(context + continuation, add_special_tokens=False)
            rows.append(whole)
            firsts.append(len(tokenizer.encode(context, add_special_tokens=False)))
            found.append(float(answer[0]))
    for sample in results["samples"]["house_texts"]:
        text = sample["doc"]["page"]
        end = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        whole = [end] + tokenizer.encode(text, add_special_tokens=False)
        if len(whole) > 256:
            continue  # in windows
        rows.append(whole)
        firsts.append(1)
        answer = sample["filtered_resps"][0]
        found.append(float(answer[0] if isinstance(answer, (list, tuple)) else answer))
    assert len(rows) > 10, len(rows)
    for row, first, got, logps in zip(rows, firsts, found, infer_scores(rows)):
        wanted = sum(logps[first - 1:])
        assert abs(got - wanted) <= 1e-5 * max(1, abs(wanted)), (got, wanted, len(row), first)
    print("house_choices and house_texts: %d log-likelihoods equal those of infer --score" % len(rows))
    return 0


if __name__ == "__main__":
    sys.exit({"openai": openai, "lm_eval": lm_eval}[NAME]())
