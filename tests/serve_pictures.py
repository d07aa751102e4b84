"""A client of infer --serve with pictures: answers equal transformers' (tests/golden/vision/sft/answers.json) also in one
batch, and requests whose pictures are no bytes are refused. python3 serve_pictures.py PORT NAME"""
import base64
import concurrent.futures
import json
import sys
import urllib.error
import urllib.request

PORT = sys.argv[1]
with open("tests/golden/vision/sft/answers.json") as file:
    ANSWERS = json.load(file)["answers"]


def data_url(name):
    kind = "jpeg" if name.endswith(".jpg") else "png"
    with open("tests/golden/images/" + name, "rb") as file:
        return f"data:image/{kind};base64," + base64.b64encode(file.read()).decode()


def part(item):
    if item["type"] == "text":
        return item
    return {"type": "image_url", "image_url": {"url": data_url(item["image"]), "detail": "auto"}}


def messages_of(answer):
    return [{"role": m["role"], "content": [part(item) for item in m["content"]]} for m in answer["messages"]]


def ask(messages, path="/v1/chat/completions", **fields):
    """The status and the answer, or the error's message."""
    body = json.dumps({"messages": messages, **fields}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}{path}", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as reply:
            return 200, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]["message"]


def check(holds, *what):
    if not holds:
        print("failed:", *what)
        sys.exit(1)


def check_answer(answer, n=1):
    status, reply = ask(messages_of(answer), max_tokens=8, temperature=0, logprobs=True, return_token_ids=True, n=n)
    check(status == 200, reply)
    check(reply["usage"]["prompt_tokens"] == answer["prompt_tokens"], reply["usage"])
    for choice in reply["choices"]:
        check(choice["token_ids"] == answer["tokens"], choice["token_ids"], answer["tokens"])
        check(choice["message"]["content"] == answer["text"], choice["message"])
        for got, wanted in zip(choice["logprobs"]["content"], answer["logprobs"]):
            check(abs(got["logprob"] - wanted) < 1e-4, got, wanted)


def answers():
    """One after the other, then all at once: each also beside others, and with its beginning in the cache."""
    for answer in ANSWERS:
        check_answer(answer)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(check_answer, answer, n) for n in (1, 3) for answer in ANSWERS + ANSWERS[::-1]]:
            done.result()
    status, reply = ask(messages_of(ANSWERS[1]), "/tokenize")
    check(status == 200 and reply["count"] == ANSWERS[1]["prompt_tokens"], reply)


def refusals():
    """No address but that of bytes is opened, wherever it stands; and the server goes on."""
    square, path = data_url("square.png"), "tests/golden/images/square.png"
    other = "this server opens no other address"
    urls = [path, "file://" + path, "http://127.0.0.1/a.png", "https://example.org/a.png", "", 3, None,
            "data:image/png,abc", " " + square, ["a"]]
    cases = [({"type": "image_url", "image_url": {"url": url}}, other) for url in urls]
    cases += [
        ({"type": "image_url", "image_url": path}, other),
        ({"type": "image_url", "image": path, "path": path, "url": path}, other),
        ({"type": "image", "image": path}, "parts of the type"),
        ({"type": "image", "image": square}, "parts of the type"),
        ({"type": "image_url", "image": path, "image_url": {"url": "data:image/png;base64,AAAA"}}, "neither PNG nor JPEG"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,!!!"}}, "and its bytes"),
        ({"type": "image_url", "image_url": {"url": "DATA:;base64,"}}, "and its bytes"),
        ({"type": "image_url", "image_url": {"url": square[:222]}}, "damaged"),
    ]
    for item, message in cases:
        status, reply = ask([{"role": "user", "content": [item, {"type": "text", "text": "What?"}]}])
        check(status == 400 and message in reply, item, status, reply)
    good = {"type": "image_url", "image_url": {"url": square}}
    for item, message in [({"type": "image", "image": path}, "neither the type"), ({"type": "text"}, "neither the type"),
                          ({"type": "text", "text": "<|image_pad|>"}, "its text 2 image tokens")]:
        status, reply = ask([{"role": "user", "content": [good, item]}])
        check(status == 400 and message in reply, item, status, reply)
    status, reply = ask([{"content": [good]}])
    check(status == 400 and "has no \"role\"" in reply, reply)
    status, reply = ask([{"role": "user", "content": [good] * 5}])
    check(status == 400 and "this server takes 16" in reply, reply)
    check_answer(ANSWERS[0])


def text_model():
    status, reply = ask(messages_of(ANSWERS[0]))
    check(status == 400 and "this model takes no pictures" in reply, reply)


def openai_client():
    """The package openai, whole and as a stream; status 77: it is absent."""
    try:
        import openai as package
    except ImportError:
        sys.exit(77)
    client = package.OpenAI(base_url=f"http://127.0.0.1:{PORT}/v1", api_key="none", max_retries=0)
    for answer in ANSWERS:
        wanted = {"model": "model", "messages": messages_of(answer), "max_tokens": 8, "temperature": 0}
        whole = client.chat.completions.create(**wanted)
        check(whole.choices[0].message.content == answer["text"], whole)
        parts = client.chat.completions.create(stream=True, **wanted)
        check("".join(part.choices[0].delta.content or "" for part in parts) == answer["text"], answer)
    for url in ["tests/golden/images/square.png", "http://127.0.0.1/a.png"]:
        try:
            talk = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
            client.chat.completions.create(model="model", messages=talk)
            check(False, url, "is accepted")
        except package.BadRequestError as error:
            check("this server opens no other address" in str(error), error)


{"answers": answers, "openai": openai_client, "refusals": refusals, "text_model": text_model}[sys.argv[2]]()
